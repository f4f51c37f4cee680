"""What sums the gradients of a stage, and gathers its weights, while it runs: buckets, and the memory that they
take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from autopart.ir.buckets import bucketed, in_order_of_use, kinds
from autopart.ir.layout import local_shape
from autopart.ir.program import Program, Stage, StoredTensor
from autopart.ir.storing import gathered_together, gathers_stored
from autopart.tracing.trace import Trace

UNDER_WAY = 1
"""Buckets of gradients that are under way when another begins (`runtime.state.reducing.IN_FLIGHT`)."""


class Sent(NamedTuple):
    """A bucket of gradients. `flat_bytes`: copied together, while they are sent. `part_bytes`: of what becomes a rank's
    part. `scatters`: the whole gradients are gone then. `each`: after every microbatch."""

    names: tuple[str, ...]
    flat_bytes: int
    part_bytes: int = 0
    scatters: bool = False
    each: bool = False


class Row(NamedTuple):
    """Weights that are gathered together. `flat_bytes`: what they are received in, and sent from."""

    nodes: tuple[fx.Node, ...]
    whole_bytes: int
    part_bytes: int
    flat_bytes: int


@dataclass(frozen=True)
class Traffic:
    """Of a stage: its buckets of gradients, and the rows of weights in their order."""

    sent: tuple[Sent, ...]
    rows: tuple[Row, ...]
    prefetch: int
    row_of: Mapping[fx.Node, int] = field(default_factory=dict)


def traffic_of(trace: Trace, program: Program, stage: Stage, whole: Mapping[str, int]) -> Traffic:
    """What is sent beside the work of a stage.

    Args:
        whole: {parameter that is held whole for a step: its bytes}.
    """
    mesh, axis = program.mesh, program.mesh.data_axis
    sizes = {name: _local_bytes(trace, program, program.parameters[name]) for name in stage.parameters}
    trained = [name for name in stage.parameters if trace.parameters[name].requires_grad]
    dtypes = {name: trace.parameters[name].dtype for name in trained}
    axes = {name: tuple(a for a in program.parameters[name].grad_axes if mesh.size(a) > 1) for name in trained}
    order = in_order_of_use(stage.graph.graph, trained)
    sent: list[Sent] = []
    for names in kinds([n for n in order if axes[n] and n not in whole], {n: (axes[n], dtypes[n]) for n in trained}):
        for row in bucketed({name: sizes[name] for name in names}):
            sent.append(Sent(row, sum(sizes[name] for name in row) if len(row) > 1 else 0))
    for names in kinds([n for n in order if n in whole], dtypes):
        for row in bucketed({name: whole[name] for name in names}):
            size = sum(whole[name] for name in row)
            parts = sum(sizes[name] for name in row)
            sent.append(Sent(row, size if len(row) > 1 else 0, parts, True, program.zero == 2))
    nodes = [n for n in stage.graph.graph.nodes if gathers_stored(n, axis) and _source(n) not in whole]
    found = gathered_together(nodes, lambda n: (trace.parameters[_source(n)].dtype, sizes[_source(n)]))
    rows = [_row(row, sum(sizes[_source(node)] for node in row), mesh.size(axis)) for row in found]
    row_of = {node: index for index, row in enumerate(rows) for node in row.nodes}
    return Traffic(tuple(sent), tuple(rows), program.prefetch, row_of)


def _row(nodes: list[fx.Node], part_bytes: int, ranks: int) -> Row:
    in_order = len(nodes) == 1 and nodes[0].args[2] == 0
    flat = 0 if in_order else part_bytes * ranks + (part_bytes if len(nodes) > 1 else 0)
    return Row(tuple(nodes), part_bytes * ranks, part_bytes, flat)


def _source(node: fx.Node) -> str:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return str(source.target)


def _local_bytes(trace: Trace, program: Program, stored: StoredTensor) -> int:
    size = trace.parameters[stored.name].dtype.itemsize
    sizes = {axis: program.mesh.size(axis) for axis in stored.layout}
    for length in local_shape(stored.shape, stored.layout, sizes):
        size *= length
    return size
