"""Guards on values of inputs and buffers (lengths, masks, flags) that Python read in the trace.

A guard is a small program on the inputs and buffers, and the value that it returned for the traced call. A call with
other values needs another trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autopart.compat.torch_internals import tree_flatten

_TO_DEVICE = {"cpu", "cuda"}
"""Methods that move a tensor to a device. Guards ignore them, and run on the device of the inputs."""
_FAILURES = (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError, OverflowError)


@dataclass(frozen=True, eq=False)
class InputTensor:
    """Placeholder for the input tensor with index `place` in a recorded call."""

    place: int


@dataclass(frozen=True, eq=False)
class Metadata:
    """Shape and dtype of a tensor whose values a recorded call does not need."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class BufferTensor(Metadata):
    """Buffer `name` of the model, with its value before the call. Zeros stand in for an unknown value."""

    name: str


@dataclass(frozen=True, eq=False)
class ValueCall:
    """Record of a torch call, with which its result can be computed again for other inputs.

    The tensors among the call's arguments are replaced by `ValueCall`, `InputTensor` and `Metadata` objects. If the
    call returns several tensors, `place` is the index of the recorded one. `place` is None if the result is a Python
    value. `of_inputs` is True if the result depends on the inputs of the traced call.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: Mapping[str, Any]
    place: int | None
    of_inputs: bool = False

    @property
    def sources(self) -> Iterator[Any]:
        """The arguments that are recorded calls, inputs or tensors."""
        yield from _recorded((self.args, self.kwargs))


@dataclass(frozen=True, eq=False)
class ValueGuard:
    """A value that Python read in a trace. A call with another value is traced again.

    Attributes:
        text: source text of the expression, `mask.sum(1).max()`.
        where: source line, `model.py:12`.
        call: computes the value from the inputs.
        value: the value in the traced call.
    """

    text: str
    where: str
    call: ValueCall
    value: Any


class ValueGuards:
    """The value guards of one trace, in the order in which Python read the values."""

    def __init__(self, guards: Sequence[ValueGuard] = ()):
        self.guards = tuple(guards)

    def __bool__(self) -> bool:
        return bool(self.guards)

    def __iter__(self) -> Iterator[ValueGuard]:
        return iter(self.guards)

    @property
    def text(self) -> str:
        """The guards as text. Ranks compare it: it is equal if the guarded values are equal."""
        return "".join(f", with {guard.text} = {guard.value}" for guard in self.guards)

    @cached_property
    def _program(self) -> ValueProgram:
        return ValueProgram([guard.call for guard in self.guards])

    @cached_property
    def _values(self) -> list[Any]:
        return [guard.value for guard in self.guards]

    def hold(self, tensors: Sequence[Tensor], computed: dict[str, Any], buffers: Mapping[str, Tensor]) -> bool:
        """Return True if a call with these tensors has the same guarded values as the traced call.

        Args:
            buffers: {name: current value} of the model's buffers.
            computed: cache of the values of guards, shared by the traces that one call is compared with.
        """
        if not self.guards:
            return True
        key = self._program.key
        if key not in computed:
            try:
                computed[key] = self._program.run(tensors, buffers)
            except _FAILURES:  # an operator rejects the new values: the model's own call will reject them too
                computed[key] = None
        return computed[key] == self._values


class ValueProgram:
    """Recorded calls that compute the values of guards, in the order in which they run.

    A call that several guards need runs once.
    """

    def __init__(self, results: Sequence[Any]):
        self._numbers: dict[int, int] = {}
        self.recorded: list[Any] = []
        """The calls, inputs and tensors, in the order in which they run."""
        for result in results:
            self._add(result)
        self._results = [self._numbers[id(result)] for result in results]
        self.key = "\n".join([*map(self._described, self.recorded), *map(str, self._results)])
        """Text that is equal for programs that compute equal values."""

    @property
    def inputs(self) -> list[int]:
        """Indices of the model inputs that the program reads."""
        return [one.place for one in self.recorded if isinstance(one, InputTensor)]

    def _add(self, result: Any) -> None:
        todo = [result]
        while todo:
            one = todo[-1]
            waiting = [] if not isinstance(one, ValueCall) else [s for s in one.sources if id(s) not in self._numbers]
            if waiting:
                todo += waiting
                continue
            todo.pop()
            if id(one) not in self._numbers:
                self._numbers[id(one)] = len(self.recorded)
                self.recorded.append(one)

    def _described(self, one: Any) -> str:
        if isinstance(one, ValueCall):
            return f"{id(one.func)} {self._text(one.args)} {self._text(dict(one.kwargs))} {one.place}"
        if isinstance(one, BufferTensor):
            return f"buffer {one.name}"
        if isinstance(one, InputTensor):
            return f"input {one.place}"
        return f"tensor {id(one)}" if isinstance(one, Tensor) else f"{one.shape} {one.dtype}"

    def _text(self, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"{type(value).__name__}({', '.join(map(self._text, value))})"
        if isinstance(value, dict):
            return ", ".join(f"{name}={self._text(entry)}" for name, entry in value.items())
        if isinstance(value, slice):
            return f"slice{self._text((value.start, value.stop, value.step))}"
        return f"%{self._numbers[id(value)]}" if _is_recorded(value) else repr(value)

    @property
    def buffers(self) -> list[BufferTensor]:
        """The buffers that the program reads."""
        return [one for one in self.recorded if isinstance(one, BufferTensor)]

    def run(self, tensors: Sequence[Tensor], buffers: Mapping[str, Tensor] = MappingProxyType({})) -> list[Any]:
        """Return the values for a call with these input tensors, computed on the device of the tensors.

        Args:
            buffers: {name: current value} of the model's buffers.
        """
        device = next((tensors[place].device for place in self.inputs), torch.device("cpu"))
        results: list[Any] = []
        with torch.no_grad():
            for step in self._steps:
                results.append(step((tensors, buffers), results, device))
        return [results[number] for number in self._results]

    @cached_property
    def _steps(self) -> list[_Step]:
        return [self._step(one) for one in self.recorded]

    def _step(self, one: Any) -> _Step:
        """Return a function that computes a recorded value from the recorded values that run before it."""
        if isinstance(one, InputTensor):
            place = one.place
            return lambda given, results, device: given[0][place].detach()
        if isinstance(one, Tensor):
            return lambda given, results, device: one.to(device)
        if isinstance(one, Metadata):
            name = one.name if isinstance(one, BufferTensor) else ""

            def value(given: _Given, results: Sequence[Any], device: torch.device) -> Tensor:
                if name in given[1]:
                    return given[1][name].detach().to(device)
                return torch.zeros((), dtype=one.dtype, device=device).expand(one.shape)

            return value
        if getattr(one.func, "__name__", "") in _TO_DEVICE and _is_recorded(one.args[0]):
            number = self._numbers[id(one.args[0])]
            return lambda given, results, device: results[number]
        kwargs = {**one.kwargs, "device": torch.device("cpu")} if one.kwargs.get("device") is not None else one.kwargs
        args, named, func, of_several = self._filled(one.args), self._filled(dict(kwargs)), one.func, one.place

        def call(given: _Given, results: Sequence[Any], device: torch.device) -> Any:
            result = func(*args(results, device), **named(results, device))
            is_one = of_several is None or isinstance(result, Tensor)
            return result if is_one else tree_flatten(result)[0][of_several]

        return call

    def _filled(self, value: Any) -> Callable[[Sequence[Any], torch.device], Any]:
        """Return a function that inserts computed values and the device into an argument of a recorded call."""
        if _is_recorded(value):
            number = self._numbers[id(value)]
            return lambda results, device: results[number]
        if isinstance(value, torch.device):
            return lambda results, device: device
        if not isinstance(value, (list, tuple, dict, slice)) or not value:
            return lambda results, device: value
        if isinstance(value, dict):
            named = {name: self._filled(entry) for name, entry in value.items()}
            return lambda results, device: {name: entry(results, device) for name, entry in named.items()}
        if isinstance(value, slice):
            bounds = self._filled((value.start, value.stop, value.step))
            return lambda results, device: slice(*bounds(results, device))
        parts, kind = [self._filled(part) for part in value], type(value)
        if hasattr(value, "_fields"):
            return lambda results, device: kind(*[part(results, device) for part in parts])
        return lambda results, device: kind([part(results, device) for part in parts])


_Given = tuple[Sequence[Tensor], Mapping[str, Tensor]]
"""Input tensors of a call, and {name: buffer}."""
_Step = Callable[[_Given, Sequence[Any], torch.device], Any]


def _is_recorded(value: Any) -> bool:
    return isinstance(value, (ValueCall, InputTensor, Metadata, Tensor))


def _recorded(value: Any) -> Iterator[Any]:
    if _is_recorded(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _recorded(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _recorded(part)
    elif isinstance(value, slice):
        for part in (value.start, value.stop, value.step):
            yield from _recorded(part)


def shown_value(value: Any) -> str:
    """Return a value as short text."""
    text = str(value)
    return text if len(text) <= 40 else f"{text[:36]} ..."
