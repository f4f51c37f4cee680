"""Compile a stage graph such that repeated blocks share one compiled function per kind.

A block is a run of calls in one numbered module, found by the module paths of the nodes. Blocks are of one kind if
their operators, constants and input specs are equal. All blocks of a kind call one compiled function, which receives
its parameters and values as arguments. Nodes between blocks, and blocks without an equal, are compiled separately. So
the compile time depends on the number of kinds, not of blocks. The outer graph, which owns the parameters and calls the
compiled graphs, is not compiled.

Every call of a compiled graph has overhead. So a compiled graph covers several consecutive blocks if that keeps no
memory alive for longer: all gradients of a compiled graph become available only when its backward ends.
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
"""Operators that a compiler runs as library kernels, without fusing them with their neighbours."""

LEAST_CHAIN = 3
"""Minimum number of consecutive equal blocks to shift boundaries inside. Two shifted blocks would be of two kinds."""

MOST_BLOCKS = 2
"""Maximum number of consecutive blocks compiled as one graph."""

Chunk = list[fx.Node]
"""Consecutive calls that are compiled as one graph."""
Run = tuple[int, int]
"""(start, stop) of a chunk among the calls of a graph."""


def compiled(module: fx.GraphModule, has_seams: bool, joins: bool) -> fx.GraphModule:
    """Return a bound stage graph that runs compiled, with its regions as in `with_regions`.

    Args:
        has_seams: block boundaries may shift inside the blocks. Not if weights are unsharded block by block, because a
            compiled graph would then keep the weights of two blocks unsharded.
        joins: a compiled graph may cover several blocks. Not if gradients of one block are used before the backward of
            the next, or if blocks are recomputed, because the compiler could then process several blocks at once.
    """
    joins = joins and not has_regions(module.graph)
    module = _make_shared_inputs_contiguous(with_regions(_with_salts(module)))
    pieces = _Chunks(module, has_seams, MOST_BLOCKS if joins else 1).of_graph()
    if len(pieces) == 1 and all(node.op in ("placeholder", "get_attr") for node in module.graph.nodes
                                if _is_given(node, module)):  # fmt: skip
        return _compile(module)
    return _with_calls(module, pieces)


def _compile(module: fx.GraphModule) -> fx.GraphModule:
    # Compile `forward`: torch counts recompilations per code object, and all modules share `__call__`.
    module.forward = compiled_apart(module.forward, _ranks(module))
    return module


def _ranks(module: fx.GraphModule) -> str:
    """Return a cache key: this process's rank and the size of every process group that the graph uses.

    Without the key a rank would find graphs in torch's caches on disk that another rank compiled.
    """
    graphs = [submodule.graph for submodule in module.modules() if isinstance(submodule, fx.GraphModule)]
    groups = sorted({axis for graph in graphs for node in graph.nodes if (axis := axis_of(node)) is not None})
    return ", ".join(f"{name}: {resolve_group(name).rank()} of {resolve_group(name).size()}" for name in groups)


def _with_salts(module: fx.GraphModule) -> fx.GraphModule:
    """Combine each dropout seed with its salt outside the blocks, because the salt differs per block."""
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
    """Return a contiguous copy. An opaque operator keeps the compiler from fusing the copy into its users.

    A fused copy would read every element from its original position.
    """
    return value.clone(memory_format=torch.contiguous_format)


@in_order.register_fake
def _(value: Tensor) -> Tensor:
    return value.new_empty(value.shape)


in_order.register_autograd(lambda _context, grad: grad)


def _make_shared_inputs_contiguous(module: fx.GraphModule) -> fx.GraphModule:
    """Make a transposed value contiguous once if several blocks use it, such as an attention bias.

    Each kernel that reads such a value with its strides takes several times as long.
    """
    graph = module.graph
    for node in list(graph.nodes):
        blocks = {path for user in node.users for path in _numbered(user, module)[:1]}
        if len(blocks) > 1 and _is_reordered(node):
            with graph.inserting_after(node):
                contiguous = graph.call_function(torch.ops.autopart.in_order.default, (node,))
            contiguous.meta = dict(node.meta)
            node.replace_all_uses_with(
                contiguous, delete_user_cb=lambda user, contiguous=contiguous: user is not contiguous
            )
    module.recompile()
    return module


def _is_reordered(node: fx.Node) -> bool:
    """Return True if a value is stored in another order than that of its dims.

    Such a value is transposed, or computed elementwise from transposed values.
    """
    if _is_view(node):
        source, *_ = node.all_input_nodes
        if _num_elements(source) != _num_elements(node) or _num_elements(node) is None:
            return False
        read: Any = facts(source).get("val")
        contiguous = torch.empty(read.shape, dtype=read.dtype, device="meta")
        view: Any = node.target
        return not view(contiguous, *node.args[1:], **node.kwargs).is_contiguous() or _is_reordered(source)
    if not is_joined(node):
        return False
    as_large = [read for read in node.all_input_nodes if _num_elements(read) == _num_elements(node)]
    return bool(as_large) and all(map(_is_reordered, as_large))


def _num_elements(node: fx.Node) -> int | None:
    value = facts(node).get("val")
    return value.numel() if isinstance(value, Tensor) else None


class _Chunks:
    """Split of a stage graph's calls into compiled graphs."""

    def __init__(self, module: fx.GraphModule, has_seams: bool, most_blocks: int):
        self.module, self.has_seams, self.most_blocks = module, has_seams, most_blocks
        self.calls = [node for node in module.graph.nodes if not _is_given(node, module) and node.op != "output"]

    def of_graph(self) -> list[tuple[str, Chunk]]:
        """Return all chunks in graph order, each with its kind."""
        pieces, begin = list[Chunk](), 0
        for start, stop in sorted(self._blocks(0, len(self.calls), 0)):
            if start < begin:  # it overlaps the block before it
                continue
            pieces += [self.calls[begin:start], self.calls[start:stop]]
            begin = stop
        pieces.append(self.calls[begin:])
        return [(self._kind(piece), piece) for piece in pieces if piece]

    def _blocks(self, begin: int, end: int, depth: int) -> Iterator[Run]:
        """Yield repeated blocks among the calls from `begin` to `end`.

        `depth`: number of enclosing numbered modules.
        """
        for siblings in self._siblings(begin, end, depth):
            gap = min((after - stop for (_, stop), (after, _) in pairwise(siblings)), default=0)
            limits = [*(start for start, _ in siblings[1:]), end]
            # Calls between blocks, such as a sum, join the block before them if the blocks stay equal.
            longer = [(start, min(stop + gap, limit)) for (start, stop), limit in zip(siblings, limits, strict=True)]
            runs = min((longer, siblings), key=lambda runs: len(set(self._kinds(runs))))
            kinds = self._kinds(runs)
            for kind, alike in groupby(zip(kinds, runs, siblings, strict=True), key=itemgetter(0)):
                _, chain, shorter = zip(*alike, strict=True)
                if kinds.count(kind) > 1:
                    blocks = self._at_seams(chain)
                    # Blocks of alternating kinds form short chains, so each block is a chunk.
                    yield from self._merged(blocks) if kinds.count(kind) == len(chain) else blocks
                else:
                    ((start, stop),) = shorter
                    yield from self._blocks(start, stop, depth + 1)

    def _at_seams(self, chain: Sequence[Run]) -> Sequence[Run]:
        """Shift the boundaries of a long chain of equal, consecutive blocks to their seams.

        Calls before the first seam join the chunk before the chain, and calls after the last seam the chunk after it.
        """
        seam = self._seam(*chain[0]) if self.has_seams and len(chain) >= LEAST_CHAIN else 0
        if not seam or not _follow(chain):
            return chain
        return [(start + seam, stop + seam) for start, stop in chain[:-1]]

    def _merged(self, chain: Sequence[Run]) -> Sequence[Run]:
        """Merge consecutive blocks into chunks of several blocks.

        Leading blocks that do not fill a chunk join the code before them. So do all blocks if there would be only one
        chunk.
        """
        if self.most_blocks == 1 or not _follow(chain):
            return chain
        firsts = range(len(chain) % self.most_blocks, len(chain), self.most_blocks)
        return [(chain[i][0], chain[i + self.most_blocks - 1][1]) for i in firsts] if len(firsts) > 1 else []

    def _seam(self, start: int, stop: int) -> int:
        """Return the best position to split a block, as a number of calls after its start; 0 without one.

        At a seam, one product (matmul or attention) is the only user of another product's output. A compiler takes both
        as library kernels, so a boundary between them prevents no fusion. Elsewhere a boundary would separate what the
        compiler fuses, such as a norm and the sum before it. Among several seams the one with the fewest live values is
        chosen.
        """
        block = self.calls[start:stop]
        seams = [index for index, call in enumerate(block) if _product_read(call) in block]
        return min(seams, key=lambda index: len(_results(block[:index])), default=0)

    def _siblings(self, begin: int, end: int, depth: int) -> Iterable[list[Run]]:
        """Return, per module with numbered children, the ranges of calls of these children."""
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
        """Return a text that is equal for chunks that one compiled function can run."""
        numbers: dict[fx.Node, int] = {}
        lines = list[Any]()

        def number(node: fx.Node) -> Any:
            if node not in numbers:
                numbers[node] = len(numbers)
                lines.append(self._input_spec(node))
            return _ValueRef(numbers[node])

        for node in piece:
            if node.op == "placeholder":
                number(node)
                continue
            called = self._kind(_operators(node, self.module)) if node.op == "call_module" else node.target
            lines.append((called, fx.map_arg((node.args, node.kwargs), number)))
            numbers[node] = len(numbers)
        lines.append([numbers[node] for node in _results(numbers)])
        return repr(lines)

    def _input_spec(self, node: fx.Node) -> Any:
        """Return the input spec that a compiled function is specialised to."""
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
    """Return the product whose output is a product's first argument, through views.

    Returns None if the output has other users.
    """
    read: Any = node.args[0] if short_name(node) in PRODUCTS else None
    while isinstance(read, fx.Node) and len(read.users) == 1:
        if short_name(read) in PRODUCTS:
            return read
        read = read.args[0] if _is_view(read) else None
    return None


