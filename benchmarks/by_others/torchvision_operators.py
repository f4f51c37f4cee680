"""torchvision has no CPU wheel for some versions of torch: its Python runs without its compiled operators."""

from __future__ import annotations

import sys

import torch

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
declared: list[torch.library.Library] = []
"""Kept: what a library declares ends with it."""


def import_torchvision() -> None:
    """Import it; where its operators are missing, declare those that it asks for. No model here calls them."""
    if "torchvision" in sys.modules:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        declared.append(library)
        for operator in OPERATORS:
            library.define(operator)
        import torchvision  # noqa: F401
