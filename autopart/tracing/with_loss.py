"""How a model is called, alone or with the user's loss function behind it; and the user's names for its parts there."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


def call(model: nn.Module, arguments: Mapping[str, Any]) -> Any:
    """Call a model with its arguments by name, as `bind_call` gives them; by position where they have to be."""
    signature = inspect.signature(model.forward).parameters
    kinds = {name: parameter.kind for name, parameter in signature.items()}
    rest = next((name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_POSITIONAL), None)
    by_position: list[Any] = []
    by_name = dict(arguments)
    for name, kind in kinds.items():
        before_rest = kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and rest in arguments
        if name in by_name and (kind is inspect.Parameter.POSITIONAL_ONLY or before_rest):
            by_position.append(by_name.pop(name))
    by_position += by_name.pop(rest, ()) if rest is not None else ()
    return model(*by_position, **by_name)


class WithLoss(nn.Module):
    """A model that returns no loss, with the user's `loss_fn(output, target)` behind it."""

    def __init__(self, model: nn.Module, loss_fn: Any):
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, target: Any, call: dict[str, Any]) -> Any:
        return self.loss_fn(call_model(self.model, call), target)


class WithLossAndOutputs(WithLoss):
    """The same, which returns the loss and the model's own outputs."""

    def forward(self, target: Any, call: dict[str, Any]) -> Any:
        outputs = call_model(self.model, call)
        return self.loss_fn(outputs, target), outputs


call_model = call  # `forward` has an input of the name that `call` has


def users_model(model: nn.Module) -> nn.Module:
    """The model as the user knows it, without the loss function behind it."""
    return model.model if isinstance(model, WithLoss) else model


def users_name(model: nn.Module, name: str) -> str:
    """What the user calls a module, parameter, buffer or attribute of `model` of this name."""
    if not isinstance(model, WithLoss):
        return name
    return "" if name == "model" else name.removeprefix("model.")


def users_input(model: nn.Module, name: str) -> str:
    """What the user calls an input of `model` of this name."""
    return name.removeprefix("call.") if isinstance(model, WithLoss) else name


def users_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The user's modules by the user's paths; those of a loss function follow, as of `loss_fn`."""
    for path, module in model.named_modules():
        if module is not model or not isinstance(model, WithLoss):
            yield users_name(model, path), module
