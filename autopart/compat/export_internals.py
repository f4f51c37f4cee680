"""Private APIs for torch.export: nested traces, `torch.cond`, `torch.func`, lazy modules, libraries."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from traceback import FrameSummary, StackSummary
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx
from torch import overrides as torch_overrides
from torch._functorch import apis as functorch_apis
from torch._functorch import eager_transforms as functorch
from torch._guards import detect_fake_mode
from torch._higher_order_ops import utils as higher_order
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._python_dispatch import _disable_current_modes

from autopart.common.scoped import attributes, variable
from autopart.compat.torch_internals import keep_for_ever


def trace_inside(
    function: Callable[..., Any], tensors: Sequence[torch.Tensor], decompositions: Mapping[Any, Callable[..., Any]]
) -> fx.GraphModule:
    """Trace a function into a separate graph while another trace is running.

    Args:
        tensors: the function's arguments, from the outer trace. Other tensors of the outer trace that the function
            uses become attributes of the graph's module.
        decompositions: {operator: function whose operators are recorded in its place}.
    """
    popped = [torch_overrides._pop_mode() for _ in torch_overrides._get_current_function_mode_stack()]
    try:
        with _disable_current_modes(), detect_fake_mode(tensors) or nullcontext():
            traced = make_fx(function, dict(decompositions))(*tensors)
    finally:
        for mode in reversed(popped):
            torch_overrides._push_mode(mode)
    traced.graph.eliminate_dead_code()
    return traced


def quiet_shapes() -> AbstractContextManager[None]:
    """Silence torch's log messages about operators whose shape inference fails.

    The errors are still raised.
    """
    return attributes({(logging.getLogger("torch._subclasses.fake_tensor"), "disabled"): True})


def compiled_when_called() -> AbstractContextManager[None]:
    """Generate the Python code of graphs when they are first called, instead of at every change.

    This saves time, because `torch.export` changes a graph about thirty times and never calls it.
    """
    return _use_lazy_graph_module(True)


def short_stacks(outermost: CodeType) -> AbstractContextManager[None]:
    """Limit the stack traces that torch records for operators to frames inside the function `outermost`.

    By default torch records all frames of the process, which is slow.
    """
    if not hasattr(fx.proxy, "CapturedTraceback"):  # this torch version calls it differently
        return nullcontext()
    return attributes({(fx.proxy, "CapturedTraceback"): _Stack(outermost)})


class _Stack:
    """Substitute for torch's `CapturedTraceback` that records no frames outside the function `outermost`."""

    def __init__(self, outermost: CodeType):
        self.outermost = outermost

    def extract(self) -> _Stack:
        return self

    def summary(self) -> StackSummary:
        """Return the frames, outermost first.

        Source lines are read from their files only when a frame is printed.
        """
        frames = list[FrameSummary]()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            frames.append(FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False))
            frame = frame.f_back if code is not self.outermost else None
        return StackSummary.from_list(frames[::-1])


def noted(call: Callable[[], Any], note: str) -> Any:
    """Run `call` and return its result.

    Sets `meta[note] = True` on the nodes that `call` adds to the trace.
    """
    tracer: Any = proxy_tensor._CURRENT_MAKE_FX_TRACER
    graph = tracer.fx_tracer.graph
    before = len(graph.nodes)
    result = call()
    for node in list(graph.nodes)[before:]:
        node.meta[note] = True
    return result


def redirected_conditions(to: Callable[..., Any]) -> AbstractContextManager[None]:
    """Replace `torch.cond(condition, a, b, operands)` by `to` with these arguments, inside a `with` block.

    A `torch.cond` whose condition is a Python bool is not replaced.
    """
    name = "_hop_compile_and_call"
    original: Any = getattr(higher_order, name, None)
    if original is None:  # this torch version lacks the function, so torch.cond is rejected
        return nullcontext()

    def call(function: Any, args: Any, *rest: Any, **options: Any) -> Any:
        if getattr(function, "__qualname__", "").startswith("cond."):
            return to(*args)
        return original(function, args, *rest, **options)

    return attributes({(higher_order, name): call})


