"""Steps from a model to a plan: trace, annotate, choose layouts, write programs, count costs.

A graph is annotated if its nodes have the facts that planning needs (`ir/facts.py`).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from autopart.common.flags import flags
from autopart.common.model_outputs import loss_entry
from autopart.common.progress import phase
from autopart.compat.torch_internals import tree_unflatten
from autopart.cost.count.compiled_saved_tensors import with_compiled
from autopart.cost.count.largest_tensors import largest_tensors
from autopart.cost.count.program_summary import crossings
from autopart.cost.count.stage_footprint import liveness_of
from autopart.cost.hardware.profile import Hardware
from autopart.cost.memory_advice import Estimate, does_not_fit, fullest
from autopart.cost.memory_kinds import RankMemory
from autopart.cost.predict.send_costs import scatter_is_cheaper
from autopart.cost.predict.table_memory import rank_memory
from autopart.errors import AutopartError, LayoutError, OptionError
from autopart.ir.blocks.deduplication import NotDeduplicable
from autopart.ir.decisions import Decisions
from autopart.ir.graph import is_floating, shape
from autopart.ir.mesh import Mesh, check_balance
from autopart.ir.program import Rng
from autopart.ir.run.full_tensors import hidden_matrices
from autopart.ir.run.mixed_precision import Precision
from autopart.ir.run.schedules import MULTI_STAGE, WITH_TAIL, Schedule, can_run, check_schedule, schedule_extra
from autopart.ir.run.sync_option import parse_sync
from autopart.ir.trace import Trace, batch_size
from autopart.ops.stage_masks import as_traced
from autopart.options import Options
from autopart.passes.choose.decide import boundary_operators, choose_stages_again, decide
from autopart.passes.choose.explain.reasons import DeferredReasons, Reasons, Solved
from autopart.passes.choose.problem import Problem
from autopart.passes.choose.recompute_regions import check_recompute, recompute_of_checkpoints
from autopart.passes.choose.solve.batch_axis import split_batch
from autopart.passes.choose.stages.stage_partition import can_run_tail
from autopart.passes.choose.storage.sharded_storage import choose_sharded_storage
from autopart.passes.dump import check_folder
from autopart.passes.facts.analyze import annotate
from autopart.passes.facts.deduplicated_blocks import check_blocks, check_written, note_blocks
from autopart.passes.facts.lookup_bounds import check_lookups
from autopart.passes.facts.mask_facts import find_bands
from autopart.passes.facts.selection_sizes import share_selections
from autopart.passes.facts.sequence_dims import check_named, follow_sequences
from autopart.passes.normalize import AS_TRACED, IN_DOUBLE, NORMALIZE
from autopart.passes.pass_pipeline import run_passes
from autopart.passes.write.lower import lower
from autopart.plans.plan import Plan
from autopart.recipe.plan_figures import Draft, Written, figures_of, plan_of
from autopart.tracing.blocks.deduplicate import copied, deduplicated
from autopart.tracing.compute_dtype import compute_dtype_context, precision_notes
from autopart.tracing.dynamic.input_decisions import Site
from autopart.tracing.gradient_check import with_gradients_checked
from autopart.tracing.trace_model import trace
from autopart.tracing.with_loss import users_model

LIFTED = "the model's casts to lower precision (a loss or norm in float32) are computed in float64 here"
LIFTED_HALF = "operators that the model runs in half precision (autocast, half weights) are computed in float64 here"


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable Python's cyclic garbage collection for a `with` block.

    A graph consists of many small objects that stay alive. Repeated scans of them would take a tenth of the planning
    time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collections()
def prepare(
    model: nn.Module, arguments: Mapping[str, Any], double: bool = False, written: Collection[str] = (),
    precision: Precision | None = None, fold: bool = False, buffers: Mapping[str, torch.Tensor] = MappingProxyType({}),
    read: set[Site] | None = None,
) -> Trace:  # fmt: skip
    """Trace, normalize and annotate a model for a call.

    Args:
        double: True to make the graph compute in float64, even if the model casts to a smaller dtype.
        written: names of frozen parameters that an earlier trace writes. They are treated as written here too.
        precision: mixed precision, in place of the model's own dtypes. If `double` is set, its casts become identities.
        fold: True to deduplicate blocks: one block represents equal blocks (`Trace.folds`). For planning only; such a
            graph is not run.
        buffers: {name: current value} of buffers that differ from the model's.
        read: code positions that get real values of inputs in place of symbols, as in `tracing.trace_model.trace`.
    """
    check_folder()
    with compute_dtype_context(model, precision, written):
        traced = _prepared(model, arguments, double, written, fold, buffers, read)
    # Parameters that are written become buffers, which keep their dtype.
    if precision is not None and not traced.written <= set(written):
        return prepare(model, arguments, double, {*written, *traced.written}, precision, fold, buffers)
    notes = (*traced.notes, *precision_notes(model, precision))
    hidden = _hidden_ids(model)
    matrices = frozenset(name for name, p in model.named_parameters() if id(p) in hidden)
    return replace(traced, notes=notes, precision=None if double else precision, hidden_matrices=matrices)


def _hidden_ids(model: nn.Module) -> set[int]:
    user = users_model(model)
    named, hidden = user.named_parameters(remove_duplicate=False), hidden_matrices(user)
    return {id(parameter) for name, parameter in named if name in hidden}


def _prepared(
    model: nn.Module, arguments: Mapping[str, Any], double: bool, written: Collection[str], fold: bool,
    buffers: Mapping[str, torch.Tensor], read: set[Site] | None,
) -> Trace:  # fmt: skip
    """Trace and annotate a model, and deduplicate its blocks if `fold`."""
    phase("tracing the model")
    traced = trace(model, arguments, written, buffers, read)
    traced = replace(traced, notes=(*traced.notes, *_dense_gradients(model, traced)))
    phase("finding out what can be sharded")
    if fold and (few := deduplicated(traced)).folds:
        try:
            few = _annotated(model, arguments, few, double, buffers)
            check_blocks(few)
            return few
        except NotDeduplicable:
            pass
    return _annotated(model, arguments, traced, double, buffers)


def _annotated(
    model: nn.Module, arguments: Mapping[str, Any], traced: Trace, double: bool, buffers: Mapping[str, torch.Tensor]
) -> Trace:
    """Normalize and annotate a trace, and check that the model and the graph give the same gradients."""
    run_passes(traced.graph, AS_TRACED)
    (lifted,) = run_passes(traced.graph, (IN_DOUBLE,)) if double else [set()]
    if lifted:
        half = {torch.float16, torch.bfloat16} & lifted
        traced = replace(traced, notes=(*traced.notes, LIFTED_HALF if half else LIFTED))
    run_passes(traced.graph, NORMALIZE)
    traced = with_gradients_checked(model, arguments, traced, find_loss(traced), buffers)
    _find_facts(traced)
    return replace(traced, size_conditions=(*traced.size_conditions, *check_lookups(traced)))


def _find_facts(traced: Trace) -> None:
    note_blocks(traced)
    annotate(traced)
    find_bands(traced)
    share_selections(traced)


def unfolded(traced: Trace) -> Trace:
    """Return the annotated trace before block deduplication, with every block in its graph."""
    if traced.whole is None:
        return traced
    return _annotate_like(traced, replace(traced.whole, graph=copied(traced.whole.graph)))


def _folded_in_stages(traced: Trace, mesh: Mesh, options: Options) -> Trace:
    """Return the annotated trace in which one block represents all equal blocks of a pipeline stage.

    A block that contains a stage boundary is not deduplicated.
    """
    if mesh.size("pp") == 1 or traced.whole is None:
        return traced
    few = deduplicated(traced.whole, boundary_operators(problem_of(traced, mesh, options)))
    if not few.folds:
        return unfolded(traced)
    few = _annotate_like(traced, few)
    check_blocks(few)
    return few


def _annotate_like(known: Trace, other: Trace) -> Trace:
    """Run on the trace `other` the passes that annotated `known`, and return the annotated trace.

    Both are traces of one call.
    """
    run_passes(other.graph, AS_TRACED)
    run_passes(other.graph, NORMALIZE)
    other = replace(other, notes=known.notes, precision=known.precision, hidden_matrices=known.hidden_matrices)
    _find_facts(other)
    return other


def _dense_gradients(model: nn.Module, traced: Trace) -> list[str]:
    """Return a note that names embeddings with `sparse=True`: autopart computes dense gradients for them."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse}
    names = [f"'{name}'" for name, parameter in traced.parameters.items() if id(parameter) in tables]
    if not names:
        return []
    few = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
    return [f"sparse=True is not kept: the gradient of {few} is dense, for optimizers that take one (not SparseAdam)"]


