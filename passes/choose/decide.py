"""Choice of a plan: shard the batch, solve layouts axis by axis, and choose stage boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import fx

from autopart.errors import LayoutError
from autopart.ir.blocks.deduplication import expand_blocks, later
from autopart.ir.decisions import Decisions, with_placements
from autopart.ir.facts import facts
from autopart.ir.graph import active_operators
from autopart.ir.layout import Layout
from autopart.ir.trace import Trace
from autopart.passes.choose.explain.axis_refusals import check_axes_divide
from autopart.passes.choose.explain.node_notes import decision_notes
from autopart.passes.choose.problem import Problem
from autopart.passes.choose.solve.batch_axis import batch_strategies, split_batch
from autopart.passes.choose.solve.layout_pins import AxisConstraints, solve_pinned
from autopart.passes.choose.solve.shard_axis import Sharding, ShardingProblem, cheapest
from autopart.passes.choose.solve.sharding_costs import CostedStep, reduce_bytes_ratio
from autopart.passes.choose.stages.stage_partition import flops_per_sent_byte, full_model_indices
from autopart.passes.choose.stages.stage_pins import pinned_partition
from autopart.passes.pass_pipeline import driven


class SolvedDecisions(NamedTuple):
    """Decisions of a plan, with the solver's problem and solution for each mesh axis."""

    decisions: Decisions
    solved: Mapping[str, tuple[ShardingProblem, Sharding]]


@driven(notes=decision_notes)
def decide(problem: Problem) -> SolvedDecisions:
    """Choose layouts and stage boundaries, except those that the user has fixed (pins).

    Raises LayoutError if no operator of the model depends on a parameter.
    """
    trace, mesh, microbatches = problem.trace, problem.mesh, problem.microbatches
    if not active_operators(trace.graph):
        raise LayoutError(
            "the model has nothing to partition",
            why="none of its operators depends on a parameter",
            hint="run it without parallelize",
        )
    split = batch_strategies(trace, mesh, problem.schedule)
    solved: dict[str, tuple[ShardingProblem, Sharding]] = {}
    stored: Mapping[str, Layout] = {}
    for axis, pinned in problem.pinned.items():
        solved[axis] = solve_pinned(trace, mesh, pinned, problem.pins, partial(_solve, problem, solved, stored))
        stored = with_placements(stored, axis, solved[axis][1].parameters)
    chosen = {axis: sharding.strategies for axis, (_, sharding) in solved.items()}
    check_axes_divide(trace, mesh, chosen, bool(problem.pins.layouts), problem.sequence_dims or {})
    strategies = {**split.on_axes(mesh), **chosen}
    return SolvedDecisions(
        Decisions(
            mesh,
            microbatches,
            strategies,
            stored,
            _stages(problem, split.tail),
            problem.num_stages,
            problem.recompute,
            problem.zero,
            problem.prefetch,
            dp_sync=problem.dp_sync,
            balance=problem.balance,
            tail=split.tail,
        ),
        solved,
    )


def _solve(
    problem: Problem,
    solved: Mapping[str, tuple[ShardingProblem, Sharding]],
    stored: Mapping[str, Layout],
    pinned: AxisConstraints,
) -> tuple[ShardingProblem, Sharding]:
    mesh, rows = problem.mesh, problem.mesh.data_parallel_size * problem.microbatches
    storage, stride = replace(problem.storage, beside=stored), mesh.stride(pinned.axis)
    summed = reduce_bytes_ratio(problem.trace)
    step = CostedStep(problem.microbatches, rows, storage, stride, summed, pinned.axis, problem.balance)
    before = {axis: sharding.strategies for axis, (_, sharding) in solved.items()}
    left = replace(pinned.with_solved_axes(before, stored, mesh), context=problem.context)
    ranks = mesh.size(pinned.axis)
    cut_values = problem.sequence_parallel if pinned.cuts == "features" else True
    return cheapest(problem.graph, ranks, problem.hardware, cut_values, step, left)


@driven(notes=decision_notes)
def choose_stages_again(problem: Problem, decisions: Decisions) -> Decisions:
    """Return a copy of `decisions` with the stages and the batch sharding chosen again for `problem`.

    Placements on axes that do not shard the batch stay.
    """
    split = batch_strategies(problem.trace, problem.mesh, problem.schedule)
    return replace(
        decisions, mesh=problem.mesh, microbatches=problem.microbatches, stage_of=_stages(problem, split.tail),
        num_stages=problem.num_stages, recompute=problem.recompute, dp_sync=problem.dp_sync,
        strategies={**split.on_axes(problem.mesh), **decisions.features}, tail=split.tail,
    )  # fmt: skip


def _stages(problem: Problem, tail: frozenset[fx.Node]) -> dict[fx.Node, int]:
    return stages_from_boundaries(problem.trace, _cuts(problem, tail), problem.num_stages, tail)


def _cuts(problem: Problem, tail: frozenset[fx.Node]) -> tuple[int, ...]:
    folds, send_cost = problem.trace.folds, 0.0 if problem.num_stages == 1 else flops_per_sent_byte(problem)
    return pinned_partition(problem.graph, problem.mesh, problem.num_stages, problem.pins, folds, send_cost, tail).cuts


def stages_from_boundaries(
    trace: Trace, cuts: tuple[int, ...], num_stages: int, tail: frozenset[fx.Node]
) -> dict[fx.Node, int]:
    """Return {operator that depends on parameters: its pipeline stage}.

    Args:
        cuts: index of the first operator of stages 1, 2, ... Indices count the operators of the full model, even if the
            trace contains only one of several equal blocks.
        tail: operators that run once for all microbatches, such as a contrastive loss. All are on the last stage.
    """
    nodes, stages = active_operators(trace.graph), dict[fx.Node, int]()
    for at, index in enumerate(full_model_indices(nodes, trace.folds)):
        node = nodes[index]
        stages.setdefault(node, num_stages - 1 if node in tail else sum(cut <= at for cut in cuts))
    return stages


def boundary_operators(problem: Problem) -> list[str]:
    """Return the keys of the operators directly before and after each stage boundary, as one list.

    A key such as `layers.3.mlp/linear` names an operator of the full model, even if the trace contains only one of
    several equal blocks.
    """
    folds = problem.trace.folds
    keys = (facts(node)["key"] for node in active_operators(problem.graph))
    names = [*expand_blocks(folds, [*keys], str, partial(later, folds))]
    tail = split_batch(problem.graph, problem.mesh.data_parallel_size, problem.microbatches).tail
    return [names[at] for cut in _cuts(problem, tail) for at in (cut - 1, cut)]
