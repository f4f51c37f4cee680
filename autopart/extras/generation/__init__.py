"""Text generation with a partitioned transformers model (`pm.generate`).

autopart imports this package at the first call of `generate`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["generate"]


def generate(call: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Generate tokens with `transformers`. `call` runs the partitioned model, which was made from `model`."""
    from autopart.extras.generation.generating_model import generate as run  # imports transformers

    return run(call, model, args, kwargs)