@_without_collections()
def make_plan(model: nn.Module, traced: Trace, mesh: Mesh, options: Options) -> Plan:
    """Choose a plan for an annotated trace.

    If the trace has deduplicated blocks, the deduplicated trace is planned, because that is faster and gives an equal
    plan. The full trace is planned in two cases: an option excludes deduplication, or planning the deduplicated trace
    fails. In the second case, the full trace has a plan, or its error names the right one of the equal blocks.
    """
    if traced.folds and not traced.checkpointed and can_be_folded(mesh, options):
        try:
            return _best_plan(model, _folded_in_stages(traced, mesh, options), mesh, options)
        except AutopartError:
            pass
    return _best_plan(model, unfolded(traced), mesh, options)


def _best_plan(model: nn.Module, traced: Trace, mesh: Mesh, options: Options) -> Plan:
    """Return the plan of the first of `candidates` whose largest rank memory is within the limit.

    Raises MemoryLimitError, with settings that need less memory, if no candidate fits.
    """
    traced = traced.without_values()
    options, notes = _with_checkpoints(traced, options)
    too_large: list[tuple[Draft, RankMemory]] = []
    for settings in candidates(mesh, options):
        chosen = replace(options, **settings)
        try:
            draft = drafted(traced, mesh, chosen)
        except LayoutError:
            if not too_large:
                raise
            continue  # nothing can be sharded
        figures = figures_of(draft, options.compile, options.optimizer)
        if options.memory is None or (needed := fullest(rank_memory(figures))).total <= int(options.memory):
            break
        too_large.append((draft, needed))
    else:
        raise _memory_error(traced, mesh, options, *too_large[0])
    if axes := draft.problem.expert_axes:
        check_balance(mesh, options.balance, axes)
    if (extra := schedule_extra(draft.problem.schedule.name)) is not None:
        extra.check_program(draft.problem.schedule.name, draft.program)
    phase("counting time, memory and collectives")
    reasons = DeferredReasons(lambda: _reasons(drafted(unfolded(traced).without_values(), mesh, chosen))) \
        if traced.folds else _reasons(draft)  # fmt: skip
    return plan_of(class_of(model), draft, chosen, figures, reasons, notes, _worst_bytes(draft, options))


