"""Checkpoints of models and optimizers by `torch.distributed.checkpoint`, for any mesh."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer


def save_sharded(module: nn.Module, optimizers: Sequence[Optimizer], folder: str | Path) -> None:
    """Save the shards of a model, and of its optimizers. A collective call.

    Args:
        module: a partitioned model, or a module that contains partitioned models.
    """
    weights, moments = get_state_dict(module, list(optimizers))
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)


def load_sharded(module: nn.Module, optimizers: Sequence[Optimizer], folder: str | Path) -> None:
    """Load a checkpoint that `save_sharded` wrote on any mesh. A collective call.

    If `optimizers` is empty, only the model is loaded.
    """
    weights, moments = get_state_dict(module, list(optimizers))
    state: dict[str, Any] = {"model": weights, **({"optimizer": moments} if optimizers else {})}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(module, list(optimizers), model_state_dict=state["model"],
                   optim_state_dict=state.get("optimizer", {}))  # fmt: skip
