"""Mixed precision: a trace in which the model's parameters have the compute dtype."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopart.compat.torch_internals import tree_map
from autopart.errors import OptionError
from autopart.ir.run.mixed_precision import Precision, as_output
from autopart.tracing.python.eager_semantics import ambient_autocast
from autopart.tracing.with_loss import users_model


@contextmanager
def compute_dtype_context(model: nn.Module, precision: Precision | None, kept: Collection[str] = ()) -> Iterator[None]:
    """Cast the parameters of a model to the compute dtype in a `with` block; restore them at its end.

    Floating-point inputs of the model are cast to this dtype, and its outputs to float32.

    Args:
        kept: parameters that keep their dtype, because the forward writes them.
    Raises OptionError if no parameter can be cast, or if `torch.autocast` is enabled.
    """
    if precision is None:
        yield
        return
    inner = users_model(model)
    check_precision(inner, precision)
    names = {id(parameter): name for name, parameter in inner.named_parameters()}
    cast = [p for p in inner.parameters() if p.is_floating_point() and names[id(p)] not in kept]
    before = [parameter.data for parameter in cast]
    try:
        for parameter in cast:
            parameter.data = _in_dtype(parameter.data, precision.compute)
        with cast_at_boundary(inner, precision):
            yield
    finally:
        for parameter, value in zip(cast, before, strict=True):
            parameter.data = value


@contextmanager
def cast_at_boundary(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Cast a model's floating-point inputs to the compute dtype, and its outputs to float32.

    Applies to calls of the model inside a `with` block.
    """

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(lambda leaf: precision.cast(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map(lambda leaf: as_output(leaf) if isinstance(leaf, Tensor) else leaf, output)

    hooks = (model.register_forward_pre_hook(enter, with_kwargs=True), model.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_precision(model: nn.Module, precision: Precision) -> None:
    """Raise OptionError if a model has no floating-point parameter, or if `torch.autocast` is enabled."""
    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        raise OptionError(
            f"precision='{precision.name}' has nothing to cast",
            why=f"{type(model).__name__} has no floating-point parameter", hint="leave precision out",
        )  # fmt: skip
    device = next(model.parameters()).device
    autocast = ambient_autocast(device.type)
    if autocast is not None:
        dtype = str(autocast).removeprefix("torch.")
        raise OptionError(
            f"precision='{precision.name}' cannot be used inside torch.autocast({dtype})",
            why="both set the dtype in which operators compute",
            hint="use one of the two; autocast regions inside the model keep their effect",
        )


def precision_notes(model: nn.Module, precision: Precision | None) -> tuple[str, ...]:
    """Return a note that lists the complex parameters, which are not cast. Empty without such parameters."""
    if precision is None:
        return ()
    kept = [f"'{name}'" for name, parameter in users_model(model).named_parameters() if parameter.is_complex()]
    few = ", ".join(kept[:3]) + ", ..." * (len(kept) > 3)
    return (f"precision='{precision.name}' leaves complex parameters as they are: {few}",) if kept else ()


def _in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor. If its storage was freed, return a tensor of the new dtype with empty storage."""
    if value.is_meta or value.untyped_storage().nbytes() or not value.numel():
        return value.to(dtype)
    form = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=value.device)
    form.untyped_storage().resize_(0)
    return form
