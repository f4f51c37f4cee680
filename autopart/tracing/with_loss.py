"""Wrapper that adds the user's loss function to a model, and maps names back to the user's names."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from autopart.common.scoped import variable
from autopart.compat.torch_internals import has_values, tree_leaves, tree_map
from autopart.errors import Refusal, TraceError
from autopart.tracing.python.number_inputs import NUMBERS

_DETACHING = ("detach", "detach_", "__get__")
"""Functions whose results need no gradient. `__get__` reads `Tensor.data` and other attributes."""


def call(model: nn.Module, arguments: Mapping[str, Any]) -> Any:
    """Call a model with arguments from `bind_call`. Replace key/value caches in its output by None."""
    return without_caches(call_model(model, arguments), arguments)


def without_caches(output: Any, arguments: Mapping[str, Any]) -> Any:
    """Return a model's output with None in place of transformers' key/value caches.

    In a call with `use_cache=True`, only the caches of autopart's `generate` (`LocalCache`) are replaced, because their
    tensors stay on the ranks.
    """
    wants_cache = any(call.get("use_cache") for call in (arguments, arguments.get("call")) if isinstance(call, Mapping))

    def is_dropped(leaf: Any) -> bool:
        return isinstance(leaf, LocalCache) or (not wants_cache and _is_cache(leaf))

    leaves = tree_leaves(output, is_leaf=is_dropped)
    if not any(map(is_dropped, leaves)):
        return output
    return tree_map(lambda leaf: None if is_dropped(leaf) else leaf, output, is_leaf=is_dropped)


class LocalCache:
    """Base class of the caches that `generate` passes to a traced model. Their tensors stay on the ranks."""


def _is_cache(leaf: Any) -> bool:
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(leaf).__mro__)


def call_model(model: nn.Module, arguments: Mapping[str, Any]) -> Any:
    """Call a model with the arguments that `bind_call` returned: by name, and by position for `*args`."""
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
    """A model that returns no loss, followed by the user's `loss_fn(output, target)`.

    A `loss_fn` that is a module keeps its own train/eval mode. Its buffers and frozen parameters are buffers of the
    trace, under names that begin with `loss_name`. Raises TraceError if it has trained parameters that the model does
    not have.
    """

    def __init__(self, model: nn.Module, loss_fn: Any):
        super().__init__()
        for name, tensor in criterion_tensors(loss_fn, model).items():
            if tensor.requires_grad:
                raise _trained(f"'{name}' of {type(loss_fn).__name__} is to be trained")
        self.model, self.loss_fn = model, loss_fn
        self.training = model.training  # layers keep their current modes
        self.loss_name = loss_name(model)
        self._of_model = frozenset(map(_memory, model.parameters()))

    def train(self, mode: bool = True) -> WithLoss:
        self.training = mode
        self.model.train(mode)
        return self

    def forward(self, target: Any, call: dict[str, Any]) -> Any:
        return self._loss(call_model(self.model, call), target)

    def _loss(self, outputs: Any, target: Any) -> Any:
        with variable(_OF_MODEL, self._of_model):
            return self.loss_fn(outputs, target)


class WithLossAndOutputs(WithLoss):
    """A `WithLoss` whose forward returns both the loss and the model's outputs."""

    def forward(self, target: Any, call: dict[str, Any]) -> Any:
        outputs = call_model(self.model, call)
        return self._loss(outputs, target), outputs


_OF_MODEL: ContextVar[frozenset[Hashable] | None] = ContextVar("the model's parameters, in a loss_fn", default=None)


def check_criterion(func: Any, tensors: Iterable[Tensor]) -> None:
    """Raise TraceError if a loss function reads a trained tensor that is not a parameter of the model.

    Such a tensor can be in a closure, an object or a global, where `criterion_tensors` does not find it.

    Args:
        tensors: inputs of an operator in a trace.
    """
    of_model = _OF_MODEL.get()
    if of_model is None or not torch.is_grad_enabled() or getattr(func, "__name__", "") in _DETACHING:
        return
    for tensor in tensors:
        if tensor.requires_grad and tensor.is_leaf and has_values(tensor) and _memory(tensor) not in of_model:
            raise _trained(f"it reads a tensor of shape {list(tensor.shape)} that needs a gradient")


