"""Private APIs of torch that several packages use."""

from __future__ import annotations

import ctypes
import functools
import operator
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp import autocast_mode
from torch.distributed.distributed_c10d import _get_default_store, _resolve_process_group, _set_pg_timeout
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from autopart.common.scoped import attributes

AUTOCAST = autocast_mode._enter_autocast, autocast_mode._exit_autocast
GRAD_MODE = torch._C._set_grad_enabled
BatchNorm = _BatchNorm  # common base class of BatchNorm1d, BatchNorm2d, ..., SyncBatchNorm
InstanceNorm = _InstanceNorm
TreeSpec = pytree.TreeSpec
tree_flatten = pytree.tree_flatten
tree_leaves = pytree.tree_leaves
tree_map = pytree.tree_map
tree_unflatten = pytree.tree_unflatten


def register_mapping(kind: type[dict[Any, Any]]) -> None:
    """Register a subclass of dict as a pytree node, whose children are its values."""

    def built(values: Iterable[Any], keys: Any) -> Any:
        new = kind.__new__(kind)
        for key, value in zip(keys, values, strict=True):
            new[key] = value
        return new

    pytree.register_pytree_node(
        kind, lambda mapping: (list(mapping.values()), list(mapping)), built,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=lambda mapping: ([(pytree.MappingKey(k), v) for k, v in mapping.items()], list(mapping)),
    )  # fmt: skip


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the process group of this name. Functional collectives refer to groups by name."""
    return _resolve_process_group(cast(Any, name))  # a plain str in torch 2.11, a separate type in later versions


def generate_code(module: fx.GraphModule) -> None:
    """Generate the code of a graph module now, if its class would do so only at the first call."""
    if isinstance(module, LazyGraphModule):
        module.real_recompile()


def compiled_apart(function: Callable[..., Any], tag: str, dynamic: bool | None) -> Callable[..., Any]:
    """Compile a function with inductor, with `tag` in the keys of inductor's on-disk cache.

    Functions share an entry of this cache only if their tags are equal.

    Args:
        dynamic: argument `dynamic` of `torch.compile`.
    """
    inductor = torch._dynamo.lookup_backend("inductor")
    config = cast(Any, torch.compiler.config)

    def backend(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        before = config.cache_key_tag
        with config.patch(cache_key_tag=f"{before}; {tag}" if before else tag):
            return inductor(graph, inputs)

    return torch.compile(function, backend=backend, dynamic=dynamic)


def is_operator(target: Any) -> bool:
    """Return True if a node's target is an operator of torch's dispatcher."""
    return isinstance(target, torch._ops.OpOverload)


def targets_in(graph: fx.Graph) -> list[Any]:
    """Return the distinct targets of all calls in a graph.

    Targets of calls that a pass has erased can be included.
    """
    return [target for op, target in graph._find_nodes_lookup_table.table if op == "call_function"]


def is_composite(target: Any) -> bool:
    """Return True if a node's target is a Python function, or an operator that decomposes into others."""
    return not isinstance(target, torch._ops.OpOverload) or target._can_decompose()


def is_higher_order(target: Any) -> bool:
    """Return True if a node's target is a higher-order operator, such as a `no_grad` region."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def keeping_draws() -> Any:
    """Keep random operators in a trace even if their results are unused, inside a `with` block.

    Without these operators, the program would draw fewer random numbers than the model.
    """
    import torch._inductor.config as inductor_config  # imported late, because it imports all of torch.compile

    return inductor_config.patch(fallback_random=True)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's values. For a sparse tensor, the bytes of its entries and indices."""
    if not tensor.is_sparse:
        return tensor.nbytes
    return tensor._indices().nbytes + tensor._values().nbytes


