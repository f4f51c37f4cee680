"""A compiled stage graph, of which each kind of repeated block is compiled once.

A block is a run of calls in one numbered module, found by the modules that nodes carry. Blocks are of one kind where
their operators, constants and forms of all that they read are the same; they are calls of one compiled function,
which is given the parameters and values that it reads. What lies between blocks, and blocks that are like no other,
are compiled in pieces of their own. So compiling takes as long as the kinds of blocks do, however many there are, and
the graph that calls the pieces is not compiled: parameters stay in it.

Every call of a piece costs time, so a piece is of several blocks that follow each other, where that holds nothing
longer: all gradients of a piece are there at once, when its backward ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter, getitem, itemgetter
from typing import Any

import torch
from torch import Tensor, fx

from autopart.compat.torch_internals import compiled_apart, resolve_group
from autopart.ir.collective_nodes import autopart_operator, axis_of
from autopart.ir.facts import facts, is_joined
from autopart.ir.graph import short_name
from autopart.ops.operators import with_salt
from autopart.runtime.comm.collectives import with_flat_names
from autopart.runtime.graphs.recompute_calls import Region, has_regions, with_regions

PRODUCTS = ("linear", "matmul", "mm", "bmm", "scaled_dot_product_attention", "window_attention", "attention_runs",
            "ring_attention", "attention_dropout")  # fmt: skip
"""What a compiler takes as it is, and makes nothing of together with what is around."""

LEAST_CHAIN = 3
"""So many blocks of one kind at least follow each other where they are cut inside: two would be of two kinds."""

MOST_BLOCKS = 2
"""Of so many blocks a piece is made, where it may be of several."""

Piece = list[fx.Node]
"""Calls that follow each other."""
Run = tuple[int, int]
"""Where a piece begins and stops among the calls of a graph."""


def compiled(module: fx.GraphModule, has_seams: bool, joins: bool) -> fx.GraphModule:
    """A bound stage graph that runs compiled, its regions as in `with_regions`.

    Args:
        has_seams: blocks may be cut inside; where weights are gathered block by block that would hold those of two.
        joins: a piece may be of several blocks; not where anything is done with the gradients of one before the
            backward of another, or blocks are computed again: the compiler could do so with several at once.
    """
    joins = joins and not has_regions(module.graph)
    module = _laid_in_order(with_regions(_with_salts(module)))
    pieces = _Pieces(module, has_seams, MOST_BLOCKS if joins else 1).of_graph()
    if len(pieces) == 1 and all(node.op in ("placeholder", "get_attr") for node in module.graph.nodes
                                if _is_given(node, module)):  # fmt: skip
        return _compile(module)
    return _calling(module, pieces)


def _compile(module: fx.GraphModule) -> fx.GraphModule:
    # A graph's code is its own, that of nn.Module's __call__ is not: recompilations are counted by code.
    module.forward = compiled_apart(module.forward, _ranks(module))
    return module


def _ranks(module: fx.GraphModule) -> str:
    """What is compiled of a graph beside what is written in it: in every process group, this process's rank among how
    many. Without that a rank would find in torch's caches on disk what another one has compiled."""
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    groups = sorted({axis for graph in graphs for node in graph.nodes if (axis := axis_of(node)) is not None})
    return ", ".join(f"{name}: {resolve_group(name).rank()} of {resolve_group(name).size()}" for name in groups)


def _with_salts(module: fx.GraphModule) -> fx.GraphModule:
    """Every dropout reads its salt with the seed: the salt is a constant that is another in every block."""
    graph = module.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in [node for node in graph.nodes if autopart_operator(node) in ("dropout", "attention_dropout")]:
        *others, seed, salt, shard = node.args
        with graph.inserting_before(first):
            both = graph.call_function(with_salt, (seed, salt))
        node.args = (*others, both, None, shard)
    module.recompile()
    return module


@torch.library.custom_op("autopart::in_order", mutates_args=())
def in_order(value: Tensor) -> Tensor:
    """A copy whose elements lie in the order of its dims. A compiler would join the plain operator with what reads it,
    and read every element where it lay."""
    return value.clone(memory_format=torch.contiguous_format)


@in_order.register_fake
def _(value: Tensor) -> Tensor:
    return value.new_empty(value.shape)


in_order.register_autograd(lambda _context, grad: grad)


def _laid_in_order(module: fx.GraphModule) -> fx.GraphModule:
    """What several blocks read transposed, such as a bias of attention, is laid in order once: each kernel that reads
    it as it is takes several times as long."""
    graph = module.graph
    for node in list(graph.nodes):
        blocks = {path for user in node.users for path in _numbered(user, module)[:1]}
        if len(blocks) > 1 and _is_reordered(node):
            with graph.inserting_after(node):
                laid = graph.call_function(torch.ops.autopart.in_order.default, (node,))
            laid.meta = dict(node.meta)
            node.replace_all_uses_with(laid, delete_user_cb=lambda user, laid=laid: user is not laid)
    module.recompile()
    return module


