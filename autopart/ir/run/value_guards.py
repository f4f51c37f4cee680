"""Guards of a trace on values of the inputs: lengths, masks and indices that Python read.

A guard is a small program on the inputs, and the value that it returned for the traced call. A call with other values
needs another trace.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autopart.compat.torch_internals import tree_flatten

_TO_DEVICE = {"cpu", "cuda"}
"""Methods that move a tensor. Guards are computed on the device of the inputs, so these return their tensor."""
_FAILURES = (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError, OverflowError)


@dataclass(frozen=True, eq=False)
class InputTensor:
    """Input number `place` of the call."""

    place: int


@dataclass(frozen=True, eq=False)
class Metadata:
    """Shape and dtype of a tensor, in place of a tensor whose values are not needed."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class ValueCall:
    """Result number `place` of a recorded call; None if the result is a Python value.

    The tensors among the call's arguments are replaced by `ValueCall`, `InputTensor` and `Metadata` objects.
    `of_inputs`: the result depends on the inputs of the traced call.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: Mapping[str, Any]
    place: int | None
    of_inputs: bool = False

    @property
    def sources(self) -> Iterator[Any]:
        """The recorded calls, inputs and tensors among the arguments."""
        yield from _recorded((self.args, self.kwargs))


@dataclass(frozen=True, eq=False)
class ValueGuard:
    """A value that Python read in a trace.

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
        """The guards as text that is equal on all ranks if the values are equal."""
        return "".join(f", with {guard.text} = {guard.value}" for guard in self.guards)

    @cached_property
    def _steps(self) -> ValueProgram:
        return ValueProgram([guard.call for guard in self.guards])

    @cached_property
    def _values(self) -> list[Any]:
        return [guard.value for guard in self.guards]

    def hold(self, tensors: Sequence[Tensor], computed: dict[Hashable, Any]) -> bool:
        """Return True if a call with these tensors has the values of the traced call.

        Args:
            computed: cache of the values of guards, shared by the traces that one call is compared with.
        """
        if not self.guards:
            return True
        key = self._steps.key
        if key not in computed:
            try:
                computed[key] = self._steps.run(tensors)
            except _FAILURES:  # an operator rejects the new values: the model's own call will, too
                computed[key] = None
        return computed[key] == self._values


class ValueProgram:
    """Recorded calls, in the order in which they run. A call that several guards need runs once."""

    def __init__(self, results: Sequence[Any]):
        self._numbers: dict[int, int] = {}
        self.recorded: list[Any] = []
        """The calls, inputs and tensors, in the order in which they run."""
        for result in results:
            self._add(result)
        self._results = [self._numbers[id(result)] for result in results]
        self.key = (tuple(self._described()), tuple(self._results))

    @property
    def inputs(self) -> list[int]:
        """Numbers of the inputs that the program reads."""
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

    def _described(self) -> Iterator[Hashable]:
        for one in self.recorded:
            if isinstance(one, ValueCall):
                yield one.func, self._text(one.args), self._text(dict(one.kwargs)), one.place
            elif isinstance(one, InputTensor):
                yield one.place
            else:
                yield id(one) if isinstance(one, Tensor) else (one.shape, one.dtype)

    def _text(self, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"{type(value).__name__}({', '.join(map(self._text, value))})"
        if isinstance(value, dict):
            return ", ".join(f"{name}={self._text(entry)}" for name, entry in value.items())
        if isinstance(value, slice):
            return f"slice{self._text((value.start, value.stop, value.step))}"
        return f"%{self._numbers[id(value)]}" if _is_recorded(value) else repr(value)

    def run(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return the values for a call with these input tensors."""
        results: list[Any] = []
        device = next((tensors[place].device for place in self.inputs), torch.device("cpu"))
        with torch.no_grad():
            for one in self.recorded:
                results.append(self._result(one, tensors, results, device))
        return [results[number] for number in self._results]

    def _result(self, one: Any, tensors: Sequence[Tensor], results: list[Any], device: torch.device) -> Any:
        if isinstance(one, InputTensor):
            return tensors[one.place].detach()
        if isinstance(one, Tensor):
            return one.to(device)
        if isinstance(one, Metadata):
            return torch.zeros((), dtype=one.dtype, device=device).expand(one.shape)
        return call_with(one, lambda source: results[self._numbers[id(source)]], device)


def call_with(call: ValueCall, result_of: Callable[[Any], Any], device: torch.device) -> Any:
    """Make a recorded call again on a device. `result_of`: returns the tensor of a recorded call or input."""
    name = getattr(call.func, "__name__", "")
    if name in _TO_DEVICE and isinstance(call.args[0], (ValueCall, InputTensor)):
        return result_of(call.args[0])
    args = _replaced(call.args, result_of, device)
    kwargs = {key: _replaced(value, result_of, device) for key, value in call.kwargs.items()}
    if kwargs.get("device") is not None:
        kwargs["device"] = device
    result = call.func(*args, **kwargs)
    if call.place is None or isinstance(result, Tensor):
        return result
    return tree_flatten(result)[0][call.place]


def _replaced(value: Any, result_of: Callable[[Any], Any], device: torch.device) -> Any:
    if isinstance(value, (list, tuple)):
        parts = [_replaced(part, result_of, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, slice):
        return slice(*(_replaced(part, result_of, device) for part in (value.start, value.stop, value.step)))
    if _is_recorded(value):
        return result_of(value)
    return device if isinstance(value, torch.device) else value


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
