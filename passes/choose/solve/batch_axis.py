"""Sharding of the batch: one strategy per operator, over data-parallel ranks and microbatches.

The planner treats data-parallel ranks and microbatches together as one axis, the batch axis. It does not minimise the
time of a step on this axis: the batch stays sharded wherever a sharding rule allows it. Operators without a batch dim
run on every rank, and their gradients are partial sums. So the gradients of all parameters are partial sums, which are
reduced once a step.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from torch import fx

from autopart.ir.atoms import BATCH
from autopart.ir.decisions import Decisions, Strategy, data_strategies, replicated
from autopart.ir.facts import PARAMETER, facts
from autopart.ir.graph import (
    is_tensor,
    on_parameters,
    shape,
    size_bytes,
    source_of,
    tensor_inputs,
)
from autopart.ir.layout import R_GRAD_P, P, Placement, R, conversion
from autopart.ir.mesh import Mesh
from autopart.ir.run.schedules import WITH_TAIL, Schedule, can_run, schedule_for
from autopart.ir.selection import is_selection
from autopart.ir.trace import Trace, batch_size
from autopart.passes.choose.solve.full_batch_tail import mixed_samples_error, tail_of
from autopart.passes.choose.stages.stage_partition import can_run_tail, check_batch
from autopart.passes.facts.strategies import can_compute_sharded, sharded_selections, strategies

LOCAL_IN_TIME = frozenset({"own_grad", "own", "own_both"})
"""Conversions between placements that need no data of other microbatches."""
COLLECTIVES = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})


def choose_batch(
    graph: fx.Graph, num_shards: int, trunk: Mapping[fx.Node, Strategy] = MappingProxyType({})
) -> dict[fx.Node, Strategy]:
    """Return {operator that depends on a parameter: its strategy on the batch axis}.

    Elements that a boolean mask selects cannot be gathered, because ranks select different numbers of elements. If an
    operator needs all selected elements, every rank selects them from the full batch.

    Args:
        graph: annotated graph.
        num_shards: data-parallel ranks times microbatches.
        trunk: {operator: its strategy}, for operators with a strategy that must not change.
    """
    unsharded_selections: set[str] = set()
    selects = any(map(is_selection, graph.nodes))
    while True:
        chosen = _choose(graph, num_shards, unsharded_selections, trunk)
        if not selects:
            return chosen
        needed = _needed_unsharded(graph, chosen, num_shards) - unsharded_selections
        if not needed:
            return chosen
        unsharded_selections |= needed


def _choose(
    graph: fx.Graph, num_shards: int, unsharded_selections: Set[str], trunk: Mapping[fx.Node, Strategy]
) -> dict[fx.Node, Strategy]:
    """Choose a batch strategy for each operator, in graph order: the one that moves the fewest bytes.

    Args:
        unsharded_selections: operators that select elements by a boolean mask, and that every rank runs on the full
            batch.
    """
    chosen: dict[fx.Node, Strategy] = {}
    gathered: set[fx.Node] = set()  # values that an earlier operator has already gathered
    cache: dict[Hashable, tuple[Sequence[Strategy], Strategy]] = {}
    for node in on_parameters(graph):
        if node in trunk:
            chosen[node] = trunk[node]
            continue
        options, sources = strategies(node, num_shards, frozenset({BATCH})), tensor_inputs(node)
        if unsharded_selections:
            options = tuple([s for s in options if not _shards_selected_elements(node, s, unsharded_selections)])
        inputs = tuple([(placement(s, chosen), size_bytes(s), s in gathered) for s in sources])
        key = options if unsharded_selections else id(options), inputs, facts(node)["for_buffers"]
        if key not in cache:
            cache[key] = options, min(options, key=lambda s: _price(node, s, chosen, gathered))
        chosen[node] = cache[key][1]
        gathered.update([s for s, target in zip(sources, chosen[node].inputs, strict=True) if target.is_replicated])
    return chosen


def _shards_selected_elements(node: fx.Node, strategy: Strategy, selections: Set[str]) -> bool:
    """Return True if a strategy shards a dim of elements that a boolean mask selects.

    `selections`: names of the selecting operators to consider. All other selections are ignored.
    """
    parts = [n for n in node.users if n.target is operator.getitem] if not is_tensor(node) else [node]
    values = [*zip(tensor_inputs(node), strategy.inputs, strict=True)]
    values += [(part, strategy.outputs[source_of(part)[1]]) for part in parts]
    return any(not sharded_selections(operand, place).isdisjoint(selections) for operand, place in values)


def _needed_unsharded(graph: fx.Graph, chosen: Mapping[fx.Node, Strategy], num_shards: int) -> set[str]:
    """Return the names of selecting operators (boolean masks) that every rank must run on the full batch.

    The reason is an operator or a model output that needs all selected elements on every rank.
    """
    selections: set[str] = set()
    for node, strategy in chosen.items():
        for source, target in zip(tensor_inputs(node), strategy.inputs, strict=True):
            at = placement(source, chosen)
            if at is None:
                selections |= (
                    set() if can_compute_sharded(source, target, num_shards) else sharded_selections(source, target)
                )
            elif at != target:
                selections |= sharded_selections(source, at) | sharded_selections(source, target)
    for output in tensor_inputs(graph.output_node()):
        at = placement(output, chosen)
        selections |= sharded_selections(output, at) if at is not None else set()
    return selections


def placement(node: fx.Node, chosen: Mapping[fx.Node, Strategy]) -> Placement | None:
    """Return the placement on the batch axis in which a value is computed.

    None for a value that does not depend on parameters.
    """
    source, index = source_of(node)
    if facts(source)["role"] == PARAMETER:
        return R_GRAD_P if facts(source)["needs_grad"] else R
    return chosen[source].outputs[index] if source in chosen else None


def _price(node: fx.Node, strategy: Strategy, chosen: dict[fx.Node, Strategy], gathered: set[fx.Node]) -> tuple:
    """Return a sort key of a strategy, lowest for the best one.

    The key has two numbers: the bytes moved to convert the inputs, and a number for the output. The second number is
    lowest for a sharded output, higher for a partial sum, highest for a replicated output.
    """
    moved = 0.0
    places = [placement(source, chosen) for source in tensor_inputs(node)]
    for source, at, target in zip(tensor_inputs(node), places, strategy.inputs, strict=True):
        if target == P and P not in places:
            moved = float("inf")  # convert to a partial sum only if another input is one
        if at is None or at == target:
            continue
        if source in gathered and target.is_replicated and not facts(node)["needs_grad"]:
            continue
        step = conversion(at, target)
        moved += (
            size_bytes(source) if step and {step.forward, step.backward} & COLLECTIVES else 0 if step else float("inf")
        )
    output = strategy.outputs[0]
    order = ("S", "P", "R(grad P)", "R").index(output.kind)
    if facts(node)["for_buffers"] and output.is_replicated:
        order = 0  # the new value of a buffer must be replicated
    return moved, order


def batch_mixing(graph: fx.Graph, chosen: Mapping[fx.Node, Strategy]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (operator, input) in graph order, for each operator that combines samples of the batch.

    Such an operator, for example a contrastive loss, needs this input for the full batch.
    """
    for node, strategy in chosen.items():
        for source, target in zip(tensor_inputs(node), strategy.inputs, strict=True):
            at = placement(source, chosen)
            if at is None or at == target:
                continue
            step = conversion(at, target)
            if step is None or step.operator not in LOCAL_IN_TIME:
                yield node, source


