"""Table of how each torch function runs on a sharded tensor, and reductions of sharded tensors."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopart.runtime.sharded_tensor.shard_spec import ShardSpec


class FunctionKind(enum.Enum):
    """Kind of a torch function, which determines how the function runs on a sharded tensor."""

    LOCAL = "harmless: the same for a shard"
    ATTRIBUTE = "right: of the full tensor"
    GET_GRAD = "right: sharded as the parameter is"
    SET = "right: takes the shard"
    SAME = "right: sharded as its argument"
    CREATED = "right: of the size that is given"
    ELEMENTWISE = "right: elementwise"
    REDUCTION = "right: reduced over ranks"
    PERMUTED = "right: dims in another order"
    VIEW = "right: a view of a gathered copy, which cannot be written to"
    GATHERED = "right: computed on the gathered tensor"
    LIKE = "right: the shard of what one device draws"
    FOREACH = "right: elementwise, list by list"
    OF_INPUTS = "right: gradients sharded as the inputs"
    REFUSED = "refused"


def _stride(spec: ShardSpec, dim: int | None = None) -> Any:
    strides = tuple(math.prod(spec.shape[i + 1 :]) for i in range(len(spec.shape)))
    return strides if dim is None else strides[dim]


def _size(spec: ShardSpec, dim: int | None = None) -> Any:
    return torch.Size(spec.shape) if dim is None else spec.shape[dim]


ATTRIBUTES: dict[str, Callable[..., Any]] = {
    "get:shape": lambda spec: torch.Size(spec.shape),
    "size": _size,
    "numel": lambda spec: spec.numel(),
    "nelement": lambda spec: spec.numel(),
    "get:nbytes": lambda spec: spec.numel(),
    "get:ndim": lambda spec: len(spec.shape),
    "dim": lambda spec: len(spec.shape),
    "ndimension": lambda spec: len(spec.shape),
    "__len__": lambda spec: spec.shape[0],
    "stride": _stride,
    "dim_order": lambda spec, **_: tuple(range(len(spec.shape))),
}

LOCAL = frozenset(
    "get:dtype get:device get:layout get:requires_grad set:requires_grad requires_grad_ get:is_leaf get:grad_fn "
    "get:_version get:retains_grad retain_grad register_hook register_post_accumulate_grad_hook get:_backward_hooks "
    "get:_post_accumulate_grad_hooks set:_backward_hooks set:_post_accumulate_grad_hooks is_floating_point is_complex "
    "is_signed is_conj is_neg is_inference is_contiguous is_coalesced is_distributed get:is_cuda get:is_cpu "
    "get:is_sparse get:is_sparse_csr get:is_meta get:is_quantized get:is_nested get:is_mkldnn get:is_mps get:is_mtia "
    "get:is_xpu get:is_xla get:is_ipu get:is_vulkan get:is_maia get:names get:name get:volatile get:output_nr "
    "get:itemsize element_size get_device has_names get:_grad get:_base get:grad_dtype set:grad_dtype backward "
    "result_type can_cast promote_types del:grad _is_view is_same_size detach_ get:_cdata is_shared is_pinned "
    "record_stream _amp_foreach_non_finite_check_and_unscale_ _fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_ "
    "__dir__".split()
)
"""Flags, hooks and fused updates: functions for which a shard behaves as the full tensor."""

SAME = frozenset(
    "detach clone alias contiguous get:data to cpu cuda float double half bfloat16 int long short char byte bool type "
    "type_as cfloat cdouble chalf pin_memory zeros_like ones_like empty_like full_like _to_copy requires_grad positive "
    "resolve_conj resolve_neg get:real __pos__".split()
)
CREATES = frozenset("new_zeros new_ones new_empty new_full new_tensor new new_empty_strided".split())
LIKE = frozenset("rand_like randn_like randint_like".split())
DRAWS = LIKE | frozenset(
    "normal_ uniform_ bernoulli_ random_ exponential_ cauchy_ log_normal_ geometric_ normal bernoulli dropout "
    "alpha_dropout feature_dropout feature_alpha_dropout rrelu rrelu_".split()
)
"""Functions that draw random numbers."""
TO_PYTHON = frozenset("item __float__ __int__ __bool__ __index__ __complex__".split())
REDUCTIONS = frozenset(
    "sum mean norm vector_norm linalg_norm linalg_vector_norm std var amax amin max min all any count_nonzero prod "
    "logsumexp nansum".split()
)
PERMUTES = frozenset("t get:T get:mT get:H get:mH adjoint transpose swapaxes swapdims permute movedim".split())
VIEWS = frozenset("__getitem__ __iter__ get:imag unbind reshape reshape_as flatten ravel".split())

REFUSED = {
    "data_ptr": "the memory has only this rank's shard",
    "storage": "the memory has only this rank's shard",
    "untyped_storage": "the memory has only this rank's shard",
    "_typed_storage": "the memory has only this rank's shard",
    "storage_offset": "the memory has only this rank's shard",
    "storage_type": "the memory has only this rank's shard",
    "share_memory_": "the memory has only this rank's shard",
    "set_": "the runtime manages the memory of a parameter",
    "resize_": "the plan determines the shape of a parameter",
    "resize_as_": "the plan determines the shape of a parameter",
    "resize": "the plan determines the shape of a parameter",
    "resize_as": "the plan determines the shape of a parameter",
    "squeeze_": "the plan determines the shape of a parameter",
    "unsqueeze_": "the plan determines the shape of a parameter",
    "t_": "the plan determines the shape of a parameter",
    "transpose_": "the plan determines the shape of a parameter",
    "swapaxes_": "the plan determines the shape of a parameter",
    "swapdims_": "the plan determines the shape of a parameter",
    "as_strided_": "the memory has only this rank's shard",
    "as_strided": "the memory has only this rank's shard",
    "get:__cuda_array_interface__": "the memory has only this rank's shard",
    "__dlpack__": "the memory has only this rank's shard",
    "__dlpack_device__": "the memory has only this rank's shard",
    "to_dlpack": "the memory has only this rank's shard",
    "apply_": "a Python function of each element would run on a shard",
    "map_": "a Python function of each element would run on a shard",
    "map2_": "a Python function of each element would run on a shard",
    "sparse_resize_": "the plan determines the shape of a parameter",
    "sparse_resize_and_clear_": "the plan determines the shape of a parameter",
    "rename_": "named dims are not supported",
    "rename": "named dims are not supported",
    "refine_names": "named dims are not supported",
    "align_to": "named dims are not supported",
    "align_as": "named dims are not supported",
    "set:names": "named dims are not supported",
    "set:shape": "the plan determines the shape of a parameter",
}
"""{rejected function: reason}."""

DUNDERS = {
    **{f"__{name}__": name for name in ("add", "sub", "mul", "pow", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge")},
    **{f"__r{name}__": name for name in ("add", "mul", "sub", "pow")},
    **{f"__i{name}__": f"{name}_" for name in ("add", "sub", "mul", "pow")},
    "__truediv__": "div", "__rtruediv__": "div", "__div__": "div", "__rdiv__": "div", "__itruediv__": "div_",
    "__idiv__": "div_", "__floordiv__": "floor_divide", "__rfloordiv__": "floor_divide",
    "__ifloordiv__": "floor_divide_", "__mod__": "remainder", "__rmod__": "remainder", "__imod__": "remainder_",
    "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor", "__invert__": "bitwise_not",
    "__iand__": "bitwise_and_", "__ior__": "bitwise_or_", "__ixor__": "bitwise_xor_", "__rand__": "bitwise_and",
    "__ror__": "bitwise_or", "__rxor__": "bitwise_xor",
}  # fmt: skip

ALSO_ELEMENTWISE = frozenset(
    "absolute negative square clip fix true_divide divide multiply subtract greater less greater_equal less_equal eq "
    "not_equal arccos arcsin arctan arccosh arcsinh arctanh arctan2 isclose isfinite isinf isnan isreal isposinf "
    "isneginf where copy fill zero masked_fill lerp addcmul addcdiv relu relu6 silu gelu elu celu selu softplus mish "
    "hardtanh hardsigmoid hardswish leaky_relu logsigmoid tanhshrink softsign softshrink hardshrink threshold "
    "sigmoid tanh ldexp float_power rsub constant zeros ones nan_to_num".split()
)
"""Elementwise functions that lack torch's tag `pointwise`. Names have no trailing underscore."""


