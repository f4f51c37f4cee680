"""Constant tensors of a trace, whose values are computed when Python code needs them.

For example, `nn.Transformer` compares a mask with the causal mask, and other models take the maximum of position ids.
Functions like `torch.arange` create such a tensor from numbers only, so its value can be computed on demand. Calls
that read only the metadata of another tensor (`torch.ones_like(x)`, `steps.to(x)`) also return constants.

A tensor in the user's code that is not a parameter, buffer or input is a constant of the trace, too. A forward that
writes to such a tensor is rejected.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autopart.compat.symbolic_shape_internals import evaluated, expression
from autopart.compat.torch_internals import has_values, outside_of_tracing, tree_flatten
from autopart.ir.graph import HOST_FUNCTION
from autopart.ir.run.value_guards import BufferTensor, InputTensor, Metadata, ValueCall, ValueProgram

_MAKERS = frozenset(
    {"arange", "eye", "full", "linspace", "logspace", "ones", "zeros", "tensor", "as_tensor", "scalar_tensor"}
    | {"tril_indices", "triu_indices", "hann_window", "hamming_window", "blackman_window", "kaiser_window"}
)
READING = frozenset(
    {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "equal", "allclose"}
    | {"is_nonzero"}
)
"""Functions that return tensor values to Python."""
_SHAPED_LIKE = {name: (0, "input") for name in ("ones_like", "zeros_like", "full_like")} | {
    name: (1, "other") for name in ("expand_as", "view_as", "reshape_as")
}
_TYPED_LIKE = {name: (0, "self") for name in ("new_tensor", "new_zeros", "new_ones", "new_full")} | {
    name: (1, "other") for name in ("to", "type_as")
}
"""{function: (position, name) of the one argument of which it reads only metadata}.

