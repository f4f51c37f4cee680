"""Errors of a failed trace, in the user's terms: source line, module, value and hint."""

from __future__ import annotations

import contextlib
import linecache
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from autopart.errors import Refusal, TraceError
from autopart.tracing.with_loss import users_model, users_name

_TORCH, _AUTOPART = Path(torch.__file__).parent, Path(__file__).parent.parent
_ENTRY = str(Path(__file__).with_name("call_signature.py"))
NOT_THE_USERS = (f"{_TORCH}/", f"{Path(np.__file__).parent}/", f"{_AUTOPART}/", contextlib.__file__, "<")


class LostInTrace(Exception):
    """Error for code in a forward whose effect would be missing from the trace.

    `trace_error` adds the source line.
    """

    def __init__(self, what: str, why: str, hint: str, refusal: Refusal):
        super().__init__(what)
        self.what, self.why, self.hint, self.refusal = what, why, hint, refusal


class TraceAgain(Exception):
    """Exception that ends a trace when it meets code that must be traced in another way.

    The way is recorded, and the call is traced again.
    """


def is_entry(frame: FrameType) -> bool:
    """Return True for the frame that calls the model in a trace."""
    return frame.f_code.co_filename == _ENTRY


def wrong_third_derivative(names: str) -> LostInTrace:
    """Return the error for a loss that needs a third derivative, which eager PyTorch computes wrongly.

    `names`: the operators with the wrong derivative.
    """
    return LostInTrace(
        f"the loss needs a third derivative of {names}",
        f"the forward differentiates a gradient, and torch's own third derivative of {names} is wrong: it "
        "treats the mean and the standard deviation as constants",
        "the normalization written with x.mean() and x.var(), or group_norm with one group",
        Refusal.GRADIENT,
    )


class _KnownFailure(NamedTuple):
    """A pattern (regular expression) of a torch error message, with the explanation that the user gets."""

    refusal: Refusal
    pattern: str
    why: str
    hint: str


_KINDS = (
    _KnownFailure(Refusal.NUMPY, r"\.numpy\(\) is not supported|can't convert .* to numpy",
          "numpy computes outside of the graph",
          "the same computation in torch or before the call, or autopart.host_function around the function"),
    _KnownFailure(Refusal.WRITE, r"a (view of a )?leaf Variable that requires grad is being used in an in-place",
          "a weight is written in place", "w = w + ..., or the change after optimizer.step()"),
    _KnownFailure(Refusal.GRADIENT, r"fake tensor in the exported program constant's list|functorch tensor",
          "the forward differentiates inside (autograd.grad, backward, torch.func), or reads a tensor that it made "
          "before, or that an earlier torch.export of the model left in a cache",
          "the gradient outside of the model, or written as operations; after torch.export: a new process"),
    _KnownFailure(Refusal.STATE, r"Constant (?:model\.)?(?P<name>\S+) is mutated in the forward",
          "the tensor '{name}' is written and is not a buffer", "register_buffer('{name}', ...)"),
    _KnownFailure(Refusal.FUNCTION, r"Please convert all Tensors to FakeTensors first",
          "an autograd.Function reads a tensor that is not among its arguments",
          "that tensor as an argument of apply()"),
    _KnownFailure(Refusal.PART, r"Creating a new Tensor subclass (?P<name>\w+)",
          "a {name} is a tensor subclass, which has no dense values in a trace",
          "a plain tensor; for causal_lower_right(q, k): torch.ones(q, k, dtype=torch.bool).tril(k - q)"),
    _KnownFailure(Refusal.PART, r"Unable to cast NotImplemented to Tensor|NestedTensor|nested_tensor|"
          r"SymInt'>.*not tracked with proxy", "this use of a nested tensor is not supported",
          "layout=torch.jagged, and operations with one sequence dim; or padded rows and a mask"),
    _KnownFailure(Refusal.REGION, r"[Hh]igher.order op",
          "while_loop, scan and the like contain parts of the model, which cannot be sharded",
          "torch.where and plain operations, or parallelize the modules inside"),
    _KnownFailure(Refusal.OUTPUT, r"Found <class '(?P<name>[^']+)'> in output, which is not a known type",
          "it returns a {name}, in which autopart cannot look for tensors",
          "return its tensors (of a cache: use_cache=False), or torch.utils._pytree.register_pytree_node"),
)  # fmt: skip


_OUT_OF_MEMORY = r"out of memory|[Cc]annot allocate memory|can't allocate memory|not enough memory"


