"""Methods of `ParallelModule` for the plain model (not partitioned) in one process.

With them, a training function that is written for a `ParallelModule` also runs with the plain model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopart.common.model_outputs import loss_entry
from autopart.compat.torch_internals import tree_flatten, tree_unflatten
from autopart.errors import InputError, NonFiniteError, UsageError


class PlainMethods:
    """The methods that `ParallelModule` adds to `nn.Module`, for an unpartitioned model in one process."""

    data_rank, num_data_ranks, skipped_steps, loss_scale, stop_requested = 0, 1, 0, 1.0, False

    def step(
        self, *args: Any, loss_fn: Callable[..., Tensor] | None = None, target: Any = None,
        loss_scale: float | Tensor | None = None, num_tokens: float | Tensor | None = None, outputs: bool = False,
        on_nonfinite: str | None = None, locate: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Run forward and backward, and return the detached loss, like `ParallelModule.step`.

        It never skips a step because of NaN or infinity: a skipped step has no values to compare.
        """
        if loss_fn is None and target is not None:
            kwargs, target = {**kwargs, "target": target}, None
        with _LabelCounts() as counts:
            returned = self(*args, **kwargs)  # type: ignore[operator]
            loss = _loss_of(returned) if loss_fn is None else loss_fn(returned, target)
        if num_tokens is not None:
            if len(counts.found) != 1:
                raise UsageError("num_tokens= cannot be applied to this loss in one process",
                                 why=f"the loss has {len(counts.found)} means over labels, not one",
                                 hint="let the loss be a sum, with loss_scale=1/n")  # fmt: skip
            loss = loss * counts.found[0] / num_tokens
        (loss if loss_scale is None else loss * loss_scale).backward()
        if on_nonfinite == "raise" or (locate and on_nonfinite is None):
            grads = [parameter.grad for parameter in _of(self).parameters() if parameter.grad is not None]
            if not all(bool(value.isfinite().all()) for value in (loss, *grads)):
                raise NonFiniteError("the loss or a gradient is not finite")
        if not outputs:
            return loss.detach()
        return loss.detach(), _detached(returned)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        return torch.nn.utils.get_total_norm([p.grad for p in _of(self).parameters() if p.grad is not None], norm_type)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        parameters = list(_of(self).parameters())
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pause_timeout(self) -> AbstractContextManager[None]:
        return nullcontext()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: with one process, optimizers need no gradient synchronization."""

    def full_state_dict(self) -> dict[str, Any]:
        state = _of(self).state_dict()
        return {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in state.items()}

    def full_grads(self) -> dict[str, Tensor]:
        return {name: p.grad.detach().clone() for name, p in _of(self).named_parameters() if p.grad is not None}

    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        from torch.distributed.checkpoint import state_dict as state_dicts

        full = state_dicts.StateDictOptions(full_state_dict=True)
        return dict(state_dicts.get_optimizer_state_dict(_of(self), optimizer, options=full))

    def load_full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, full: dict[str, Any]) -> None:
        from torch.distributed.checkpoint import state_dict as state_dicts

        options = state_dicts.StateDictOptions(full_state_dict=True)
        state_dicts.set_optimizer_state_dict(_of(self), optimizer, full, options=options)

    @property
    def device(self) -> torch.device:
        return next(_of(self).parameters()).device


def with_plain_methods(model: nn.Module) -> nn.Module:
    """Add the methods of `ParallelModule` to a model, in place.

    Its attributes and class name do not change.
    """
    kind = type(model)
    model.__class__ = type(kind.__name__, (PlainMethods, kind), {"__module__": kind.__module__})
    return model


def _of(methods: PlainMethods) -> nn.Module:
    assert isinstance(methods, nn.Module)
    return methods


def _detached(returned: Any) -> Any:
    flat, spec = tree_flatten(returned)
    return tree_unflatten([v.detach() if isinstance(v, Tensor) else v for v in flat], spec)


def _loss_of(returned: Any) -> Tensor:
    """Return the scalar loss that a model returned. Raises InputError if there is no scalar."""
    loss = loss_entry(returned)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        raise InputError("step() finds no scalar loss in what the model returns", hint="give loss_fn= and target=")
    return loss


class _LabelCounts(TorchFunctionMode):
    """`TorchFunctionMode` that records, for each mean-reduced loss, over how many labels it averages."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss) and kwargs.get("reduction", "mean") == "mean":
            target = args[1] if len(args) > 1 else kwargs["target"]
            self.found.append(int((target != kwargs.get("ignore_index", -100)).sum()))
        return func(*args, **kwargs)
