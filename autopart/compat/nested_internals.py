"""Private APIs of torch's nested (jagged) tensors."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import _symbolic_trace
from torch.fx.experimental import proxy_tensor
from torch.nested._internal.nested_int import NestedIntNode
from torch.nested._internal.nested_tensor import NestedTensor as NestedTensor
from torch.nested._internal.nested_tensor import _nt_view_dummy
from torch.nested._internal.ops import lookup_jagged

from autopart.common.scoped import attributes

_NUMBERS = itertools.count(1_000_000)
_aten = torch.ops.aten
GET_VALUES = _aten._nested_get_values.default, _aten.values.default
UNBIND = _aten.unbind.int
TO_PADDED = _aten.to_padded_tensor.default
FROM_JAGGED = _aten._nested_view_from_jagged.default
FROM_PADDED = _aten._nested_from_padded_tensor.default
attention = torch._C._nn.scaled_dot_product_attention


def is_jagged(value: Any) -> bool:
    return isinstance(value, NestedTensor)


def have_jagged(types: Iterable[type]) -> bool:
    """Return True if an argument is a jagged tensor, from the `types` that torch passes to a mode."""
    return any(issubclass(kind, NestedTensor) for kind in types)


def make_view_dummy() -> None:
    """Create the tensor that torch shares between jagged tensors, before a trace would create a fake one."""
    _nt_view_dummy()


def jagged(
    values: Tensor, offsets: Tensor, lengths: Tensor | None, ragged_dim: int, cache: Mapping[str, Any]
) -> Tensor:  # fmt: skip
    """Return a jagged tensor of traced values and offsets.

    Its ragged size is a number of its own, not a symbol of the trace.
    """
    source = offsets if lengths is None else lengths
    if isinstance(source, FakeTensor) and source.nested_int_memo is None:
        source.nested_int_memo = torch.SymInt(NestedIntNode(next(_NUMBERS), 1))
    cache = {name: tensor for name, tensor in cache.items() if tensor is not None}
    made: Tensor = NestedTensor(values, offsets, lengths=lengths, _ragged_idx=ragged_dim, _metadata_cache=cache)
    return made


def jagged_operators(to: Callable[..., Any], around: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Trace operators on jagged tensors as operators on their values and offsets, inside a `with` block.

    Torch's trace stops at an operator with such an argument, because the argument is not a tensor of the trace.

    Args:
        to: function of (operator, args, kwargs). It returns the result, or NotImplemented for torch's own code.
        around: context in which the operators on values run.
    """
    mode = proxy_tensor.ProxyTorchDispatchMode
    dispatch = mode.__torch_dispatch__

    def of_operator(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not have_jagged(types):
            return dispatch(self, func, types, args, kwargs)
        with self, around():
            result = to(func, args, kwargs)
            if result is NotImplemented and (run := lookup_jagged(func, *args, **kwargs)) is not None:
                result = run(*args, **kwargs)
        if result is NotImplemented:  # a composite operator
            with self, torch._C.DisableTorchFunction():
                result = func.decompose(*args, **kwargs)
        return result

    is_tracing = _symbolic_trace.is_fx_tracing

    def refuses() -> bool:  # `torch.nested` refuses every trace, as it does not know this one
        return sys._getframe(1).f_globals["__name__"] != torch.nested.__name__ and is_tracing()

    return attributes({(mode, "__torch_dispatch__"): of_operator, (_symbolic_trace, "is_fx_tracing"): refuses})