`new_zeros(x, ...)` and similar functions use the dtype and device of `self`; `to` and `type_as` those of `other`.
"""
_SELECTING = frozenset({"__getitem__", "masked_select", "index_select", "repeat_interleave"})
"""Functions that select elements of their first argument."""
_WRITING = frozenset({"__setitem__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"})
"""Functions that write to their first argument, and whose names do not end with a single `_`."""
_NORMS = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})
"""Functions that update running statistics, which they are passed."""
_OF_TORCH_NORMS = "input", "weight", "bias", "running_mean", "running_var", "training"
"""Arguments of `torch.batch_norm` and `torch.instance_norm`."""
UNKNOWN = object()


Call = tuple[Callable[..., Any], tuple, Mapping[str, Any]]
"""A call: the function, its arguments, and its keyword arguments."""


class _NotRecorded(Exception):
    """Exception: a call has an argument whose value is unknown."""


class ConcreteConstants:
    """The constant tensors of a trace, and the tensors computed only from constants, inputs and buffers.

    For each of these tensors the object has a record, from which the value can be computed again: the call that
    returned the tensor (`ValueCall`), the index of an input (`InputTensor`), or the name of a buffer (`BufferTensor`).

    Args:
        of_model: parameters, buffers and inputs, whose values can differ in the next call.

    Attributes:
        read: the constants whose values Python has read.
    """

    def __init__(self, of_model: Iterable[Tensor] = ()) -> None:
        self._made = WeakIdKeyDictionary()
        self._changing = {memory_of(tensor) for tensor in of_model} | {None}
        self.read: list[Tensor] = []
        self._held: list[tuple[Tensor, BufferTensor]] = []
        self.buffers: dict[str, Tensor] = {}
        """{name: real buffer of the model}."""
        self.inputs: list[Tensor] = []
        """Real tensors of the inputs."""
        self.lacks_values = False
        """True if Python needed the value of an input that is on meta."""
        self.symbols: dict[Any, ValueCall] = {}
        """{torch's symbol of a number or size: the recorded call that computes it}."""

    def bind(self, tensors: Sequence[Tensor], real: Sequence[Tensor]) -> None:
        """Record the inputs of a trace, and the real tensors that they represent."""
        self.inputs = list(real)
        self.symbols.clear()
        for place, (tensor, value) in enumerate(zip(tensors, real, strict=True)):
            if value.layout is torch.strided:
                self._made[tensor] = InputTensor(place)

    def bind_numbers(self, numbers: Sequence[Any]) -> None:
        """Record the Python numbers that are inputs of the trace.

        Their tensors are the last ones passed to `bind`.
        """
        for place, number in enumerate(numbers, len(self.inputs) - len(numbers)):
            record = ValueCall(Tensor.item, (InputTensor(place),), {}, None, of_inputs=True)
            self.symbols[expression(number)] = record

    def is_recorded(self, tensor: Tensor) -> bool:
        """Return True for a tensor that is computed only from constants, inputs and buffers given to `hold`."""
        if tensor not in self._made and self._is_constant(tensor):
            self._made[tensor] = tensor
        return tensor in self._made

    def _is_known(self, tensor: Tensor) -> bool:
        return self.is_recorded(tensor) and not _is_of_inputs(self._made[tensor])

    def _is_constant(self, tensor: Tensor) -> bool:
        is_real = type(tensor) is Tensor and has_values(tensor) and not tensor.requires_grad
        return is_real and memory_of(tensor) not in self._changing

    def note(self, call: Call, inputs: Sequence[Tensor], output: Any) -> None:
        """Record a torch call that returned `output`. `inputs`: the tensors among its arguments."""
        func, args, kwargs = call
        # It can draw random numbers, so a guard cannot recompute it.
        if getattr(func, "namespace", "") == HOST_FUNCTION:
            return
        name = getattr(func, "__name__", "")
        if name in _SHAPED_LIKE or name in _TYPED_LIKE:
            args, kwargs = _without_model(name, args, kwargs)
            inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
            is_made = all(map(self.is_recorded, inputs))
        else:
            is_made = all(map(self.is_recorded, inputs)) if inputs else name in _MAKERS
        if not is_made:
            return
        leaves = [(place, leaf) for place, leaf in enumerate(tree_flatten(output)[0]) if isinstance(leaf, Tensor)]
        made = [(place, leaf) for place, leaf in leaves if not any(leaf is tensor for tensor in inputs)]
        if made and (recorded := self.recorded((func, args, kwargs))) is not None:
            for place, leaf in made:
                self._made[leaf] = replace(recorded, place=place)

    def recorded(self, call: Call) -> ValueCall | None:
        """Return the record of a call, from which the call's result can be computed again.

        Returns None if the call reads a tensor or number whose values are unknown.
        """
        func, args, kwargs = call
        try:
            args, kwargs = self._record(args), {name: self._record(value) for name, value in kwargs.items()}
        except _NotRecorded:
            return None
        made = ValueCall(func, args, kwargs, None)
        return replace(made, of_inputs=any(map(_is_of_inputs, made.sources)))

    def _record(self, value: Any) -> Any:
        """Replace the tensors and symbolic numbers in an argument by records of how they are computed."""
        if isinstance(value, Tensor):
            if not self.is_recorded(value):
                raise _NotRecorded
            return self._made[value]
        if isinstance(value, (list, tuple)):
            parts = [self._record(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, slice):
            return slice(*map(self._record, (value.start, value.stop, value.step)))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._number(expression(value))
        return value

    def size(self, call: Call, output: Tensor, dim: int) -> ValueCall | None:
        """Return a record (`ValueCall`) of how to compute a size of a call's result; None if impossible.

        Example: the size of `x[mask]` depends on the values of `mask`. The values of `x` may be unknown, because only
        its shape affects the size.
        """
        func, args, kwargs = call
        selected = self._made.get(output)
        if selected is None and getattr(func, "__name__", "") in _SELECTING and args and isinstance(args[0], Tensor):
            shape = tuple(map(expression, args[0].shape))
            if all(isinstance(size, int) for size in shape):
                rest = self.recorded((func, args[1:], kwargs))
                form = Metadata(shape, args[0].dtype)
                selected = rest and replace(rest, args=(form, *rest.args), place=0)
        if not isinstance(selected, ValueCall):
            return None
        return ValueCall(Tensor.size, (selected, dim), {}, None, selected.of_inputs)

    def formula(self, formula: Any) -> ValueCall | None:
        """Return a record (`ValueCall`) of how to compute a formula of torch's symbolic numbers.

        Returns None if the value of a symbol is unknown.
        """
        try:
            recorded = self._number(formula)
        except _NotRecorded:
            return None
        return recorded if isinstance(recorded, ValueCall) else None

    def _number(self, formula: Any) -> Any:
        symbols = list(getattr(formula, "free_symbols", ()))
        if not symbols:
            return evaluated(formula, ())
        if any(symbol not in self.symbols for symbol in symbols):
            raise _NotRecorded
        calls = [self.symbols[symbol] for symbol in symbols]
        return ValueCall(partial(_evaluated, formula, symbols), tuple(calls), {}, None, any(c.of_inputs for c in calls))

    def forget(self, written: Sequence[Tensor]) -> None:
        """Forget tensors that are written in place, and all constants that share memory with them.

        Tensors that were computed from these constants before the write stay constant.
        """
        memory = {memory_of(tensor) for tensor in written}
        self._changing |= memory
        self.drop([tensor for tensor in self._made if None in memory or memory_of(tensor) in memory])

    def write(self, call: Call, written: Sequence[Tensor]) -> None:
        """Record an in-place write.

        The records of all tensors that share the memory then compute the new values.

        The tensors are forgotten instead if the written values are unknown, or if the memory is from outside of the
        trace.
        """
        if not written:
            return
        recorded = self.recorded(call)
        is_first = len(written) == 1 and call[1][:1] and call[1][0] is written[0] and call[2].get("out") is None
        if not is_first or recorded is None or not self._writes(recorded, written[0]):
            self.forget(written)

    def _writes(self, recorded: ValueCall, written: Tensor) -> bool:
        memory = memory_of(written)
        shared = [] if memory is None else [tensor for tensor in self._made if memory_of(tensor) == memory]
        before = {id(self._made[tensor]) for tensor in shared}
        views = views_of(self._made[written])
        root = next(view for view in reversed(views) if id(view) in before)
        if not isinstance(root, (ValueCall, BufferTensor)):
            return False
        of_inputs = _is_of_inputs(root)
        new = ValueCall(torch.clone, (root,), {}, 0, of_inputs)
        write = replace(recorded, args=(moved_view(self._made[written], root, new), *recorded.args[1:]))
        new = ValueCall(_first, (new, write), {}, 0, recorded.of_inputs or of_inputs)
        for tensor in shared:
            moved = moved_view(self._made.pop(tensor), root, new)
            if moved is not None:
                self._made[tensor] = moved
        return True

    def drop(self, tensors: Sequence[Tensor]) -> None:
        """Forget how these tensors are computed."""
        for tensor in tensors:
            self._made.pop(tensor, None)

    def answer(self, call: Call, inputs: Sequence[Tensor], of_inputs: bool = False) -> Any:
        """Return the result of a call such as `item()`, if its tensors are constant; else UNKNOWN.

        Args:
            inputs: the tensors among the call's arguments.
            of_inputs: True to also return results that depend on the inputs of the traced call, or on buffers.
        """
        asks = getattr(call[0], "__name__", "") in READING and (of_inputs or not any(map(self.reads_buffers, inputs)))
        if not asks or not inputs or not all(map(self.is_recorded if of_inputs else self._is_known, inputs)):
            return UNKNOWN
        return self.result(call)

    def result(self, call: Call) -> Any:
        """Return the result of a call, computed from the real inputs; UNKNOWN if the values are unknown."""
        recorded = self.recorded(call)
        return UNKNOWN if recorded is None else self.value(recorded)

    def value_of(self, func: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        """Return `func(tensor)`, computed from the real inputs; UNKNOWN if the values are unknown."""
        return self.result((func, (tensor,), {}))

    def value(self, recorded: Any) -> Any:
        """Compute the value of a recorded tensor or number.

        Returns UNKNOWN if it depends on tensors on meta, or if its calls draw random numbers.
        """
        program = ValueProgram([recorded])
        if any(one.name not in self.buffers for one in program.buffers):
            return UNKNOWN
        if not all(has_values(self.inputs[place]) for place in program.inputs):
            self.lacks_values = True
            return UNKNOWN
        return self._without_draws(program, self.buffers)

    def _without_draws(self, program: ValueProgram, buffers: Mapping[str, Tensor] = MappingProxyType({})) -> Any:
        """Run the recorded calls that compute a value. Return UNKNOWN if one of them draws random numbers."""
        self.read += [leaf for leaf in program.recorded if isinstance(leaf, Tensor)]
        drawn = torch.get_rng_state()
        with outside_of_tracing(), torch.no_grad():
            (result,) = program.run(self.inputs, buffers)
            is_random = not torch.equal(drawn, torch.get_rng_state())
        if not is_random:
            return result
        torch.set_rng_state(drawn)
        return UNKNOWN

    def hold(self, buffers: Mapping[str, Tensor]) -> None:
        """Record the buffers {name: buffer}. A buffer's value counts as known until a call writes to it."""
        self._held = [
            (buffer, BufferTensor(tuple(buffer.shape), buffer.dtype, name)) for name, buffer in buffers.items()
        ]
        for buffer, form in self._held:
            self._made[buffer] = form

    def reads_buffers(self, tensor: Tensor) -> bool:
        """Return True for a tensor that is computed from buffers, possibly together with inputs and constants."""
        if not self.is_recorded(tensor):
            return False
        return bool(ValueProgram([self._made[tensor]]).buffers)

    def is_fixed(self, tensor: Tensor) -> bool:
        """Return True if a tensor has equal values in every call."""
        if not self._is_known(tensor):
            return False
        program = ValueProgram([self._made[tensor]])
        written = {id(form) for held, form in self._held if self._made.get(held) is not form}
        if written & {id(form) for form in program.buffers}:
            return False
        try:
            return self._without_draws(program) is not UNKNOWN
        except (RuntimeError, ValueError, IndexError):  # zeros stand in for unknown values, and may not fit
            return False


def views_of(recorded: Any) -> list[Any]:
    """Return the record of a tensor, then the records of the tensors of which it may be a view.

    These are found by following the first argument of each recorded call, which is the tensor that a view is based on.
    """
    views = [recorded]
    while isinstance(views[-1], ValueCall) and views[-1].args:
        views.append(views[-1].args[0])
    return views


def moved_view(view: Any, root: Any, new: Any) -> Any:
    """Return the record of a view that applies the operators of `view` to `new` instead of `root`.

    Returns None if `view` is not the record of a view of `root`.
    """
    views = views_of(view)
    if not any(one is root for one in views):
        return None
    moved = new
    for one in reversed(views[: next(i for i, one in enumerate(views) if one is root)]):
        of_inputs = one.of_inputs or _is_of_inputs(moved)
        moved = replace(one, args=(moved, *one.args[1:]), of_inputs=of_inputs)
    return moved


def _first(tensor: Tensor, _: Any) -> Tensor:
    return tensor


def _is_of_inputs(recorded: Any) -> bool:
    return isinstance(recorded, InputTensor) or (isinstance(recorded, ValueCall) and recorded.of_inputs)


def _evaluated(formula: Any, symbols: Sequence[Any], *numbers: Any) -> Any:
    return evaluated(formula, zip(symbols, numbers, strict=True))


def _without_model(name: str, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, Mapping[str, Any]]:
    """Return the arguments of a call such as `ones_like(x)` with `x` replaced by its shape and dtype.

    The call reads only metadata of `x`. Returns positional and keyword arguments.
    """
    place, keyword = (_SHAPED_LIKE | _TYPED_LIKE)[name]
    like = args[place] if place < len(args) else kwargs.get(keyword)
    if not isinstance(like, Tensor):
        return args, kwargs
    shape = tuple(map(expression, like.shape)) if name in _SHAPED_LIKE else ()
    if not all(isinstance(size, int) for size in shape):
        return args, kwargs
    form = Metadata(shape, like.dtype)
    if place < len(args):
        return (*args[:place], form, *args[place + 1 :]), kwargs
    return args, {**kwargs, keyword: form}


def written_by(func: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a call writes in place."""
    schema = getattr(func, "_schema", None)
    if schema is not None:
        return list(tensors_in(_written_by_schema(schema, args, kwargs)))
    name = getattr(func, "__name__", "")
    named = _named(func, args, kwargs)
    written = [kwargs.get("out")]
    if name in _WRITING or (name.endswith("_") and not name.endswith("__")) or named.get("inplace") is True:
        written += args[:1] or [kwargs.get("input", kwargs.get("self"))]
    if name in _NORMS and named.get("training", named.get("use_input_stats")):
        written += [named.get("running_mean"), named.get("running_var")]
    return list(tensors_in(written))


def _written_by_schema(schema: Any, args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
    writing = [(place, a.name) for place, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
    return [args[place] if place < len(args) else kwargs.get(name) for place, name in writing]


def _named(func: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return {name: argument} of a call of a Python function of torch that may write in place; else {}."""
    names: tuple[str, ...]
    if getattr(func, "__name__", "") in _NORMS and not isinstance(func, FunctionType):
        names = _OF_TORCH_NORMS
    elif isinstance(func, FunctionType) and func.__module__ == "torch.nn.functional":
        names = _parameters(func)
    else:
        return {}
    return {**dict(zip(names, args, strict=False)), **kwargs}


@lru_cache(maxsize=1024)
def _parameters(function: FunctionType) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, including those in nested containers, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def memory_of(tensor: Tensor) -> int | None:
    """Return a key of a tensor's memory, equal for tensors that share storage; None without storage."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors have several storages
        return None
