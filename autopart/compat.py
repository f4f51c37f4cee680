"""The one file that touches private parts of torch. Each name says what it stands for."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp import autocast_mode
from torch.distributed import pipelining
from torch.distributed.distributed_c10d import _resolve_process_group, _set_pg_timeout
from torch.distributed.pipelining import _backward as pipelining_backward
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

AUTOCAST = autocast_mode._enter_autocast, autocast_mode._exit_autocast
BatchNorm = _BatchNorm  # what BatchNorm1d, BatchNorm2d, ..., SyncBatchNorm have in common
InstanceNorm = _InstanceNorm
TreeSpec = pytree.TreeSpec
tree_flatten = pytree.tree_flatten
tree_unflatten = pytree.tree_unflatten


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of this name, as functional collectives name it."""
    return _resolve_process_group(cast(Any, name))  # a plain str in torch 2.11, a type of its own later


def is_operator(target: Any) -> bool:
    """Whether a node's target is an operator of torch's dispatcher."""
    return isinstance(target, torch._ops.OpOverload)


def is_composite(target: Any) -> bool:
    """Whether an operator, or a plain function, is written in terms of others."""
    return not isinstance(target, torch._ops.OpOverload) or target._can_decompose()


def is_higher_order(target: Any) -> bool:
    """Whether a node's target is a higher-order operator, which holds a region of the graph."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def keeping_draws() -> Any:
    """A context in which tracing keeps calls that draw random numbers although nothing reads them: the model itself
    makes them, and they move its generator on."""
    return inductor_config.patch(fallback_random=True)


@functools.cache
def _decompositions() -> Mapping[Any, Callable[..., Any]]:
    return cast(Mapping[Any, Callable[..., Any]], torch.export.default_decompositions())


def decomposition(target: Any) -> Callable[..., Any] | None:
    """Torch's own way of computing an operator by smaller ones, or None where it has none."""
    if target in _decompositions():
        return _decompositions()[target]
    is_composite = isinstance(target, torch._ops.OpOverload) and target._can_decompose()
    return cast(Callable[..., Any], target.decompose) if is_composite else None


def trace_function(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The operators that a function of fake tensors calls, every composite one as its parts."""
    with torch.no_grad():
        return make_fx(function)(*tensors)


def outside_of_tracing() -> AbstractContextManager[Any]:
    """A context in which operators run as they do outside of a trace, on real tensors."""
    return cast(AbstractContextManager[Any], _disable_current_modes())


def trace_apart(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The operators that a function calls on tensors like these, outside of any trace that is being made."""
    with outside_of_tracing(), FakeTensorMode():
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]
        return make_fx(function)(*fakes)


class _Redirected:
    """Holds the code that `torch.autograd.Function.apply` has inside `redirected_functions`."""

    to: Callable[..., Any]
    """What is called with torch's own `apply`, the class, and the call's arguments."""

    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        from autopart.compat import _Redirected

        __class__  # type: ignore[name-defined]  # noqa: B018  # the cell that torch's own code has for super()
        return _Redirected.to(_Redirected.own, cls, args, kwargs)

    own: Callable[..., Any]


@contextmanager
def redirected_functions(to: Callable[..., Any]) -> Iterator[None]:
    """Inside, `F.apply(*args, **kwargs)` of every autograd.Function is `to(apply, F, args, kwargs)`.

    The code of `apply` is exchanged, so that this holds of `f = F.apply` as well, which was bound before.
    """
    function = vars(torch.autograd.Function)["apply"].__func__
    code = function.__code__
    if code is _Redirected.apply.__code__:  # a trace inside another
        yield
        return
    _Redirected.own = staticmethod(types.FunctionType(code, function.__globals__, "apply", None, function.__closure__))
    _Redirected.to = staticmethod(to)
    function.__code__ = _Redirected.apply.__code__
    try:
        yield
    finally:
        function.__code__ = code


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group moves tensors of this device with gloo, which on a GPU can only all-reduce and broadcast."""
    return group._get_backend(device).name() == "gloo"


def runs_on_host(group: dist.ProcessGroup) -> bool:
    """Whether the group has a backend for tensors in the host's memory."""
    return torch.device("cpu") in group._device_types


def fake_mode() -> AbstractContextManager[Any]:
    """A context in which tensors have shapes, strides and memory of their own, but no data."""
    return cast(AbstractContextManager[Any], FakeTensorMode())


def pipeline_order(schedule: Any, num_stages: int, num_ranks: int, microbatches: int) -> dict[int, list[Any]]:
    """{rank: what torch's schedule runs there, in order}, by its own code, without processes.

    The part of its construction that adds sends and receives is left out: it takes minutes for large pipelines.
    """
    per_rank = num_stages // num_ranks
    stages: list[Any] = [
        types.SimpleNamespace(
            stage_index=index, num_stages=num_stages, group_size=num_ranks, group_rank=0, submod=None,
            is_first=index == 0, is_last=index == num_stages - 1,
        ) for index in range(per_rank)
    ]  # fmt: skip
    if issubclass(schedule, pipelining.schedules.PipelineScheduleSingle):
        return cast(dict[int, list[Any]], schedule(stages[0], microbatches).pipeline_order)
    quick: Any = type(
        schedule.__name__, (schedule,), {"_prepare_schedule_with_comms": lambda *arguments, **options: None}
    )
    return quick(stages, microbatches).pipeline_order


class PipelineStage(pipelining.PipelineStage):
    """A pipeline stage that does not greet itself: in torch 2.11 neighbouring stages on one rank (zbv, dualpipev) do,
    which gloo refuses."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


@functools.cache
def split_backward_counts_twice() -> bool:
    """Whether pipelining's split backward (zero bubble) is wrong for a parameter that one stage reads twice.

    Torch 2.11 counts a gradient twice that passes one use on its way to the other; later versions do not. Tried here
    rather than looked up by version: z = (x + w) + w has gradient 2 by w.
    """
    x, w = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    with torch.enable_grad():
        z = (x.clone() + w) + w
        _, groups = pipelining_backward.stage_backward_input([z], None, [x], iter([w]))
        pipelining_backward.stage_backward_weight(iter([w]), groups)
    return w.grad is None or w.grad.item() != 2.0


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """How long a rank of the group waits for the others; the device mesh's own groups have no argument for it."""
    _set_pg_timeout(timeout, group)


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `fn` to every leaf."""
    return pytree.tree_map(fn, tree)


def leaves_with_names(tree: Any) -> list[tuple[str, object]]:
    """The leaves of a dict of arguments with readable names: `mask`, `batch.ids`, `states.0`."""
    named = []
    for path, leaf in pytree.tree_leaves_with_path(tree):
        keys = [str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path]
        named.append((".".join(keys), leaf))
    return named
