"""Constant tensors of a trace, whose values are computed when Python code needs them.

For example, `nn.Transformer` compares a mask with the causal mask, and other models take the maximum of position ids.
Functions like `torch.arange` create such a tensor from numbers only, so its value can be computed on demand. Calls that
read only the metadata of another tensor (`torch.ones_like(x)`, `steps.to(x)`) also return constants.

A tensor in the user's code that is not a parameter, buffer or input is a constant of the trace, too. A forward that
writes to such a tensor is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autopart.compat.torch_internals import has_values, outside_of_tracing, tree_flatten, tree_map

_MAKERS = frozenset(
    {"arange", "eye", "full", "linspace", "logspace", "ones", "zeros", "tensor", "as_tensor", "scalar_tensor"}
    | {"tril_indices", "triu_indices", "hann_window", "hamming_window", "blackman_window", "kaiser_window"}
)
_ANSWERS = frozenset(
    {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose", "is_nonzero"} | {"_total"}
)
_SHAPED_LIKE = {name: (0, "input") for name in ("ones_like", "zeros_like", "full_like")}
_TYPED_LIKE = {name: (0, "self") for name in ("new_tensor", "new_zeros", "new_ones", "new_full")} | {
    name: (1, "other") for name in ("to", "type_as")
}
"""Functions that read the form of one argument alone, and which that is: its shape, dtype and device, or but the latter
two."""
UNKNOWN = object()


Call = tuple[Callable[..., Any], tuple, Mapping[str, Any]]
"""A call: the function, its arguments, and its keyword arguments."""


@dataclass(frozen=True, eq=False)
class _Made:
    """A constant tensor: result number `place` of a recorded call.

    Constant tensors among the call's arguments are replaced by their own `_Made` objects.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    place: int