@functools.cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return {operator: torch's decomposition of it}."""
    return cast(Mapping[Any, Callable[..., Any]], torch.export.default_decompositions())


def decomposition(target: Any) -> Callable[..., Any] | None:
    """Return torch's decomposition of an operator; None if it has none."""
    if target in decompositions():
        return decompositions()[target]
    is_composite = isinstance(target, torch._ops.OpOverload) and target._can_decompose()
    return cast(Callable[..., Any], target.decompose) if is_composite else None


def trace_function(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Trace a function of fake tensors into a graph without composite operators."""
    with torch.no_grad():
        return make_fx(function)(*tensors)


@contextmanager
def outside_of_tracing() -> Iterator[None]:
    """Run operators on real tensors during a trace, inside a `with` block.

    Torch's Python dispatcher is disabled too: with it, padding returns a tensor that requires grad even under
    `no_grad`.
    """
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch._C._DisablePythonDispatcher():
        yield


def trace_apart(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Trace a function into a separate graph, on fake tensors with the metadata of `tensors`."""
    with outside_of_tracing(), FakeTensorMode():
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]
        return make_fx(function)(*fakes)


class Tracing:
    """Access to the trace that torch is recording: the graph, and each tensor's node in it."""

    def __init__(self, tracer: Any):
        self.tracer = tracer

    @classmethod
    def current(cls) -> Tracing | None:
        """Return the innermost running trace; None if no trace is running or it records no module paths."""
        made_by = proxy_tensor._CURRENT_MAKE_FX_TRACER
        tracer = made_by.fx_tracer if made_by is not None else None
        return cls(tracer) if isinstance(tracer, proxy_tensor._ModuleStackTracer) else None

    @property
    def modules(self) -> list[tuple[str, Any]]:
        """(path, class) of every module whose forward is running, outermost first."""
        return list(self.tracer.module_stack.values())

    @property
    def last(self) -> fx.Node:
        return cast(fx.Node, self.tracer.graph._root.prev)

    def nodes_after(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes of the graph after this node, in graph order."""
        nodes = []
        while node.next is not self.tracer.graph._root:
            node = node.next
            nodes.append(node)
        return nodes

    def node_of(self, tensor: torch.Tensor) -> fx.Node | None:
        slot = proxy_tensor.get_proxy_slot(tensor, self.tracer, None)
        return cast(fx.Node, slot.proxy.node) if slot is not None else None

    def add(self, target: Any, nodes: Sequence[fx.Node], tensors: Sequence[torch.Tensor]) -> fx.Node:
        """Add a call `target(nodes)` to the graph, and make `tensors` its results. Return the call's node."""
        name = operator_name(target)
        create = self.tracer.create_node
        with torch._C.DisableTorchFunction():
            whole = create("call_function", target, (list(nodes),), {}, name)
            for i, tensor in enumerate(tensors):
                part = fx.Proxy(create("call_function", operator.getitem, (whole, i), {}, f"{name}_part"), self.tracer)
                proxy_tensor.track_tensor_tree(tensor, part, constant=None, tracer=self.tracer)
        whole.meta["val"] = [user.meta["val"] for user in whole.users]
        return cast(fx.Node, whole)

    def tracked(self) -> list[torch.Tensor]:
        """Return all live tensors that have a node in the trace."""
        return list(self.tracer.tensor_tracker.keys())

    def adopt(self, tensor: torch.Tensor, target: Any, base: torch.Tensor, *options: Any) -> None:
        """Add the call `target(base, *options)` to the graph, with `tensor` as its result.

        `tensor` must have no node in the trace.
        """
        with torch._C.DisableTorchFunction():
            args, name = (self.node_of(base), *options), operator_name(target)
            node = self.tracer.create_node("call_function", target, args, {}, name)
            proxy_tensor.track_tensor_tree(tensor, fx.Proxy(node, self.tracer), constant=None, tracer=self.tracer)

    def put_in_place(self, tensor: torch.Tensor, replacement: torch.Tensor, before: dict[fx.Node, fx.Node]) -> bool:
        """Replace all uses of `tensor` in the trace by `replacement`, including uses that were traced earlier.

        `replacement` is the result of a call on `tensor`. The call moves to directly after its last input. Returns
        False if `tensor` has a use before that position.

        Args:
            before: {replacement: replaced node} of earlier calls of this method. This call adds an entry.
        """
        old, new = self.node_of(tensor), self.node_of(replacement)
        assert old is not None and new is not None and old in new.all_input_nodes
        base = old
        while base in before:  # later code reads the first replacement
            base = before[base]
        new.replace_input_with(old, base)
        order = {node: i for i, node in enumerate(self.tracer.graph.nodes)}
        readers = [user for user in base.users if user is not new]
        last = max(new.all_input_nodes, key=order.__getitem__)
        if any(order[user] < order[last] for user in readers):
            return False
        last.append(new)
        base.replace_all_uses_with(new, lambda user: user is not new)
        before[new] = base
        if base is old:
            with torch._C.DisableTorchFunction():
                proxy_tensor.track_tensor_tree(tensor, fx.Proxy(new, self.tracer), constant=None, tracer=self.tracer)
        return True

    def counts(self) -> Any:
        """Return which modules are running in the trace, and how often each module was called."""
        tracer, scope = self.tracer, self.tracer.scope
        return dict(tracer.num_calls), dict(tracer.module_stack), scope.module_path, scope.module_type

    def restore(self, counts: Any) -> None:
        """Reset the record of running and called modules to an earlier result of `counts`."""
        tracer = self.tracer
        for held, was in zip((tracer.num_calls, tracer.module_stack), counts[:2], strict=True):
            held.clear()
            held.update(was)
        tracer.scope.module_path, tracer.scope.module_type = counts[2:]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Run operators in a `with` block without recording them in the trace."""
        with torch._C.DisableTorchFunction(), proxy_tensor.disable_proxy_modes_tracing():
            yield


def without_torch_functions() -> AbstractContextManager[Any]:
    """Disable `__torch_function__` of modes and of tensor subclasses, inside a `with` block."""
    return cast(AbstractContextManager[Any], torch._C.DisableTorchFunction())


def intercepted(to: Callable[..., Any]) -> AbstractContextManager[None]:
    """Call `to(run, tracer, function, args, kwargs)` for every step of a trace, inside a `with` block.

    A step is an operator, or the entry or exit of a grad-mode or autocast region. `run()` executes the step as torch
    would.
    """
    mode, regions = proxy_tensor.ProxyTorchDispatchMode, proxy_tensor.PreDispatchTorchFunctionMode
    dispatch, enter = mode.__torch_dispatch__, regions.__torch_function__
    kept = {GRAD_MODE, *AUTOCAST}

    def of_operator(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return dispatch(self, func, types, args, kwargs)
        return to(lambda: dispatch(self, func, types, args, kwargs), self.tracer, func, args, kwargs or {})

    def of_region(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in kept:
            return enter(self, func, types, args, kwargs)
        return to(lambda: enter(self, func, types, args, kwargs), self.tracer, func, args, kwargs or {})

    return attributes({(mode, "__torch_dispatch__"): of_operator, (regions, "__torch_function__"): of_region})


def argument_of(func: Any, args: tuple, kwargs: Mapping[str, Any], name: str) -> Any:
    """Return an operator call's argument by its name in the schema; None if it is not passed."""
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)).get(name, kwargs.get(name))


