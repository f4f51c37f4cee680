"""`tensor.register_hook(hook)` in a forward: the hook becomes the backward of an identity operator.

A hook gets the gradient of all uses of its tensor, including uses before the hook was registered. So every use of the
tensor in the trace is changed to use the output of the identity operator. This operator is an autograd.Function
(`autograd_functions.py`). A pointwise hook therefore runs on shards, any other hook on the full gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx

from autopart.compat.torch_internals import Tracing
from autopart.errors import Refusal
from autopart.tracing.autograd.autograd_functions import apply_as_operator, code_of
from autopart.tracing.trace_errors import LostInTrace

_FUNCTIONS: dict[tuple[str, str], type] = {}
"""{(name, computation) of a hook: the autograd.Function of the first such hook}"""


class Rewrites(Exception):
    """Exception: a forward needs to change earlier nodes of its trace.

    The model is then traced again, with every repeated block traced separately.
    """


class TracedHookHandle:
    """Handle that `register_hook` returns in a trace."""

    def remove(self) -> None:
        """Raise LostInTrace, because the trace already contains the hook."""
        raise _lost("the forward removes it again", "register it only on tensors whose gradient it must change")


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor], Any], before: dict[fx.Node, fx.Node]) -> str:
    """Insert a hook on the gradient of a traced tensor, for all uses of the tensor.

    Returns a note for the user if the hook returns nothing, so that no gradient changes. Raises LostInTrace for a hook
    that reads anything except the gradient and traced tensors.

    Args:
        before: {identity operator of a hook: the value whose uses it replaced}.
    """
    tracing = Tracing.current()
    if tensor.is_leaf or tracing is None or tracing.node_of(tensor) is None:
        raise _lost(
            "it is on a parameter or an input, and every call would add one more",
            "the hook on a parameter of the partitioned model, outside of forward()",
        )
    captured = _captured(hook, tracing)
    answers: list[bool] = []
    function = _function(hook, [cell for cell, _ in captured], answers)
    tensors = [tensor, *(value for _, value in captured)]
    with torch.enable_grad():
        try:
            code = code_of(function, tensors)
        except LostInTrace as error:
            raise _lost(error.why, error.hint) from error
        except Exception as error:  # the hook's code may raise anything for a gradient without values
            text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"
            raise _lost(f"it cannot be run on a gradient alone ({text})", _HINT) from error
        if not any(answers):
            return f"a hook on a gradient that changes nothing is not in the program: {_name(hook)}"
        function = _FUNCTIONS.setdefault((_name(hook), code), function)
        hooked = apply_as_operator(function.apply, function, tuple(tensors), {})  # type: ignore[attr-defined]
    if not tracing.put_in_place(tensor, hooked, before):
        raise _lost(
            "it reads a tensor that is computed after the hook's own tensor was used",
            "register the hook before its tensor is used",
        )
    return ""


_HINT = "the same change of the gradient by operations in forward()"


def _lost(why: str, hint: str) -> LostInTrace:
    return LostInTrace("a tensor has a hook on its gradient", why, hint, Refusal.HOOK)


def _name(hook: Callable[..., Any]) -> str:
    plain = hook.func if isinstance(hook, functools.partial) else hook
    return f"{getattr(plain, '__module__', '')}.{getattr(plain, '__qualname__', type(plain).__qualname__)}"


def _captured(hook: Callable[..., Any], tracing: Tracing) -> list[tuple[int, Tensor]]:
    """Return (index of the closure cell, tensor) for the traced tensors in a hook's closure."""
    cells = (hook.__closure__ or ()) if isinstance(hook, FunctionType) else ()
    contents = [(place, cell.cell_contents) for place, cell in enumerate(cells)]
    return [(i, t) for i, t in contents if isinstance(t, Tensor) and tracing.node_of(t) is not None]


def _with_cells(hook: Callable[..., Any], places: Sequence[int], values: Sequence[Tensor]) -> Callable[[Tensor], Any]:
    """Return a copy of the hook, with other values in the closure cells with these indices."""
    if not places:
        return hook
    assert isinstance(hook, FunctionType) and hook.__closure__ is not None
    cells = list(hook.__closure__)
    for place, value in zip(places, values, strict=True):
        cells[place] = CellType(value)
    return FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, tuple(cells))


def _function(hook: Callable[..., Any], places: Sequence[int], answers: list[bool]) -> type:
    """Return an autograd.Function that returns its input, and whose backward runs the hook.

    Args:
        answers: list that receives, for every run, True if the hook returned a new gradient.
    """

    class Hooked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor, *held: Tensor) -> Tensor:
            ctx.save_for_backward(*held)
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            held = ctx.saved_tensors
            changed = _with_cells(hook, places, held)(gradient)
            answers.append(changed is not None)
            return (gradient if changed is None else changed, *(None for _ in held))

    Hooked.__module__, Hooked.__qualname__ = "gradient_hook", _name(hook)
    Hooked.__name__ = "a hook on a gradient"
    return Hooked
