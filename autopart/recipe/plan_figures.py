"""Assembly of a plan from its decisions, with predicted figures (time, memory, FLOPs)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from autopart.cost.count.program_summary import collectives, cost, stage_rows
from autopart.cost.count.stage_footprint import Liveness
from autopart.cost.count.tabulate import tabulate
from autopart.cost.predict.simulate import schedule_notes, simulated
from autopart.cost.predict.stage_balance import TIME_TOLERANCE, Partition
from autopart.cost.predict.table import TableCost
from autopart.cost.predict.table_data import as_data, deduplicated_rows, plan_setting
from autopart.cost.predict.table_memory import rank_memory
from autopart.cost.systems.host_time import host_notes
from autopart.cost.update_rules import ADAMW
from autopart.ir.decisions import Decisions
from autopart.ir.program import Program
from autopart.passes.choose.explain.alignment_notes import alignment_notes
from autopart.passes.choose.explain.axis_refusals import expert_notes
from autopart.passes.choose.explain.indivisible_sizes import size_notes
from autopart.passes.choose.explain.reasons import Solved, certificate
from autopart.passes.choose.explain.sequence_notes import context_axis_notes
from autopart.passes.choose.explain.unsharded_operators import unsharded
from autopart.passes.choose.plan_codec import encode
from autopart.passes.choose.problem import Problem
from autopart.passes.choose.recompute_regions import recompute_notes
from autopart.passes.choose.solve.layout_pins import FREE
from autopart.passes.choose.stages.stage_partition import partition
from autopart.passes.choose.storage.sharded_storage import storage_notes
from autopart.passes.facts.mask_facts import mask_notes
from autopart.passes.facts.selection_sizes import selection_notes
from autopart.plans.plan import Explainer, Plan
from autopart.recipe.plan_checks import identity_of

if TYPE_CHECKING:
    from autopart.options import Options


class Written(NamedTuple):
    """A program, with the liveness analysis (memory use) of each of its stages."""

    program: Program
    walks: Sequence[Liveness]


class Draft(NamedTuple):
    """A plan before its time, memory and FLOPs are counted: the problem, its decisions and the program.

    Attributes:
        problem: the planning problem.
        program: the program of the decisions.
        solved: {axis: result of the layout solver}.
        walks: liveness analysis of each stage.
        whole: variant of the program in which every `tp` rank sends full tensors to the next stage, without
            scatter-gather sends. FLOPs and bytes of operators are counted on this variant. None: the program has no
            scatter-gather sends.
    """

    problem: Problem
    decisions: Decisions
    program: Program
    solved: Mapping[str, Solved]
    walks: Sequence[Liveness]
    whole: Written | None = None


def figures_of(draft: Draft, is_compiled: bool, optimizer: str = ADAMW) -> TableCost:
    """Predict time and memory of a draft: count the FLOPs, bytes and collectives of its operators."""
    problem, decisions, program, _, walks, whole = draft
    counted = whole if whole is not None else Written(program, walks)
    table = tabulate(problem.trace, counted.program, counted.walks, {}, is_compiled, optimizer)
    table = deduplicated_rows(table, decisions.scatter_sends, problem.trace.folds)
    chosen = decisions.zero, decisions.prefetch, decisions.scatter_sends, decisions.dp_sync
    return TableCost(table, plan_setting(table, problem.mesh, problem.schedule, *chosen, is_compiled), problem.hardware)


def _balance_notes(problem: Problem, stages: Sequence[Mapping[str, Any]], most_even: Partition | None) -> list[str]:
    """Return a note if better balanced stages exist that were not chosen because they send more bytes."""
    pinned = problem.pins.cuts or problem.pins.together
    if most_even is None or pinned:
        return []
    heaviest, bound = max(row["flops"] for row in stages), most_even.lower_bound
    if heaviest <= most_even.least_load * (1 + TIME_TOLERANCE):
        return []
    over, least = (f"{100 * (load / bound - 1):.1f} %" for load in (heaviest, most_even.least_load))
    return [f"stages could be more even, but would send more, which takes longer on {problem.hardware.name}: the "
            f"largest is {over} over the lower bound, not {least}"]  # fmt: skip


def _tail_notes(draft: Draft, options: Options) -> list[str]:
    """Return a note if operators that must run once on all microbatches decided the schedule."""
    tail, name = draft.decisions.tail, draft.problem.schedule.name
    if not tail or options.schedule is not None:
        return []
    return [f"schedule='{name}', because operators that mix samples run once on all microbatches; microbatches=1 runs "
            "all operators on the whole batch"]  # fmt: skip


def plan_of(
    kind: str, draft: Draft, options: Options, figures: TableCost, reasons: Explainer | None,
    notes: Sequence[str] = (), worst_bytes: int | None = None,
) -> Plan:  # fmt: skip
    """Return the plan of a draft.

    Args:
        kind: class name of the model.
        figures: as returned by `figures_of`.
        notes: notes to append.
        worst_bytes: memory in bytes of the fullest rank if its experts get all tokens.
    """
    problem, decisions, program, solved, *_ = draft
    traced, mesh, schedule, hardware = problem.trace, problem.mesh, problem.schedule, problem.hardware
    precision = traced.precision
    pinned = next(iter(problem.pinned.values()), FREE).operators
    own_notes = (*traced.notes, *size_notes(traced, decisions), *storage_notes(traced, decisions, problem.zero),
                 *recompute_notes(traced.graph, decisions.recompute), *mask_notes(traced),
                 *selection_notes(traced), *expert_notes(traced, mesh),
                 *context_axis_notes(traced, decisions), *alignment_notes(traced, decisions, hardware))  # fmt: skip
    rows, moved = stage_rows(traced, decisions, program), collectives(traced, program)
    names = {"class": kind, **identity_of(traced.all_parameters), "mode": traced.mode}
    if traced.autocast:
        names["autocast"] = traced.autocast
    inputs = {
        name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
        for name, t in zip(traced.call.names, traced.call.tensors, strict=True)
    }
    held = tuple(rank.as_row() for rank in rank_memory(figures))
    took = {**figures.timing, "table": as_data(figures.table)}
    worst = {} if worst_bytes is None else {"worst_memory_bytes": worst_bytes}
    step = simulated(took, schedule, mesh, held)
    stages = decisions.num_stages
    sizes = {"tp": mesh.tensor_parallel_size, "microbatches": schedule.microbatches}
    most_even = partition(traced.graph, stages, traced.folds, tail=decisions.tail) if stages > 1 else None
    bound = None if most_even is None else most_even.lower_bound
    limit = (hardware.name, hardware.memory_bytes) if options.memory is None else ("memory=", float(options.memory))
    return Plan(
        dict(mesh.sizes), names, inputs, schedule, **encode(traced, decisions), stages=rows, collectives=moved,
        unsharded=unsharded(traced, decisions, pinned), hardware=hardware.name, compile=options.compile,
        sequence_dims=problem.sequence_dims,
        precision=precision.name if precision is not None else None,
        reduce_dtype=precision.reduce_name if precision is not None else None,
        cost=cost(rows, moved, step, limit, bound) | certificate(solved) | worst,
        memory=held, timing=took,
        notes=(*own_notes, *_balance_notes(problem, rows, most_even),
               *_tail_notes(draft, options), *schedule_notes(took, schedule, mesh, held, step, hardware),
               *host_notes(step.parts, step.step_time_s, sizes), *notes),
        pins=problem.pins.as_data(), reasons=reasons, axes=mesh.axes,
    )  # fmt: skip
