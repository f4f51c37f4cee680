"""Selection of entries from what a model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def loss_entry(output: Any) -> Any:
    """Return the entry of a model's output that is its loss.

    The loss is `output["loss"]`, `output.loss`, the first entry of a tuple or list, or else the output itself. The
    caller checks that it is a scalar.
    """
    if isinstance(output, Mapping):
        return output.get("loss")
    if hasattr(output, "loss"):
        return output.loss
    if isinstance(output, (tuple, list)):
        return output[0] if output else None
    return output