is_forward_mode: ContextVar[bool] = ContextVar("a forward-mode derivative of the model is traced", default=False)


def redirected_transforms(to: Callable[..., Any]) -> AbstractContextManager[None]:
    """Replace torch's functions that implement `torch.func` by `to(name, original, args, kwargs)`.

    `jacfwd` is replaced by `jacrev`, because fake tensors do not support forward-mode derivatives of a backward.
    `hessian`, which is `jacfwd` of `jacrev`, therefore becomes `jacrev` of `jacrev`.
    """
    places = [(functorch_apis, "vmap_impl")]
    places += [(functorch, name) for name in ("grad_and_value_impl", "_vjp_with_argnums", "_jvp_with_argnums")]

    def instead(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: to(name, original, args, kwargs)

    redirected = {(place, name): instead(name, getattr(place, name)) for place, name in places}

    def jacfwd(*args: Any, **options: Any) -> Callable[..., Any]:
        derivative = functorch.jacrev(*args, **options)

        def call(*inputs: Any) -> Any:
            with variable(is_forward_mode, True):
                return derivative(*inputs)

        return call

    return attributes({**redirected, (functorch, "jacfwd"): jacfwd})


def plain_mask_indexing() -> AbstractContextManager[None]:
    """Make `x[i]` an index operator inside of torch's `TransformGetItemToIndex`.

    Transformers builds masks in this mode. In an export, torch itself would record a call that contains Python objects.
    """
    module = sys.modules.get("torch._dynamo._trace_wrapped_higher_order_op")
    if not hasattr(module, "mod_index"):  # not imported, or a torch version that uses the operator
        return nullcontext()
    return attributes({(module, "mod_index"): torch.ops.aten.index})


def is_batched(tensor: torch.Tensor) -> bool:
    """Return True for a tensor inside `torch.vmap`. Such a tensor has no storage."""
    return torch._C._functorch.is_batchedtensor(tensor)


def initialize_lazy(module: torch.nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Initialize a lazy module for these arguments, as the module's first call would."""
    if isinstance(module, LazyModuleMixin):  # an earlier import may have loaded it already
        lazy: Any = module
        lazy._infer_parameters(lazy, args, dict(kwargs))


def keep_calls(target: Any) -> None:
    """Exempt an operator from dead-code elimination: its calls stay even if their results are unused."""
    fx.node.has_side_effect(target)


def other_lists(to: Callable[[torch.Tensor], Any]) -> AbstractContextManager[None]:
    """Replace `tensor.tolist()` by `to(tensor)` for traced tensors, inside a `with` block.

    If `to` returns None, torch's own `tolist()` runs.
    """

    def instead(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def tolist(tensor: Any) -> Any:
            stand_in = to(tensor)
            return original(tensor) if stand_in is None else stand_in

        return tolist

    return attributes({(kind, "tolist"): instead(kind.tolist) for kind in (FakeTensor, FunctionalTensor)})


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """Remove the hooks on tensors that autograd saves, and restore them at the end of a `with` block.

    `torch.func` does not run with such hooks.
    """
    autograd: Any = torch._C._autograd
    hooks = []
    while top := autograd._top_saved_tensors_default_hooks(True):
        autograd._pop_saved_tensors_default_hooks()
        hooks.append(top)
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def restored_transforms() -> Iterator[None]:
    """Exit the `torch.func` transforms (vmap, grad) that an error in the `with` block leaves active.

    Otherwise the user's next random number raises "called random operation while in randomness error mode".
    """
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    except BaseException:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        raise


def lasting_library(namespace: str) -> torch.library.Library:
    """Return a library whose operators are registered until the process ends.

    Torch deregisters the operators of other libraries when Python ends. For an operator with three overloads, this
    aborts the process.
    """
    library = torch.library.Library(namespace, "FRAGMENT")
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        found = finalizer.peek()
        if found is not None and found[0] is library:
            finalizer.detach()
    keep_for_ever(library, library.m)
    return library
