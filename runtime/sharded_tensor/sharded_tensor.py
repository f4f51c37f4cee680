"""Parameters that store this rank's shard and behave as the full tensor, as DTensor does.

A `ShardedTensor` is a strided tensor with the local values. Kernels, autograd, and fused and foreach optimizers
therefore run on it as on any tensor. Calls from Python code go through `__torch_function__`:

- Shapes are those of the full tensor. Elementwise functions run on the shards.
- Reductions and random fills give the result of a single device. All other functions run on the gathered tensor.

Library code runs inside `local_values()`. There, a `ShardedTensor` behaves as a plain local tensor.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from autopart.compat.torch_function_internals import as_class, function_name, local_values, register_foreach
from autopart.errors import UsageError
from autopart.runtime.sharded_tensor.shard_spec import DimShard, ShardSpec
from autopart.runtime.sharded_tensor.tensor_functions import (
    ATTRIBUTES,
    DRAWS,
    REFUSED,
    TO_PYTHON,
    FunctionKind,
    kind_of,
    permutation,
    reduce_locally,
    reduced_dims,
)
from autopart.runtime.shards.shard_owners import ShardInfo

Handler = Callable[..., Any]


class ShardedTensor(Tensor):
    """This rank's shard of a tensor, with the interface of the full tensor.

    `to_local()` returns the shard as a plain tensor. `full_tensor()` gathers it (a differentiable collective call).

    Example (dp2, zero=3):
        >>> weight = pm.get_parameter("0.weight")                               # doctest: +SKIP
        >>> weight.shape, weight.to_local().shape                               # doctest: +SKIP
        (torch.Size([16, 8]), torch.Size([8, 8]))
    """

    spec: ShardSpec
    is_gathered: bool
    """True for a read-only view of a full tensor that was gathered as a copy."""

    def to_local(self) -> Tensor:
        """Return this rank's values as a plain tensor, which shares memory and autograd history."""
        with local_values():
            return self.as_subclass(Tensor)

    def full_tensor(self) -> Tensor:
        """Return the full tensor on every rank. A differentiable collective call."""
        with local_values():
            return _full(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        with local_values():
            return _call(func, name, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        with local_values():
            values = self.detach().clone(memory_format=torch.preserve_format)
            result = as_sharded(values, self.spec, type(self), self.requires_grad)
            if self.grad is not None:
                result.grad = copy.copy(self.grad) if not isinstance(self.grad, ShardedTensor) else as_sharded(
                    self.grad.detach().clone(), self.grad.spec)  # fmt: skip
        memo[id(self)] = result
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # as Tensor has it
        with local_values():
            shards = ", ".join(f"dim {s.dim} over {s.axis}" for s in self.spec.shards) or "unsharded"
            values = self.as_subclass(Tensor).detach()
            return f"{type(self).__name__}('{self.spec.name}' of shape {self.spec.shape}, {shards}; local {values!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        with local_values():
            return self.as_subclass(Tensor).detach().__reduce_ex__(protocol)


class ShardedParameter(ShardedTensor, nn.Parameter):
    """A parameter of a partitioned model that is sharded, or that only some pipeline stages store."""


def as_sharded(
    values: Tensor, spec: ShardSpec, kind: type[ShardedTensor] | None = None, requires_grad: bool = False,
    is_gathered: bool = False,
) -> ShardedTensor:  # fmt: skip
    """Return a ShardedTensor with these local values and this shard spec.

    Args:
        kind: class of the result. None: ShardedTensor, with the autograd history of `values`.
        is_gathered: True if `values` are gathered from shards. Writes to such a copy are rejected.
    """
    with local_values():
        if kind is None:
            result: Any = values.as_subclass(ShardedTensor)
        else:
            result = as_class(values, kind, requires_grad)
    result.__dict__["spec"], result.__dict__["is_gathered"] = spec, is_gathered
    return result


def with_spec(parameter: nn.Parameter, shard_info: ShardInfo) -> nn.Parameter:
    """Return a parameter as a ShardedParameter. Without `pp`, return an unsharded parameter unchanged."""
    shards = tuple(
        DimShard(axis, cut, index)
        for (axis, cut), (_, index) in zip(shard_info.cuts, shard_info.local_splits, strict=True)
    )
    if not shards and "pp" not in shard_info.process.groups:
        return parameter
    spec = ShardSpec(shard_info.name, tuple(shard_info.stored.shape), shards, shard_info.process)
    sharded: Any = as_sharded(parameter, spec, ShardedParameter, parameter.requires_grad)
    return sharded


# --- Calls.


def _call(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch on sharded arguments, inside `local_values`."""
    kind = kind_of(func, name)
    if kind is FunctionKind.REFUSED:
        raise UsageError(
            f"{name}() is not supported on '{_first(args, kwargs).spec.name}', of which this rank holds a shard",
            why=REFUSED.get(name, "the runtime itself uses this attribute"),
            hint="p.to_local() for this rank's values, p.full_tensor() or pm.full_state_dict() for all",
        )
    if name in DRAWS and _is_of_stage(_first(args, kwargs).spec):
        _warn_of_random_numbers(_first(args, kwargs).spec)
    return _HANDLERS[kind](func, name, args, kwargs)


def _first(args: Any, kwargs: Any) -> ShardedTensor:
    return next(leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, ShardedTensor))


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in _leaves(item)]
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in _leaves(item)]
    return [tree]


def _map(fn: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(fn, item) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map(fn, item) for item in tree)
    if isinstance(tree, dict):
        return {key: _map(fn, item) for key, item in tree.items()}
    return fn(tree)


def _local(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function whose result for the shard also holds for the full tensor, such as `requires_grad`."""
    return func(*args, **kwargs)


def _attribute(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return an attribute of the full tensor, such as `shape` or `nbytes`."""
    if name == "get:nbytes":
        return args[0].spec.numel() * args[0].element_size()
    return ATTRIBUTES[name](args[0].spec, *args[1:], **kwargs)


def _get_grad(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    grad = func(*args, **kwargs)
    if grad is None or isinstance(grad, ShardedTensor) or grad.layout is not torch.strided:
        return grad
    wrapped = as_sharded(grad, args[0].spec)
    args[0].grad = wrapped  # so that `p.grad is p.grad`
    return wrapped


def _set(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Assign `grad` or `data` from a sharded tensor, this rank's shard or the full tensor."""
    target, value = args
    if isinstance(value, Tensor) and isinstance(target, ShardedTensor):
        value = as_sharded(_onto(value, target.spec), target.spec)
    return func(target, value)


def _same(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function whose result is sharded like its argument, such as a copy, a cast or `zeros_like`."""
    result, source = func(*args, **kwargs), args[0] if args else _first(args, kwargs)
    if isinstance(result, ShardedTensor) or not (isinstance(result, Tensor) and isinstance(source, ShardedTensor)):
        return result  # for example, a plain tensor that is cast to the dtype of a sharded one
    shares_memory = source.is_gathered and result.data_ptr() == source.data_ptr()
    return as_sharded(result, source.spec, is_gathered=shares_memory)


def _created(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `new_zeros` or a similar function, which creates a plain tensor of the size that is passed."""
    return func(*args, **kwargs)


def _elementwise(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    specs = [tensor.spec for tensor in tensors if isinstance(tensor, ShardedTensor)]
    inplace, out = _writes(name, kwargs), kwargs.get("out")
    target = out if isinstance(out, Tensor) else args[0] if inplace else None
    if target is not None and not isinstance(
        target, ShardedTensor
    ):  # a plain tensor that sharded tensors are written into
        return func(*_map(_full, list(args)), **_map(_full, kwargs))
    if target is not None:
        _check_writable(target, name)
        spec = target.spec
    else:
        spec = _broadcast(specs, tensors)
    _check_one_parameter(name, specs)

    def conform(leaf: Any) -> Any:
        if leaf is target or not isinstance(leaf, Tensor):
            return leaf
        return _onto(leaf, spec)

    result = func(*_map(conform, list(args)), **_map(conform, kwargs))
    if target is not None:
        return result
    return _map(lambda leaf: as_sharded(leaf, spec) if isinstance(leaf, Tensor) else leaf, result)


def _check_one_parameter(name: str, specs: Sequence[ShardSpec]) -> None:
    """Raise UsageError if code under `pp` combines one parameter's scalar (a norm) with another parameter."""
    names = {spec.name for spec in specs}
    if len(names) > 1 and any(spec.is_derived and spec.numel() == 1 for spec in specs):
        _check_all_stages(name, specs[0])


def _broadcast(specs: Sequence[ShardSpec], tensors: Sequence[Tensor]) -> ShardSpec:
    """Return the shard spec of the result of an elementwise function.

    A dim is sharded as in the first argument that shards it. If one mesh axis would shard two dims, `specs[0]` decides.
    """
    shapes = [spec.shape for spec in specs]
    local = {spec.local_shape for spec in specs}
    shapes += [tuple(t.shape) for t in tensors if not isinstance(t, ShardedTensor) and tuple(t.shape) not in local]
    shape = torch.broadcast_shapes(*shapes)
    shards: dict[int, tuple[DimShard, ...]] = {}
    for spec in specs:
        offset = len(shape) - len(spec.shape)
        for shard in spec.shards:
            dim = shard.dim + offset
            if dim not in shards or shards[dim][0].key == shard.key:
                shards[dim] = tuple(one.on_dim(dim) for one in spec.of_dim(shard.dim))
    used_axes = [shard.axis for of_dim in shards.values() for shard in of_dim]
    if len(used_axes) != len(set(used_axes)):  # one mesh axis shards different dims of two arguments
        first, offset = specs[0], len(shape) - len(specs[0].shape)
        shards = {s.dim + offset: tuple(o.on_dim(s.dim + offset) for o in first.of_dim(s.dim)) for s in first.shards}
    all_shards = tuple(shard for dim in sorted(shards) for shard in shards[dim])
    return replace(specs[0], shape=tuple(shape), shards=all_shards)


def _onto(value: Tensor, spec: ShardSpec) -> Tensor:
    """Return this rank's part of an argument of an elementwise function whose result has this shard spec.

    In backward, partial gradients of the argument are all-reduced.
    """
    if not spec.shards and not (isinstance(value, ShardedTensor) and value.spec.shards):
        return value
    if isinstance(value, ShardedTensor):
        source = value.spec
        offset = len(spec.shape) - len(source.shape)
        wanted = {d: tuple(s.key for s in spec.of_dim(d)) for d in range(len(spec.shape))}
        fits = all(
            tuple(s.key for s in source.of_dim(dim)) == wanted[dim + offset] or (size == 1 and not source.of_dim(dim))
            for dim, size in enumerate(source.shape)
        )
        if fits:
            return spec.partial_gradient(value, spec.axes - source.axes)
        value = _full(value)
    elif tuple(value.shape) == spec.local_shape != spec.shape:
        return value  # from `to_local()`, or optimizer state
    if torch.broadcast_shapes(value.shape, spec.shape) != torch.Size(spec.shape):
        raise UsageError(
            f"a tensor of shape {tuple(value.shape)} cannot be combined with '{spec.name}' of shape {spec.shape}",
            why=f"this rank holds a shard of shape {spec.local_shape}, and the shapes cannot be broadcast",
            hint="pass the full tensor, or p.to_local() and local values",
        )
    return spec.take(spec.partial_gradient(value, spec.axes))


def _full(value: Any) -> Any:
    if not isinstance(value, ShardedTensor):
        return value
    return value.spec.gather(value.as_subclass(Tensor))


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or bool(kwargs.get("inplace")) or name == "__setitem__"


def _check_writable(target: ShardedTensor, name: str) -> None:
    if target.is_gathered:
        raise UsageError(
            f"{name}() writes to a slice or another view of '{target.spec.name}'",
            why="the parameter is sharded; the view is of a gathered copy, so the parameter would not change",
            hint="write to the parameter itself: p[...] = value, p.copy_(value), p.mul_(mask)",
        )


def _reduction(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    value = args[0] if args else kwargs.get("input")
    if not isinstance(value, ShardedTensor) or kwargs.get("out") is not None:
        return _gathered(func, name, args, kwargs)
    spec = value.spec
    dims = reduced_dims(name, args, kwargs, len(spec.shape))
    is_complete = dims is not None and len(dims) == len(spec.shape)
    if is_complete and spec.shape:
        _check_all_stages(name, spec)
    if dims is None or spec.has_empty_shards:
        return _gathered(func, name, args, kwargs)
    axes = [shard.axis for dim in dims for shard in reversed(spec.of_dim(dim))]
    result = reduce_locally(func, name, args, kwargs, spec, dims, axes)
    reduced_spec = spec.reduced(dims, bool(_keepdim(result, spec, dims)))
    if is_complete and not reduced_spec.shape:
        return result
    return as_sharded(result, reduced_spec)


def _keepdim(result: Tensor, spec: ShardSpec, dims: Sequence[int]) -> bool:
    return result.ndim == len(spec.shape) and len(dims) > 0


def _check_all_stages(name: str, spec: ShardSpec) -> None:
    if _is_of_stage(spec):
        raise UsageError(
            f"{name}() of '{spec.name}' is not supported under pp",
            why="a rank holds only the parameters of its own stages, so a loop over parameters would miss those of "
            "other stages",
            hint="pm.summed(fn) to add fn(parameter) over all stages; pm.grad_norm(), pm.full_grads() or "
            "pm.full_state_dict(); p.to_local() for this rank alone",
        )


_SEPARABLE: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Optimizers that treat each tensor separately, so reductions of a stage's parameters need no other stage."""


def allow_reductions_in(optimizer: torch.optim.Optimizer) -> None:
    """Allow an optimizer that treats each parameter separately to reduce over a parameter under `pp`."""
    _SEPARABLE.add(optimizer)


def _combines_stages() -> bool:
    """Return True if a calling function may reduce over a parameter that only one pipeline stage stores.

    `pm.summed` may, because it adds the results of all stages. Optimizers may if they treat each tensor separately.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if frame.f_code.co_name == "summed" or (
            isinstance(caller, torch.optim.Optimizer) and caller in _SEPARABLE
        ):  # fmt: skip
            return True
        frame = frame.f_back
    return False


def _permuted(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    spec = args[0].spec
    result = func(*args, **kwargs)
    dims = permutation(name, args, kwargs, len(spec.shape))
    return as_sharded(result, spec.permuted(dims), is_gathered=args[0].is_gathered)


def _viewed(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a view of an unsharded tensor, or a read-only view of a gathered copy of a sharded tensor."""
    spec = _first(args, kwargs).spec
    value = args[0] if args else None
    same_shape = name in ("view", "reshape", "view_as", "reshape_as", "expand_as", "expand") and (
        isinstance(value, ShardedTensor) and _wanted_shape(value, args[1:], kwargs) == spec.shape
    )
    if same_shape:
        return as_sharded(value.view_as(value), spec, is_gathered=value.is_gathered)
    is_copy = bool(spec.shards) or getattr(value, "is_gathered", False)
    result = func(*_map(_full, list(args)), **_map(_full, kwargs))

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return as_sharded(leaf, replace(spec, shape=tuple(leaf.shape), shards=()), is_gathered=is_copy)

    return _map(wrap, result)


def _wanted_shape(value: ShardedTensor, sizes: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    values = [size for size in (*sizes, *kwargs.values())]
    if len(values) == 1 and isinstance(values[0], Tensor):
        return values[0].spec.shape if isinstance(values[0], ShardedTensor) else tuple(values[0].shape)
    flat = _leaves(values)
    return tuple(flat) if all(isinstance(size, int) for size in flat) else None


def _gathered(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function on gathered tensors. If it writes to one in place, update this rank's shard."""
    out = kwargs.get("out")
    target = out if isinstance(out, Tensor) else args[0] if args and _writes(name, kwargs) else None
    if not isinstance(target, ShardedTensor):
        target = kwargs.get("tensor") if target is None and _writes(name, kwargs) else None
    if not isinstance(target, ShardedTensor):
        spec = _first(args, kwargs).spec
        result = func(*_map(_full, list(args)), **_map(_full, kwargs))
        return _from_stage(result, name, spec) if _is_of_stage(spec) else result
    _check_writable(target, name)
    if not target.spec.shards:
        result = func(*_map(_full, list(args)), **_map(_full, kwargs))
        return target if isinstance(result, Tensor) else result
    with torch.no_grad():
        full = _full(target).contiguous()

        def replaced(leaf: Any) -> Any:
            return full if leaf is target else _full(leaf)

        result = func(*_map(replaced, list(args)), **_map(replaced, kwargs))
        target.copy_(target.spec.take(full))
    return target if isinstance(result, Tensor) else result


def _is_of_stage(spec: ShardSpec) -> bool:
    """Return True if a reduction over this parameter must be rejected, because other stages lack it."""
    return "pp" in spec.process.groups and not _combines_stages()


def _from_stage(result: Any, name: str, spec: ShardSpec) -> Any:
    """Mark tensors computed from a parameter that other stages lack, so that reductions of them raise."""
    if name in TO_PYTHON and spec.is_derived:
        _check_all_stages(name, spec)

    def named(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return as_sharded(leaf, replace(spec, shape=tuple(leaf.shape), shards=(), is_derived=True))

    return _map(named, result)


def _warn_of_random_numbers(spec: ShardSpec) -> None:
    warnings.warn(
        f"random numbers for '{spec.name}' differ under pp from those of one process: the parameters of other stages "
        "draw no numbers on this rank. For independent numbers give each stage its own seed: "
        "torch.manual_seed(seed + torch.distributed.get_rank())",
        stacklevel=4,
    )


def _like(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Draw a random tensor of the full shape (`randn_like`), and return this rank's shard."""
    spec = args[0].spec
    like = args[0].as_subclass(Tensor).detach().new_empty(spec.shape)
    drawn = func(like, *args[1:], **kwargs)
    return as_sharded(spec.take(drawn).contiguous(), spec).requires_grad_(drawn.requires_grad)


def _foreach(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a foreach function, which takes lists of tensors, on sharded tensors."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    target: Sequence[Any] = lists[0]
    if name in ("_foreach_norm", "_foreach_powsum", "_foreach_max"):
        single: Any = {"_foreach_norm": torch.linalg.vector_norm, "_foreach_max": torch.max}.get(name)
        rest = args[1:]
        return tuple(
            _call(single, single.__name__, (t, *rest), kwargs) if isinstance(t, ShardedTensor) else single(t, *rest)
            for t in target
        )

    def row(index: int) -> Any:
        return [arg[index] if isinstance(arg, (list, tuple)) and len(arg) == len(target) else arg for arg in args]

    specs: list[ShardSpec | None] = []
    for index, leaf in enumerate(target):
        sharded = [arg for arg in row(index) if isinstance(arg, ShardedTensor)]
        if sharded and not isinstance(leaf, ShardedTensor) and name.endswith("_"):
            raise UsageError(
                f"{name} writes '{sharded[0].spec.name}' into a plain tensor", why="this rank holds only a shard of it",
                hint="torch.zeros_like(p) gives a tensor that is sharded like p",
            )  # fmt: skip
        specs.append(leaf.spec if isinstance(leaf, ShardedTensor) else sharded[0].spec if sharded else None)

    def conform(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)) and len(arg) == len(target):
            return [
                _onto(leaf, spec) if isinstance(leaf, Tensor) and spec is not None and leaf is not first else leaf
                for leaf, spec, first in zip(arg, specs, target, strict=True)
            ]
        return arg

    result = func(*(conform(arg) for arg in args), **{key: conform(value) for key, value in kwargs.items()})
    if result is None or name.endswith("_"):
        return result
    return tuple(leaf if spec is None else as_sharded(leaf, spec) for leaf, spec in zip(result, specs, strict=True))


def _of_inputs(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `torch.autograd.grad`. Return gradients that are sharded like the tensors in `inputs`."""
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    listed = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if "inputs" in kwargs:
        kwargs = {**kwargs, "inputs": listed}
    else:
        args = (args[0], listed, *args[2:])
    grads = func(*args, **kwargs)
    return tuple(
        as_sharded(grad, one.spec) if isinstance(one, ShardedTensor) and grad is not None else grad
        for one, grad in zip(listed, grads, strict=True)
    )


_HANDLERS: dict[FunctionKind, Handler] = {
    FunctionKind.LOCAL: _local,
    FunctionKind.ATTRIBUTE: _attribute,
    FunctionKind.GET_GRAD: _get_grad,
    FunctionKind.SET: _set,
    FunctionKind.SAME: _same,
    FunctionKind.CREATED: _created,
    FunctionKind.ELEMENTWISE: _elementwise,
    FunctionKind.REDUCTION: _reduction,
    FunctionKind.PERMUTED: _permuted,
    FunctionKind.VIEW: _viewed,
    FunctionKind.GATHERED: _gathered,
    FunctionKind.LIKE: _like,
    FunctionKind.FOREACH: _foreach,
    FunctionKind.OF_INPUTS: _of_inputs,
}

register_foreach([ShardedTensor, ShardedParameter])
