"""Construction of a model's cost table (`Table`) from the stage graphs of a program."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, count
from typing import Any, NamedTuple

from torch import fx

from autopart.compat.torch_internals import stored_bytes
from autopart.cost.count.gradient_communication import local_bytes
from autopart.cost.count.operator_counts import OperatorWork, counted
from autopart.cost.count.scaling_exponents import ScalingExponents, tokens
from autopart.cost.count.shard_counts import divided
from autopart.cost.count.stage_footprint import (
    Liveness,
)
from autopart.cost.count.symbolic_memory import SymbolicMemory
from autopart.cost.flops import matrix_work, work
from autopart.cost.predict.operator_work import CHOSEN, NOTHING, Exponents, Size, chosen_ranks
from autopart.cost.predict.table import Table
from autopart.cost.predict.table_rows import Parameter
from autopart.cost.update_rules import ADAMW, UPDATES
from autopart.ir.blocks.block_index import blocks as repeated_blocks
from autopart.ir.blocks.deduplication import expand_blocks, later
from autopart.ir.facts import facts, times
from autopart.ir.graph import active_operators, source_of
from autopart.ir.layout import MIN_DIMS, P, flattened_shards, mesh_axes_of
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program, StoredTensor
from autopart.ir.run.buckets import bucketed, by_first_use
from autopart.ir.run.unshard_policy import gather_of, gathers_stored, source_name, storing_axes
from autopart.ir.sharding import DimSharding
from autopart.ir.trace import Trace, batch_size

Blocks = Mapping[str, Sequence[int]]
"""{module path of a list of blocks: index of the traced block for every block of the model}.

