"""Tensors that autograd saves for the backward of an operator, found by a run on fake tensors.

An operator runs once per signature (target, shapes, strides, dtypes, which inputs need gradients) under
`torch.autograd.graph.saved_tensors_hooks`. The storage of each saved tensor shows whether it is an input, an output,
or another tensor. Composite operators may choose their kernel by device (attention, recurrent layers). Such operators
run as on a CPU, where flash attention saves the same tensors as on a GPU. All other operators run on `meta`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autopart.common.scoped import no_autocast
from autopart.compat.torch_internals import TorchDispatchMode, fake_mode, is_composite, tree_flatten

MAX_CACHED_SIGNATURES = 20_000
"""Maximum number of operator signatures that one process caches, over all plans."""


class TensorSpec(NamedTuple):
    """Shape, strides, dtype and gradient flag of a tensor.

    What autograd saves for an operator depends only on these properties of its inputs.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool = False

    @staticmethod
    def contiguous(shape: Sequence[int], dtype: torch.dtype, needs_grad: bool = False) -> TensorSpec:
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        return TensorSpec(tuple(shape), tuple(reversed(strides)), dtype, needs_grad and _differentiable(dtype))

    @staticmethod
    def of(tensor: Tensor, needs_grad: bool = False) -> TensorSpec:
        """Return the spec of a tensor, which may be fake or on `meta`."""
        return TensorSpec(
            tuple(tensor.shape), tensor.stride(), tensor.dtype, needs_grad and _differentiable(tensor.dtype)
        )

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements in memory. A dim of stride 0 counts as one element."""
        elements = (size for size, stride in zip(self.shape, self.stride, strict=True) if stride or not size)
        return math.prod(elements) * self.dtype.itemsize


def _differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class SavedTensors(NamedTuple):
    """Tensors that autograd saves for an operator's backward.

    Args:
        inputs: indices of the saved inputs, in the order of `graph.tensor_inputs`. An input that is passed twice has
            two indices.
        outputs: indices of the saved outputs.
        other_bytes: bytes of saved tensors that are neither inputs nor outputs.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    other_bytes: int


@dataclass(frozen=True)
class Effect:
    """Memory effects of an operator call: outputs, buffers, saved tensors and workspace.

    Args:
        made: the call's result with a `TensorIndex` in place of every tensor.
        forms: the spec of each output tensor.
        memory: the buffer of each output tensor: `i` for the buffer of input `i`, or `-1 - j` for the new buffer `j`.
        pieces: bytes of each new buffer.
        kept: the saved tensors.
        forward_bytes, backward_bytes: peak bytes of new memory while forward or backward runs. Some of it may be freed
            when the call ends.
    """

    made: Any
    forms: tuple[TensorSpec, ...]
    memory: tuple[int, ...]
    pieces: tuple[int, ...]
    kept: SavedTensors
    forward_bytes: int = 0
    backward_bytes: int = 0


@dataclass(frozen=True)
class TensorIndex:
    """Placeholder for a tensor in `Effect.made`: the tensor's index in `Effect.forms`."""

    number: int


