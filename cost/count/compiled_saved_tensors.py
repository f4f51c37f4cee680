"""Tensors that a compiled stage saves for backward, and values that its kernels materialise.

`torch.compile` saves other tensors than eager autograd, because its backward recomputes values in fused kernels. It
saves the fewest bytes from which fusible operators can compute all tensors that the backward reads. These tensors are
a minimum cut of the graph (Chen et al. 2016, arXiv:1604.06174; torch's `min_cut_rematerialization_partition`).

As in torch, the backward does not recompute:

- matrix products, attention, collectives and random operators
- outputs with less than a quarter of the bytes of their operator's inputs
- tensors that the backward of an unfusible operator reads

A value that is fused into all its users is not materialised, and neither is its gradient.

Operators that are never recomputed divide a graph into small components. Repeated blocks have identical components,
and the cut of identical components is computed once.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import networkx as nx
from torch import fx

from autopart.cost.count.saved_tensors import MAX_CACHED_SIGNATURES
from autopart.cost.count.stage_footprint import Liveness, LocalValue, MemoryBuffer, memories
from autopart.ir.facts import cost_notes, is_fusible
from autopart.ops.operators import is_cast

SMALL = 4
"""An output with less than 1 / `SMALL` of the bytes of its operator's inputs is saved, not recomputed."""

FARTHER = 1.1
"""Factor on the cost of saving a buffer, for each operator between the buffer and the backward.

The minimum cut then prefers buffers near the backward, as in torch's partitioner.
"""


@dataclass(frozen=True, eq=False)
class _ExtraSaved:
    """A buffer that an operator saves for its own backward, in addition to its inputs and outputs.

    It holds statistics, a copy of the output, or one byte per element if the backward needs only the sign.
    """

    size_bytes: int


Piece = MemoryBuffer | _ExtraSaved
Edges = Mapping[Piece, list[MemoryBuffer] | None]
"""{buffer: the buffers from which it is computed}, without parameters and gathered weights.

The value is None for a buffer that is never recomputed.
"""


def with_compiled(walk: Liveness) -> Liveness:
    """Return a stage's liveness analysis with the analysis of its compiled graph in the field `compiled`.

    In this second analysis, the saved tensors of an operator (`keeps`, `others`) are all tensors that its compiled
    backward reads, including those from which the backward recomputes values. Values that the compiled graph never
    writes to memory have 0 bytes.
    """
    return replace(walk, compiled=_Compiled(walk).walk())