With repeated blocks, one traced block can represent several blocks of the model.
"""


class BlocksNotContiguous(Exception):
    """Error: the operators of two repeated blocks are interleaved.

    A cost table can then not represent several equal blocks by one traced block.
    """


class _BlockId(NamedTuple):
    """A repeated block: the module path of the list that it is in, and its index in the traced model."""

    path: str
    number: int


def tabulate(trace: Trace, program: Program, walks: Sequence[Liveness], blocks: Blocks, fused: bool = False,
             optimizer: str = ADAMW) -> Table:  # fmt: skip
    """Build the cost table of a program in which one traced block may represent several equal blocks.

    The table lists all operators of the model in order. If the trace itself is deduplicated (`trace.folds`), the table
    lists only the operators of the trace, and `deduplicated_rows` adds the blocks that are not traced.

    Args:
        walks: liveness analysis of every stage.
        blocks: {module path of a list of blocks: for each block of the model, the index of the traced block that
            represents it}. Empty if each traced block represents only itself.
        fused: True to count each chain of fusible operators as one kernel, as a compiler emits it.
        optimizer: optimizer of the step, as in `cost.update_rules.UPDATES`.

    Raises BlocksNotContiguous if the operators of two blocks are interleaved.
    """
    growth, mesh, stages = ScalingExponents(trace, program), program.mesh, counted(trace, program, walks, fused)
    held = list[SymbolicMemory]()
    for walk in walks:
        before = (held[-1].saved_sends, held[-1].held_sends) if held else ()
        held.append(SymbolicMemory(walk.in_memory, growth, *before))
    nodes = [each.node for operators in stages for each in operators]
    places, loads = _stage_starts(trace, nodes), _loads(trace, growth, nodes)
    places |= {operators[0].node for operators in stages[1:]}  # it may be a conversion of a received value
    names = _prologue_names(walks)
    rows = [
        one.row(each, each.node in places, loads.get(each.node, NOTHING), names)
        for one, operators in zip(held, stages, strict=True) for each in operators
    ]  # fmt: skip
    starts = tuple(accumulate(map(len, stages)))[:-1]
    gathers = bool(storing_axes(program)) and program.zero not in (1, 2)
    order = _order(_blocks_of([one for operators in stages for one in operators], blocks), blocks)
    if trace.folds:
        nodes = [one.node for operators in stages for one in operators]
        order = ((row, *facts(node).get("block", ("", 0))) for row, node in enumerate(nodes))
    active = active_operators(trace.graph)
    flops = sum(matrix_work(n) * _copies(facts(n).get("key", ""), blocks) * times(n) for n in active)
    buffers = {id(buffer): stored_bytes(buffer) * _copies(name, blocks) for name, buffer in trace.buffers.items()}
    batch = batch_size(trace)
    of_rank = max(
        1, batch // (program.data_parallel_size * program.microbatches)
    )  # a call without a batch is identical on every rank
    prologue = {
        names[name]: _per_sample(size, growth.of(node), batch) for walk in walks
        for name, (node, size) in walk.in_memory.input_bytes.items()
    }  # fmt: skip
    inputs = {id(tensor): tensor.nbytes for tensor in trace.call.tensors}
    return Table(
        rows=tuple(rows),
        order=tuple(order),
        parameters=_parameters(trace, program, held, UPDATES[optimizer].full),
        b=of_rank,
        s=tokens(trace),
        row_flops=flops / batch,
        input_bytes=sum(inputs.values()) / batch,
        buffer_bytes=sum(buffers.values()),
        gathers=gathers,
        hidden_sums=_overlappable_share(trace, program),
        prologue=prologue,
        cuts={program.num_stages: starts[: program.num_stages - 1]},
        m=program.microbatches if program.tail is not None else 1,
        divided=divided(trace, program),
        **chosen_ranks(mesh),
        optimizer=optimizer,
    )


def _parameters(trace: Trace, program: Program, held: Sequence[SymbolicMemory], full: str) -> dict[str, Parameter]:
    trained = frozenset().union(*(one.trained for one in held))
    again = frozenset().union(*(one.cast_again for one in held))
    is_stored, scattered_shards = bool(storing_axes(program)), _scattered_shards(program)
    parameters = dict[str, Parameter]()
    for name, stored in program.parameters.items():
        read, summed = _mixed_precision_ratios(trace, name)
        itemsize, rows = _sync_sizes(trace, program, name)
        parameters[name] = Parameter(
            size=_stored(trace, program, name),
            axes=_reduced_over(program.mesh, stored),
            trained=name in trained,
            over=_zero3_axes(program.mesh, stored, is_stored),
            read=read,
            summed=summed,
            cast_again=name in again,
            itemsize=itemsize,
            rows=rows,
            contiguous=name not in scattered_shards,
            **_full_sizes(trace, program, name, full),
        )
    return parameters


def _full_sizes(trace: Trace, program: Program, name: str, full: str) -> dict[str, Any]:
    """Return the fields of `Parameter` for an update that needs the full tensor; {} for other updates.

    Args:
        full: the parameters whose update needs the full tensor, as in `cost.update_rules.UpdateRule`.
    """
    if full == "none" or (full == "matrices" and name not in trace.hidden_matrices):
        return {}
    mesh, stored = program.mesh, program.parameters[name]
    layout = {axis: stored.layout[axis] for axis in sorted(stored.layout, key=mesh.stride) if mesh.size(axis) > 1}
    shards = [axis for axis, place in layout.items() if place.is_shard]
    matrix = tuple(stored.shape) if full == "matrices" else ()
    return {"full": True, "matrix": matrix, "joined": len(flattened_shards(layout)) < len(shards)}


def _prologue_names(walks: Sequence[Liveness]) -> dict[str, str]:
    """Return {name of a prologue buffer in `walks`: its name in the cost table}.

    A prologue buffer has a value that a stage computes once per call, such as a mask. Its name in the table is an
    operator key, because names of graph nodes depend on the stage and on the number of traced blocks. Several buffers
    of one operator are numbered.
    """
    names, sizes_bytes = dict[str, str](), dict[str, int]()
    for walk in walks:
        buffers = walk.in_memory.input_bytes
        of_stage = {names[name] for name in buffers if name in names}
        for name, (node, size_bytes) in buffers.items():
            if name not in names:
                key = facts(node).get("key", name)
                candidates = (f"{key}+{number}" if number else key for number in count())
                names[name] = next(
                    one for one in candidates
                    if one not in of_stage and sizes_bytes.setdefault(one, size_bytes) == size_bytes
                )  # fmt: skip
                of_stage.add(names[name])
    return names


def _per_sample(size_bytes: int, powers: Exponents, batch: int) -> Size:
    """Return the bytes of a replicated value as a `Size`: a polynomial in the samples of the global batch.

    Args:
        size_bytes: bytes of the value in the trace.
        powers: scaling exponents of the value.
        batch: samples of the global batch in the trace.
    """
    return Size.of(size_bytes / batch**powers.b, Exponents(b=powers.b, s=powers.s))


def _scattered_shards(program: Program) -> set[str]:
    """Return the parameters whose ZeRO shards are not contiguous slices of the unsharded parameter."""
    axes, names = storing_axes(program), set[str]()
    for stage in program.stages:
        for node in stage.graph.graph.nodes:
            if gathers_stored(node, axes):
                way = gather_of(node)
                ranks = program.mesh.size(way.axis)
                if not DimSharding(way.dim, way.size, way.sections, ranks).is_contiguous:
                    names.add(source_name(node))
    return names


def _stage_starts(trace: Trace, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes of the stage graphs at which a stage may begin.

    A stage may begin at the first node of each traced operator that depends on parameters. Conversions of an
    operator's inputs count as nodes of the operator. If its output is a partial sum, the reduction counts too: no
    stage begins between the operator and the reduction.

    Args:
        nodes: all operators of the stage graphs, in order.
    """
    keys = {facts(node).get("key") for node in active_operators(trace.graph)}
    places, last, begins, is_made = set[fx.Node](), None, True, False
    for node in nodes:
        if node.target is operator.getitem:
            continue
        key = facts(node).get("key")
        is_same = key is not None and key == last
        is_one = key in keys and not (is_same and is_made)  # else this node converts the output for another operator
        if begins and not (is_one and is_same):
            places.add(node)
        begins, last = is_one, key if is_one else last
        is_made = is_made if not is_one else P not in facts(node).get("layout", {}).values()
    return places


