"""Errors for plan files with inconsistent figures, for example if `timing` lacks a stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from autopart.common.json_text import shortened
from autopart.errors import AutopartError, PlanError

if TYPE_CHECKING:
    from autopart.plans.plan import Plan


@contextmanager
def reading_figures(plan: Plan) -> Iterator[None]:
    """Turn errors that inconsistent figures of a plan file cause in a `with` block into PlanErrors."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if not plan.text or isinstance(error, AutopartError):
            raise
        raise PlanError(
            "the figures of the plan do not fit together",
            why=f"{type(error).__name__}: {shortened(str(error))}",
            hint="make the plan again with autopart.plan(...), or undo the edit of 'cost', 'timing' or 'memory'",
        ) from error
