"""Activation checkpointing: save the inputs of a region, and recompute the region in backward.

Each region (marked by `passes/choose/recompute_regions.py`) is one call under `torch.utils.checkpoint`. Recomputation
starts when the backward of the region begins, and stops after the last value that the backward needs. Random numbers,
or their seeds, are inputs of the region, so the forward and its recomputation use equal numbers. Forward and
recomputation launch the same collectives on all ranks.
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
    """Call a function under `torch.utils.checkpoint`: backward recomputes it instead of saving its values."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(on_local_values(function), *arguments, use_reentrant=False, preserve_rng_state=False)


def with_regions(module: fx.GraphModule) -> fx.GraphModule:
    """Replace each region that backward recomputes, in a rank's stage graph, by one checkpointed call.

    Parameters stay in the graph module, which passes them to the calls.
    """
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
    """Checkpointed call of the operators of one recompute region. It has no parameters."""

    def __init__(self, operators: fx.GraphModule):
        super().__init__()
        self.operators = operators

    def forward(self, *read: Any) -> tuple[Any, ...]:
        return run_again(self.operators, *read)