def _numbered(node: fx.Node, module: fx.GraphModule) -> list[str]:
    """Return the paths of the numbered modules that a call is in, outermost first."""
    operators = _operators(node, module)
    stacks = (facts(inner).get("nn_module_stack") for inner in operators if inner.op != "placeholder")
    paths = [path for path, _ in next(filter(None, stacks), {}).values()]
    return [path for path in dict.fromkeys(paths) if path.rpartition(".")[2].isdigit()]


def _operators(node: fx.Node, module: fx.GraphModule) -> Iterable[fx.Node]:
    """Return the operators that a call runs: itself, or those of its region."""
    called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    return called.operators.graph.nodes if isinstance(called, Region) else [node]


def _is_view(node: fx.Node) -> bool:
    return getattr(node.target, "is_view", False)


@dataclass(frozen=True)
class _ValueRef:
    """Reference to a value in the text of a kind."""

    number: int


def _is_given(node: fx.Node, module: fx.GraphModule) -> bool:
    """Return True if a value exists before any chunk runs.

    Such values are inputs, parameters, unsharded parameters, and seeds combined with salts.
    """
    if node.op == "call_module":
        return not isinstance(module.get_submodule(str(node.target)), Region)
    if node.target is getitem and isinstance(node.args[0], fx.Node):
        return node.args[0].op == "call_module" and _is_given(node.args[0], module)
    return node.op in ("placeholder", "get_attr") or node.target is with_salt


