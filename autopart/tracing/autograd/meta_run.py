"""Run of a model's own Python on meta tensors, to find which outputs depend on which parameters.

Autograd's graph of the run shows these dependencies. Parameters and inputs are on the meta device, but report the
model's device. Small tensors that depend on no parameter or input are real, so that Python can read their values.
Results of repeated calls are cached, because torch infers shapes slowly. `.item()` returns 1. The entries of
`.tolist()` are 0, which is a valid index of any tensor.
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
from autopart.tracing.autograd.decompositions import TRACE_DECOMPOSITIONS
from autopart.tracing.dynamic.branch_source import skipped_code_of
from autopart.tracing.dynamic.packed_sequences import PackedSequences
from autopart.tracing.dynamic.sized_calls import with_numbers, with_size
from autopart.tracing.python.concrete_constants import UNKNOWN, ConcreteConstants, tensors_in, written_by
from autopart.tracing.python.value_checks import asking_frame, passing_answer

_SMALL = 2**16
"""Maximum number of elements of a real tensor."""
_TENSOR: Any = Tensor
_DEVICE = _TENSOR.device.__get__
_IS_META, _IS_CUDA = _TENSOR.is_meta.__get__, _TENSOR.is_cuda.__get__

_SELECTING = frozenset({"nonzero", "argwhere", "unique", "unique_consecutive"})
"""Functions whose results have sizes that depend on values.

A result is a real tensor if it depends only on inputs.
"""

Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""


@contextmanager
def meta_run(device: torch.device, known: ConcreteConstants) -> Iterator[None]:
    """Run a model on meta tensors inside a `with` block, to find dependencies between tensors.

    The tensors report `device` as their device.

    Args:
        known: the tensors whose values Python can read.
    """
    placed = _Placed(device, known)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), exporting(), all_selected(), _Forms(), placed:
        yield


class _Placed(TorchFunctionMode):
    def __init__(self, device: torch.device, known: ConcreteConstants):
        super().__init__()
        self.device = torch.device("cpu") if device.type == "meta" else device
        self.known, self.packed = known, PackedSequences(known)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = list(tensors_in((args, kwargs)))
        if any(map(_IS_META, tensors)):
            args = with_numbers(func, args, lambda tensor: self.__torch_function__(Tensor.item, (), (tensor,)))
            answer = self.known.answer((func, args, kwargs), tensors, of_inputs=True)
            if answer is not UNKNOWN:
                return answer
            if getattr(func, "__name__", "") in ("numpy", "__array__"):
                real = self.known.value_of(Tensor.detach, args[0])
                return func(*args, **kwargs) if real is UNKNOWN else real.numpy()
            passing = passing_answer(func, tensors, sys._getframe(1))
            if passing is not None:
                return passing
            if func is Tensor.__bool__ and (skipped := skipped_code_of(asking_frame(sys._getframe(1)))) is not None:
                return skipped.runs_if
            if func in (Tensor.item, Tensor.__float__, Tensor.__int__):
                one = torch.ones((), dtype=args[0].dtype).item()
                return int(one) if func is Tensor.__int__ else one
            if func is Tensor.tolist:
                zeros = torch.zeros(args[0].shape, dtype=args[0].dtype).tolist()
                return tree_map(lambda zero: _Listed() if type(zero) is int else zero, zeros)
        if func in (torch.masked_select, Tensor.masked_select):  # has no kernel on meta
            source, mask = torch.broadcast_tensors(*args, *kwargs.values())
            return self.__torch_function__(Tensor.__getitem__, (), (source, mask))
        if func is Tensor.__getitem__:
            args = (args[0], self._indices(args[1]))
        if (
            getattr(func, "__name__", "") in _SELECTING
            and (real := self.known.result((func, args, kwargs))) is not UNKNOWN
        ):
            return real
        if (packed := self.packed.run(func, args, self.known.value_of)) is not UNKNOWN:
            return packed
        func, args, kwargs = with_size((func, args, kwargs), self.known.value_of)
        self.known.write((func, args, kwargs), written_by(func, args, kwargs))
        result = TRACE_DECOMPOSITIONS.get(func, func)(*args, **kwargs)
        self.known.note((func, args, kwargs), tensors, result)
        if func == _DEVICE:
            return self.device if result.type == "meta" else result
        if func == _IS_META:
            return False
        return self.device.type == "cuda" if func == _IS_CUDA else result

    def _indices(self, index: Any) -> Any:
        """Replace boolean masks with known values in an index by the indices of their true elements."""
        parts: list[Any] = []
        for part in index if type(index) is tuple else (index,):
            is_mask = isinstance(part, Tensor) and _IS_META(part) and part.dtype == torch.bool
            mask = self.known.value_of(Tensor.detach, part) if is_mask else UNKNOWN
            parts += [part] if mask is UNKNOWN else mask.nonzero().unbind(1)
        return tuple(parts) if type(index) is tuple or len(parts) > 1 else parts[0]


class _Listed(int):
    """Entry of `tensor.tolist()`: the integer 0.

    A comparison of the entry that decides if code is skipped returns the outcome for which the code runs.
    """


def _compared(compare: Callable[[Any, Any], bool]) -> Callable[[_Listed, Any], bool]:
    def compared(self: _Listed, other: Any) -> bool:
        skipped = skipped_code_of(sys._getframe(1))
        return skipped.runs_if if skipped is not None else compare(int(self), other)

    return compared


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(_Listed, f"__{_name}__", _compared(getattr(operator, _name)))


class _Forms(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.known: dict[Any, Any] = {}
        self.own: dict[int, Tensor] = {}
        """{memory address: real tensor that was created during the run}: only these may be written."""

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
        """Return True if a call may run on real tensors: its results are small, or of data-dependent size.

        Floating-point results with three or more dims are excluded. They are states or activations, which torch's
        recurrent layers expect on the device of their input.
        """
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
        """Return the meta results of a call, from the cache if possible.

        The call must neither write to its inputs nor return a view of them.
        """
        try:
            forms = self.known.get(key)
        except TypeError:  # an argument is not hashable
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
    """Move a tensor to meta. A tensor with one element stays, because any device accepts it as an operand."""
    return leaf.to("meta") if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


def _placed_on_meta(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keyword arguments of a call, with `device="meta"` if the call creates or moves a tensor."""
    makes = not args or not any(isinstance(leaf, Tensor) for leaf in args)
    if kwargs.get("device") is None and not (makes and any(a.name == "device" for a in func._schema.arguments)):
        return kwargs
    return {**kwargs, "device": torch.device("meta")}


def _key(value: Any, tensors: list[Tensor]) -> Any:
    """Return a cache key of an argument, in which tensors are replaced by their metadata.

    The tensors themselves are appended to `tensors`.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, (tuple, list)):
        return type(value), tuple([_key(part, tensors) for part in value])
    return type(value), value