def _trained(what: str) -> TraceError:
    return TraceError(
        "loss_fn has parameters of its own: make it a part of the model",
        why=f"{what}, and pm.parameters() has only the model's parameters",
        hint="a module whose forward returns loss_fn(model(x), target); or loss_fn.requires_grad_(False)",
    )


def _memory(tensor: Tensor) -> Hashable:
    """Return a key of a tensor's memory: the address of its values, or its identity if it has no values."""
    return tensor.data_ptr() if has_values(tensor) and tensor.numel() else id(tensor)


def users_model(model: nn.Module) -> nn.Module:
    """Return the user's model: the argument itself, or the model inside a `WithLoss`."""
    return model.model if isinstance(model, WithLoss) else model


def users_name(model: nn.Module, name: str) -> str:
    """Return the user's name of a module, parameter, buffer or attribute of a traced model."""
    if not isinstance(model, WithLoss):
        return name
    if name.partition(".")[0] == "loss_fn":
        return model.loss_name + name.removeprefix("loss_fn")
    return "" if name == "model" else name.removeprefix("model.")


def users_inputs(model: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """Return the user's names of the inputs of a traced model."""
    plain = [name.removeprefix(f"{NUMBERS}.") for name in names]
    return inputs_with_loss(plain) if isinstance(model, WithLoss) else tuple(plain)


def inputs_with_loss(names: Collection[str]) -> tuple[str, ...]:
    """Return the names of inputs of `WithLoss` without the prefix of the model's inputs.

    An input of `loss_fn` with the name of an input of the model gets the suffix "of loss_fn".
    """
    of_model = {name.removeprefix("call.") for name in names if name.startswith("call.")}
    return tuple(f"{name} of loss_fn" if name in of_model else name.removeprefix("call.") for name in names)


def users_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) for the modules of the user's model, then for those of the loss function."""
    for path, module in model.named_modules():
        if module is not model or not isinstance(model, WithLoss):
            yield users_name(model, path), module


def loss_name(model: nn.Module) -> str:
    """Return a name for the loss function that differs from the names of all attributes of the model."""
    name = "loss_fn"
    while name in model._modules or name in model._buffers or name in model._parameters:
        name += "_"
    return name


def criterion_tensors(loss_fn: Any, model: nn.Module) -> dict[str, Tensor]:
    """Return {name: tensor} of a loss function that is a module, except tensors that the model also has."""
    if not isinstance(loss_fn, nn.Module):
        return {}
    of_model = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    named = (*loss_fn.named_parameters(), *loss_fn.named_buffers())
    return {name: tensor for name, tensor in named if id(tensor) not in of_model}


def criterion_key(loss_fn: Any) -> Hashable:
    """Return the cache key of a loss function that is a module: modes, and metadata of its tensors."""
    if not isinstance(loss_fn, nn.Module):
        return None
    modes = tuple(module.training for module in loss_fn.modules())
    tensors = (*loss_fn.named_parameters(), *loss_fn.named_buffers())
    return modes, tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors)


def is_of_loss(model: nn.Module, name: str) -> bool:
    """Return True if a name that `users_name` returned belongs to a tensor of the loss function."""
    return isinstance(model, WithLoss) and name.partition(".")[0] == model.loss_name


def check_unwritten(model: nn.Module, names: Mapping[str, Any]) -> None:
    """Raise TraceError if the loss function writes to one of its own tensors."""
    written = next((name for name in names if is_of_loss(model, name)), None)
    if written is not None:
        raise TraceError(
            f"loss_fn writes to its buffer '{written.partition('.')[2]}': make it a part of the model",
            refusal=Refusal.WRITE, why="a step writes only buffers of the model",
            hint="a module whose forward returns loss_fn(model(x), target)",
        )  # fmt: skip