def candidates(mesh: Mesh, options: Options) -> list[dict[str, Any]]:
    """Return the settings to try under a memory limit, fastest first, as {option: value}.

    Only options that the user has not set are changed. The candidates are, in this order: no change, sequence
    parallelism, `zero=3`, and both.
    """
    cuts: list[dict[str, Any]] = [{}]
    if options.sequence_parallel == "auto" and mesh.tensor_parallel_size > 1:
        cuts.append({"sequence_parallel": True})
    stores: list[dict[str, Any]] = [{}]
    if options.zero is None and mesh.storing_axis is not None:
        stores.append({"zero": 3})
    return [{**cut, **store} for store in stores for cut in cuts]


def _memory_error(traced: Trace, mesh: Mesh, options: Options, draft: Draft, needed: RankMemory) -> AutopartError:
    """Return the error for a memory limit that no candidate meets, with settings that need less memory."""
    if traced.folds:
        return NotDeduplicable("settings that need less memory are estimated for the full trace")
    assert options.memory is not None
    estimate, rows = estimator(traced, mesh, options, draft), batch_size(traced)
    schedule, limit = draft.problem.schedule, int(options.memory)
    largest = largest_tensors(traced, draft.program, draft.walks, needed)
    return does_not_fit(needed, largest, limit, mesh, schedule, rows, estimate, left_open(options))


def can_be_folded(mesh: Mesh, options: Options) -> bool:
    """Return True if planning can deduplicate blocks: no option treats equal blocks differently.

    Some options can treat equal blocks differently: pins (layouts or stages that the user fixes), recomputation by
    block name, `dp_sync` other than all-reduce, and `prefetch` above 1. Dumps of passes also exclude deduplication,
    because they show the full graph.
    """
    by_name = options.pins or not isinstance(options.recompute or "none", str) or options.prefetch > 1
    sync_is_plain = parse_sync(options.dp_sync).is_default
    return not by_name and sync_is_plain and not flags().dump


def _reasons(draft: Draft) -> Reasons:
    return Reasons(draft.problem, draft.program, draft.solved)


