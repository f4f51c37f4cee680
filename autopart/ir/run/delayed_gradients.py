"""What a schedule that leaves the gradient of the batch before asks of a program."""

from __future__ import annotations

from autopart.errors import StageError
from autopart.ir.program import Program
from autopart.ir.run.schedules import DELAYED, check_schedule
from autopart.ir.run.unshard_policy import storing_axes

_OTHER = "schedule='1f1b', which finishes each batch"


def check_delayed(schedule: str | None, program: Program) -> None:
    """Raises StageError where a schedule begins a batch before the last is finished, and the program cannot."""
    if schedule is None or schedule not in DELAYED:
        return
    check_schedule(schedule, len(program.stages), program.mesh.size("pp"), program.microbatches)
    cut = storing_axes(program)
    if cut:
        raise StageError(
            f"schedule='{schedule}' with parameters stored in parts over {cut[0]} (zero=)",
            why="each of its two versions of the weights is held whole", hint=f"zero=0, or {_OTHER}",
        )  # fmt: skip
    updates = [update.name for stage in program.stages for update in stage.updates]
    written = [f"buffer '{name}'" for name in updates] + [f"weight '{name}'" for name in program.weight_updates]
    if written:
        raise StageError(
            f"schedule='{schedule}' of a model whose forward writes {written[0]}",
            why="the first microbatches of a batch run before the last of the batch before have written it",
            hint=f"model.eval() where that stops the writing, or {_OTHER}",
        )  # fmt: skip