@functools.cache
def _is_tagged(name: str, tag: torch.Tag) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(tag in getattr(packet, overload).tags for overload in packet.overloads())


@functools.cache
def _is_view(name: str) -> bool:
    """Return True if an operator returns a view of an argument, and does not write to the argument."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    return any(
        result.alias_info is not None and not result.alias_info.is_write for s in schemas for result in s.returns
    )


@functools.cache
def kind_of(func: Any, name: str) -> FunctionKind:
    """Return the kind of a torch function.

    Args:
        name: name of the function. For an attribute it has the prefix "get:" or "set:", such as "get:shape".
    """
    for kind, names in _NAMED:
        if name in names:
            return kind
    if name.startswith("_foreach_"):
        return FunctionKind.FOREACH
    aten = DUNDERS.get(name, name)
    base = aten.rstrip("_") if not aten.startswith("__") else aten
    if base in ALSO_ELEMENTWISE or _is_tagged(aten, torch.Tag.pointwise) or _is_tagged(base, torch.Tag.pointwise):
        return (
            FunctionKind.ELEMENTWISE
            if base not in ("dropout", "bernoulli", "normal", "uniform", "equal")
            else FunctionKind.GATHERED
        )
    if name.startswith("set:") or name.startswith("del:"):
        return FunctionKind.REFUSED
    if _is_view(name):
        return FunctionKind.VIEW
    return FunctionKind.GATHERED


_NAMED: tuple[tuple[FunctionKind, Any], ...] = (
    (FunctionKind.REFUSED, REFUSED),
    (FunctionKind.ATTRIBUTE, ATTRIBUTES),
    (FunctionKind.LOCAL, LOCAL),
    (FunctionKind.GET_GRAD, ("get:grad",)),
    (FunctionKind.SET, ("set:grad", "set:data")),
    (FunctionKind.OF_INPUTS, ("grad",)),
    (FunctionKind.SAME, SAME),
    (FunctionKind.CREATED, CREATES),
    (FunctionKind.LIKE, LIKE),
    (FunctionKind.REDUCTION, REDUCTIONS),
    (FunctionKind.PERMUTED, PERMUTES),
    (FunctionKind.VIEW, VIEWS),
)


def permutation(name: str, args: Sequence[Any], kwargs: dict[str, Any], ndim: int) -> list[int]:
    """Return, for each dim of the result of `transpose` or a similar function, its dim in the input."""
    probe = torch.empty(tuple(range(2, ndim + 2)), device="meta")
    if name.startswith("get:"):
        result = getattr(probe, name.removeprefix("get:"))
    elif name in ("t", "adjoint"):
        result = getattr(probe, name)()
    else:
        result = getattr(probe, name)(*args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
    return [size - 2 for size in result.shape]


def reduced_dims(name: str, args: Sequence[Any], kwargs: dict[str, Any], ndim: int) -> list[int] | None:
    """Return the dims that a reduction reduces.

    Returns None for reductions that cannot be applied to each shard, such as `max(dim)`, which also returns indices.
    """
    rest = list(args[1:])
    if name in ("max", "min") and (rest or set(kwargs) - {"input"}):
        return None
    if name == "count_nonzero" and len(rest) > 1:
        return None
    if name in ("std", "var") and rest and isinstance(rest[0], bool):
        dim: Any = kwargs.get("dim")
    elif name in ("norm", "vector_norm", "linalg_norm", "linalg_vector_norm"):
        order = kwargs.get("p", kwargs.get("ord", rest[0] if rest else None))
        dim = kwargs.get("dim", kwargs.get("axis", rest[1] if len(rest) > 1 else None))
        is_matrix = (isinstance(order, str) and order != "fro") or (name == "linalg_norm" and order is not None)
        if is_matrix or (isinstance(order, Tensor)):
            return None
    else:
        dim = kwargs.get("dim", kwargs.get("axis", rest[0] if rest else None))
    if dim is None or isinstance(dim, torch.dtype) or (isinstance(dim, (tuple, list)) and not dim):
        return list(range(ndim))
    listed = [dim] if isinstance(dim, int) else list(dim)
    return sorted(one % max(ndim, 1) for one in listed)


def reduce_locally(
    func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], spec: ShardSpec, dims: Sequence[int],
    axes: Sequence[str],
) -> Tensor:  # fmt: skip
    """Reduce this rank's shard over `dims`, then reduce the results of the ranks along the mesh `axes`."""
    value: Tensor = args[0] if args else kwargs["input"]
    value = value.as_subclass(Tensor)
    rest = args[1:]
    if not axes:
        return func(value, *rest, **{k: v for k, v in kwargs.items() if k != "input"})
    first_flag = 2 if name in ("std", "var") else 1  # std(dim, unbiased, keepdim), sum(dim, keepdim)
    keep = bool(kwargs.get("keepdim", False)) or any(one is True for one in rest[first_flag:])
    count = math.prod(spec.shape[dim] for dim in dims)
    over = tuple(dims)

    def total(x: Tensor, keepdim: bool) -> Tensor:
        return spec.combine(x.sum(over, keepdim=keepdim) if over else x, axes, lambda stack: stack.sum(0))

    if name in ("mean", "sum"):
        dtype = kwargs.get("dtype") or next((one for one in rest if isinstance(one, torch.dtype)), None)
        total_value = total(value if dtype is None else value.to(dtype), keep)
        return total_value if name == "sum" else total_value / count
    if name in ("std", "var"):
        correction = _correction(rest, kwargs)
        # Ranks subtract the global mean from different elements.
        centred = value - spec.partial_gradient(total(value, True) / count, set(axes))
        variance = total(centred * centred.conj(), keep).real / max(count - correction, 0)
        return variance.sqrt() if name == "std" else variance
    local = func(value, *rest, **{k: v for k, v in kwargs.items() if k != "input"})
    return spec.combine(local, axes, _over_ranks(name, rest, kwargs))