def decomposed_calls(form_of: Callable[..., Any]) -> AbstractContextManager[None]:
    """Record operators of a trace as other operators, inside a `with` block.

    Args:
        form_of: function of (operator, args, kwargs). It returns a function with the operator's arguments, whose
            operators are recorded instead. It returns None to record the operator itself.
    """
    original = proxy_tensor.maybe_handle_decomp

    def decompose(mode: Any, func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        form = form_of(func, args, kwargs)
        if form is None:
            return original(mode, func, args, cast(Any, kwargs))
        with mode:
            return form(*args, **kwargs)

    return attributes({(proxy_tensor, "maybe_handle_decomp"): decompose})


class _Redirected:
    """Replacement for the code object of `torch.autograd.Function.apply` inside `redirected_functions`."""

    to: Callable[..., Any]
    """Replacement of `apply`: receives torch's own `apply`, the class, and the call's arguments."""

    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        from autopart.compat.torch_internals import _Redirected

        __class__  # type: ignore[name-defined]  # noqa: B018  # the cell that torch's own code has for super()
        return _Redirected.to(_Redirected.own, cls, args, kwargs)

    own: Callable[..., Any]


@contextmanager
def redirected_functions(to: Callable[..., Any]) -> Iterator[None]:
    """Replace `F.apply(*args, **kwargs)` of every autograd.Function by `to(apply, F, args, kwargs)`.

    The code object of `apply` is replaced. This also redirects references that exist already, such as `f = F.apply`.
    """
    function = vars(torch.autograd.Function)["apply"].__func__
    code = function.__code__
    if code is _Redirected.apply.__code__:  # a trace that runs inside another trace
        yield
        return
    _Redirected.own = staticmethod(types.FunctionType(code, function.__globals__, "apply", None, function.__closure__))
    _Redirected.to = staticmethod(to)
    function.__code__ = _Redirected.apply.__code__
    try:
        yield
    finally:
        function.__code__ = code
        del _Redirected.to  # drop the reference: it may keep a model alive


def exporting() -> AbstractContextManager[None]:
    """Make `torch.compiler.is_exporting()` return True in a `with` block, as in `torch.export`."""
    return attributes({(torch.compiler, flag): True for flag in ("_is_exporting_flag", "_is_compiling_flag")})


def other_checkpoints(around: Callable[[Any], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
    """Make non-reentrant `torch.utils.checkpoint(function)` a plain call, inside a `with` block.

    The plain call runs inside the context manager `around(function)`. Nothing is recomputed, and the random state is
    neither saved nor restored.
    """

    def generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with around(function):
            yield

    return attributes({(torch_checkpoint, "_checkpoint_without_reentrant_generator"): generator})


def gather_collective() -> Callable[..., Any]:
    """Return the function that all-gathers into one tensor. Torch 2.13 renamed it."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def scatter_collective() -> Callable[..., Any]:
    """Return the function that reduce-scatters into one tensor. Torch 2.13 renamed it."""
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if a process group uses gloo for this device.

    Callers need this because on a GPU, gloo supports only all-reduce and broadcast.
    """
    return group._get_backend(device).name() == "gloo"


def runs_on_host(group: dist.ProcessGroup) -> bool:
    """Return True if the group has a backend for CPU tensors."""
    return runs_on(group, torch.device("cpu"))


def runs_on(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if the group has a backend for tensors on this kind of device."""
    return torch.device(device.type) in group._device_types


def has_values(tensor: torch.Tensor) -> bool:
    """Return True for a tensor with data: not fake, not meta, and not lazy and uninitialized."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor) or is_lazy(tensor))


def fake_mode() -> AbstractContextManager[Any]:
    return cast(AbstractContextManager[Any], FakeTensorMode())


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of an existing process group. DeviceMesh cannot set it when it creates the group."""
    _set_pg_timeout(timeout, group)


def default_store() -> dist.Store:
    """Return the store of torch.distributed's default process group."""
    return _get_default_store()


def clone_of(store: dist.Store, connect_s: float) -> dist.Store:
    """Return a second client of a store, with a separate connection, for use in another thread.

    Raises RuntimeError if it cannot connect in `connect_s` seconds per attempt. Torch makes two attempts.
    """
    untyped: Any = store
    timeout = untyped.timeout
    store.set_timeout(timedelta(seconds=connect_s))
    try:
        clone: dist.Store = untyped.clone()
    finally:
        store.set_timeout(timeout)
    clone.set_timeout(timeout)
    return clone


def keep_for_ever(*things: Any) -> None:
    """Keep these objects until the process ends.

    Used for process groups, because destroying a group waits for its collectives.
    """
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def register_node(kind: type, children: Callable[[Any], list[Any]]) -> None:
    """Register a class as a pytree node.

    Unflattening passes the children to the class as positional arguments.
    """
    pytree.register_pytree_node(
        kind, lambda node: (children(node), None), lambda values, _: kind(*values),
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=lambda node: ([(pytree.SequenceKey(i), c) for i, c in enumerate(children(node))], None),
    )  # fmt: skip


def leaves_with_names(arguments: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return (name, value) for each leaf of a call's arguments, such as `mask`, `batch.ids` or `states.0`."""
    if _is_flat(arguments):
        return list(arguments.items())
    named = []
    for path, leaf in pytree.tree_leaves_with_path(dict(arguments)):
        keys = [str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path]
        named.append((".".join(keys), leaf))
    return named


def structure_of(arguments: Mapping[str, Any]) -> Hashable:
    """Return the tree structure of a call's arguments."""
    return tuple(arguments) if _is_flat(arguments) else str(tree_flatten(dict(arguments))[1])


def _is_flat(arguments: Mapping[str, Any]) -> bool:
    """Return True if no argument is a container, as in most calls. Torch's slow pytree is then not needed."""
    return all(isinstance(value, _LEAVES) for value in arguments.values())


_LEAVES = (torch.Tensor, type(None), bool, int, float, str)


WITHOUT_TORCH_FUNCTION = torch._C._disabled_torch_function_impl
"""Value of `__torch_function__` in a Tensor subclass whose `__torch_dispatch__` alone decides the results' classes."""


def empty_wrapper(kind: Any, like: torch.Tensor) -> Any:
    """Return a tensor of class `kind` without storage, with the metadata of `like`."""
    return torch.Tensor._make_wrapper_subclass(
        kind, like.size(), strides=like.stride(), dtype=like.dtype, layout=like.layout, device=like.device
    )


def operator_name(func: Any) -> str:
    """Return the name of an operator without its namespace and overload, such as `add`."""
    return cast(str, func._schema.name.rpartition("::")[2])


def product_of_float8(first: torch.Tensor, second: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply float8 matrices of shapes [m, k] and [k, n]. The second must be column-major.

    `scale`: scalar tensor, the scale of both matrices. Returns bfloat16 of shape [m, n].
    """
    return torch._scaled_mm(first, second, scale, scale, out_dtype=torch.bfloat16)


def softmax_backward_(grad: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute the input gradient of a softmax over the last dim, in place.

    `grad`: gradient of the softmax's output, which is overwritten. `weights`: the output.
    """
    return cast(torch.Tensor, torch.ops.aten._softmax_backward_data.out(grad, weights, -1, grad.dtype, grad_input=grad))


@contextmanager
def recording_gradients() -> Iterator[None]:
    """Enable autograd in a `with` block inside a custom operator. By default torch disables it there."""
    keys = torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView
    before = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in keys]
    for key in keys:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for key, was_excluded in zip(keys, before, strict=True):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, was_excluded)