def _worst_bytes(draft: Draft, options: Options) -> int | None:
    """Return the memory in bytes of the fullest rank in the worst case: its experts get all tokens.

    Returns None if the program has no expert dispatch (all-to-all).
    """
    problem, decisions = draft.problem, draft.decisions
    if not decisions.routes:
        return None
    worst = replace(decisions, balance=float(math.prod(map(problem.mesh.size, decisions.routing))))
    sent_whole = replace(worst, scatter_sends=False)
    lowered = written(problem.trace, sent_whole, plan_outputs(problem.trace), "fast", options.compile)
    figures = figures_of(draft._replace(decisions=worst, whole=lowered), options.compile, options.optimizer)
    return fullest(rank_memory(figures)).total


def _with_checkpoints(traced: Trace, options: Options) -> tuple[Options, tuple[str, ...]]:
    """Return the options, with `recompute` set to the model's own checkpoints, and notes for the user.

    The options are unchanged if the user has set `recompute`.
    """
    if not traced.checkpointed:
        return options, ()
    if options.recompute is not None:
        option = f"recompute={options.recompute!r}"
        return options, (f"{option} is used in place of the model's own checkpoints",)
    recompute, notes = recompute_of_checkpoints(traced.graph, traced.checkpointed)
    return replace(options, recompute=recompute), notes


def drafted(traced: Trace, mesh: Mesh, options: Options, known: Draft | None = None) -> Draft:
    """Choose placements and stages of a plan, and write its program.

    Args:
        known: an earlier draft for a mesh with an equal number of `tp` ranks. Its placements are reused, and only the
            pipeline stages are chosen again.
    """
    phase(f"choosing layouts and stages on {mesh}")
    check_recompute(traced.graph, options.recompute or "none")
    problem = problem_of(traced, mesh, options)
    _check_options(problem, options)
    follow_sequences(traced, options.sequence_dims or {})
    if options.sequence_dims:
        check_blocks(traced)
    if known is None:
        decisions, solved = decide(problem)
    else:
        decisions, solved = choose_stages_again(problem, known.decisions), known.solved
    decisions = replace(decisions, stored=choose_sharded_storage(problem, decisions.stored))
    decisions.dp_sync.check_storage(traced, decisions)
    return _with_program(problem, decisions, solved, options)


def _check_options(problem: Problem, options: Options) -> None:
    """Raise OptionError if an option does not fit the model or the mesh."""
    mesh = problem.mesh
    if options.compile and problem.expert_axes:
        hint = "dp in place of ep" if mesh.along("experts") else "a plan without pins that shard experts"
        raise OptionError(
            f"compile=True is not supported on {mesh}",
            why="a compiled stage has fixed sizes, and the number of tokens of a rank's experts is known only at "
            "run time", hint=f"leave compile out, or use {hint}",
        )  # fmt: skip
    check_named(problem.trace, options.sequence_dims or {})


def _with_program(problem: Problem, decisions: Decisions, solved: Mapping[str, Solved], options: Options) -> Draft:
    """Write the program of the decisions. Stages send shards, not replicated values, if that is cheaper."""
    traced, outputs = problem.trace, plan_outputs(problem.trace)
    rng: Rng = "fast" if options.memory is None else options.rng  # a memory limit applies to the program that will run
    decisions = replace(decisions, scatter_sends=False)
    unscattered = written(traced, decisions, outputs, rng, options.compile)
    decisions.dp_sync.check_program(unscattered.program)
    if not scatter_is_cheaper(crossings(traced, unscattered.program), problem.mesh, problem.hardware):
        return Draft(problem, decisions, unscattered.program, solved, unscattered.walks)
    decisions = replace(decisions, scatter_sends=True)
    scattered = written(traced, decisions, outputs, rng, options.compile)
    return Draft(problem, decisions, scattered.program, solved, scattered.walks, unscattered)


def written(
    traced: Trace, decisions: Decisions, outputs: Sequence[Any], rng: Rng, is_compiled: bool = False
) -> Written:  # fmt: skip
    """Write the program of a training step, and analyse the memory use (liveness) of its stages."""
    program = as_traced(lower(traced, decisions, outputs, whole_outputs=False, rng=rng))
    for stage in program.stages:
        check_written(stage.graph.graph, traced.folds)
    walks = [liveness_of(traced, program, stage) for stage in program.stages]
    return Written(program, [with_compiled(walk) if is_compiled else walk for walk in walks])


