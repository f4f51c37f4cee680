"""`pm.export` and `Plan.export_code`: write a package with the weights of every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from autopart.errors import PlanError
from autopart.extras.code_export.function_text import unsupported
from autopart.extras.code_export.write_package import check_supported, save_batch, save_rank, write_code
from autopart.ir.program import Program
from autopart.options import Options
from autopart.plans.plan import Plan
from autopart.recipe.compiler import Compiler
from autopart.runtime.comm.stage_ranks import stages_at
from autopart.runtime.shards.shard_state import shard_parameters


def export_module(
    folder: Path, rank: int, program: Program, plan: Plan, parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor], inputs: Sequence[Any] | None,
) -> None:  # fmt: skip
    """Save the weights of one rank of a partitioned module. Rank 0 also writes the code.

    Args:
        inputs: inputs of the program for the batch to save; None: no batch is saved.
    """
    _check_plan(plan)
    check_supported(program)
    if rank == 0:
        _check_folder(folder)
        write_code(program, plan, folder)
        if inputs is not None:
            save_batch(folder, program, inputs)
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    save_rank(folder, rank, program, parameters, buffers)


def export_plan(plan: Plan, folder: Path, model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Write a package for a plan, in one process: the code, and the weights of every rank."""
    _check_plan(plan)
    _check_folder(folder)
    mesh = plan.mesh_object()
    compiler = Compiler(model, mesh, Options(), plan)
    program, inputs = compiler.program(args, kwargs, purpose="step", training=model.training)
    write_code(program, plan, folder)
    save_batch(folder, program, inputs)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for rank in range(mesh.num_ranks):
        coordinates = mesh.coordinates(rank)
        stages = stages_at(program, coordinates.get("pp", 0), "loop")
        save_rank(folder, rank, program, shard_parameters(model, program, coordinates, stages=stages), buffers)


def _check_plan(plan: Plan) -> None:
    if plan.precision == "fp16":
        raise unsupported('precision="fp16"', "the package does not scale the loss")
    if plan.schedule.name == "1f1b_2bw":
        raise unsupported('schedule="1f1b_2bw"', "the package runs 1F1B, with the loss of each batch in its own step")


def _check_folder(folder: Path) -> None:
    """Raise PlanError if `folder` has files that are not of an exported package."""
    others = [path.name for path in folder.iterdir() if path.name != "weights"] if folder.is_dir() else []
    if (folder.exists() and not folder.is_dir()) or (others and "settings.py" not in others):
        raise PlanError(f"cannot export to {folder}", why="it exists and is not an exported package",
                        hint="name a new or empty folder")  # fmt: skip
