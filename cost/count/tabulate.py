"""A model as a `Table`: what the operators of a program do."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from torch import fx

from autopart.compat.torch_internals import stored_bytes
from autopart.cost.count.gradient_communication import local_bytes
from autopart.cost.count.operator_counts import Counted, counted
from autopart.cost.count.scaling_exponents import Growth, tokens
from autopart.cost.count.shard_counts import divided
from autopart.cost.count.stage_footprint import (
    Walk,
)
from autopart.cost.count.symbolic_memory import Held
from autopart.cost.flops import matrix_work, work
from autopart.cost.predict.operator_work import CHOSEN, NOTHING, Powers, Size, chosen_ranks
from autopart.cost.predict.table import Table
from autopart.cost.predict.table_rows import Parameter
from autopart.ir.blocks.block_index import blocks as repeated_blocks
from autopart.ir.blocks.deduplication import later, unrolled
from autopart.ir.facts import facts, times
from autopart.ir.graph import active_operators, source_of
from autopart.ir.layout import MIN_DIMS, P, parts_of
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program, StoredTensor
from autopart.ir.run.buckets import bucketed, in_order_of_use
from autopart.ir.run.unshard_policy import storing_axes
from autopart.ir.trace import Trace, batch_size

Blocks = Mapping[str, Sequence[int]]
"""{path of a container: for every block of the model, which block of the traced copy it is like}."""


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
    blocks that are there; `of_few_rows` puts in those left out.
    """
    growth, mesh = Growth(trace, program), program.mesh
    stages = counted(trace, program, walks, fused)
    held = list[Held]()
    for walk in walks:
        held.append(Held(walk.in_memory, growth, held[-1].sends_kept if held else set()))
    nodes = [each.node for operators in stages for each in operators]
    places, loads = _places(trace, nodes), _loads(trace, growth, nodes)
    places |= {operators[0].node for operators in stages[1:]}  # maybe a conversion of what is received
    rows = [
        one.row(each, each.node in places, loads.get(each.node, NOTHING))
        for one, operators in zip(held, stages, strict=True) for each in operators
    ]  # fmt: skip
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
    order = _order(_blocks_of([one for operators in stages for one in operators], blocks), blocks)
    if trace.folds:
        nodes = [one.node for operators in stages for one in operators]
        order = ((row, *facts(node).get("block", ("", 0))) for row, node in enumerate(nodes))
    active = active_operators(trace.graph)
    flops = sum(matrix_work(n) * _copies(facts(n).get("key", ""), blocks) * times(n) for n in active)
    buffers = {id(buffer): stored_bytes(buffer) * _copies(name, blocks) for name, buffer in trace.buffers.items()}
    batch = batch_size(trace)
    of_rank = max(1, batch // (program.row_ranks * program.microbatches))  # a call without rows is alike on every rank
    return Table(
        tuple(rows), tuple(order), parameters, of_rank, tokens(trace), flops / batch,
        sum(tensor.nbytes for tensor in trace.call.tensors) / batch, sum(buffers.values()), gathers,
        _hidden(trace, program), **chosen_ranks(mesh), cuts={len(walks): starts}, divided=divided(trace, program),
    )  # fmt: skip


def _places(trace: Trace, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The written operators before which plans cut: the first of those that are written for an operator of the trace
    that depends on parameters, with what is done to its inputs. What makes a partial sum whole is the operator's."""
    keys = {facts(node).get("key") for node in active_operators(trace.graph)}
    places, last, begins, is_made = set[fx.Node](), None, True, False
    for node in nodes:
        if node.target is operator.getitem:
            continue
        key = facts(node).get("key")
        is_same = key is not None and key == last
        is_one = key in keys and not (is_same and is_made)  # else what is made is converted for another
        if begins and not (is_one and is_same):
            places.add(node)
        begins, last = is_one, key if is_one else last
        is_made = is_made if not is_one else P not in facts(node).get("layout", {}).values()
    return places


def _loads(trace: Trace, growth: Growth, nodes: Sequence[fx.Node]) -> dict[fx.Node, Size]:
    """What plans balance stages by, on the first operator that is written for each of the trace; of what is written
    together with another, on that one."""
    first = {key: node for node in reversed(nodes) if (key := facts(node).get("key")) is not None}
    loads, total = dict[fx.Node, Size](), 0.0
    for traced in active_operators(trace.graph):
        total += work(traced)
        node = first.get(facts(traced)["key"])
        if node is not None:
            loads[node], total = Size.of(total, Powers(s=growth.of_product(node).s)), 0.0
    return loads


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
    counts: dict[str, int] = {}
    for name in repeated_blocks(trace.graph).values():
        path, _, number = name.rpartition(".")
        if path:
            counts[path] = max(counts.get(path, 0), int(number) + 1)
    return {path: tuple(range(number)) for path, number in counts.items()}


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


def _blocks_of(operators: Sequence[Counted], blocks: Blocks) -> list[_At | None]:
    """The block of every operator; what lies between two of a block is in it."""
    at = [_block_of(_name(one.node), blocks) for one in operators]
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