def problem_of(traced: Trace, mesh: Mesh, options: Options, schedule: Schedule | None = None) -> Problem:
    """Return the planning problem of a trace, a mesh and options.

    `schedule`: pipeline schedule. None: the one in the options, or a default.
    """
    return Problem(
        traced, mesh, schedule or _schedule(traced, mesh, options), Hardware.load(options.hardware), options.pins,
        options.sequence_parallel, options.zero or 0, options.recompute or "none", options.prefetch,
        options.context, parse_sync(options.dp_sync), options.balance, options.sequence_dims,
    )  # fmt: skip


def estimator(traced: Trace, mesh: Mesh, options: Options, draft: Draft) -> Estimate:
    """Return a function of (mesh, changed options) that estimates the memory of each rank.

    The estimate reuses the placements of `draft` if sizes of feature axes (`tp`) and `sequence_parallel` are unchanged.
    """

    def estimate(other: Mesh, changed: Mapping[str, Any]) -> Sequence[RankMemory]:
        same = _feature_sizes(other) == _feature_sizes(mesh) and "sequence_parallel" not in changed
        redrafted = drafted(traced, other, replace(options, **changed), draft if same else None)
        return rank_memory(figures_of(redrafted, options.compile, options.optimizer))

    return estimate


def _feature_sizes(mesh: Mesh) -> dict[str, int]:
    return {axis: mesh.size(axis) for axis in mesh.chosen}


def left_open(options: Options) -> dict[str, Any]:
    """Return {option: current value} of the options that the memory advice may change, such as `zero`."""
    return {name: getattr(options, name) for name in ("zero", "sequence_parallel", "recompute", "compile")}


def class_of(model: nn.Module) -> str:
    return type(users_model(model)).__name__


def _schedule(traced: Trace, mesh: Mesh, options: Options) -> Schedule:
    """Return the given schedule, or 1F1B with up to four microbatches per stage if none is given."""
    pp = mesh.size("pp")
    name, virtual = options.schedule, options.virtual_stages
    if pp == 1:
        if name is not None or (virtual or 1) > 1:
            asked = f"schedule={name!r}" if name is not None else f"virtual_stages={virtual}"
            why, hint = f"the mesh {mesh} has no axis pp", f"mesh='pp2', or leave {asked.partition('=')[0]} out"
            raise OptionError(f"{asked} needs a pipeline", why=why, hint=hint)
        return Schedule(None, options.microbatches or 1, 1)
    names = (name,) if name else ("interleaved_1f1b",) if (virtual or 1) > 1 else ("1f1b", *WITH_TAIL)
    virtual = virtual or (2 if name in MULTI_STAGE else 1)
    most = batch_size(traced) // mesh.batch_divisor
    counts = [options.microbatches] if options.microbatches else _divisors(most, 4 * pp)
    for microbatches in counts:
        split = split_batch(traced.graph, mesh.data_parallel_size, microbatches)
        for name in names:
            has_tail = name in WITH_TAIL and can_run_tail(traced, split.tail, pp * virtual)
            if (has_tail or not split.tail) and can_run(name, pp * virtual, pp, microbatches):
                return Schedule(name, microbatches, virtual)
    is_mixed = options.microbatches is not None and split.tail  # `decide` explains why the tail cannot run
    schedule = Schedule(names[-1 if is_mixed else 0], counts[0] if counts else 1, virtual)
    check_schedule(names[0], pp * virtual, pp, schedule.microbatches)
    return schedule


def _divisors(size: int, most: int) -> list[int]:
    """Return the divisors of `size` that do not exceed `most`, largest first."""
    return [m for m in range(min(size, most), 0, -1) if size % m == 0]


def plan_outputs(traced: Trace, with_outputs: bool = False) -> list[Any]:
    """Return the outputs for which a plan is made: the loss alone if there is one, else all outputs."""
    loss = find_loss(traced, with_outputs)
    return [loss] if loss is not None else list(traced.graph.output_node().args[0])


def find_loss(traced: Trace, with_outputs: bool = False) -> fx.Node | None:
    """Return the node of the loss among the outputs (`loss_entry`), None if there is no scalar loss.

    Args:
        with_outputs: True if the traced model is a `WithLossAndOutputs`, whose first output is the loss.
    """
    flat = list(traced.graph.output_node().args[0])
    output = tree_unflatten(flat, traced.output_spec)
    output = output[0] if with_outputs else output
    loss = loss_entry(output)
    scalar = isinstance(loss, fx.Node) and is_floating(loss) and shape(loss) == ()
    return loss if scalar else None
