"""torchvision has no CPU wheel for some versions of torch: its Python runs without its compiled operators."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import torch

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
declared: list[torch.library.Library] = []
"""Kept: what a library declares ends with it."""


def import_torchvision() -> None:
    """Import it if it is installed; declare the operators that it asks for and lacks. No model here calls them."""
    if "torchvision" in sys.modules or find_spec("torchvision") is None:
        return
    try:
        import torchvision
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        declared.append(library)
        for operator in OPERATORS:
            library.define(operator)
        import torchvision  # noqa: F401
