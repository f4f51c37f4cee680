"""Texts that ranks compare because they must be equal: versions, options and plan."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from autopart.plans.plan import Plan

TIMEOUT_S = 120.0
"""Default timeout: seconds that a rank waits for other ranks before it reports who waits for whom."""

EXAMPLE = "the example's inputs"
"""Name of the compared text that lists the shapes of the example call.

If ranks differ in the shapes, only this difference is reported, because plans depend on the shapes.
"""

DECIDING = (
    "mesh", "schedule", "parameters", "operators", "cuts", "recompute", "zero", "prefetch", "scatter_sends",
    "dp_sync", "balance", "sequence_dims", "compile", "precision", "reduce_dtype",
)  # fmt: skip
"""Fields of a plan that determine the program.

Predicted figures are excluded: machines round differently.
"""


def autopart_version() -> str:
    """Return the version of this package."""
    return str(vars(sys.modules["autopart"]).get("__version__"))


def agreed(options: Any, plan: Plan | None) -> dict[str, str]:
    """Return {name: text} of versions, options and plan, for a check that they are equal on all ranks.

    The text of a plan has one line per entry, so that an error can show the lines that differ.

    Args:
        options: the options of the run, as a dataclass.
    """
    import torch  # imported late, because the command line imports this file for TIMEOUT_S

    subjects = {"version": f"autopart {autopart_version()}, torch {torch.__version__}"}
    subjects |= {f"option {field.name}": str(getattr(options, field.name)) for field in fields(options)}
    for part in DECIDING if plan is not None else ():
        content = getattr(plan, part)
        rows = [f"{key}: {value}" for key, value in content.items()] if isinstance(content, Mapping) else [content]
        subjects[f"the plan's {part}"] = "\n".join(map(str, rows))
    return subjects