class _Compiled:
    """Analysis of a compiled stage graph: which tensors it saves, and which values it writes to memory."""

    def __init__(self, eager: Liveness):
        self.eager, self.alive = eager, eager.reached()
        self.calls = [node for node in eager.values if node.op == "call_function"]
        self.order = {node: index for index, node in enumerate(self.calls)}
        self.made = {node: self._made(node) for node in self.calls}
        self.read = {node: self._read(node) for node in self.calls}
        self.joined = cache(is_fusible)
        self.users: defaultdict[Piece, list[fx.Node]] = defaultdict(list)
        for node in self.calls:
            for memory in self.read[node] if self.made[node] else ():
                self.users[memory].append(node)
        self.apart = {node: _ExtraSaved(size) for node, size in eager.others.items()}
        self.in_backward = self._in_backward()
        self.signs_of = self._signs()
        self.far = self._reused_values()
        self.forced = self._forced()
        self.kept = self._kept()

    def _made(self, node: fx.Node) -> list[MemoryBuffer]:
        made = memories(self.eager.values[node], lasting=True)
        return sorted((m for m in made if m.made_by is node), key=lambda memory: memory.size_bytes)

    def _pieces(self, node: fx.Node) -> list[Piece]:
        return [*self.made[node], *([self.apart[node]] if node in self.apart else [])]

    def _read(self, node: fx.Node) -> list[MemoryBuffer]:
        read = (memories(self.eager.values[used], lasting=True) for used in node.all_input_nodes)
        return list(dict.fromkeys(memory for pieces in read for memory in pieces))

    def _in_backward(self) -> dict[fx.Node, list[Piece]]:
        """Return {operator: buffers that its backward reads}. Parameters and gathered weights are left out."""
        reads: dict[fx.Node, list[Piece]] = {}
        for node in self.calls:
            if node in self.alive:
                kept = [memory for memory in self.eager.keeps.get(node, ()) if not _is_there(memory)]
                reads[node] = [*dict.fromkeys(kept), *([self.apart[node]] if node in self.apart else [])]
        return reads

    def _signs(self) -> dict[_ExtraSaved, list[MemoryBuffer]]:
        """Replace saved values by a sign buffer if an operator's backward needs only their signs.

        A sign buffer has one byte per element. It replaces these values in the mapping `in_backward`. Returns {sign
        buffer: the buffers that it replaces}.
        """
        signs: dict[_ExtraSaved, list[MemoryBuffer]] = {}
        for node, read in self.in_backward.items():
            numbers = [piece for piece in read if isinstance(piece, MemoryBuffer)]
            if cost_notes(node).keeps_sign and numbers:
                item_bytes = self.eager.values[node].form.dtype.itemsize
                apart = _ExtraSaved(sum(memory.size_bytes // item_bytes for memory in numbers))
                self.apart[node], self.in_backward[node], signs[apart] = apart, [apart], numbers
        return signs

    def _reused_values(self) -> dict[MemoryBuffer, bool]:
        """Find values that fusible operators read again after an unfusible operator has run.

        Such a value is written to memory. As in torch, the backward does not recompute the outputs of the operators
        that read it again. Returns {buffer: True if the backward must not recompute it}: False for the buffers of these
        values, True for the buffers of these outputs.
        """
        far: dict[MemoryBuffer, bool] = {}
        for memory, users in self.users.items():
            if len(users) < 2 or not isinstance(memory, MemoryBuffer):
                continue
            first = self._first_unfusible(users)
            behind = [node for node in users if self.order[node] > first and self.joined(node)]
            if behind:
                far.setdefault(memory, False)
                far |= {made: True for node in behind for made in self.made[node]}
        return far

    def _first_unfusible(self, users: Sequence[fx.Node]) -> int:
        """Return the index of the first unfusible operator among `users` and their dependents.

        Dependents are operators that read the output of a user or of another dependent. Dependents after the last user
        are not searched. If there is no unfusible operator, returns the index of the last user.
        """
        last = max(self.order[node] for node in users)
        queue, seen = [self.order[node] for node in users], set(users)
        heapq.heapify(queue)
        while queue:
            index = heapq.heappop(queue)
            node = self.calls[index]
            if not self.joined(node):
                return index
            for made in self.made[node]:
                for user in self.users[made]:
                    if user not in seen and self.order[user] <= last:
                        seen.add(user)
                        heapq.heappush(queue, self.order[user])
        return last

    def _forced(self) -> set[Piece]:
        forced: set[Piece] = {memory for memory, is_behind in self.far.items() if is_behind}
        for node in self.calls:
            size = sum(memory.size_bytes for memory in self.read[node])
            is_made_once = not self.joined(node) or cost_notes(node).joins == "copied"
            forced |= {m for m in self.made[node] if is_made_once or m.size_bytes * SMALL < size}
            apart, is_drawn = self.apart.get(node), not self.joined(node) or cost_notes(node).joins == "drawn"
            if apart is not None and (is_drawn or apart.size_bytes * SMALL < size):
                forced.add(apart)
            if not self.joined(node):
                forced |= set(self.in_backward.get(node, ()))
        return forced

    def _sources(self) -> dict[Piece, list[MemoryBuffer]]:
        """Return {buffer: buffers from which it is computed}. Parameters and gathered weights are left out."""
        sources: dict[Piece, list[MemoryBuffer]] = {}
        for node in self.calls:
            read = [memory for memory in self.read[node] if not _is_there(memory)]
            sources |= dict.fromkeys(self._pieces(node), read)
        return sources | self.signs_of

    def _kept(self) -> set[Piece]:
        """Return the buffers to save for backward: the minimum cut, and the inputs of checkpointed regions."""
        regions = self.eager.regions(self.alive)
        kept: set[Piece] = {m for nodes in regions.values() for m in self.eager.read_by(nodes)}
        self.entering = set(kept)
        reads = {piece for pieces in self.in_backward.values() for piece in pieces}
        self.sources = self._sources()
        edges = {piece: None if piece in self.forced else read for piece, read in self.sources.items()}
        away = self._distances(reads)
        weights = {
            piece: piece.size_bytes
            * FARTHER ** min(away.get(piece, 100), 100)
            * (1 if self._is_materialised(piece) else 2)
            for piece in edges
        }
        for part in _components(edges):
            if not reads.isdisjoint(part):
                kept |= _component_cut(part, edges, weights, reads)
        return kept

    def _distances(self, reads: set[Piece]) -> dict[Piece, int]:
        """Return {buffer: its distance to the backward, counted in operators}.

        The buffers in `reads`, which the backward reads directly, have distance 1.
        """
        away: dict[Piece, int] = dict.fromkeys(reads, 1)
        for node in reversed(self.calls):
            nearest = min((away[made] for made in self._pieces(node) if made in away), default=100)
            for memory in self.read[node]:
                away[memory] = min(away.get(memory, 100), nearest + 1)
        return away

    def _is_materialised(self, piece: Piece) -> bool:
        """Return True if a value must be written to memory, because it is not fused into all its users."""
        return isinstance(piece, MemoryBuffer) and not (
            self.users.get(piece) and all(map(self.joined, self.users[piece]))
        )

    def _needs(self) -> dict[Piece, dict[Piece, None]]:
        """Return {buffer: saved buffers from which the backward computes it}. A saved buffer maps to itself."""
        needs: dict[Piece, dict[Piece, None]] = {}
        for piece, sources in self.sources.items():
            if piece in self.kept:
                needs[piece] = {piece: None}
            elif piece in self.forced:
                needs[piece] = {}
            else:
                needs[piece] = {other: None for source in sources for other in needs.get(source, {source: None})}
        return needs

    def walk(self) -> Liveness:
        eager, left_out = self.eager, self._replacements()
        values = {node: _with(value, left_out) for node, value in eager.values.items()}
        needs = self._needs()
        keeps, others = dict[fx.Node, list[MemoryBuffer]](), dict[fx.Node, int]()
        for node in self.calls:
            pieces = {other: None for piece in self.in_backward.get(node, ()) for other in needs.get(piece, [piece])}
            lasting = [memory for memory in eager.keeps.get(node, ()) if _is_there(memory)]
            keeps[node] = [*lasting, *(m for m in pieces if isinstance(m, MemoryBuffer))]
            size = sum(m.size_bytes for m in pieces if isinstance(m, _ExtraSaved))
            if size:
                others[node] = size
        joined = frozenset(filter(self.joined, self.calls))
        takes = {node: (0, 0) if node in joined else sizes for node, sizes in eager.takes.items()}
        keeps = {node: [left_out.get(memory, memory) for memory in kept] for node, kept in keeps.items()}
        return replace(eager, values=values, keeps=keeps, others=others, takes=takes, in_place=joined)

    def _replacements(self) -> dict[MemoryBuffer, MemoryBuffer]:
        """Return {buffer of the eager graph: the buffer that takes its place in the compiled graph}.

        A buffer that no kernel writes to memory is replaced by one of 0 bytes. A cast weight that is saved is replaced
        by a buffer that the backward does not cast again.
        """
        outputs = (self.eager.values[node] for node in self.eager.outputs if isinstance(node, fx.Node))
        sent = {memory for output in outputs for memory in memories(output)}
        made = {memory for node in self.calls if self.joined(node) for memory in self.made[node]}
        there = sent | self.kept | self.entering | set(self.far)
        casts = {memory for memory in made & self.kept if memory.again}
        nowhere = {m for m in made - there if self.users.get(m) and not self._is_materialised(m)}
        changed = {memory: replace(memory, again=False) for memory in casts}
        return changed | {memory: replace(memory, size_bytes=0, again=False) for memory in nowhere}


def _is_there(memory: MemoryBuffer) -> bool:
    return memory.lives or (memory.again and not is_cast(memory.made_by))


def _with(value: Any, others: dict[MemoryBuffer, MemoryBuffer]) -> Any:
    if isinstance(value, tuple):
        return tuple(_with(item, others) for item in value)
    return replace(value, memory=others.get(value.memory, value.memory)) if isinstance(value, LocalValue) else value


def _components(edges: Edges) -> Iterable[list[Piece]]:
    """Return the connected components of the graph of buffers, each in program order."""
    graph: nx.Graph[Piece] = nx.Graph()
    for piece, sources in edges.items():
        graph.add_node(piece)
        graph.add_edges_from((source, piece) for source in sources or ())
    index = {piece: i for i, piece in enumerate(graph)}
    return (sorted(part, key=index.__getitem__) for part in nx.connected_components(graph))


def _component_cut(part: Sequence[Piece], edges: Edges, weights: dict[Piece, float], reads: set[Piece]) -> set[Piece]:
    """Return the buffers to save among the buffers of one connected component.

    Args:
        part: the buffers of the component, in program order.
        edges: {buffer: buffers from which it is computed}.
        weights: {buffer: cost of saving it}.
        reads: the buffers that the backward reads.
    """
    number = {piece: i for i, piece in enumerate(part)}
    component = []
    for piece in part:
        sources = edges[piece]
        indices = None if sources is None else tuple(number[source] for source in sources)
        component.append((indices, round(weights[piece]), piece in reads))
    return {part[i] for i in _minimum_cut(tuple(component))}


@lru_cache(MAX_CACHED_SIGNATURES)
def _minimum_cut(component: tuple[tuple[tuple[int, ...] | None, int, bool], ...]) -> frozenset[int]:
    """Return the indices of the buffers to save in one connected component.

    Args:
        component: a tuple for each buffer: (indices of the buffers from which it is computed, cost of saving it, True
            if the backward reads it). The indices are None for a buffer that is never recomputed.
    """
    graph: nx.DiGraph[Hashable] = nx.DiGraph()
    for i, (sources, weight, is_read) in enumerate(component):
        graph.add_edge((i, "in"), (i, "out"), capacity=weight)
        for source in sources or ():
            graph.add_edge((source, "out"), (i, "in"), capacity=math.inf)
        if sources is None:
            graph.add_edge("source", (i, "in"), capacity=math.inf)
        if is_read:
            graph.add_edge((i, "out"), "sink", capacity=math.inf)
    if "source" not in graph or "sink" not in graph:
        return frozenset()
    _, (source_side, _) = nx.minimum_cut(graph, "source", "sink")
    return frozenset(i for i in range(len(component)) if (i, "in") in source_side and (i, "out") not in source_side)