@dataclass
class EffectCache:
    """Cache of the `Effect` (outputs, buffers, saved tensors) of operator calls.

    The key is the operator and the specs of the arguments.
    """

    effects: dict[Hashable, Effect] = field(default_factory=dict)

    def effect(self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Effect:
        """Return the outputs, buffers and saved tensors of `target(*args, **kwargs)`.

        The arguments have a `TensorSpec` in place of every tensor. Raises any error of the operator on fake tensors.
        """
        key = (target, _hashable(args), _hashable(kwargs))
        if key not in self.effects:
            if len(self.effects) >= MAX_CACHED_SIGNATURES:
                self.effects.clear()
            self.effects[key] = _run(target, args, kwargs)
        return self.effects[key]


EFFECT_CACHE = EffectCache()


def _hashable(argument: Any) -> Hashable:
    if isinstance(argument, TensorSpec):
        return argument
    if isinstance(argument, Mapping):
        return tuple((name, _hashable(item)) for name, item in argument.items())
    if isinstance(argument, (list, tuple)):
        return tuple(map(_hashable, argument))
    return argument, type(argument)


def _run(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Effect:
    inputs: list[Tensor] = []
    device = torch.device("cpu" if is_composite(target) else "meta")
    saved: list[weakref.ref[_Saved]] = []

    def keep(tensor: Tensor) -> _Saved:
        held = _Saved(tensor)
        saved.append(weakref.ref(held))
        return held

    def fake(argument: Any) -> Any:
        if isinstance(argument, TensorSpec):
            tensor = torch.empty_strided(argument.shape, argument.stride, dtype=argument.dtype, device=device)
            inputs.append(tensor.requires_grad_(argument.needs_grad))
            return tensor
        if isinstance(argument, Mapping):
            return {name: fake(item) for name, item in argument.items()}
        if isinstance(argument, (list, tuple)) and not isinstance(argument, torch.Size):
            return type(argument)(map(fake, argument)) if type(argument) in (list, tuple) else list(map(fake, argument))
        return device if isinstance(argument, torch.device) else argument

    mode = fake_mode() if device.type == "cpu" else nullcontext()
    with mode, torch.enable_grad(), no_autocast():
        args, kwargs = fake(tuple(args)), fake(kwargs)
        with saved_tensors_hooks(keep, lambda held: held.tensor), Allocated() as forward:
            result = target(*args, **kwargs)
        alive = [held.tensor for reference in saved if (held := reference()) is not None]
        effect = _effect(result, inputs, alive)
        return replace(effect, forward_bytes=forward.most, backward_bytes=_backward_bytes(result, inputs))


def _backward_bytes(result: Any, inputs: Sequence[Tensor]) -> int:
    """Return the peak bytes of new memory of a backward, or 0 if the backward cannot run on fake tensors."""
    outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    towards = [tensor for tensor in inputs if tensor.requires_grad]
    if not outputs or not towards:
        return 0
    grads = [torch.empty(output.shape, dtype=output.dtype, device=output.device) for output in outputs]
    with Allocated() as backward:
        try:
            torch.autograd.grad(outputs, towards, grads, allow_unused=True)
        except (RuntimeError, NotImplementedError, TypeError):
            return 0
    return backward.most


class Allocated(TorchDispatchMode):
    """Dispatch mode that measures the peak bytes of the storages allocated under it (`most`)."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.given: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            if (input_ref := StorageWeakRef(storage)).cdata not in self.made:
                self.given[input_ref.cdata] = input_ref
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if (output_ref := StorageWeakRef(storage)).cdata not in self.given:
                self.made[output_ref.cdata] = output_ref, storage.nbytes()
        self.made = {key: entry for key, entry in self.made.items() if not entry[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.made.values()))
        return result


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


class _Saved:
    """Wrapper of a tensor that autograd saves.

    Its garbage collection shows when autograd drops the tensor.
    """

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def _effect(result: Any, inputs: Sequence[Tensor], saved: Sequence[Tensor]) -> Effect:
    owner = {_memory(tensor): index for index, tensor in reversed(list(enumerate(inputs)))}
    forms, memory, pieces = [], [], []
    leaves = tree_flatten(result)[0]
    for output in (leaf for leaf in leaves if isinstance(leaf, Tensor)):
        key = _memory(output)
        if key not in owner:
            pieces.append(output.untyped_storage().nbytes())
            owner[key] = -len(pieces)
        forms.append(TensorSpec.of(output, output.requires_grad))
        memory.append(owner[key])
    owners = {owner[_memory(tensor)] for tensor in saved if _memory(tensor) in owner}
    others = {_memory(tensor): tensor.untyped_storage().nbytes() for tensor in saved if _memory(tensor) not in owner}
    keeps = SavedTensors(
        tuple(sorted(index for index in owners if index >= 0)),
        tuple(index for index, place in enumerate(memory) if place < 0 and place in owners), sum(others.values()),
    )  # fmt: skip
    return Effect(_numbered(result, iter(range(len(forms)))), tuple(forms), tuple(memory), tuple(pieces), keeps)


def _memory(tensor: Tensor) -> int:
    return StorageWeakRef(tensor.untyped_storage()).cdata


def _numbered(result: Any, numbers: Any) -> Any:
    if isinstance(result, Tensor):
        return TensorIndex(next(numbers))
    if isinstance(result, (list, tuple)):
        return tuple(_numbered(item, numbers) for item in result)
    return result
