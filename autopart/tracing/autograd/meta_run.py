"""A run of a model's own Python that computes nothing: tensors have shapes, and autograd notes who is made of whom.

Parameters and inputs are on the meta device, and say that they are where the model's are. What is made of numbers alone
is real as long as it is small, so that Python can ask for its values. What a call gives is looked up where the same
call was made before: torch takes long to work out a shape. A number that depends on values is one, and those of a list
are zero, which is a place of any tensor.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopart.compat.symbolic_shape_internals import all_selected
from autopart.compat.torch_internals import TorchDispatchMode, exporting, tree_map
from autopart.tracing.autograd.decompositions import WRITTEN_OUT
from autopart.tracing.dynamic.branch_source import skipped_by
from autopart.tracing.python.concrete_constants import UNKNOWN, KnownValues, tensors_in, written_by
from autopart.tracing.python.value_checks import asking_frame, passing_answer

_SMALL = 2**16
"""Entries of the largest tensor that is real."""
_TENSOR: Any = Tensor
_DEVICE = _TENSOR.device.__get__
_IS_META, _IS_CUDA = _TENSOR.is_meta.__get__, _TENSOR.is_cuda.__get__

Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype."""


@contextmanager
def meta_run(device: torch.device) -> Iterator[None]:
    """Inside, operators on tensors of the meta device run as described above; these say that they are on `device`."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), exporting(), all_selected(), _Forms(), _Placed(device):
        yield


class _Placed(TorchFunctionMode):
    def __init__(self, device: torch.device):
        super().__init__()
        self.device = torch.device("cpu") if device.type == "meta" else device
        self.known = KnownValues()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = list(tensors_in((args, kwargs)))
        if any(map(_IS_META, tensors)):
            answer = self.known.answer((func, args, kwargs), tensors)
            if answer is not UNKNOWN:
                return answer
            passing = passing_answer(func, tensors, sys._getframe(1))
            if passing is not None:
                return passing
            if func is Tensor.__bool__ and (skipped := skipped_by(asking_frame(sys._getframe(1)))) is not None:
                return skipped.runs_if
            if func in (Tensor.item, Tensor.__float__):
                return torch.ones((), dtype=args[0].dtype).item()
            if func is Tensor.tolist:
                zeros = torch.zeros(args[0].shape, dtype=args[0].dtype).tolist()
                return tree_map(lambda zero: _Listed() if type(zero) is int else zero, zeros)
        if func in (torch.masked_select, Tensor.masked_select):  # without a kernel there
            source, mask = torch.broadcast_tensors(*args, *kwargs.values())
            return source[mask]
        kwargs = dict(self.known.sized((func, args, kwargs)))
        self.known.forget(written_by(func, args, kwargs))
        result = WRITTEN_OUT.get(func, func)(*args, **kwargs)
        self.known.note((func, args, kwargs), tensors, result)
        if func == _DEVICE:
            return self.device if result.type == "meta" else result
        if func == _IS_META:
            return False
        return self.device.type == "cuda" if func == _IS_CUDA else result


class _Listed(int):
    """A number in a list of a tensor's: 0, and in a condition that skips writes one with which they run."""


def _compared(compare: Callable[[Any, Any], bool]) -> Callable[[_Listed, Any], bool]:
    def compared(self: _Listed, other: Any) -> bool:
        skipped = skipped_by(sys._getframe(1))
        return skipped.runs_if if skipped is not None else compare(int(self), other)

    return compared


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(_Listed, f"__{_name}__", _compared(getattr(operator, _name)))


class _Forms(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.known: dict[Any, Any] = {}
        self.own: dict[int, Tensor] = {}
        """Real tensors that were made inside, by where their memory begins: these may be written."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors: list[Tensor] = []
        key = (func, _key(args, tensors), _key(tuple(kwargs.items()), tensors) if kwargs else ())
        real = not any(tensor.is_meta for tensor in tensors)
        schema = func._schema
        if real and not schema.is_mutable and not func.is_view and func.namespace != "prim":
            real = self._may_be_real(func, args, kwargs)
        if real and (not schema.is_mutable or all(t.untyped_storage().data_ptr() in self.own for t in tensors)):
            return self._keep(func(*args, **kwargs))
        if not tensors:
            return func(*args, **_placed_on_meta(func, args, kwargs))
        if not all(tensor.is_meta for tensor in tensors):
            meta_args, meta_kwargs = tree_map(_on_meta, (args, dict(kwargs)))
            result = func(*meta_args, **meta_kwargs)
            return args[0] if schema.is_mutable else result
        if schema.is_mutable or any(r.alias_info is not None for r in schema.returns):
            return func(*args, **_placed_on_meta(func, args, kwargs))
        return self._made(func, key, args, kwargs)

    def _may_be_real(self, func: Any, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Whether a call gives only small tensors, or of a size that depends on values; and none with three dims, which
        is a state or an activation: torch's recurrent layers want it where their input is."""
        meta_args, meta_kwargs = tree_map(_on_meta, (args, dict(kwargs)))
        try:
            outputs = tensors_in(func(*meta_args, **_placed_on_meta(func, meta_args, meta_kwargs)))
        except (RuntimeError, NotImplementedError):
            return True
        return all(t.numel() <= _SMALL and (t.ndim < 3 or not t.is_floating_point()) for t in outputs)

    def _keep(self, result: Any) -> Any:
        for leaf in tensors_in(result):
            self.own[leaf.untyped_storage().data_ptr()] = leaf
        return result

    def _made(self, func: Any, key: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """What a call gives that writes nothing and gives no part of its inputs' memory."""
        try:
            forms = self.known.get(key)
        except TypeError:  # an argument that cannot be a key
            return func(*args, **kwargs)
        if forms is not None:
            tensors = [_empty(form) for form in forms[1]]
            return forms[0](tensors) if forms[0] is not None else tensors[0]
        result = func(*args, **_placed_on_meta(func, args, kwargs))
        kind = None if isinstance(result, Tensor) else type(result) if type(result) in (tuple, list) else False
        leaves = [result] if kind is None else result
        if kind is not False and all(isinstance(leaf, Tensor) for leaf in leaves):
            self.known[key] = kind, [(tuple(t.shape), t.stride(), t.dtype) for t in leaves]
        return result


def _empty(form: Form) -> Tensor:
    return torch.empty_strided(form[0], form[1], dtype=form[2], device="meta")


def _on_meta(leaf: Any) -> Any:
    """A tensor on meta; one number stays as it is, which any device takes."""
    return leaf.to("meta") if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


def _placed_on_meta(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keyword arguments with which a call gives tensors on meta."""
    makes = not args or not any(isinstance(leaf, Tensor) for leaf in args)
    if kwargs.get("device") is None and not (makes and any(a.name == "device" for a in func._schema.arguments)):
        return kwargs
    return {**kwargs, "device": torch.device("meta")}


def _key(value: Any, tensors: list[Tensor]) -> Any:
    """What a call's form depends on; the tensors in a value are added to a list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, (tuple, list)):
        return type(value), tuple([_key(part, tensors) for part in value])
    return type(value), value
