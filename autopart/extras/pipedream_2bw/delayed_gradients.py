"""Checks for a schedule whose step computes the gradient of the previous batch (PipeDream-2BW)."""

from __future__ import annotations

from autopart.errors import StageError
from autopart.ir.program import Program
from autopart.ir.run.schedules import check_schedule
from autopart.ir.run.unshard_policy import storing_axes

_FLUSHING = "schedule='1f1b', which finishes each batch"


def check_delayed(schedule: str, program: Program) -> None:
    """Raise StageError if a program cannot run under a schedule that overlaps two batches."""
    check_schedule(schedule, len(program.stages), program.mesh.size("pp"), program.microbatches)
    sharding_axes = storing_axes(program)
    if sharding_axes:
        raise StageError(
            f"schedule='{schedule}' cannot be combined with parameters sharded over {sharding_axes[0]} (zero=)",
            why="the schedule needs two unsharded versions of the weights", hint=f"zero=0, or {_FLUSHING}",
        )  # fmt: skip
    updates = [update.name for stage in program.stages for update in stage.updates]
    written = [f"buffer '{name}'" for name in updates] + [f"weight '{name}'" for name in program.weight_updates]
    if written:
        raise StageError(
            f"schedule='{schedule}' does not support a model whose forward writes {written[0]}",
            why="the first microbatches of a batch run before the last microbatches of the previous batch have "
            "written it", hint=f"model.eval() if that stops the writing, or {_FLUSHING}",
        )  # fmt: skip