def trace_error(model: nn.Module, error: Exception, origin: str = "", limit: str = "") -> TraceError:
    """Convert an exception of torch.export to the error that the user gets.

    `origin`: text of the values from which the last data-dependent condition was computed. `limit`: why both sides of a
    data-dependent branch cannot be computed.
    """
    wrapped, model = model, users_model(model)
    name = type(model).__name__
    frame, line = _innermost(error)
    where = _where(frame, line, model)
    if isinstance(error, LostInTrace):
        return TraceError(error.what, refusal=error.refusal, why=error.why, where=where, hint=error.hint)
    text = str(error).strip()
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or re.search(_OUT_OF_MEMORY, text):
        reason = text.splitlines()[0][:300] if text else "MemoryError"
        return TraceError(
            f"there is not enough memory to trace {name}", why=reason, where=where,
            hint="use fewer samples or a shorter sequence in the example, or free memory: a model built on meta "
            "is traced without weights",
        )  # fmt: skip
    if "DataDependent" in type(error).__name__ or "data-dependent" in text:
        why = "this line decides what to run by the values in a tensor, which a graph cannot hold" + _from(origin)
        why += f"; a graph cannot compute both sides of the branch either: {limit}" if limit else ""
        return TraceError(f"{name} cannot be traced", refusal=Refusal.DECISION, why=why, where=where,
                          hint=_data_dependent_hint(frame, model))  # fmt: skip
    if "DynamicOutputShape" in type(error).__name__:
        return shape_by_values(model, text.removeprefix("aten."), where, path_of_frame(frame, model), origin)
    for kind in _KINDS:
        match = re.search(kind.pattern, text)
        if match:
            names = {key: users_name(wrapped, text) for key, text in match.groupdict().items()}
            why, hint = (part.format(**names) for part in (kind.why, kind.hint))
            return TraceError(f"{name} cannot be traced", refusal=kind.refusal, why=why, where=where, hint=hint)
    first_line = text.splitlines()[0][:300] if text else ""
    why = f"{type(error).__name__}: {first_line}".rstrip(": ")
    if where:
        return TraceError(
            f"{name} fails in its own forward, or in its trace", why=why, where=where,
            hint="call the model itself with this example; if that works, use plain operations on this line",
        )  # fmt: skip
    hint = "torch.export.export(model, args, kwargs, strict=False) shows the same failure in full"
    return TraceError(f"{name} cannot be traced", why=why, where=where, hint=hint)


def without_values_error(error: TraceError) -> TraceError:
    """Return the error with an additional hint: the example's inputs must not be on meta."""
    hint = f"an example whose inputs have values, not on meta; or {error.hint}"
    return TraceError(error.what, refusal=error.refusal, why=error.why, where=error.where, hint=hint)


def shape_by_values(model: nn.Module, operator: str, where: str, path: str, origin: str) -> TraceError:
    """Return the error for an operator whose output shape depends on the values of a tensor."""
    model = users_model(model)
    return TraceError(
        f"{type(model).__name__} cannot be traced",
        refusal=Refusal.SIZE,
        why=f"the size of the result of {operator} depends on tensor values" + _from(origin),
        where=where,
        hint="a mask in place of a selection: torch.where(mask, x, 0); or " + _both_sides(path, model),
    )


def _from(origin: str) -> str:
    return f"; they come from {origin}" if origin else ""


def _both_sides(path: str, model: nn.Module) -> str:
    """Return a hint for the user: parallelize the modules before and after the failing line separately."""
    inside = model.get_submodule(path).named_children()
    part = next((name for name, child in inside if any(True for _ in child.parameters())), "")
    full = ".".join(filter(None, (path, part))) or "encoder"
    spelt = re.sub(r"\.(\d+)", r"[\1]", f"model.{full}")
    return f"parallelize the modules on either side of it, e.g. parallelize({spelt}, mesh)"


def _data_dependent_hint(frame: FrameType | None, model: nn.Module) -> str:
    path = path_of_frame(frame, model)
    file = frame.f_code.co_filename if frame is not None else ""
    if "/transformers/" in file and "experts" in path:
        return 'experts_implementation="batched_mm" or "grouped_mm" when the model is made'
    if "/transformers/" in file and "attn" in path:
        return 'attn_implementation="sdpa" when the model is made'
    return f"torch.where(condition, a, b); or the decision outside of forward(); or {_both_sides(path, model)}"


def _innermost(error: Exception) -> tuple[FrameType | None, int]:
    """Return the innermost frame of the user's code inside the model's call, and the frame's source line."""
    frames = list(traceback.walk_tb(error.__traceback__))
    start = next((i for i, (frame, _) in enumerate(frames) if is_entry(frame)), len(frames))
    users_frames = [f for f in frames[start:] if not f[0].f_code.co_filename.startswith(NOT_THE_USERS)]
    return users_frames[-1] if users_frames else (None, 0)


def _where(frame: FrameType | None, line: int, model: nn.Module) -> str:
    if frame is None:
        return ""
    file, path = frame.f_code.co_filename, path_of_frame(frame, model)
    return f"{file}:{line}: {linecache.getline(file, line).strip()}" + (f" ({path})" if path else "")


def path_of_frame(frame: FrameType | None, model: nn.Module) -> str:
    """Return the path of the module whose forward runs a frame, directly or through other functions.

    Returns "" if there is none, and for the model itself.
    """
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            names: Iterator[Any] = model.named_modules()
            return next((name for name, other in names if other is module), "")
        frame = frame.f_back
    return ""
