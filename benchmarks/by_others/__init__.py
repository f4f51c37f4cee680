"""Third-party models: functions that build a model with random weights and an example call.

Every function imports its package, so a missing package affects only its own models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from by_others import (
    idioms,
    language,
    later,
    python_idioms,
    science,
    speech_and_boxes,
    tables,
    unseen,
    vision,
    vision_language,
)  # fmt: skip
from by_others.case import Case
from by_others.torchvision_operators import import_torchvision

MODELS: dict[str, Callable[[], Case]] = {
    **idioms.MODELS,
    **python_idioms.MODELS,
    **vision.MODELS,
    **language.MODELS,
    **tables.MODELS,
    **science.MODELS,
    **unseen.MODELS,
    **later.MODELS,
    **vision_language.MODELS,
    **speech_and_boxes.MODELS,
}


def build_case(name: str) -> Case:
    """A model as its package makes it, in training mode and float32."""
    torch.manual_seed(0)
    import_torchvision()
    return MODELS[name]()
