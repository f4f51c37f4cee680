"""Whether a model is one that can be traced at all, before it is called."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autopart.errors import Refusal, TraceError


def check_model(model: Any) -> None:
    """Raises TraceError for what is not an nn.Module, or holds a part that has no Python or no shapes."""
    if not isinstance(model, nn.Module):
        raise TraceError(
            f"a {type(model).__name__} is not a model", why="autopart partitions an nn.Module",
            hint="an nn.Module whose forward calls it",
        )  # fmt: skip
    for path, module in model.named_modules():
        name = f"'{path}'" if path else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(
                f"{name} is a TorchScript module", refusal=Refusal.PART, why="a trace follows Python, and it has none",
                hint="the nn.Module that it was scripted or traced from; compile=True compiles it",
            )  # fmt: skip
        if any(map(is_lazy, (*module._parameters.values(), *module._buffers.values()))):
            raise TraceError(
                f"{name} is a {type(module).__name__} that has no weights yet",
                refusal=Refusal.PART,
                why="their shapes come with its first call",
                hint="call the model once before: with torch.no_grad(): model(...)",
            )


def check_hooks(model: nn.Module) -> None:
    """Raises TraceError for hooks on gradients, which a trace of the forward does not see."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise TraceError(
                f"'{name or type(model).__name__}' has a backward hook",
                refusal=Refusal.HOOK,
                why="only the forward is traced; its gradients are computed without hooks of modules",
                hint="remove it, or let the model be changed by it in forward()",
            )
