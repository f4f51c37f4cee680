"""Text generation with a partitioned transformers model (`pm.generate`).

autopart imports this package at the first call of `generate`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["generate"]


def generate(caller: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run transformers' `model.generate(*args, **kwargs)`. `caller` runs the partitioned model instead."""
    from autopart.extras.generation.generating_model import generate as run  # imports transformers

    return run(caller, model, args, kwargs)
