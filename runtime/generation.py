"""Text generation with a partitioned model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopart.common.extras import load_extra


class GenerateMethods(nn.Module):
    """The method `generate` of a partitioned transformers model."""

    _source: Any
    _traced: Any

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens, as `generate` of the transformers model. A collective call."""
        self._traced("generate()")
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            return load_extra("generation").generate(self, self._source.model, args, kwargs)
        finally:
            for module, mode in modes:
                module.training = mode
