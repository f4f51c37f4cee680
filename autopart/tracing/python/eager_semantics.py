"""Effects of eager Python that `torch.export` would lose, written into the trace while it runs.

Export marks `torch.no_grad()` regions. It loses these marks inside autocast regions and when it functionalizes writes,
and it cannot trace `.data`. `EagerSemantics` writes both `no_grad` and `.data` as `detach` calls, which stay in the
graph.

`traceable` replaces the forward of the few torch modules that export cannot trace by an equivalent forward.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from autopart.common.scoped import attributes
from autopart.compat.export_internals import other_lists, plain_mask_indexing
from autopart.compat.nested_internals import attention, have_jagged
from autopart.compat.symbolic_shape_internals import MANY
from autopart.compat.torch_internals import (
    BatchNorm,
    InstanceNorm,
    Tracing,
    redirected_functions,
    tree_flatten,
    tree_map,
)
from autopart.errors import Refusal
from autopart.ir.graph import DTYPE_NAMES
from autopart.tracing.autograd.autograd_functions import apply_as_operator
from autopart.tracing.autograd.cond_branches import both_branches
from autopart.tracing.autograd.decompositions import TRACE_DECOMPOSITIONS
from autopart.tracing.autograd.tensor_hooks import Rewrites, TracedHookHandle, hook_gradient
from autopart.tracing.dynamic.data_dependent_branches import DataDependentBranches
from autopart.tracing.dynamic.float_calls import Floats, ReadsFloat
from autopart.tracing.dynamic.found_functions import FoundFunctions
from autopart.tracing.dynamic.host_functions import array_of
from autopart.tracing.dynamic.index_lists import as_places, indexed
from autopart.tracing.dynamic.input_decisions import InputDecisions
from autopart.tracing.dynamic.numpy_memory import NumpyMemory
from autopart.tracing.dynamic.packed_sequences import PackedSequences
from autopart.tracing.dynamic.pointer_slices import PointerSlices, with_positions
from autopart.tracing.dynamic.random_branches import RandomBranches, depends_only_on_random
from autopart.tracing.dynamic.sized_calls import with_numbers, with_size
from autopart.tracing.nested_tensors import attend
from autopart.tracing.python.concrete_constants import UNKNOWN, ConcreteConstants, memory_of, tensors_in, written_by
from autopart.tracing.python.size_conditions import SizeConditions, recorded_functions, traced_sizes
from autopart.tracing.python.value_checks import asking_frame, check_text, operand_of, passing_answer
from autopart.tracing.trace_errors import NOT_THE_USERS, LostInTrace, wrong_third_derivative
from autopart.tracing.with_loss import check_criterion

_ASKING = frozenset(
    {"item", "tolist", "numpy", "nonzero", "unique", "masked_select"}
    | {"__bool__", "__int__", "__float__", "__index__", "__getitem__", "__iter__", "__len__"}
)
"""Functions that return tensor values to Python, or a number of items that depends on tensor values."""
_TENSOR: Any = Tensor
_OF_SIZE = frozenset(
    {_TENSOR.shape.__get__, _TENSOR.nbytes.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.stride}
) | {torch.numel}
_OF_METADATA = frozenset(
    getattr(_TENSOR, name).__get__
    for name in ("dtype", "device", "layout", "ndim", "is_sparse", "is_quantized", "is_nested", "is_meta")
) | {Tensor.dim, Tensor.storage_offset, Tensor.is_floating_point, *_OF_SIZE}
"""Functions that read only metadata: the grad mode does not affect them, and they return no tensor."""
_DATA: Any = Tensor.data
_GET_DATA, _SET_DATA = _DATA.__get__, _DATA.__set__
_SIZED_BY_VALUES = {
    "_pack_padded_sequence": (
        "the size of pack_padded_sequence's result depends on the values of the lengths",
        "sizes in a graph cannot depend on tensor values",
        "padded sequences as input of the recurrent layer, and a mask of the positions after each end",
    ),
    "ctc_loss": (
        "torch.ctc_loss allocates tables whose sizes depend on the values of the target lengths",
        "sizes in a graph cannot depend on tensor values",
        "torch.nn.functional.ctc_loss, or nn.CTCLoss",
    ),
}
"""{function of torch that cannot be traced: what is wrong, why, and what to try}."""
_CALL_OF_GRAD = inspect.signature(torch.autograd.grad)
_SET_REQUIRES_GRAD = _TENSOR.requires_grad.__set__


class EagerSemantics(TorchFunctionMode):
    """Torch function mode around a forward: writes the effects of grad mode and `.data` into the trace.

    `tensors`: the model's parameters, buffers and inputs outside of the trace.

    Raises TraceError for hooks on tensors, because a trace would lose them. Raises TraceError for in-place writes
    without grad mode to a value with a gradient.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.drops_caches = False  # True if an output was a key/value cache
        self.origins = WeakIdKeyDictionary()  # {tensor: its ancestors among inputs and module outputs}
        self.asked = ""  # ancestors of the tensor whose values Python read last
        self.data = WeakIdKeyDictionary()  # results of `.data`
        self.known = ConcreteConstants(tensors)
        self.arrays = NumpyMemory()
        self.decisions = InputDecisions(self.known, self.arrays, self._check_may_rewrite)
        self.packed = PackedSequences(self.known)
        self.floats = Floats()
        self.sizes = SizeConditions(self.floats.replace_for_sizes)
        self.found = FoundFunctions()
        self.differentiates = False  # True if forward has called torch.autograd.grad
        self.twice_only: dict[str, None] = {}  # operators whose third derivative is wrong in torch
        self.gradients: list[Any] = []  # autograd nodes of gradients that the forward takes with create_graph
        self.passed: dict[str, None] = {}  # texts of value checks, for notes
        self.may_rewrite = False  # True if earlier nodes may be changed
        self.hooked: set[Any] = set()  # the memory of tensors whose gradients have a hook
        self.hooks: dict[fx.Node, fx.Node] = {}  # {operator of a hook: the value that it replaced}
        self.hook_notes: dict[str, None] = {}
        self.chances = RandomBranches()
        self.skipped = DataDependentBranches()
        self.numbers_drawn = False  # True if forward converts a random tensor to a number
        self.numbers_stay = False  # True if forward gets the tensor instead
        self.slices = PointerSlices()
        self.spent: dict[Any, Tensor] = {}  # {memory that an autograd.Function has written to: its tensor}
        self.toggled = WeakIdKeyDictionary()  # {parameter that the forward froze or unfroze: `requires_grad` before}
        self.both = False  # True if both branches of a torch.cond are in the trace

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        self.skipped.go_on()
        if have_jagged(types):
            return self._of_jagged(func, args, kwargs)
        if func in _OF_METADATA:
            output = func(*args, **kwargs)
            return traced_sizes(output, self.sizes) if func in _OF_SIZE else output
        args = with_numbers(func, indexed(func, args), self._item)
        index = args[1] if func in (Tensor.__setitem__, Tensor.__getitem__) else None
        if (positions := with_positions(index)) is not index:
            args = args[0], positions, *args[2:]
        tensors = list(tensors_in((args, kwargs)))
        args, kwargs = self.arrays.arguments(func, args, kwargs, tensors)
        self.check_unspent(tensors)
        check_criterion(func, tensors)
        answer = self.sizes.with_constants(self.known.answer((func, args, kwargs), tensors))
        if answer is not UNKNOWN:
            return answer
        if func is Tensor.__bool__ and self.known.reads_buffers(args[0]):
            value = self.decisions.answer((func, args, kwargs), tensors, sys._getframe(1))
            if value is not UNKNOWN:
                return value
        if func is Tensor.__bool__ and (decided := self._decided(args[0], sys._getframe(1))) is not None:
            return decided
        if func is Tensor.__len__:
            if self.skipped.has_length(sys._getframe(1), args[0].shape[0]):
                return MANY
            if args[0].ndim and type(args[0].shape[0]) is int:
                self.sizes.record_equal(args[0].shape[0])  # `len` returns a plain int
        if func is Tensor.item and self._is_drawn(args[0]):
            self.numbers_drawn = True
            if self.numbers_stay:
                return args[0].reshape(())
        passing = passing_answer(func, tensors, frame := sys._getframe(1))
        if passing is not None:
            self.passed[check_text(frame, NOT_THE_USERS)] = None
            return passing
        if (value := self.decisions.answer((func, args, kwargs), tensors, frame)) is not UNKNOWN:
            return value
        if func in (Tensor.numpy, Tensor.__array__):
            return array_of(args[0], func)
        names = tuple(dict.fromkeys(name for tensor in tensors for name in self.origins.get(tensor, ())))[:3]
        if getattr(func, "__name__", "") in _ASKING:
            self.asked = " and ".join(names)
        self._check_number(func, args, frame)
        if func is Tensor.__iter__ and args[0].ndim:
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        read = partial(self.decisions.read, frame)
        if (output := self.packed.run(func, args, read)) is not UNKNOWN:
            return output
        func, args, kwargs = with_size((func, args, kwargs), read)
        if func is torch.tensor and self.chances.by_values and type(args[0]) in (bool, int, float):
            func, args = torch.full, ((), *args)  # an operator: a constant of one side of a branch must not be an input
        output = self._run(TRACE_DECOMPOSITIONS.get(func, func), args, dict(kwargs))
        self.known.note((func, args, kwargs), tensors, output)
        output = self.decisions.note((func, args, kwargs), output, frame)
        if positions is not index and func is Tensor.__getitem__:
            self.slices.add(args[0], positions, output)
        self.slices.note_writes(written_by(func, args, kwargs), self._assign)
        for tensor in tensors_in(output) if names else ():
            self.origins[tensor] = names
        return output

    def _of_jagged(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a function of nested (jagged) tensors. Operators on their values return to this mode."""
        if func is attention:
            with self:
                output = attend(self.read, *args, **kwargs)
            if output is not NotImplemented:
                return output
        return func(*args, **kwargs)

    def read(self, func: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        """Return `func(tensor)` for the real inputs; UNKNOWN if the tensor's values are unknown."""
        return self.decisions.read(sys._getframe(1), func, tensor)

    def to_list(self, tensor: Tensor) -> Any:
        """Return `tensor.tolist()` or its stand-in `IndexList`; None to let torch return a list of symbols."""
        value = self.decisions.answer((Tensor.tolist, (tensor,), {}), [tensor], sys._getframe(1))
        return as_places(tensor) if value is UNKNOWN else value

    def _check_number(self, func: Callable[..., Any], args: tuple, frame: FrameType) -> None:
        if func is Tensor.__float__ and self.floats.may_be_added(frame):
            raise ReadsFloat
        reads_pointer = func is Tensor.__int__ and self.known.reads_buffers(args[0])
        if reads_pointer and self.floats.may_be_added(frame, "int"):
            raise ReadsFloat

    def _item(self, tensor: Tensor) -> Any:
        return self.__torch_function__(Tensor.item, (), (tensor,)) if self.known.is_recorded(tensor) else tensor

    def _assign(self, tensor: Tensor, index: Any, values: Tensor) -> None:
        self.__torch_function__(Tensor.__setitem__, (), (tensor, index, values))

    def spend(self, tensor: Tensor) -> bool:
        """Record that an autograd.Function overwrote a tensor, so that later reads of it are rejected.

        Returns False for a tensor that the trace does not compute, because later reads of it cannot be detected.
        """
        memory = memory_of(tensor)
        made = tensor._base if tensor._base is not None else tensor
        if memory is None or made.grad_fn is None:
            return False
        self.spent[memory] = tensor
        return True

    def check_unspent(self, tensors: Iterable[Tensor]) -> None:
        """Raise LostInTrace if one of these tensors was written in a way that the trace cannot see.

        Such writes are made by an autograd.Function (see `spend`), to a tensor of which the trace copied a slice, or to
        a numpy array that shares its memory in eager torch.
        """
        self.slices.check_current(tensors := list(tensors))
        self.arrays.check_read(tensors)
        if self.spent and any(memory_of(tensor) in self.spent for tensor in tensors):
            raise LostInTrace(
                "a tensor is read after an autograd.Function has written to it",
                "the Function does not declare the write (ctx.mark_dirty): the gradient would be that of the old value",
                "a Function that writes to a copy: x = x.clone()",
                Refusal.WRITE,
            )

    def named(self, value: Any, name: str) -> None:
        """Record a name for each tensor in a value, for error messages."""
        for leaf in tree_flatten(value)[0]:
            if isinstance(leaf, Tensor):
                self.origins[leaf] = (name,)

    def _run(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if func == _GET_DATA:
            alias = args[0].detach()
            self.data[alias] = None
            return alias
        if getattr(func, "__name__", "") in _SIZED_BY_VALUES:
            raise LostInTrace(*_SIZED_BY_VALUES[func.__name__], Refusal.SIZE)
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise LostInTrace(
                f"{func.__name__} draws from a torch.Generator of the model's own",
                "its state is no tensor that a graph could hold, and ranks that draw the same number would have to "
                "share it",
                "the same without generator=, after torch.manual_seed; or draw outside of forward()",
                Refusal.RANDOM,
            )
        if func == Tensor.register_hook and args[0].requires_grad:
            return self._hook(*args, **kwargs)
        if func == Tensor.detach_ and args[0].requires_grad:
            raise LostInTrace("detach_() detaches a tensor in place", "a trace loses that: values computed "
                       "from it earlier would keep their gradient", "x = x.detach()", Refusal.WRITE)  # fmt: skip
        if func in (Tensor.requires_grad_, _SET_REQUIRES_GRAD) and isinstance(args[0], nn.Parameter):
            return self._toggle(func, *args, **kwargs)
        args, kwargs = self.without_frozen(args, kwargs)
        if func == _SET_DATA:
            return self._set_data(*args)
        written = written_by(func, args, kwargs)
        self.known.write((func, args, kwargs), written)
        if func is Tensor.backward:
            raise LostInTrace("forward() calls backward()", "it adds to the gradients of parameters, which a program "
                       "computes only after the forward", "torch.autograd.grad(loss, inputs, create_graph=True)",
                       Refusal.GRADIENT)  # fmt: skip
        if func is torch.autograd.grad and not self.differentiates:
            self.differentiates = self.may_rewrite = True
            raise Rewrites
        if self.hooked and (self.differentiates or self.hooked & {memory_of(t) for t in written}):
            did = "the forward differentiates inside" if self.differentiates else f"{func.__name__} writes to it"
            raise LostInTrace(
                "a tensor has a hook on its gradient", did, "operations in place of the hook", Refusal.HOOK
            )
        if func is torch.autograd.grad:
            return self._differentiated(*args, **kwargs)
        if torch.is_grad_enabled() and not any(t in self.data for t in written):
            return func(*args, **kwargs)
        for target in written:
            if target.requires_grad and not target.is_leaf:
                raise LostInTrace(
                    f"{func.__name__} writes in place to a value that has a gradient, without grad mode",
                    "its gradient would be that of the value before the write",
                    f"{func.__name__.rstrip('_')} in grad mode, or on value.detach().clone()",
                    Refusal.WRITE,
                )
        args, kwargs = tree_map(lambda leaf: _detached(leaf, written), (args, kwargs))
        return func(*args, **kwargs)

    def _set_data(self, tensor: Tensor, values: Tensor) -> None:
        if tensor.shape != values.shape:
            raise LostInTrace(
                f"forward() assigns to .data of a tensor of shape {list(tensor.shape)} a tensor of shape "
                f"{list(values.shape)}", "in a program, a tensor keeps its shape", "a new tensor", Refusal.WRITE,
            )  # fmt: skip
        self.known.write((Tensor.copy_, (tensor, values), {}), [tensor])
        tensor.detach().copy_(values.detach())
        self.slices.note_writes([tensor], self._assign)

    def _differentiated(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Trace `torch.autograd.grad`. Raises LostInTrace for a gradient that eager torch computes wrongly."""
        call = _CALL_OF_GRAD.bind(*args, **kwargs).arguments
        if not call.get("create_graph"):
            return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf,
                            torch.autograd.grad(*args, **kwargs))  # fmt: skip
        if self.twice_only and _reaches(call["outputs"], call["inputs"], self.gradients):
            raise wrong_third_derivative(" and ".join(self.twice_only))
        gradients = torch.autograd.grad(*args, **kwargs)
        self.gradients += [gradient.grad_fn for gradient in tensors_in(gradients) if gradient.grad_fn is not None]
        return gradients

    def _toggle(self, func: Callable[..., Any], parameter: nn.Parameter, requires_grad: bool = True) -> Any:
        """Trace a call that freezes or unfreezes a parameter during the forward (`requires_grad_`)."""
        if parameter.requires_grad != requires_grad:
            # Trace again: blocks that were recorded before have the parameter in its earlier state.
            if not self.may_rewrite:
                raise Rewrites
            self.toggled.setdefault(parameter, parameter.requires_grad)
        return func(parameter, requires_grad)

    def without_frozen(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return a call's arguments, in which parameters that the forward has frozen are detached."""
        if not any(was and not parameter.requires_grad for parameter, was in self.toggled.items()):
            return args, kwargs

        def detached(leaf: Any) -> Any:
            is_frozen = isinstance(leaf, Tensor) and self.toggled.get(leaf) and not leaf.requires_grad
            return leaf.detach() if is_frozen else leaf

        replaced: tuple[tuple, dict[str, Any]] = tree_map(detached, (args, kwargs))
        return replaced

    def check_unfrozen(self) -> None:
        """Raise LostInTrace if a forward leaves `requires_grad` of a parameter changed."""
        changed = [was for parameter, was in self.toggled.items() if parameter.requires_grad != was]
        if changed:
            raise LostInTrace(
                f"forward() {'freezes' if changed[0] else 'unfreezes'} a parameter and does not undo it",
                "the backward and the next call would find the parameter in another state",
                "requires_grad_() outside of forward(), or requires_grad_ back to its value before forward() returns",
                Refusal.WRITE,
            )

    def _decided(self, condition: Tensor, frame: FrameType) -> bool | None:
        """Return the outcome with which this run of the forward continues at an `if` on a tensor.

        Returns None if the trace cannot represent both outcomes.
        """
        answer = self.chances.answer(condition)
        if answer is None:
            skipped = self.skipped.answer(asking_frame(frame), lambda: condition)
            return self.by_values(asking_frame(frame), lambda: condition) if skipped is None else skipped
        self._check_may_rewrite()
        self.chances.lines[check_text(frame, NOT_THE_USERS)] = None
        return answer

    def by_values(self, frame: FrameType | None, truth: Callable[[], Tensor]) -> bool | None:
        """Return the outcome with which this run of the forward continues at an `if` on tensor values.

        The other outcome is traced in another run. `truth()` returns the condition as a tensor. Returns None if the
        trace cannot contain both sides of the branch.
        """
        operand = operand_of(frame)
        chances = self.chances
        if chances.refuses_values or chances.is_full or operand is False or Tracing.current() is None:
            return None
        # A value check: the other side raises an error.
        if passing_answer(Tensor.__bool__, [truth()], frame) is not None:
            return None
        self._check_may_rewrite()
        return self.chances.answer_values(truth(), operand, check_text(frame, NOT_THE_USERS))

    def _is_drawn(self, number: Tensor) -> bool:
        tracing = Tracing.current()
        node = tracing.node_of(number) if tracing is not None and number.is_floating_point() else None
        return node is not None and depends_only_on_random(node)

    def _check_may_rewrite(self) -> None:
        if not self.may_rewrite:
            raise Rewrites

    def condition(self, *arguments: Any) -> Any:
        """Trace both branches of a `torch.cond` call and return the selected result."""
        self._check_may_rewrite()
        self.both = True
        return both_branches(*arguments)

    def _hook(self, tensor: Tensor, hook: Callable[[Tensor], Any]) -> TracedHookHandle:
        self._check_may_rewrite()
        note = hook_gradient(tensor, hook, self.hooks)
        if note:
            self.hook_notes[note] = None
        else:
            self.hooked.add(memory_of(tensor))
        return TracedHookHandle()


def _reaches(outputs: Any, inputs: Any, nodes: Collection[Any]) -> bool:
    """Return True if autograd's graph has a path from `outputs` to one of `nodes`, not through `inputs`."""
    todo = [output.grad_fn for output in tensors_in(outputs)]
    seen, wanted = {*todo, *(source.grad_fn for source in tensors_in(inputs))}, set(nodes)
    while todo:
        node = todo.pop()
        if node in wanted:
            return True
        after = [] if node is None else [one for one, _ in node.next_functions if one not in seen]
        seen.update(after)
        todo += after
    return False


def _detached(leaf: Any, written: list[Tensor]) -> Any:
    keeps = not isinstance(leaf, Tensor) or not leaf.requires_grad or any(leaf is t for t in written)
    return leaf if keeps else leaf.detach()


@contextmanager
def traceable(
    model: nn.Module, apply: Callable[..., Any] = apply_as_operator, to_list: Callable[[Tensor], Any] = as_places
) -> Iterator[None]:
    """Replace modules and functions that torch.export cannot trace, inside a `with` block.

    A SyncBatchNorm becomes a BatchNorm, because the batch of a trace is the global batch. A cast of a module to the
    dtype that it already has becomes a no-op.

    Args:
        apply: replaces `Function.apply` of a user's autograd.Function. It receives torch's own `apply`, the class, args
            and kwargs.
        to_list: replaces `tensor.tolist()`.
    """
    exchanged = recorded_functions()
    for module in model.modules():
        if not isinstance(module, (BatchNorm, InstanceNorm)) or "forward" in vars(module):
            continue
        if module.track_running_stats and isinstance(module, InstanceNorm):
            exchanged[module, "forward"] = partial(_tracking_instance_norm, module)
        elif module.track_running_stats and module.momentum is None:
            exchanged[module, "forward"] = partial(_cumulative_batch_norm, module)
        elif isinstance(module, nn.SyncBatchNorm):
            exchanged[module, "forward"] = partial(BatchNorm.forward, module)
    to = nn.Module.to
    exchanged[nn.Module, "to"] = lambda module, *args, **kwargs: _to(to, module, *args, **kwargs)
    with attributes(exchanged), redirected_functions(apply), other_lists(to_list), plain_mask_indexing():
        yield


def _to(to: Any, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Make `module.to(device, dtype)` in a forward a no-op, if the module has this device and dtype.

    Raises LostInTrace for any other device or dtype, because torch.export cannot replace the module's parameters.
    """
    targets = [*args, *(value for name, value in kwargs.items() if name not in ("non_blocking", "memory_format"))]
    devices = [torch.device(value) for value in targets if isinstance(value, (str, torch.device))]
    dtypes = [value for value in targets if isinstance(value, torch.dtype)]
    if not targets or len(devices) + len(dtypes) < len(targets):
        return to(module, *args, **kwargs)
    for tensor in (*module.parameters(), *module.buffers()):
        floats = tensor.is_floating_point() or tensor.is_complex()
        if not all(_is_on(tensor, device) for device in devices) or (floats and any(tensor.dtype != d for d in dtypes)):
            raise LostInTrace(
                f"forward() moves or casts a {type(module).__name__}",
                f"it has weights on {tensor.device} in {DTYPE_NAMES.get(tensor.dtype, tensor.dtype)}, and a trace "
                "cannot replace them",
                f"module.to({', '.join(str(value) for value in targets)}) before the model is parallelized",
                Refusal.WRITE,
            )
    return module


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def ambient_autocast(device_type: str) -> torch.dtype | None:
    """Return the dtype of the enclosing `torch.autocast`; None outside of autocast."""
    for kind in dict.fromkeys((device_type, "cuda")):
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
    return None


def _cumulative_batch_norm(module: Any, source: Tensor) -> Tensor:
    """Compute a batch norm with `momentum=None`, whose running statistics are means over all batches.

    Torch's own code reads the number of batches as a Python number, which would be a constant of the trace.
    """
    if not (module.training and module.track_running_stats):  # a forward can toggle both
        return BatchNorm.forward(module, source)
    module._check_input_dim(source)
    module.num_batches_tracked.add_(1)
    dims = [dim for dim in range(source.ndim) if dim != 1]
    _move_statistics(module, source, dims, module.num_batches_tracked.to(module.running_mean.dtype).reciprocal())
    return F.batch_norm(source, None, None, module.weight, module.bias, True, 0.0, module.eps)


def _tracking_instance_norm(module: Any, source: Tensor) -> Tensor:
    """Compute an instance norm that updates its running statistics.

    Torch's operator writes the statistics, but its schema does not declare the write, so that export loses it.
    """
    if module.track_running_stats and not module.training:
        return InstanceNorm.forward(module, source)
    module._check_input_dim(source)
    if source.dim() == module._get_no_batch_dim():
        return _tracking_instance_norm(module, source.unsqueeze(0)).squeeze(0)
    _move_statistics(module, source, list(range(2, source.ndim)), module.momentum or 0.0)
    return F.instance_norm(source, None, None, module.weight, module.bias, True, 0.0, module.eps)


@torch.no_grad()
def _move_statistics(module: Any, source: Tensor, dims: list[int], share: Any) -> None:
    """Update the running mean and variance: move them by the fraction `share` towards this batch's values.

    The variance is the unbiased one.
    """
    rows = source.to(module.running_mean.dtype)
    mean = rows.mean(dims, keepdim=True)
    var = (rows - mean).square().sum(dims, keepdim=True) / (math.prod(rows.shape[dim] for dim in dims) - 1)
    for running, new in ((module.running_mean, mean), (module.running_var, var)):
        running.copy_((1 - share) * running + share * new.reshape(-1, len(running)).mean(0))
