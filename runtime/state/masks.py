"""Which attention masks of a stage's call are bands: causal, a window, or nothing hidden."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopart.ir.attention import Band, band_of
from autopart.ir.masks import mask_graph, masks_of, scores_of
from autopart.ir.program import Stage

Bands = tuple[tuple[str, Band], ...]
"""The masks of a stage that are bands, by their names."""


class Masks:
    """The masks of one stage. `bind`: makes a graph of the stage run on this rank."""

    def __init__(self, stage: Stage, bind: Callable[[fx.GraphModule], fx.GraphModule]):
        calls = masks_of(stage)
        self.scores = {mask.name: {*map(scores_of, of)} for mask, of in calls.items()}
        self.make = bind(mask_graph(stage, list(calls))) if calls else None
        self.reads = [str(n.target) for n in self.make.graph.find_nodes(op="placeholder")] if self.make else []

    @torch.no_grad()
    def bands(self, microbatches: Sequence[Mapping[str, Any]]) -> list[Bands]:
        """Those of every microbatch, from the arguments of the stage's graph. A mask that all of them share, one made
        of positions alone, is looked at once."""
        known: dict[tuple[int, ...], Bands] = {}
        found = []
        for arguments in microbatches:
            key = tuple(id(arguments[name]) for name in self.reads)
            if key not in known:
                known[key] = self._bands(arguments)
            found.append(known[key])
        return found

    def _bands(self, arguments: Mapping[str, Any]) -> Bands:
        if self.make is None:
            return ()
        made = self.make(**{name: arguments[name] for name in self.reads})
        bands = []
        for (name, scores), mask in zip(self.scores.items(), made, strict=True):
            band = band_of(mask, *next(iter(scores))) if len(scores) == 1 else None
            bands += [(name, band)] if band is not None else []
        return tuple(bands)
