"""Options of a training step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from autopart.errors import InputError
from autopart.ir.program import LabelCount, Program
from autopart.runtime.comm.process_mesh import Process, reduce_over_all

if TYPE_CHECKING:
    from autopart.runtime.pipeline_stages import StageModule


@dataclass(frozen=True)
class StepOptions:
    """Options of one `step`.

    Attributes:
        loss_scale: factor by which the loss is multiplied for the backward. The returned loss is not multiplied.
        num_tokens: number by which the sum of the labels' losses is divided. None: the number of labels in the batch
            that are not ignored.
        outputs: True to return the model's outputs too.
        on_nonfinite: what to do if the loss or a gradient is not finite: raise an error, or skip the batch. None: do
            not check.
        locate: True to search for the first operator that computes NaN or infinity.
    """

    loss_scale: float = 1.0
    num_tokens: float | None = None
    outputs: bool = False
    on_nonfinite: str | None = None
    locate: bool = False

    @classmethod
    def read(
        cls,
        model: nn.Module,
        kwargs: Mapping[str, Any],
        *,
        loss_scale: float | Tensor | None = None,
        num_tokens: int | Tensor | None = None,
        outputs: bool = False,
        on_nonfinite: str | None = None,
        locate: bool = False,
    ) -> StepOptions:
        """Validate the options that a user passes with the model's inputs. Raises InputError."""
        options = {
            "loss_scale": loss_scale, "num_tokens": num_tokens, "outputs": outputs or None,
            "on_nonfinite": on_nonfinite, "locate": locate or None,
        }  # fmt: skip
        _check_names(model, [name for name, value in options.items() if value is not None])
        if not isinstance(outputs, bool):
            raise InputError(
                f"outputs={outputs!r:.40} is neither True nor False",
                why="it selects whether step() returns the outputs",
                hint="step(..., outputs=True), which returns (loss, outputs)",
            )
        if on_nonfinite not in (None, "raise", "skip"):
            raise InputError(
                f"on_nonfinite={on_nonfinite!r:.40} is not known", why="it selects what a NaN or infinity does",
                hint="'raise' for an error on every rank, 'skip' to drop the batch, None for no check",
            )  # fmt: skip
        if not isinstance(locate, bool):
            raise InputError(f"locate={locate!r:.40} is neither True nor False", hint="step(..., locate=True)")
        if num_tokens is not None and kwargs.get("num_items_in_batch") is not None:
            raise InputError(
                "num_tokens= and num_items_in_batch= are both given", why="each is the divisor of the sum over labels",
                hint="one of the two; num_tokens= suits every model",
            )  # fmt: skip
        scale = 1.0 if loss_scale is None else _number("loss_scale", loss_scale)
        tokens = None if num_tokens is None else _number("num_tokens", num_tokens)
        if tokens is not None and tokens <= 0:
            raise InputError(
                f"num_tokens={tokens} is not a number of labels", why="it must be 1 or more",
                hint="the number of labels in all batches whose gradients are accumulated",
            )  # fmt: skip
        return cls(float(scale), tokens, outputs, on_nonfinite or ("raise" if locate else None), locate)

    @property
    def text(self) -> str:
        """Options that differ from their defaults, as text for the comparison between ranks.

        For example, `, loss_scale=1024.0`.
        """
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return "".join(f", {name}={value}" for name, value in changed)


def scaled(loss: Tensor, scale: float) -> Tensor:
    """Return the loss with an unchanged value. Its backward multiplies the gradient by `scale`."""
    return loss if scale == 1.0 else _Scaled.apply(loss, scale)


class _Scaled(Function):
    """Autograd function: identity in forward; backward multiplies the gradient by a number.

    The gradient is multiplied, not the loss, so that the loss stays exact, and finite in half precision.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return loss.clone()  # not a view: zero-bubble schedules detach it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


def _number(name: str, value: float | Tensor) -> float:
    number = value
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        number = value.item()
    if isinstance(number, (bool, Tensor)) or not isinstance(number, (int, float)):
        shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise InputError(f"{name}={shown} is not a number", hint="a number, or a tensor with one entry")
    if not math.isfinite(number):
        raise InputError(f"{name}={number} is not finite", why="every gradient would be zero, inf or nan",
                         hint="a finite number: torch.amp.GradScaler begins with a loss scale of 65536")  # fmt: skip
    return number


def _check_names(model: nn.Module, names: Sequence[str]) -> None:
    """Raise InputError if an input of the model has the name of an option of `step`."""
    inputs = inspect.signature(model.forward).parameters if names else ()
    for name in [name for name in names if name in inputs]:
        raise InputError(
            f"{name}= is an option of step(), and {type(model).__name__} has an input of that name",
            why="it is not clear which of the two is meant",
            hint=f"give the input by its position, or rename it; step() takes {name}= for models without it",
        )


def divide_by(num_tokens: float, modules: Sequence[StageModule], program: Program, process: Process) -> None:
    """Make the current step divide the sum of the labels' losses by `num_tokens`. A collective call.

    Raises InputError on every rank if the loss is not a mean over labels, or if the batch has more than `num_tokens`
    labels.
    """
    label_count = program.label_count
    if not isinstance(label_count, LabelCount):
        raise InputError(
            "num_tokens= does not fit this loss",
            why=label_count or "the program has no division of the loss by a label count",
            hint="let the loss be a sum, with loss_scale=1/n, and leave num_tokens out",
        )
    most = 0.0
    for module in (module for module in modules if module.stage.index == label_count.stage):
        for arguments in module.loaded.arguments:
            count = arguments[label_count.name]
            if not count.is_floating_point() and num_tokens != int(num_tokens):
                raise InputError(f"num_tokens={num_tokens:g} is not a whole number", why="it counts labels")
            most = max(most, float(count))
            arguments[label_count.name] = torch.full_like(count, num_tokens)
    on_host = torch.tensor(most, dtype=torch.float64)
    reduce_over_all(on_host, dist.ReduceOp.MAX, process)
    most = on_host.item()
    if most > num_tokens:
        raise InputError(
            f"num_tokens={num_tokens:g} is fewer than the {most:g} labels of this batch alone",
            why="it counts the labels of all batches whose gradients are added",
            hint="count the labels that are not ignored; causal models read only labels[:, 1:]",
        )
