"""Calls whose result has a size that depends on tensor values. The size becomes an explicit argument.

Examples: `repeat_interleave(x, counts)`, `one_hot(labels)`, `bincount(labels)`, `zeros(labels.max() + 1)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopart.tracing.python.concrete_constants import UNKNOWN, Call

_FACTORIES = frozenset({"arange", "zeros", "ones", "full", "empty", "eye", "linspace"})
_SIZED_METHODS = frozenset(
    {"new_zeros", "new_ones", "new_full", "new_empty", "view", "reshape", "expand", "repeat", "tile", "unflatten"}
    | {"narrow", "split", "chunk", "topk", "pad", "roll", "__getitem__", "__setitem__"}
)
"""Methods whose arguments after the first are sizes, positions or numbers of elements."""

_INTEGERS = (torch.int64, torch.int32, torch.int16)

Read = Callable[[Callable[[Tensor], int], Tensor], Any]
"""Function that returns an integer computed from a tensor, or UNKNOWN."""


def with_size(call: Call, read: Read) -> Call:
    """Return a call that has the size of its result as an argument, if `read` can compute the size."""
    func, args, kwargs = call
    name = getattr(func, "__name__", "")
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return func, args, _repeated(args, kwargs, read)
    if name == "one_hot" and (args[1:] or (kwargs.get("num_classes", -1),))[0] == -1:
        last = _read_argument(largest, args, kwargs, read)
        return call if last is UNKNOWN else (func, args[:1], {**kwargs, "num_classes": last + 1})
    if name == "bincount" and not kwargs.get("minlength") and len(args) < 3:
        last = _read_argument(largest, args, kwargs, read)
        return call if last is UNKNOWN else (func, args, {**kwargs, "minlength": last + 1})
    return call


def _read_argument(function: Callable[[Tensor], int], args: tuple, kwargs: Mapping[str, Any], read: Read) -> Any:
    source = args[0] if args else kwargs.get("input", kwargs.get("tensor", kwargs.get("self")))
    return read(function, source) if isinstance(source, Tensor) and source.numel() else UNKNOWN


def _repeated(args: tuple, kwargs: Mapping[str, Any], read: Read) -> Mapping[str, Any]:
    operands = [*args[:2], *(kwargs[name] for name in ("input", "repeats") if name in kwargs)]
    source, counts = operands[0], operands[-1]
    total = read(_total, counts) if isinstance(counts, Tensor) else UNKNOWN
    if total is UNKNOWN:
        return kwargs
    if source is not counts and counts.numel() == 1:  # one number of repeats for all elements
        dim = args[2] if len(args) > 2 else kwargs.get("dim")
        total *= source.numel() if dim is None else source.shape[dim]
    return {**kwargs, "output_size": total}


def _total(counts: Tensor) -> int:
    return int(counts.sum())


def largest(labels: Tensor) -> int:
    return int(labels.max())


def with_numbers(func: Callable[..., Any], args: tuple, item: Callable[[Tensor], Any]) -> tuple:
    """Return a call's arguments, with tensors that are sizes or slice bounds replaced by `item(tensor)`."""
    name = getattr(func, "__name__", "")
    if name in _FACTORIES:
        return tuple(_numbers(argument, item) for argument in args)
    if name in _SIZED_METHODS and len(args) > 1:
        is_index = name in ("__getitem__", "__setitem__")
        return args[0], *(_slices(argument, item) if is_index else _numbers(argument, item) for argument in args[1:])
    return args


def _numbers(argument: Any, item: Callable[[Tensor], Any]) -> Any:
    if isinstance(argument, Tensor):
        return argument if argument.ndim or argument.is_floating_point() else item(argument)
    if type(argument) in (list, tuple):
        return type(argument)(_numbers(part, item) for part in argument)
    return argument


def _slices(argument: Any, item: Callable[[Tensor], Any]) -> Any:
    """Replace one-element integer tensors in an index by numbers, as Python's indexing does."""
    if isinstance(argument, slice):
        return slice(*(_index(part, item) for part in (argument.start, argument.stop, argument.step)))
    if type(argument) is tuple:
        return tuple(_slices(part, item) for part in argument)
    return argument if isinstance(argument, Tensor) and argument.ndim else _index(argument, item)


def _index(argument: Any, item: Callable[[Tensor], Any]) -> Any:
    is_number = isinstance(argument, Tensor) and argument.dtype in _INTEGERS and argument.numel() == 1
    return item(argument) if is_number else argument