def _loads(trace: Trace, growth: ScalingExponents, nodes: Sequence[fx.Node]) -> dict[fx.Node, Size]:
    """Return {node of a stage graph: FLOPs}. The FLOPs of a traced operator count at its first node.

    A traced operator without a node was fused into another operator. Its FLOPs are added to the next operator that has
    a node.
    """
    first = {key: node for node in reversed(nodes) if (key := facts(node).get("key")) is not None}
    loads, total = dict[fx.Node, Size](), 0.0
    for traced in active_operators(trace.graph):
        total += work(traced)
        node = first.get(facts(traced)["key"])
        if node is not None:
            loads[node], total = Size.of(total, Exponents(s=growth.of_product(node).s)), 0.0
    return loads


def _overlappable_share(trace: Trace, program: Program) -> float:
    """Return the share of gradient bytes whose reduction can overlap with the backward.

    In each stage, only the reduction of one bucket cannot overlap. This is the bucket of the parameters that the
    forward reads first, because the backward completes it last.
    """
    total = last = 0
    for stage in program.stages:
        read = [n for n in by_first_use(stage.graph.graph, stage.parameters) if trace.parameters[n].requires_grad]
        names = expand_blocks(trace.folds, read, str, partial(later, trace.folds))
        sizes = {name: trace.parameters[trace.originals[name]].nbytes for name in names}
        buckets = bucketed(sizes)
        total += sum(sizes.values())
        last += sum(sizes[name] for name in buckets[0]) if buckets else 0
    return 1 - last / total if total else 0.0


def _stored(trace: Trace, program: Program, name: str) -> Size:
    """Return the bytes of a parameter on a rank without ZeRO sharding, as a `Size` (a polynomial)."""
    mesh, stored = program.mesh, program.parameters[name]
    axes = {name: mesh.innermost(cuts) for name, cuts in CHOSEN.items()}
    cut = {name: int(axis in stored.layout and stored.layout[axis].is_shard) for name, axis in axes.items()}
    parts = mesh.size(mesh.stored_over(stored.layout) or "")
    whole = local_bytes(trace, program, stored) * parts
    return Size.of(whole, Exponents(**cut))


def _sync_sizes(trace: Trace, program: Program, name: str) -> tuple[int, int]:
    """Return the sizes of a parameter that `dp_sync` methods need: (bytes per element, size of dim 0).

    The size of dim 0 is 0 for a vector. Returns (4, 0) if gradients are all-reduced, which needs neither size.
    """
    tensor = trace.parameters[name]
    if program.dp_sync.is_default:
        return 4, 0
    return tensor.dtype.itemsize, tensor.shape[0] if tensor.dim() > 1 else 0


def _reduced_over(mesh: Mesh, stored: StoredTensor) -> tuple[str, ...]:
    """Return the axes over which a parameter's gradient is all-reduced or, by ZeRO, reduce-scattered."""
    over = mesh_axes_of(mesh.stored_over(stored.layout) or mesh.data_axis)
    return tuple(dict.fromkeys((mesh.data_axis, *over, *stored.grad_axes)))


