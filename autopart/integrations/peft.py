"""PEFT: raise an error if adapters are added to a model that is partitioned already."""

from __future__ import annotations

import functools
from typing import Any

from peft.mixed_model import PeftMixedModel
from peft.peft_model import PeftModel

from autopart.errors import UsageError
from autopart.runtime.training.layers import ModuleProxy


def connect() -> None:
    """Make `get_peft_model(pm)` and `PeftModel.from_pretrained(pm, folder)` raise UsageError."""
    for kind in (PeftModel, PeftMixedModel):
        if not hasattr(kind.__init__, "__wrapped__"):
            kind.__init__ = _refusing(kind.__init__)


def _refusing(original: Any) -> Any:
    @functools.wraps(original)
    def initialise(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(model, ModuleProxy):
            raise UsageError(
                "an adapter of PEFT cannot be added to a partitioned model",
                why="its programs were traced without the adapter",
                hint="add it first: pm = parallelize(get_peft_model(model, config), mesh, ...)",
            )
        original(self, model, *args, **kwargs)

    return initialise


connect()
