"""Errors for figures of a plan file that do not fit together, such as a stage that `timing` lacks."""

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
    """Context manager that raises PlanError if figures of a plan file do not fit together."""
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