@dataclass(frozen=True, eq=False)
class _Metadata:
    """Shape and dtype of a tensor. It replaces an argument of a recorded call whose values are not needed."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ConcreteConstants:
    """The constant tensors of a trace, each with the recorded calls that recompute it.

    `of_model`: parameters, buffers and inputs, whose values can differ in the next call. `read`: the constants whose
    values Python has read.
    """

    def __init__(self, of_model: Iterable[Tensor] = ()) -> None:
        self._made = WeakIdKeyDictionary()
        self._changing = {memory_of(tensor) for tensor in of_model} | {None}
        self.read: list[Tensor] = []
        self._held: list[tuple[Tensor, _Metadata]] = []

    def _is_known(self, tensor: Tensor) -> bool:
        if tensor not in self._made and self._is_constant(tensor):
            self._made[tensor] = tensor
        return tensor in self._made

    def _is_constant(self, tensor: Tensor) -> bool:
        is_real = type(tensor) is Tensor and has_values(tensor) and not tensor.requires_grad
        return is_real and memory_of(tensor) not in self._changing

    def note(self, call: Call, inputs: Sequence[Tensor], output: Any) -> None:
        """Record a torch call that returned `output`. `inputs`: the tensors among its arguments."""
        func, args, kwargs = call
        name = getattr(func, "__name__", "")
        if name in _SHAPED_LIKE or name in _TYPED_LIKE:
            args, kwargs = _without_model(name, args, kwargs)
            inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
            is_made = all(map(self._is_known, inputs))
        else:
            is_made = all(map(self._is_known, inputs)) if inputs else name in _MAKERS
        if not is_made:
            return
        args, kwargs = tree_map(self._recipe, (args, kwargs))
        for place, leaf in enumerate(tree_flatten(output)[0]):
            if isinstance(leaf, Tensor) and not any(leaf is t for t in inputs):
                self._made[leaf] = _Made(func, args, kwargs, place)

    def _recipe(self, leaf: Any) -> Any:
        return self._made[leaf] if isinstance(leaf, Tensor) else leaf

    def forget(self, written: Sequence[Tensor]) -> None:
        """Record that tensors are written in place: constants that share their memory are no longer constant.

        Tensors that were computed from these constants earlier stay constant.
        """
        memory = {memory_of(tensor) for tensor in written}
        self._changing |= memory
        self.drop([tensor for tensor in self._made if None in memory or memory_of(tensor) in memory])

    def drop(self, tensors: Sequence[Tensor]) -> None:
        """Forget the recorded calls of these tensors."""
        for tensor in tensors:
            self._made.pop(tensor, None)

    def sized(self, call: Call) -> Mapping[str, Any]:
        """Return a call's keyword arguments.

        For `repeat_interleave`, adds the output size if it can be computed.
        """
        func, args, kwargs = call
        if getattr(func, "__name__", "") != "repeat_interleave" or kwargs.get("output_size") is not None:
            return kwargs
        operands = [*args[:2], *(kwargs[name] for name in ("input", "repeats") if name in kwargs)]
        source, counts = operands[0], operands[-1]
        is_known = isinstance(counts, Tensor) and self._is_known(counts)
        total: Any = self._computed(lambda real: int(real.sum()), (counts,), {}) if is_known else UNKNOWN
        if total is UNKNOWN:
            return kwargs
        if source is not counts and counts.numel() == 1:  # one count for all
            dim = args[2] if len(args) > 2 else kwargs.get("dim")
            total *= source.numel() if dim is None else source.shape[dim]
        return {**kwargs, "output_size": total}

    def answer(self, call: Call, inputs: Sequence[Tensor]) -> Any:
        """Return the result of a call such as `item()` if its tensors `inputs` are constant; else UNKNOWN."""
        func, args, kwargs = call
        asks = getattr(func, "__name__", "") in _ANSWERS
        if not asks or not inputs or not all(map(self._is_known, inputs)):
            return UNKNOWN
        return self._computed(func, args, kwargs)

    def _computed(self, func: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
        recipe = tree_map(self._recipe, (args, kwargs))
        if self._forms_of(recipe) & {id(form) for _, form in self._held}:
            return UNKNOWN
        return self._without_draws(lambda real: func(*real[0], **real[1]), recipe)

    def _without_draws(self, compute: Callable[[Any], Any], recipe: Any) -> Any:
        """Compute a constant from its recorded calls, and return `compute` of it.

        Returns UNKNOWN if one of the calls draws random numbers.
        """
        drawn = torch.get_rng_state()
        with outside_of_tracing(), torch.no_grad():
            result = compute(self._real(recipe, {}))
            is_random = not torch.equal(drawn, torch.get_rng_state())
        if not is_random:
            return result
        torch.set_rng_state(drawn)
        return UNKNOWN

    def hold(self, buffers: Sequence[Tensor]) -> None:
        """Record buffers as constant in every call until they are written. Their values stay unknown."""
        self._held = [(buffer, _Metadata(tuple(buffer.shape), buffer.dtype)) for buffer in buffers]
        for buffer, form in self._held:
            self._made[buffer] = form

    def is_fixed(self, tensor: Tensor) -> bool:
        """Return True if a tensor has equal values in every call."""
        if not self._is_known(tensor):
            return False
        recipe = self._made[tensor]
        if self._forms_of(recipe) & {id(form) for held, form in self._held if self._made.get(held) is not form}:
            return False
        try:
            return self._without_draws(lambda real: True, recipe) is True
        except (RuntimeError, ValueError, IndexError):  # held tensors are assumed to be zeros, which may not fit
            return False

    def _forms_of(self, recipe: Any) -> set[int]:
        """Return the ids of all `_Metadata` objects among the arguments of these recorded calls."""
        forms, seen, todo = set[int](), set[int](), [recipe]
        while todo:
            leaves = [leaf for leaf in tree_flatten(todo.pop())[0] if id(leaf) not in seen]
            seen |= {id(leaf) for leaf in leaves if isinstance(leaf, _Made)}
            forms |= {id(leaf) for leaf in leaves if isinstance(leaf, _Metadata)}
            todo += [(leaf.args, leaf.kwargs) for leaf in leaves if isinstance(leaf, _Made)]
        return forms

    def _real(self, value: Any, done: dict[int, Tensor]) -> Any:
        """Replay recorded calls on the CPU. Return the arguments of a call with real tensors."""

        def one(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            if isinstance(leaf, _Metadata):
                return torch.zeros((), dtype=leaf.dtype).expand(leaf.shape)
            if isinstance(leaf, Tensor):
                self.read.append(leaf)
                return leaf.cpu()
            if not isinstance(leaf, _Made):
                return leaf
            if id(leaf) not in done:
                args, kwargs = self._real((leaf.args, leaf.kwargs), done)
                if "device" in kwargs:
                    kwargs = {**kwargs, "device": "cpu"}
                done[id(leaf)] = tree_flatten(leaf.func(*args, **kwargs))[0][leaf.place]
            return done[id(leaf)]

        return tree_map(one, value)


def _without_model(name: str, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, Mapping[str, Any]]:
    """Return the arguments of a call such as `ones_like(x)` with `x` replaced by its shape and dtype.

    The call reads only metadata of `x`. Returns positional and keyword arguments.
    """
    place, keyword = (_SHAPED_LIKE | _TYPED_LIKE)[name]
    like = args[place] if place < len(args) else kwargs.get(keyword)
    if not isinstance(like, Tensor):
        return args, kwargs
    shape = tuple(like.shape) if name in _SHAPED_LIKE else ()
    if not all(isinstance(size, int) for size in shape):
        return args, kwargs
    form = _Metadata(shape, like.dtype)
    if place < len(args):
        return (*args[:place], form, *args[place + 1 :]), kwargs
    return args, {**kwargs, keyword: form}


def written_by(func: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a call writes in place."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    written = [*(args[:1] if in_place else ()), kwargs.get("out")]
    return [tensor for tensor in written if isinstance(tensor, Tensor)]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Return the tensors in a value, including those in nested containers, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def memory_of(tensor: Tensor) -> int | None:
    """Return a key of a tensor's memory, equal for tensors that share storage; None without storage."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors have several
        return None
