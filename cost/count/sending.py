"""What sums the gradients of a stage, and gathers its weights, while it runs: buckets, and the memory that they
take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import fx

from autopart.cost.dp_sync import Carried, carried
from autopart.ir.buckets import bucketed, in_order_of_use, kinds
from autopart.ir.dp_sync import Method
from autopart.ir.facts import times
from autopart.ir.fold import NotFoldable, later, unrolled
from autopart.ir.layout import local_shape
from autopart.ir.operators import axis_of
from autopart.ir.pieces import Cut
from autopart.ir.program import Program, Stage, StoredTensor
from autopart.ir.storing import Way, gathered_together, gathers_stored, source_name, storing_axes, way_of
from autopart.tracing.trace import Trace


class Sent(NamedTuple):
    """A bucket of gradients. `flat_bytes`: copied together, while they are sent. `part_bytes`: of what becomes a rank's
    part. `gather_bytes`: what the wholes are received in, and sent from. `scatters`: the whole gradients are gone then.
    `each`: after every microbatch. `kept_bytes`: of the gradients of earlier microbatches, where these are added up in
    a higher precision."""

    names: tuple[str, ...]
    flat_bytes: int
    part_bytes: int = 0
    gather_bytes: int = 0
    scatters: bool = False
    each: bool = False
    kept_bytes: int = 0


class Row(NamedTuple):
    """Weights that are gathered together. `received_bytes`: what they are received in, and sent from; `opening_bytes`:
    with the wholes that are made of it; `grad_bytes`: what their gradients are sent from."""

    nodes: tuple[fx.Node, ...]
    whole_bytes: int
    received_bytes: int
    opening_bytes: int
    grad_bytes: int


@dataclass(frozen=True)
class Traffic:
    """Of a stage: its buckets of gradients, and the rows of weights in their order."""

    sent: tuple[Sent, ...]
    rows: tuple[Row, ...]
    prefetch: int
    row_of: Mapping[fx.Node, int] = field(default_factory=dict)


def traffic_of(
    trace: Trace, program: Program, stage: Stage, whole: Mapping[str, int], ways: Mapping[str, Way]
) -> Traffic:
    """What is sent beside the work of a stage.

    Args:
        whole: {parameter that is held whole for a step: its bytes}.
        ways: {parameter: how it is gathered}, of at least these.
    """
    mesh, over = program.mesh, program.mesh.stored_over
    held = {name: local_bytes(trace, program, program.parameters[name]) for name in stage.parameters}
    read = in_order_of_use(stage.graph.graph, (n for n in stage.parameters if trace.parameters[n].requires_grad))
    order = list(unrolled(trace.folds, read, str, partial(later, trace.folds)))
    stored = {name: program.parameters[trace.originals[name]] for name in order}
    sizes = {name: held[one.name] for name, one in stored.items()}
    dtypes = {name: trace.parameters[one.name].dtype for name, one in stored.items()}
    axes = {name: (one.whole_to_send(mesh) or one).summed_over(mesh) for name, one in stored.items()}
    sent: list[Sent] = []
    summed = [n for n in order if axes[n] and n not in whole and not over(stored[n].layout)]
    for names in kinds(summed, {n: (axes[n], dtypes[n]) for n in order}):
        for row in bucketed({name: sizes[name] for name in names}):
            copied = len(row) > 1 or summed_dtype(dtypes[row[0]], program) != dtypes[row[0]]
            flat = sum(sizes[name] for name in row) * _summed(dtypes[row[0]], program)
            sent.append(Sent(row, round(flat) if copied else 0))
    together = {name: (over(one.layout), axes[name], dtypes[name], one.whole_to_send(mesh) is None)
                for name, one in stored.items()}  # fmt: skip
    for names in kinds([n for n in order if n in whole], together):
        for row in bucketed({name: whole[name] for name in names}):
            size, parts = sum(whole[name] for name in row), sum(sizes[name] for name in row)
            computed, way = stored[row[0]].compute_dtype or dtypes[row[0]], ways[stored[row[0]].name]
            flat = size // computed.itemsize * summed_dtype(dtypes[row[0]], program).itemsize
            alone = len(row) == 1 and is_in_order(way, mesh.size(way.axis))
            received = parts * computed.itemsize // dtypes[row[0]].itemsize
            received = sent_copy(received, len(row), dtypes[row[0]], computed) + (0 if alone else size)
            whole_grads = parts * mesh.size(way.axis)
            is_kept = program.zero == 1 and program.microbatches > 1 and flat != size
            if stored[row[0]].whole_to_send(mesh) is None:
                sent.append(Sent(row, flat if not alone or flat != size else 0, parts, received, True,
                                 program.zero == 2, flat if is_kept else 0))  # fmt: skip
            elif computed == dtypes[row[0]]:  # they stay as they are
                sent.append(Sent(row, flat if axes[row[0]] else 0, 0, received))
            else:
                sent.append(Sent(row, flat if axes[row[0]] else 0, whole_grads, received, True))
    storing = storing_axes(program)
    nodes = [n for n in stage.graph.graph.nodes if gathers_stored(n, storing) and source_name(n) not in whole]
    found = gathered_together(nodes, lambda n: (trace.parameters[source_name(n)].dtype, axes.get(source_name(n), ())))
    if any(len({times(node) for node in row}) > 1 for row in found):
        raise NotFoldable("weights of a block that stands for others are gathered with those of another")
    rows = [_row(trace, program, row, sum(held[source_name(node)] for node in row)) for row in found]
    row_of = {node: index for index, row in enumerate(rows) for node in row.nodes}
    return Traffic(tuple(sent), tuple(rows), program.prefetch, row_of)


def _row(trace: Trace, program: Program, nodes: list[fx.Node], part_bytes: int) -> Row:
    stored, ranks = trace.parameters[source_name(nodes[0])].dtype, program.mesh.size(str(axis_of(nodes[0])))
    read = program.parameters[source_name(nodes[0])].compute_dtype or stored
    in_order = len(nodes) == 1 and is_in_order(way_of(nodes[0]), ranks)
    part = part_bytes * read.itemsize // stored.itemsize
    received = part * ranks + sent_copy(part, len(nodes), stored, read)
    summed = summed_dtype(stored, program)
    grads = 0 if in_order and summed == read else part_bytes * ranks * summed.itemsize // stored.itemsize
    return Row(tuple(nodes), part * ranks, received, received + (0 if in_order else part * ranks), grads)


def sent_copy(part_bytes: int, number: int, stored: torch.dtype, read: torch.dtype) -> int:
    """What so many parts are sent from: their own memory, where it is one that is not cast."""
    return part_bytes if number > 1 or read != stored else 0


def is_in_order(way: Way, ranks: int) -> bool:
    """Whether a whole is its parts one behind the other in memory."""
    return Cut(way.dim, way.size, way.sections, ranks).is_in_order


def summed_dtype(stored: torch.dtype, program: Program) -> torch.dtype:
    """What the gradient of a parameter of this dtype is summed in."""
    reduce = program.reduce_dtype
    return reduce if reduce is not None and stored.is_floating_point else stored


def _summed(stored: torch.dtype, program: Program) -> float:
    """Bytes that are summed for each that is stored."""
    return summed_dtype(stored, program).itemsize / stored.itemsize


def carried_by(trace: Trace, program: Program, names: Iterable[str]) -> list[Carried]:
    """What data-parallel ranks send each other of these parameters in place of sums, by method."""
    rows: dict[Method, list[tuple[float, int, tuple[int, ...]]]] = {}
    for name in names:
        stored, itemsize = program.parameters[name], trace.parameters[name].dtype.itemsize
        if stored.method is not None:
            size = local_bytes(trace, program, stored.whole_to_send(program.mesh) or stored)
            rows.setdefault(stored.method, []).append((size / itemsize, itemsize, stored.shape))
    return [carried(method, sizes) for method, sizes in rows.items()]


def local_bytes(trace: Trace, program: Program, stored: StoredTensor) -> int:
    """Bytes of a rank's part of a parameter."""
    sizes = {axis: program.mesh.size(axis) for axis in stored.layout}
    return math.prod(local_shape(stored.shape, stored.layout, sizes)) * trace.parameters[stored.name].dtype.itemsize
