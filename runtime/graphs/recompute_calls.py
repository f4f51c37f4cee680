"""Regions of a stage graph are run again in the backward: of a forward only what they read is kept.

Each region (`region`, from `passes/choose/recompute_regions.py`) is one call under `torch.utils.checkpoint`, which runs
it once more when its backward begins, up to the last value that the backward needs. All that is random in a stage comes
from its inputs or from seeds among them, so it is the same both times, and so are the collectives of all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions
from torch.utils.checkpoint import checkpoint

from autopart.compat.torch_function_internals import on_local_values
from autopart.ir.facts import facts


def has_regions(graph: fx.Graph) -> bool:
    return any("region" in facts(node) for node in graph.nodes)


def run_again(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, which keeps nothing for the backward but the arguments and what the function holds."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(on_local_values(function), *arguments, use_reentrant=False, preserve_rng_state=False)


def with_regions(module: fx.GraphModule) -> fx.GraphModule:
    """A bound stage graph in which every region is one call; parameters stay in the module and are its arguments."""
    regions: defaultdict[int, dict[fx.Node, int | None]] = defaultdict(dict)
    for node in module.graph.nodes:
        if "region" in facts(node):
            regions[facts(node)["region"]][node] = None
    if not regions:
        return module
    fused = fuse_by_partitions(module, list(regions.values()), prefix="region_", always_return_tuple=True)
    for name, region in list(fused.named_children()):
        if name.startswith("region_") and isinstance(region, fx.GraphModule):
            setattr(fused, name, Region(region))
    fused.recompile()
    return fused


class Region(nn.Module):
    """The operators of a region. They hold no parameters."""

    def __init__(self, operators: fx.GraphModule):
        super().__init__()
        self.operators = operators

    def forward(self, *read: Any) -> tuple[Any, ...]:
        return run_again(self.operators, *read)
