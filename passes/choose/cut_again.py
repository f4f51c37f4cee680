"""Other stages and microbatches for what is decided already."""

from __future__ import annotations

from dataclasses import replace

from autopart.ir.decisions import Decisions, over_rows
from autopart.passes.choose.decide import batch_strategies, stages_of
from autopart.passes.choose.notes import decision_notes
from autopart.passes.choose.problem import Problem
from autopart.passes.pipeline import driven


@driven(notes=decision_notes)
def cut_again(problem: Problem, decisions: Decisions) -> Decisions:
    """These layouts with the stages and microbatches of another problem; nothing is solved for again."""
    rows = batch_strategies(problem.trace, problem.mesh, problem.microbatches)
    return replace(
        decisions, mesh=problem.mesh, microbatches=problem.microbatches, stage_of=stages_of(problem),
        num_stages=problem.num_stages, recompute=problem.recompute,
        strategies={**over_rows(problem.mesh, problem.microbatches, rows), **decisions.features},
    )  # fmt: skip
