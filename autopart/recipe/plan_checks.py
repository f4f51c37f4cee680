"""Checks that a given plan fits the mesh, the options, the model and the memory of this machine."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from autopart.common.text import quantity
from autopart.cost.hardware.profile import DEFAULT
from autopart.errors import MemoryLimitError, OptionError, PlanError
from autopart.ir.mesh import Mesh
from autopart.ir.run.report_terms import MEMORY_KINDS
from autopart.options import OPTIONS, Options
from autopart.plans.plan import Plan


def identity_of(parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a fingerprint (hash of parameter names and shapes) and the number of parameters of a model."""
    listing = "\n".join(f"{name} {list(p.shape)}" for name, p in sorted(parameters.items()))
    number = sum(p.numel() for p in parameters.values())
    return {"fingerprint": hashlib.sha256(listing.encode()).hexdigest(), "num_parameters": number}


def check_plan_mesh(plan: Plan, mesh: Mesh) -> None:
    """Raise PlanError if a plan is for another mesh."""
    of_plan = Mesh.parse(plan.mesh, mesh.axes)
    if any(of_plan.size(axis.name) != mesh.size(axis.name) for axis in mesh.axes):
        raise PlanError(
            f"the plan is for the mesh {of_plan}, not {mesh}", where=plan.where("mesh"),
            hint=f"parallelize(model, '{of_plan}', plan=...), or make a plan for {mesh}",
        )  # fmt: skip


def check_plan_options(options: Options, plan: Plan) -> None:
    """Raise OptionError if a given option contradicts the plan."""
    for name, option in OPTIONS.items():
        if not option.in_plan:
            continue
        asked, planned = getattr(options, name), attrgetter(option.in_plan)(plan)
        if asked not in (option.default, planned):
            raise OptionError(
                f"{name}={asked!r} contradicts the plan, which has {planned!r}",
                where=plan.where(option.in_plan.partition(".")[0]), hint=f"leave {name} out, or edit the plan",
            )  # fmt: skip
    over, axis = plan.axes_in_parts, plan.mesh_object().data_axis
    planned_sharding = f"shards parameters over {over[0]}" if over else f"shards no parameters over {axis}"
    pinned = any(axis in places for name, places in plan.pins.items() if name != "stages")
    if (options.zero and not over) or (options.zero == 0 and over and not pinned):
        raise OptionError(
            f"zero={options.zero} contradicts the plan, which {planned_sharding}",
            where=plan.where("parameters"), hint="leave zero out, or make a new plan",
        )  # fmt: skip
    # Plans of earlier versions lack `zero`, and shard as with zero=3.
    if options.zero and options.zero != (plan.zero or 3):
        raise OptionError(
            f"zero={options.zero} contradicts the plan, which has zero={plan.zero}", where=plan.where("zero"),
            hint="leave zero out, or edit the plan",
        )  # fmt: skip
    _check_given_memory(options.memory, plan)
    if options.pins and options.pins.as_data() != plan.pins:
        asked = "other pins" if plan.pins else "none"
        raise OptionError(f"pins= contradict the plan, which was made with {asked}", where=plan.where("pins"),
                          hint="leave pins out, edit the plan, or make a new one")  # fmt: skip


def _check_given_memory(limit: int | str | None, plan: Plan) -> None:
    """Raise MemoryLimitError if a given plan needs more memory than `memory=`."""
    if limit is None:
        return
    if not plan.memory:
        raise OptionError("memory= cannot be checked: the plan has no memory figures", why="an older version made it",
                          hint="make a new plan, or leave memory out")  # fmt: skip
    row = max(plan.memory, key=lambda row: row["total"])
    if row["total"] > int(limit):
        raise MemoryLimitError(
            f"the plan needs {quantity(row['total'], 'B')} on a rank, and memory is {quantity(int(limit), 'B')}",
            why=", ".join(f"{kind} {quantity(row.get(kind, 0), 'B')}" for kind in MEMORY_KINDS if row.get(kind)),
            where=plan.where("memory"),
            hint="make a new plan with memory=; if none fits, its error lists settings that need less",
        )


def check_plan_model(plan: Plan, name: str, parameters: Mapping[str, Tensor]) -> None:
    """Raise PlanError if a plan is for another model."""
    identity = identity_of(parameters)
    if plan.model["fingerprint"] != identity["fingerprint"]:
        raise PlanError(
            f"the plan is for another model than this {name}",
            why=f"it is for {plan.model['class']} with {plan.model['num_parameters']:,} parameters; this one has "
            f"{identity['num_parameters']:,}, or other names or shapes",
            where=plan.where("model"), hint="make a new plan: autopart.plan(model, mesh, example_kwargs=...)",
        )  # fmt: skip


def warn_of_memory(plan: Plan) -> None:
    """Warn, in the first process, if a plan that is about to run needs more memory than the device has.

    A GPU reports its own memory. Without a GPU, the limit is the memory in the hardware profile of the plan. There is
    no warning for the default profile, because it does not describe this machine.
    """
    if os.environ.get("RANK", "0") != "0" or not plan.memory:
        return
    capacity, of = plan.cost.get("device_memory_bytes", 0) if plan.hardware != DEFAULT else 0, plan.hardware
    if torch.cuda.is_available():
        capacity, of = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory, "this GPU"
    needed = max(row["total"] for row in plan.memory)
    if capacity and needed > capacity:
        warnings.warn(
            f"the plan needs {quantity(needed, 'B')} on the fullest rank, and {of} has {quantity(capacity, 'B')}: "
            "autopart.plan(...).explain() lists what needs memory, and settings that need less", stacklevel=2,
        )  # fmt: skip