def _correction(rest: Sequence[Any], kwargs: dict[str, Any]) -> float:
    if "correction" in kwargs:
        return 1 if kwargs["correction"] is None else kwargs["correction"]
    unbiased = kwargs.get("unbiased", next((one for one in rest[:1] if isinstance(one, bool)), True))
    if len(rest) > 1 and isinstance(rest[1], bool):
        unbiased = rest[1]
    return 1 if unbiased else 0


def _over_ranks(name: str, rest: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Return the function that reduces the ranks' results, stacked along dim 0, to the full result."""
    if "norm" in name:
        order = kwargs.get("p", kwargs.get("ord", rest[0] if rest else 2))
        power = 2.0 if order is None or order == "fro" else float(order)
        if power == 0:
            return lambda stack: stack.sum(0)
        return lambda stack: torch.linalg.vector_norm(stack, power, dim=0)
    if name in ("max", "amax"):
        return lambda stack: stack.amax(0)
    if name in ("min", "amin"):
        return lambda stack: stack.amin(0)
    if name in ("count_nonzero", "nansum"):
        return lambda stack: stack.sum(0)
    return {
        "all": lambda stack: stack.all(0),
        "any": lambda stack: stack.any(0),
        "prod": lambda stack: stack.prod(0),
        "logsumexp": lambda stack: stack.logsumexp(0),
    }[name]
