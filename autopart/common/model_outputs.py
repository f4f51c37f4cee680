"""Access to the loss in the output of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def loss_entry(output: Any) -> Any:
    """Return the loss in the output of a model.

    It is `output["loss"]` for a mapping, `output.loss` if that attribute exists, the first entry of a tuple or list,
    and otherwise the output itself. The function does not check that the loss is a scalar.
    """
    if isinstance(output, Mapping):
        return output.get("loss")
    if hasattr(output, "loss"):
        return output.loss
    if isinstance(output, (tuple, list)):
        return output[0] if output else None
    return output