def _results(nodes: Collection[fx.Node]) -> list[fx.Node]:
    """Return those of the nodes that other nodes use."""
    return [node for node in nodes if any(user not in nodes for user in node.users)]


def _with_calls(module: fx.GraphModule, pieces: Sequence[tuple[str, Chunk]]) -> fx.GraphModule:
    """Return the graph with one call per chunk, and one compiled module per kind."""
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
        part, read = _chunk_graph(piece)
        if kind not in kinds:
            kinds[kind] = f"piece_{len(kinds)}"
            module.add_submodule(kinds[kind], _compile(fx.GraphModule(module, part, class_name=kinds[kind])))
        call = graph.call_module(kinds[kind], tuple(map(value, read)))
        for index, node in enumerate(_results(dict.fromkeys(piece))):
            values[node] = graph.call_function(getitem, (call, index))
    graph.output(fx.map_arg(module.graph.output_node().args[0], value))
    return with_flat_names(fx.GraphModule(module, graph, class_name=module.__class__.__name__))


def _chunk_graph(piece: Chunk) -> tuple[fx.Graph, list[fx.Node]]:
    """Return a chunk as a separate graph, and its inputs in the order of the placeholders."""
    graph = fx.Graph()
    members = set(piece)
    read = list(dict.fromkeys(node for call in piece for node in call.all_input_nodes if node not in members))
    copies = {node: graph.placeholder(f"read_{index}") for index, node in enumerate(read)}
    for node in piece:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in _results(dict.fromkeys(piece))))
    return graph, read