def _is_reordered(node: fx.Node) -> bool:
    """Whether a value's elements, each there once, are read where they lie in another order than that of its dims: it
    is transposed, or is made of such values one element by one."""
    if _is_view(node):
        source, *_ = node.all_input_nodes
        if _num_elements(source) != _num_elements(node) or _num_elements(node) is None:
            return False
        read: Any = facts(source).get("val")
        laid = torch.empty(read.shape, dtype=read.dtype, device="meta")
        view: Any = node.target
        return not view(laid, *node.args[1:], **node.kwargs).is_contiguous() or _is_reordered(source)
    if not is_joined(node):
        return False
    as_large = [read for read in node.all_input_nodes if _num_elements(read) == _num_elements(node)]
    return bool(as_large) and all(map(_is_reordered, as_large))


def _num_elements(node: fx.Node) -> int | None:
    value = facts(node).get("val")
    return value.numel() if isinstance(value, Tensor) else None


class _Pieces:
    """How the calls of a stage graph are cut."""

    def __init__(self, module: fx.GraphModule, has_seams: bool, most_blocks: int):
        self.module, self.has_seams, self.most_blocks = module, has_seams, most_blocks
        self.calls = [node for node in module.graph.nodes if not _is_given(node, module) and node.op != "output"]

    def of_graph(self) -> list[tuple[str, Piece]]:
        """All pieces in order, each with its kind."""
        pieces, begin = list[Piece](), 0
        for start, stop in sorted(self._blocks(0, len(self.calls), 0)):
            if start < begin:  # it stands between others, and belongs to the one before it
                continue
            pieces += [self.calls[begin:start], self.calls[start:stop]]
            begin = stop
        pieces.append(self.calls[begin:])
        return [(self._kind(piece), piece) for piece in pieces if piece]

    def _blocks(self, begin: int, end: int, depth: int) -> Iterator[Run]:
        """Blocks among the calls from `begin` to `end` that are like another; `depth`: in how many numbered modules."""
        for siblings in self._siblings(begin, end, depth):
            gap = min((after - stop for (_, stop), (after, _) in pairwise(siblings)), default=0)
            limits = [*(start for start, _ in siblings[1:]), end]
            # What stands between blocks, such as a sum, belongs to the block before it, where all stay alike.
            longer = [(start, min(stop + gap, limit)) for (start, stop), limit in zip(siblings, limits, strict=True)]
            runs = min((longer, siblings), key=lambda runs: len(set(self._kinds(runs))))
            kinds = self._kinds(runs)
            for kind, alike in groupby(zip(kinds, runs, siblings, strict=True), key=itemgetter(0)):
                _, chain, shorter = zip(*alike, strict=True)
                if kinds.count(kind) > 1:
                    blocks = self._at_seams(chain)
                    # Of kinds that take turns, in chains of one or a few, each is a piece wherever it stands.
                    yield from self._joined(blocks) if kinds.count(kind) == len(chain) else blocks
                else:
                    ((start, stop),) = shorter
                    yield from self._blocks(start, stop, depth + 1)

    def _at_seams(self, chain: Sequence[Run]) -> Sequence[Run]:
        """Blocks of one kind from seam to seam, where they follow each other and are many: what is before the first
        seam and behind the last one belongs to what stands there."""
        seam = self._seam(*chain[0]) if self.has_seams and len(chain) >= LEAST_CHAIN else 0
        if not seam or not _follow(chain):
            return chain
        return [(start + seam, stop + seam) for start, stop in chain[:-1]]

    def _joined(self, chain: Sequence[Run]) -> Sequence[Run]:
        """Blocks as pieces of several. Those at the front that are too few for one belong to what stands there, and so
        do all where there would be one such piece only."""
        if self.most_blocks == 1 or not _follow(chain):
            return chain
        firsts = range(len(chain) % self.most_blocks, len(chain), self.most_blocks)
        return [(chain[i][0], chain[i + self.most_blocks - 1][1]) for i in firsts] if len(firsts) > 1 else []

    def _seam(self, start: int, stop: int) -> int:
        """How many calls after the start of a block a product reads what attention or another one gives, and nothing
        else reads: both are kernels that a compiler takes as they are, forward and backward. Elsewhere a cut parts
        what it would make one kernel, such as a norm and the sum before it. Of several the one over which the fewest
        values go; 0: there is none."""
        block = self.calls[start:stop]
        seams = [index for index, call in enumerate(block) if _product_read(call) in block]
        return min(seams, key=lambda index: len(_results(block[:index])), default=0)

    def _siblings(self, begin: int, end: int, depth: int) -> Iterable[list[Run]]:
        """For every module that holds numbered ones: where the calls of each of those are."""
        inside = [(position, _numbered(self.calls[position], self.module)) for position in range(begin, end)]
        placed = [(paths[depth], position) for position, paths in inside if len(paths) > depth]
        runs: defaultdict[str, list[Run]] = defaultdict(list)
        for path, calls in groupby(placed, key=itemgetter(0)):
            positions = [position for _, position in calls]
            runs[path.rpartition(".")[0]].append((positions[0], positions[-1] + 1))
        return runs.values()

    def _kinds(self, runs: Sequence[Run]) -> list[str]:
        return [self._kind(self.calls[start:stop]) for start, stop in runs]

    def _kind(self, piece: Iterable[fx.Node]) -> str:
        """A text that is the same for pieces that one compiled function can run."""
        numbers: dict[fx.Node, int] = {}
        lines = list[Any]()

        def number(node: fx.Node) -> Any:
            if node not in numbers:
                numbers[node] = len(numbers)
                lines.append(self._form(node))
            return _Value(numbers[node])

        for node in piece:
            if node.op == "placeholder":
                number(node)
                continue
            called = self._kind(_operators(node, self.module)) if node.op == "call_module" else node.target
            lines.append((called, fx.map_arg((node.args, node.kwargs), number)))
            numbers[node] = len(numbers)
        lines.append([numbers[node] for node in _results(numbers)])
        return repr(lines)

    def _form(self, node: fx.Node) -> Any:
        """What a compiled function is told of a value that it reads."""
        value, needs_grad = facts(node).get("val"), facts(node).get("needs_grad")
        if node.op == "get_attr":
            value = attrgetter(str(node.target))(self.module)
            needs_grad = value.requires_grad
        if not isinstance(value, Tensor):
            return type(value)
        return value.shape, value.stride(), value.dtype, value.device, needs_grad