def _zero3_axes(mesh: Mesh, stored: StoredTensor, is_stored: bool) -> tuple[str, ...]:
    """Return the axes over which ZeRO-3 would shard a parameter if all mesh axes had several ranks.

    The cost table also serves other meshes, on which more axes have several ranks.

    Args:
        is_stored: True if this program shards parameters with ZeRO-3.
    """
    over = mesh.stored_over(stored.layout)
    if over is None and (is_stored or len(stored.shape) < MIN_DIMS):
        return ()
    cutting = {axis for axis, place in stored.layout.items() if place.is_shard}
    left = set() if over is None else {axis for axis in mesh.sizes if mesh.size(axis) > 1} - set(mesh_axes_of(over))
    return tuple(axis.name for axis in mesh.axes if axis.stores and axis.name not in cutting | left)


def _mixed_precision_ratios(trace: Trace, name: str) -> tuple[float, float]:
    """Return the bytes of an element in the compute and in the reduction dtype, per stored byte.

    Both are 1 without mixed precision.
    """
    stored, precision = trace.parameters[name].dtype, trace.precision
    if precision is None or not stored.is_floating_point:
        return 1.0, 1.0
    return precision.compute.itemsize / stored.itemsize, precision.reduce.itemsize / stored.itemsize


# Repeated blocks


def each_block(trace: Trace) -> dict[str, tuple[int, ...]]:
    """Return the argument `blocks` of `tabulate` for a trace in which each block represents only itself.

    The argument is {module path of a list of repeated blocks: indices of its blocks}.
    """
    counts: dict[str, int] = {}
    for name in repeated_blocks(trace.graph).values():
        path, _, number = name.rpartition(".")
        if path:
            counts[path] = max(counts.get(path, 0), int(number) + 1)
    return {path: tuple(range(number)) for path, number in counts.items()}


def _block_of(name: str, blocks: Blocks) -> _BlockId | None:
    for path in blocks:
        match = re.match(rf"{re.escape(path)}\.(\d+)(?=[./]|$)", name)
        if match is not None:
            return _BlockId(path, int(match[1]))
    return None


def _copies(name: str, blocks: Blocks) -> int:
    """Return the number of copies in the full model of a traced operator or tensor.

    Args:
        name: key of the operator, such as `layers.3.mlp/linear`, or name of the tensor.
    """
    at = _block_of(name, blocks)
    return 1 if at is None else list(blocks[at.path]).count(at.number)


def _blocks_of(operators: Sequence[OperatorWork], blocks: Blocks) -> list[_BlockId | None]:
    """Return, for every operator, the repeated block that it belongs to; None outside of blocks.

    An operator between two operators of a block belongs to the block. Raises BlocksNotContiguous if the operators of
    two blocks are interleaved.
    """
    at = [_block_of(_name(one.node), blocks) for one in operators]
    last: dict[_BlockId, int] = {block: i for i, block in enumerate(at) if block is not None}
    inside: _BlockId | None = None
    for i, block in enumerate(at):
        if block is not None and inside is not None and block != inside and i < last[inside]:
            raise BlocksNotContiguous(f"{block.path}.{block.number} begins inside {inside.path}.{inside.number}")
        inside = block or inside
        if inside is not None:
            at[i] = inside if i <= last[inside] else None
            inside = inside if i < last[inside] else None
    return at


def _name(node: fx.Node) -> str:
    """Return the key of a node's operator, or the name of the parameter that a conversion reads.

    A key is a module path and an operator: `layers.3.mlp/linear`.
    """
    source = source_of(node)[0]
    while "key" not in facts(source) and source.op == "call_function" and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    return facts(source).get("key", str(source.target))


def _order(at: Sequence[_BlockId | None], blocks: Blocks) -> Iterator[tuple[int, str, int]]:
    """Yield all operators of the model in order, as (row, module path of the list of blocks, block index).

    The row is the index of the operator in the trace. An operator outside of blocks has the path "" and the index 0.

    Args:
        at: the block of each operator of the trace.
    """
    for row, block in enumerate(at):
        if block is None:
            yield row, "", 0
        elif row == at.index(block):  # emit all blocks up to the next traced one
            like = blocks[block.path]
            ends = like.index(block.number + 1) if block.number + 1 in like else len(like)
            for number in range(like.index(block.number), ends):
                same = _BlockId(block.path, like[number])
                yield from ((row, block.path, number) for row, other in enumerate(at) if other == same)
