"""Tensors that depend on nothing: Python may ask for their values in a trace, which has no values.

`nn.Transformer` compares a mask with the causal one; others take the largest of a few positions. Such a tensor is made
by functions like `torch.arange` from numbers alone, so it can be computed when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autopart.compat import outside_of_tracing, tree_flatten, tree_map

_MAKERS = frozenset(
    {"arange", "eye", "full", "linspace", "logspace", "ones", "zeros", "tensor", "as_tensor", "scalar_tensor"}
    | {"tril_indices", "triu_indices", "hann_window", "hamming_window", "blackman_window", "kaiser_window"}
)
_ANSWERS = frozenset(
    {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose", "is_nonzero"}
)
UNKNOWN = object()


Call = tuple[Callable[..., Any], tuple, Mapping[str, Any]]
"""A function, its arguments, and its keyword arguments."""


@dataclass(frozen=True, eq=False)
class _Made:
    """The call that made a tensor, which is `place` of its outputs. In its arguments, other such calls stand for the
    tensors that they made."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    place: int


class KnownValues:
    """Which tensors of a trace are known, and how they were made."""

    def __init__(self) -> None:
        self._made = WeakIdKeyDictionary()

    def note(self, call: Call, inputs: Sequence[Tensor], output: Any) -> None:
        """Note a call of the tensors `inputs` that gave `output`."""
        func, args, kwargs = call
        name = getattr(func, "__name__", "")
        if not (all(t in self._made for t in inputs) if inputs else name in _MAKERS):
            return
        args, kwargs = tree_map(self._recipe, (args, kwargs))
        for place, leaf in enumerate(tree_flatten(output)[0]):
            if isinstance(leaf, Tensor) and not any(leaf is t for t in inputs):
                self._made[leaf] = _Made(func, args, kwargs, place)

    def _recipe(self, leaf: Any) -> Any:
        return self._made[leaf] if isinstance(leaf, Tensor) else leaf

    def forget(self, written: Sequence[Tensor]) -> None:
        """These tensors are written: known ones in the same memory have other values from now on. What was computed of
        them before keeps its own."""
        memory = {memory_of(tensor) for tensor in written}
        self.drop([tensor for tensor in self._made if None in memory or memory_of(tensor) in memory])

    def drop(self, tensors: Sequence[Tensor]) -> None:
        """Forget how these were made."""
        for tensor in tensors:
            self._made.pop(tensor, None)

    def answer(self, call: Call, inputs: Sequence[Tensor]) -> Any:
        """What a call gives Python where all the tensors that it is about, `inputs`, are known; else UNKNOWN."""
        func, args, kwargs = call
        asks = getattr(func, "__name__", "") in _ANSWERS
        if not asks or not inputs or not all(t in self._made for t in inputs):
            return UNKNOWN
        drawn = torch.get_rng_state()
        with outside_of_tracing(), torch.no_grad():
            real, options = _real(tree_map(self._recipe, (args, kwargs)), {})
            answer = func(*real, **options)
            is_random = not torch.equal(drawn, torch.get_rng_state())
        if not is_random:
            return answer
        torch.set_rng_state(drawn)
        return UNKNOWN


def _real(value: Any, done: dict[int, Tensor]) -> Any:
    """A call's arguments with real tensors, all on the CPU."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if not isinstance(leaf, _Made):
            return leaf
        if id(leaf) not in done:
            args, kwargs = _real((leaf.args, leaf.kwargs), done)
            if "device" in kwargs:
                kwargs = {**kwargs, "device": "cpu"}
            done[id(leaf)] = tree_flatten(leaf.func(*args, **kwargs))[0][leaf.place]
        return done[id(leaf)]

    return tree_map(one, value)


def memory_of(tensor: Tensor) -> int | None:
    """Equal for tensors in the same memory; None where torch does not say, as inside of `torch.func`."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors have several
        return None