def _follow(chain: Sequence[Run]) -> bool:
    return all(stop == start for (_, stop), (start, _) in pairwise(chain))


def _product_read(node: fx.Node) -> fx.Node | None:
    """The product of which a product reads the result first, through views, if nothing else reads that."""
    read: Any = node.args[0] if short_name(node) in PRODUCTS else None
    while isinstance(read, fx.Node) and len(read.users) == 1:
        if short_name(read) in PRODUCTS:
            return read
        read = read.args[0] if _is_view(read) else None
    return None


def _numbered(node: fx.Node, module: fx.GraphModule) -> list[str]:
    """The modules with a number for a name that a call is in, outermost first."""
    operators = _operators(node, module)
    stacks = (facts(inner).get("nn_module_stack") for inner in operators if inner.op != "placeholder")
    paths = [path for path, _ in next(filter(None, stacks), {}).values()]
    return [path for path in dict.fromkeys(paths) if path.rpartition(".")[2].isdigit()]


def _operators(node: fx.Node, module: fx.GraphModule) -> Iterable[fx.Node]:
    """Those that a call runs: one, or a region's."""
    called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    return called.operators.graph.nodes if isinstance(called, Region) else [node]


def _is_view(node: fx.Node) -> bool:
    return getattr(node.target, "is_view", False)


@dataclass(frozen=True)
class _Value:
    """A value in the text of a kind."""

    number: int


def _is_given(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether a value is there before any piece runs: an input, a parameter, a gathered one, a seed with its salt."""
    if node.op == "call_module":
        return not isinstance(module.get_submodule(str(node.target)), Region)
    if node.target is getitem and isinstance(node.args[0], fx.Node):
        return node.args[0].op == "call_module" and _is_given(node.args[0], module)
    return node.op in ("placeholder", "get_attr") or node.target is with_salt


def _results(nodes: Collection[fx.Node]) -> list[fx.Node]:
    """Those of some nodes that others read."""
    return [node for node in nodes if any(user not in nodes for user in node.users)]


def _calling(module: fx.GraphModule, pieces: Sequence[tuple[str, Piece]]) -> fx.GraphModule:
    """The graph with one call for each piece, and one compiled module for each kind of piece."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    kinds: dict[str, str] = {}

    def value(node: fx.Node) -> fx.Node:
        if node not in values:
            values[node] = graph.node_copy(node, value)
        return values[node]

    for node in module.graph.nodes:
        if node.op == "placeholder":
            value(node)
    for kind, piece in pieces:
        part, read = _part(piece)
        if kind not in kinds:
            kinds[kind] = f"piece_{len(kinds)}"
            module.add_submodule(kinds[kind], _compile(fx.GraphModule(module, part, class_name=kinds[kind])))
        call = graph.call_module(kinds[kind], tuple(map(value, read)))
        for index, node in enumerate(_results(dict.fromkeys(piece))):
            values[node] = graph.call_function(getitem, (call, index))
    graph.output(fx.map_arg(module.graph.output_node().args[0], value))
    return with_flat_names(fx.GraphModule(module, graph, class_name=module.__class__.__name__))


def _part(piece: Piece) -> tuple[fx.Graph, list[fx.Node]]:
    """A piece as a graph of its own, and what it reads, in the order of its placeholders."""
    graph = fx.Graph()
    members = set(piece)
    read = list(dict.fromkeys(node for call in piece for node in call.all_input_nodes if node not in members))
    copies = {node: graph.placeholder(f"read_{index}") for index, node in enumerate(read)}
    for node in piece:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in _results(dict.fromkeys(piece))))
    return graph, read