class BatchSplit(NamedTuple):
    """Result of splitting a batch into microbatches and over data-parallel ranks.

    Attributes:
        strategies: {operator: its strategy on the data-parallel axes}.
        copied: True if the batch is not sharded over `dp`, so that every rank of `dp` computes all samples.
        tail: operators that run once for all microbatches.
        mixed: the first operator that combines samples, and its input that is needed for the full batch.
    """

    microbatches: int
    strategies: Mapping[fx.Node, Strategy]
    copied: bool = False
    tail: frozenset[fx.Node] = frozenset()
    mixed: tuple[fx.Node, fx.Node] | None = None

    def on_axes(self, mesh: Mesh) -> dict[str, Mapping[fx.Node, Strategy]]:
        """Return {axis: {operator: its strategy}} for the data-parallel axes and `MICROBATCH_AXIS`."""
        return data_strategies(mesh, self.microbatches, self.strategies, self.copied, self.tail)


def split_batch(graph: fx.Graph, num_ranks: int, microbatches: int) -> BatchSplit:
    """Choose the batch strategies of all operators, and find the operators of the tail.

    The tail is the set of operators that must run once for all microbatches.

    Args:
        num_ranks: number of data-parallel ranks that shard the batch.
    """
    if num_ranks * microbatches == 1:
        return BatchSplit(1, {})
    chosen = choose_batch(graph, num_ranks * microbatches)
    mixing = [*batch_mixing(graph, chosen)] if microbatches > 1 else []
    if not mixing:
        return BatchSplit(microbatches, chosen)
    tail = tail_of(chosen, [node for node, _ in mixing])
    trunk = {node: strategy for node, strategy in chosen.items() if node not in tail}
    chosen = (
        choose_batch(graph, num_ranks, trunk)
        if num_ranks > 1
        else {**trunk, **dict(zip(tail, map(replicated, tail), strict=True))}
    )
    return BatchSplit(microbatches, chosen, False, tail, mixing[0])


