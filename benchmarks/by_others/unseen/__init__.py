"""Models and idioms that were chosen by what people use, before any of them was tried.

The result of the first run of each is kept in `by_others_first.jsonl`, and of the files `further_*.py`, which were
written later, in `by_others_third.jsonl`.
"""

from __future__ import annotations

from collections.abc import Callable

from by_others.case import Case
from by_others.unseen import (
    audio_vision,
    further_idioms,
    further_models,
    hub,
    idioms_losses,
    idioms_modules,
    language_tables,
    science_generative,
)

MODELS: dict[str, Callable[[], Case]] = {
    **idioms_losses.MODELS,
    **idioms_modules.MODELS,
    **hub.MODELS,
    **audio_vision.MODELS,
    **language_tables.MODELS,
    **science_generative.MODELS,
    **further_idioms.MODELS,
    **further_models.MODELS,
}
