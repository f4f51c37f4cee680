"""A model as a `Table`: what the operators of a program do."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

from torch import fx

from autopart.compat import stored_bytes
from autopart.cost.count.counting import Counted, counted
from autopart.cost.count.footprint import (
    Memory,
    Value,
    Walk,
    memories,
    needs_grad,
    rerun_bytes,
    saved_memory,
    saved_others,
)
from autopart.cost.count.growth import Growth, tokens
from autopart.cost.count.sending import local_bytes
from autopart.cost.flops import matrix_work
from autopart.cost.rows import Parameter, Row
from autopart.cost.table import Table
from autopart.cost.work import CHOSEN, NOTHING, Powers, Size, chosen_ranks
from autopart.ir.blocks import blocks as repeated_blocks
from autopart.ir.buckets import bucketed, in_order_of_use
from autopart.ir.facts import facts, times
from autopart.ir.fold import later, unrolled
from autopart.ir.graph import active_operators, source_of, tensor_inputs
from autopart.ir.layout import MIN_DIMS, parts_of
from autopart.ir.mesh import Mesh
from autopart.ir.operators import is_cast, stored_source
from autopart.ir.program import Program, StoredTensor
from autopart.ir.scattering import in_parts
from autopart.ir.storing import storing_axes
from autopart.tracing.trace import Trace, batch_size

Blocks = Mapping[str, Sequence[int]]
"""{path of a container: for every block of the model, which block of the traced copy it is like}."""

PARTS = ("forward", "recompute", "input_backward", "weight_backward", "accumulate")


class BlocksApart(Exception):
    """The operators of a repeated block do not lie together, so that one cannot stand for others."""


class _At(NamedTuple):
    """A repeated block: its container, and its number in the traced copy."""

    path: str
    number: int


def tabulate(trace: Trace, program: Program, walks: Sequence[Walk], blocks: Blocks, fused: bool = False) -> Table:
    """The table of a program in which blocks stand for all that are like them; `fused` as in `counted`. `walks`: of
    every stage.

    Raises BlocksApart where the operators of such a block do not lie together. Of a folded trace the order has the
    blocks that are there; `folded` puts in those left out.
    """
    growth, mesh = Growth(trace, program), program.mesh
    stages = counted(trace, program, walks, fused)
    held = [_Held(walk, growth) for walk in walks]
    rows = [one.row(each) for one, found in zip(held, stages, strict=True) for each in found]
    starts = tuple(accumulate(map(len, stages)))[:-1]
    trained = frozenset().union(*(one.trained for one in held))
    again = frozenset().union(*(one.cast_again for one in held))
    is_stored = bool(storing_axes(program))
    gathers = is_stored and program.zero not in (1, 2)
    parameters = {
        name: Parameter(
            _stored(trace, program, name), _summed_over(mesh, stored), name in trained,
            _cut_over(mesh, stored, is_stored), *_shares(trace, name), name in again, *_form(trace, program, name),
        ) for name, stored in program.parameters.items()
    }  # fmt: skip
    order = _order(_blocks_of([one for found in stages for one in found], blocks), blocks)
    if trace.folds:
        nodes = [one.node for found in stages for one in found]
        order = ((row, *facts(node).get("block", ("", 0))) for row, node in enumerate(nodes))
    active = active_operators(trace.graph)
    flops = sum(matrix_work(n) * _copies(facts(n).get("key", ""), blocks) * times(n) for n in active)
    buffers = {id(buffer): stored_bytes(buffer) * _copies(name, blocks) for name, buffer in trace.buffers.items()}
    batch = batch_size(trace)
    of_rank = max(1, batch // (program.row_ranks * program.microbatches))  # a call without rows is alike on every rank
    return Table(
        tuple(rows), tuple(order), parameters, of_rank, tokens(trace),
        chosen_ranks(mesh)["tp"], flops / batch, sum(tensor.nbytes for tensor in trace.call.tensors) / batch,
        sum(buffers.values()), gathers, _hidden(trace, program), chosen_ranks(mesh)["cp"], chosen_ranks(mesh)["ep"],
        {len(walks): starts},
    )  # fmt: skip


def _hidden(trace: Trace, program: Program) -> float:
    """The share of gradients that are not in the bucket which a backward completes last: the first that is read."""
    total = last = 0
    for stage in program.stages:
        read = [n for n in in_order_of_use(stage.graph.graph, stage.parameters) if trace.parameters[n].requires_grad]
        names = unrolled(trace.folds, read, str, partial(later, trace.folds))
        sizes = {name: trace.parameters[trace.originals[name]].nbytes for name in names}
        buckets = bucketed(sizes)
        total += sum(sizes.values())
        last += sum(sizes[name] for name in buckets[0]) if buckets else 0
    return 1 - last / total if total else 0.0


def _stored(trace: Trace, program: Program, name: str) -> Size:
    """What a rank stores of a parameter, before ZeRO cuts it."""
    mesh, stored = program.mesh, program.parameters[name]
    axes = {name: mesh.innermost(cuts) for name, cuts in CHOSEN.items()}
    cut = {name: int(axis in stored.layout and stored.layout[axis].is_shard) for name, axis in axes.items()}
    parts = mesh.size(mesh.stored_over(stored.layout) or "")
    whole = local_bytes(trace, program, stored) * parts
    return Size.of(whole, Powers(**cut))


def _form(trace: Trace, program: Program, name: str) -> tuple[int, int]:
    """Bytes of an element, and the first dim, where that counts for what data-parallel ranks send."""
    tensor = trace.parameters[name]
    if program.dp_sync.is_default:
        return 4, 0
    return tensor.dtype.itemsize, tensor.shape[0] if tensor.dim() > 1 else 0


def _summed_over(mesh: Mesh, stored: StoredTensor) -> tuple[str, ...]:
    """The axes over which its gradient is summed, or would be if it were not stored in parts."""
    over = parts_of(mesh.stored_over(stored.layout) or mesh.data_axis)
    return tuple(dict.fromkeys((mesh.data_axis, *over, *stored.grad_axes)))


def _cut_over(mesh: Mesh, stored: StoredTensor, is_stored: bool) -> tuple[str, ...]:
    """The axes over which ZeRO-3 cuts it on a mesh on which all of them have several ranks; `is_stored`: as this
    program has it."""
    over = mesh.stored_over(stored.layout)
    if over is None and (is_stored or len(stored.shape) < MIN_DIMS):
        return ()
    cutting = {axis for axis, place in stored.layout.items() if place.is_shard}
    left = set() if over is None else {axis for axis in mesh.sizes if mesh.size(axis) > 1} - set(parts_of(over))
    return tuple(axis.name for axis in mesh.axes if axis.stores and axis.name not in cutting | left)


def _shares(trace: Trace, name: str) -> tuple[float, float]:
    """Bytes that are read of a parameter, and summed of its gradient, for each that is stored."""
    stored, precision = trace.parameters[name].dtype, trace.precision
    if precision is None or not stored.is_floating_point:
        return 1.0, 1.0
    return precision.compute.itemsize / stored.itemsize, precision.reduce.itemsize / stored.itemsize


# Repeated blocks


def each_block(trace: Trace) -> dict[str, tuple[int, ...]]:
    """Every repeated block that has a name as one like itself alone."""
    found: dict[str, int] = {}
    for name in repeated_blocks(trace.graph).values():
        path, _, number = name.rpartition(".")
        if path:
            found[path] = max(found.get(path, 0), int(number) + 1)
    return {path: tuple(range(number)) for path, number in found.items()}


def _block_of(name: str, blocks: Blocks) -> _At | None:
    for path in blocks:
        match = re.match(rf"{re.escape(path)}\.(\d+)(?=[./]|$)", name)
        if match is not None:
            return _At(path, int(match[1]))
    return None


def _copies(name: str, blocks: Blocks) -> int:
    """How many operators or tensors of the model one of the copy stands for."""
    at = _block_of(name, blocks)
    return 1 if at is None else list(blocks[at.path]).count(at.number)


def _blocks_of(found: Sequence[Counted], blocks: Blocks) -> list[_At | None]:
    """The block of every operator; what lies between two of a block is in it."""
    at = [_block_of(_name(one.node), blocks) for one in found]
    last: dict[_At, int] = {block: i for i, block in enumerate(at) if block is not None}
    inside: _At | None = None
    for i, block in enumerate(at):
        if block is not None and inside is not None and block != inside and i < last[inside]:
            raise BlocksApart(f"{block.path}.{block.number} begins inside {inside.path}.{inside.number}")
        inside = block or inside
        if inside is not None:
            at[i] = inside if i <= last[inside] else None
            inside = inside if i < last[inside] else None
    return at


def _name(node: fx.Node) -> str:
    """What an operator is known by: its key, or the parameter that it is done to."""
    source = source_of(node)[0]
    while "key" not in facts(source) and source.op == "call_function" and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    return facts(source).get("key", str(source.target))


def _order(at: Sequence[_At | None], blocks: Blocks) -> Iterator[tuple[int, str, int]]:
    """All operators of the model in order: the row of each, and the block of the model it is in ("" for none)."""
    for row, block in enumerate(at):
        if block is None:
            yield row, "", 0
        elif row == at.index(block):  # here begin the blocks of the model up to the next one that was traced
            like = blocks[block.path]
            ends = like.index(block.number + 1) if block.number + 1 in like else len(like)
            for number in range(like.index(block.number), ends):
                same = _At(block.path, like[number])
                yield from ((row, block.path, number) for row, other in enumerate(at) if other == same)


class _Held:
    """What a stage's operators hold in memory."""

    def __init__(self, walk: Walk, growth: Growth):
        self.walk, self.growth = walk, growth
        self.traced = {node.name: node for node in walk.trace.graph.nodes}
        self.scattered: dict[fx.Node, bool] = {}
        self.alive, self.parameters = walk.reached(), set(walk.stage.parameters)
        self.saved = saved_memory(walk, self.alive)
        self.rerun = {
            region: Size.of(size, self._powers(walk.regions(self.alive)[region]))
            for region, size in rerun_bytes(walk, self.alive).items()
        }
        self.trained = {str(node.target) for node in self.alive if node.op == "get_attr"}
        casts = {memory.made_by for kept in walk.keeps.values() for memory in kept if memory.again}
        read = (stored_source(n) for n in casts if is_cast(n) or n.kwargs.get("dtype"))
        self.cast_again = {str(node.target) for node in read if node is not None}

    def row(self, one: Counted) -> Row:
        works = {part: found for part in PARTS if (found := getattr(one, part))}
        products = [work.flops for work in one.forward if work.flops.terms]
        computes = any(not work.axis for work in one.forward)
        names = {str(n.target) for n in one.node.all_input_nodes if n.op == "get_attr"}
        travelling = self.crossing[one.node]
        crossing = None if None in travelling.values() else Size.sum(filter(None, travelling.values()))
        alike = Size.sum(size for node, size in travelling.items() if size is not None and self._in_parts(node))
        return Row(
            works, self.kept(one.node), self.temporary(one.node), crossing,
            products[0] if products else self._elements(one.node) if computes else NOTHING,
            tuple(sorted(names & self.parameters)), NOTHING if crossing is None else alike,
        )  # fmt: skip

    def _in_parts(self, node: fx.Node) -> bool:
        """Whether a value of the stage can be sent in parts."""
        if node not in self.scattered:
            origin = self.traced.get(facts(node).get("origin", ""))
            layout = facts(node).get("layout", {})
            mesh = self.walk.program.mesh
            self.scattered[node] = origin is not None and in_parts(origin, layout, mesh) is not None
        return self.scattered[node]

    def _powers(self, nodes: Sequence[fx.Node]) -> Powers:
        """Those of the largest of what operators keep."""
        kept = [memory for node in nodes for memory in self.walk.keeps.get(node, ()) if not memory.lives]
        return self.growth.of(max(kept, key=lambda memory: memory.size_bytes).made_by) if kept else Powers()

    def size(self, memory: Memory) -> Size:
        return Size.of(memory.size_bytes, self.growth.of(memory.made_by))

    def _elements(self, node: fx.Node) -> Size:
        found = self.walk.values[node]
        made = [v for v in (found if isinstance(found, tuple) else (found,)) if isinstance(v, Value)]
        return Size.sum([Size.of(float(math.prod(v.form.shape)), self.growth.of(node)) for v in made])

    def kept(self, node: fx.Node) -> Size:
        own = saved_others(self.walk, node) if node in self.alive else 0
        return Size.sum([self._own(node, own), *map(self.size, self.saved.get(node, ()))])

    def _own(self, node: fx.Node, size_bytes: int) -> Size:
        """What an operator keeps that is neither its input nor its output: copies of inputs, by their size, or else
        something that grows as what it makes."""
        values = [(n, self.walk.values[n]) for n in tensor_inputs(node)]
        read = [Size.of(v.form.size_bytes, self.growth.of(n)) for n, v in values if isinstance(v, Value)]
        options = [Size.sum(read), *read]
        return next((o for o in options if o.value == size_bytes), Size.of(size_bytes, self.growth.of(node)))

    def temporary(self, node: fx.Node) -> Size:
        """The node's value and what it reads; of a region that is run again, what it keeps then too."""
        values = [self.walk.values[used] for used in (node, *node.all_input_nodes)]
        again = self.rerun.get(facts(node).get("region", -1), NOTHING)
        return Size.sum([again, *map(self.size, {memory for found in values for memory in memories(found)})])

    @cached_property
    def crossing(self) -> dict[fx.Node, dict[fx.Node, Size | None]]:
        """What a stage that begins at a node would receive: None of a value without gradient, which cannot travel."""
        nodes = list(self.walk.values)
        last = {used: i for i, node in enumerate(nodes) for used in node.all_input_nodes}
        last |= dict.fromkeys(self.walk.outputs[: len(self.walk.stage.sends)], len(nodes))
        received = [n for n in nodes if n.op == "placeholder" and str(n.target) not in self.walk.inputs]
        data, weights = set[fx.Node](), set[fx.Node]()  # made from inputs, from weights alone: made where they are read
        travelling: dict[fx.Node, Size | None] = {}
        found: dict[fx.Node, dict[fx.Node, Size | None]] = {}
        for i, node in enumerate(nodes):
            travelling = {made: size for made, size in travelling.items() if last[made] >= i}
            found[node] = dict(travelling)
            reads, value = node.all_input_nodes, self.walk.values[node]
            if node in received:
                travelling[node] = self.size(value.memory)
            elif node.op == "placeholder" or (node.op == "call_function" and data.issuperset(reads)):
                data.add(node)
            elif node.op == "get_attr" or weights.issuperset(reads):
                weights.add(node)
            elif last.get(node, i) > i:
                single = isinstance(value, Value) and needs_grad(value)
                travelling[node] = Size.of(value.form.size_bytes, self.growth.of(node)) if single else None
        return found