def batch_strategies(trace: Trace, mesh: Mesh, schedule: Schedule) -> BatchSplit:
    """Choose the batch strategies of all operators for the microbatches of a schedule.

    Raises StageError if data-parallel ranks times microbatches does not divide the batch size, or if operators combine
    samples of different microbatches and the schedule cannot run these operators once for all microbatches.
    """
    microbatches = schedule.microbatches
    # A model whose inputs have no batch dim is not split.
    if any(map(shape, trace.graph.find_nodes(op="placeholder"))) or microbatches > 1:
        check_batch(trace, mesh, microbatches)
    split = split_batch(trace.graph, mesh.data_parallel_size, microbatches)
    if split.mixed is not None:
        _check_tail(trace, mesh, schedule, split.mixed, split.tail)
    return split


def _check_tail(
    trace: Trace, mesh: Mesh, schedule: Schedule, mixed: tuple[fx.Node, fx.Node], tail: Set[fx.Node]
) -> None:
    """Raise StageError if the operators that combine samples cannot run once for all microbatches.

    Args:
        mixed: the first of these operators, and its input that is needed for the full batch.
        tail: these operators, and all that depend on them.
    """
    num_stages, because, hint = mesh.size("pp") * schedule.virtual_stages, "", "microbatches=1"
    if schedule.name is not None and not can_run_tail(trace, tail, num_stages):
        because = ", and too much of the model depends on it to run once on all microbatches"
    elif schedule.name is not None and schedule.name not in WITH_TAIL:
        because = f". Operators that mix samples run once on all microbatches, but not with schedule='{schedule.name}'"
        hint = f"schedule='{WITH_TAIL[0]}', or microbatches=1"
    elif schedule.name is not None:
        return
    raise mixed_samples_error(mixed, schedule.microbatches, because, hint)


def without_microbatches(trace: Trace, decisions: Decisions) -> Decisions:
    """Return a copy of the decisions for steps with one microbatch."""
    mesh, copied = decisions.mesh, decisions.copied
    split = split_batch(trace.graph, 1 if copied else mesh.data_parallel_size, 1)._replace(copied=copied)
    strategies = {**split.on_axes(mesh), **decisions.features}
    return replace(decisions, microbatches=1, strategies=strategies, tail=frozenset())


def fit_batch(trace: Trace, mesh: Mesh, schedule: Schedule) -> BatchSplit:
    """Split a batch whose size differs from the plan's batch size.

    The new number of microbatches divides the batch, can be run by the schedule, and is as near as possible to the
    plan's number. If `dp` does not divide the batch, every rank of `dp` computes all samples.
    """
    rows, pp = batch_size(trace), mesh.size("pp")
    num_stages = pp * schedule.virtual_stages
    nearest = sorted(range(1, rows + 1), key=lambda m: (abs(m - schedule.microbatches), -m))
    inside = mesh.batch_divisor // mesh.data_parallel_size
    inside = inside if rows % inside == 0 else 1  # otherwise every rank of the expert axis has all samples
    for ranks in dict.fromkeys((mesh.data_parallel_size, 1)):
        for microbatches in (m for m in nearest if rows % (ranks * m * inside) == 0):
            name = schedule_for(schedule.name, num_stages, pp, microbatches) if schedule.name else None
            if name is not None and not can_run(name, num_stages, pp, microbatches):
                continue
            split = split_batch(trace.graph, ranks, microbatches)
            if not split.tail or (name in WITH_TAIL and can_run_tail(trace, split.tail, num_stages)):
                return split._replace(copied=ranks < mesh.data_parallel_size)
    raise AssertionError("unreachable: a step of one microbatch is always possible")
