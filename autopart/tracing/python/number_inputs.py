"""Python numbers that change between calls (such as a KL weight), as inputs of the program.

A trace first holds each Python number as a constant. When a number changes for the first time, the call is traced
again with the number as a 0-d tensor input. The model's code gets `tensor.item()`, so its arithmetic is that of Python
numbers. If code branches on the number, the number cannot be an input, and the call is traced again for each new
value.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

NUMBERS = "python_numbers"
"""Name of the argument that holds the Python numbers of a call, as {name: tensor}."""


class NumberSlot(NamedTuple):
    """Variable from which the user's code reads a number: attribute, global, closure variable or entry.

    Attributes:
        identity: the object that has the number, and the number's key in this object.
        get: returns the number.
        set: replaces the number.
    """

    identity: tuple[int, Any]
    get: Callable[[], Any]
    set: Callable[[Any], None]


class NumberInputs:
    """The Python numbers that are inputs of a model's programs, because they changed between calls.

    Attributes:
        options: names of inputs that are arguments of the call, or variables, defaults or keywords of `loss_fn`.
        slots: {path: `NumberSlot`} of inputs that are attributes, globals or container entries.
        constants: names of numbers on which code branches, so that they cannot be inputs.
        last: {name: number} of the arguments and of `loss_fn` at the last trace.
    """

    def __init__(self) -> None:
        self.options: set[str] = set()
        self.slots: dict[str, NumberSlot] = {}
        self.constants: set[str] = set()
        self.last: Mapping[str, Any] = {}

    def __bool__(self) -> bool:
        return bool(self.options or self.slots)

    def key(self, numbers: Mapping[str, Any]) -> Hashable:
        """Return the part of a call's cache key that depends on numbers.

        It has the names of numbers that are inputs of the program, and the values of numbers that are constants in it.
        """
        others = tuple((name, value) for name, value in numbers.items() if name not in self.options)
        return frozenset(self.options), tuple((path, type(slot.get())) for path, slot in self.slots.items()), others

    def can_be_tensors(self) -> bool:
        """Return True if the program has number inputs, and all their slots still contain numbers."""
        return bool(self) and all(is_number(slot.get()) for slot in self.slots.values())

    def add(self, numbers: Mapping[str, Any], slots: Mapping[str, NumberSlot]) -> set[str]:
        """Turn numbers into inputs: those of `numbers` that differ from `last`, and all in `slots`.

        Numbers in `constants` stay constants. Returns the names of the new inputs.
        """
        options = {name for name, value in numbers.items() if self.last.get(name, value) != value}
        options -= self.options | self.constants
        added = {path: slot for path, slot in slots.items() if path not in self.constants}
        self.last = numbers
        self.options |= options
        self.slots |= added
        return options | added.keys()

    def refuse(self, names: set[str]) -> None:
        """Keep these numbers as constants in all later traces."""
        self.constants |= names
        self.options -= names
        self.slots = {path: slot for path, slot in self.slots.items() if path not in names}

    def tensors(self, numbers: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
        """Return {name: 0-d tensor} of the current values of the inputs."""
        values = {name: numbers[name] for name in sorted(self.options)}
        values |= {path: slot.get() for path, slot in self.slots.items()}
        return {name: torch.tensor(value, dtype=_DTYPES[type(value)], device=device) for name, value in values.items()}


_DTYPES = {int: torch.int64, float: torch.float64}


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def numbers_of(options: Mapping[str, Any], loss_fn: Any) -> dict[str, Any]:
    """Return {name: number} of a call's options and of its loss function's closure and defaults."""
    found = {name: value for name, value in options.items() if is_number(value)}
    return found | {path: slot.get() for path, slot in slots_of(loss_fn).items() if is_number(slot.get())}


def slots_of(function: Any) -> dict[str, NumberSlot]:
    """Return {name: `NumberSlot`} for a function's closure variables, defaults and partial keywords."""
    if isinstance(function, functools.partial):
        keywords = {f"{name} of loss_fn": entry_slot(function.keywords, name) for name in function.keywords}
        return {**slots_of(function.func), **keywords}
    if not isinstance(function, types.FunctionType):
        return {}
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        found[f"{name} of loss_fn"] = cell_slot(cell)
    defaults = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    for place, name in enumerate(names[len(names) - len(defaults) :]):
        found[f"{name} of loss_fn"] = _default_slot(function, place)
    for name in function.__kwdefaults__ or {}:
        found[f"{name} of loss_fn"] = entry_slot(function.__kwdefaults__, name)
    return found


def entry_slot(container: Any, key: Any) -> NumberSlot:
    """Return a `NumberSlot` for an entry of a dict or list."""
    get = _or_none(lambda: container[key])
    return NumberSlot((id(container), key), get, lambda value: container.__setitem__(key, value))


def attribute_slot(holder: Any, name: str) -> NumberSlot:
    get = _or_none(lambda: getattr(holder, name))
    return NumberSlot((id(holder), name), get, lambda value: setattr(holder, name, value))


def cell_slot(cell: types.CellType) -> NumberSlot:
    get = _or_none(lambda: cell.cell_contents)
    return NumberSlot((id(cell), ""), get, lambda value: setattr(cell, "cell_contents", value))


def _or_none(get: Callable[[], Any]) -> Callable[[], Any]:
    def value() -> Any:
        try:
            return get()
        except (LookupError, AttributeError, ValueError):  # ValueError: the closure variable is not set yet
            return None

    return value


def _default_slot(function: types.FunctionType, place: int) -> NumberSlot:
    def put(value: Any) -> None:
        before = function.__defaults__ or ()
        function.__defaults__ = (*before[:place], value, *before[place + 1 :])

    return NumberSlot((id(function), place), lambda: (function.__defaults__ or ())[place], put)


class _Slots:
    current: Mapping[str, NumberSlot] = {}


@contextmanager
def number_slots(slots: Mapping[str, NumberSlot]) -> Iterator[None]:
    """Let `assigned` write to these variables in the traces inside this `with` block.

    Each slot is a variable of the user's code that contains a number.
    """
    before, _Slots.current = _Slots.current, slots
    try:
        yield
    finally:
        _Slots.current = before


@contextmanager
def assigned(numbers: Mapping[str, Any]) -> Iterator[None]:
    """Write numbers to their slots, which are variables of the user's code, in a `with` block.

    Restore the earlier values at its end.
    """
    with ExitStack() as undo:
        for name, number in numbers.items():
            slot = _Slots.current.get(name)
            if slot is not None:
                undo.callback(slot.set, slot.get())
                slot.set(number)
        yield
