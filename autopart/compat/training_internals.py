"""Private APIs of torch for training loops: end of backward, gradient norms, loss scaling."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

HALVES = (torch.float16, torch.bfloat16)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run a function at the end of the current backward, as DistributedDataParallel does."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Return True if autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def backward_traceback() -> list[str]:
    """Return the Python stack of the forward call whose backward is running; [] if no backward is running.

    Only torch's anomaly detection records this stack.
    """
    node = torch._C._current_autograd_node()
    metadata: Any = {} if node is None else node.metadata  # torch declares it as a method
    return list(metadata.get("traceback_", []))


def compiled_from(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the function from which `torch.compile` made a function; None for other functions."""
    original: Callable[..., Any] | None = getattr(function, "_torchdynamo_orig_callable", None)
    return original


def current_transform() -> str:
    """Return the name of the innermost running `torch.func` transform ("grad", "vmap", ...), or ""."""
    level: Any = torch._C._functorch.peek_interpreter_stack()
    if level is not None:
        return str(level.key().name).lower()
    return "forward-mode AD" if forward_ad._current_level >= 0 else ""


class _Norms:
    """Torch's `clip_grad_norm_` and `get_total_norm`, and the functions that replace them."""

    clip: Callable[..., Any]
    total: Callable[..., Any]
    own_clip: Callable[..., Any] | None = None
    own_total: Callable[..., Any]

    def clip_code(*args: Any, **kwargs: Any) -> Any:
        from autopart.compat.training_internals import _Norms

        return _Norms.clip(_Norms.own_clip, *args, **kwargs)

    def total_code(*args: Any, **kwargs: Any) -> Any:
        from autopart.compat.training_internals import _Norms

        return _Norms.total(_Norms.own_total, *args, **kwargs)


def redirect_norms(clip: Callable[..., Any], total: Callable[..., Any]) -> None:
    """Replace `torch.nn.utils.clip_grad_norm_` by `clip(original, ...)`, and `get_total_norm` by `total`.

    Both replacements run under `torch.no_grad()`. The code objects of torch's functions are replaced. This also
    redirects names that other modules have already imported.
    """
    if _Norms.own_clip is not None:
        return
    _Norms.clip, _Norms.total = staticmethod(clip), staticmethod(total)
    total_function, clip_function = (
        f.__wrapped__ for f in (torch.nn.utils.get_total_norm, torch.nn.utils.clip_grad_norm_)
    )
    _Norms.own_total = staticmethod(_exchanged(total_function, _Norms.total_code, {}))
    own_total = {total_function.__name__: _Norms.own_total}
    _Norms.own_clip = staticmethod(_exchanged(clip_function, _Norms.clip_code, own_total))


def _exchanged(function: Any, code: Callable[..., Any], names: Mapping[str, Any]) -> Callable[..., Any]:
    """Replace the code object of `function` by that of `code`. Return a function with the original code.

    Args:
        names: additional globals for the original code.
    """
    scope = {**function.__globals__, **names}
    original = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    function.__signature__ = inspect.signature(function)
    function.__code__ = code.__code__
    return original


def redirect_unscale(to: Callable[..., Any]) -> None:
    """Replace the unscaling of every `torch.amp.GradScaler` by `to(original, scaler, optimizer, ...)`.

    Unscaling divides an optimizer's gradients by the scale and looks for infinities. `original` and `to` return
    {device: tensor}: 1.0 if a gradient on the device has an infinity, else 0.0.
    """
    scalers: Any = torch.amp.GradScaler
    original = scalers._unscale_grads_
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def unscale(self: Any, *args: Any) -> Any:
        return to(original, self, *args)

    scalers._unscale_grads_ = unscale


def norms_of_each(tensors: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Return the norm of every tensor, as one vector per device and dtype, in at least float32."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return [
        torch.stack(torch._foreach_norm(same, norm_type, dtype=torch.float32 if dtype in HALVES else None))
        for (_, dtype), same in kinds.items()
    ]


def before_wrappers(check: Callable[[Any, str], None]) -> None:
    """Call `check` before DDP, DataParallel, FSDP, `fully_shard` or `torch.compile` wraps a module.

    Args:
        check: called with the module (or list of modules) and the wrapper's name. It may raise an error.
    """
    for kind in (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel):
        _check_first(kind, check)
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # `torch.export` has imported it
    if dynamo is not None:
        _check_first(dynamo.OptimizedModule, check)
    # Its import takes long, so it is patched only if the user has imported it.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and _FullyShard.own is None:
        _check_first(fsdp.FullyShardedDataParallel, check)
        function = inspect.unwrap(fsdp.fully_shard)
        _FullyShard.check = staticmethod(check)
        _FullyShard.own = staticmethod(_exchanged(function, _FullyShard.code, {}))


def _check_first(kind: Any, check: Callable[[Any, str], None]) -> None:
    original = kind.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def made(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        check(module, kind.__name__)
        original(self, module, *args, **kwargs)

    kind.__init__ = made


class _FullyShard:
    """Torch's `fully_shard`, which `before_wrappers` replaced, and the check that runs before it."""

    own: Callable[..., Any] | None = None
    check: Callable[[Any, str], None]

    def code(*args: Any, **kwargs: Any) -> Any:
        from autopart.compat.training_internals import _FullyShard

        _FullyShard.check(kwargs["module"] if "module" in kwargs else args[0], "fully_shard()")
        assert _FullyShard.own is not None
        return _FullyShard.own(*args, **kwargs)
