"""Guards: checks, at each call, that no Python value that is a constant of the trace has changed."""

from __future__ import annotations

import functools
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autopart.errors import Refusal, TraceError, UsageError
from autopart.ir.trace import Trace
from autopart.tracing.python.number_inputs import NumberSlot, attribute_slot, cell_slot, entry_slot, is_number
from autopart.tracing.python.recorded_reads import (
    ALL_NAMES,
    FUNCTIONS,
    MAX_ENTRIES,
    MISSING,
    PLAIN,
    Cell,
    Computed,
    RecordedReads,
    entries_of,
    identity_of,
    is_absent,
    is_terminal,
    is_watched,
    names_of,
    value_key,
    version,
    where,
)
from autopart.tracing.with_loss import users_model, users_modules

_MODULES_OWN = frozenset(vars(nn.Module())) | {"training"}
"""Attributes that every module has, which are not guarded.

`training` needs no guard, because the cache key of a call contains the train/eval mode.
"""

_CODE = (*FUNCTIONS, classmethod, staticmethod)


class Change(NamedTuple):
    """A Python value that differs from its value in the trace.

    `slot`: the `NumberSlot` with which the value can be replaced; None if it cannot be replaced.
    """

    path: str
    before: Any
    now: Any
    slot: NumberSlot | None


class Guards:
    """Guards of one trace: all Python values that it depends on, except tensors and the call's arguments.

    Args:
        reads: the names that the user's code read in the trace.
        model: the traced module: the user's model, or a `WithLoss` around it.
        others: the loss function and other options, whose attributes are guarded too.
        inputs: numbers that are inputs of the program; they are not guarded.
        device: the program reads the user's constant tensors on this device directly, so they need no guard. It has
            copies of tensors on other devices, which are guarded. None: it has copies of all tensors.
        updated: attributes of modules that every call sets to values that the trace computed. They are guarded. Of
            other values that the code changes, only numbers, flags, strings and containers of these are guarded.
    """

    def __init__(
        self, reads: RecordedReads, model: nn.Module, others: Iterable[Any], inputs: Iterable[NumberSlot] = (),
        device: torch.device | None = None, updated: Iterable[str] = (),
    ):  # fmt: skip
        self._reads, self._device = reads, device
        self._inputs = {slot.identity for slot in inputs}
        modules = dict(users_modules(model))
        self._updated = {
            (id(vars(modules[path])), name) for path, _, name in (name.rpartition(".") for name in updated)
        }
        self.unstable: list[str] = []
        """Paths of values that the user's code changes in one call and reads in the next call."""
        self._containers: list[_Entries] = []
        self._tensors: list[tuple[str, Tensor, int]] = []
        self._of_model = {id(t) for t in (*model.parameters(), *model.buffers())}
        self._seen: set[int] = set()
        self._todo: list[tuple[str, Any]] = []
        self._by_mapping: dict[int, dict[str, tuple[str, Any]]] = {}
        self._mappings: dict[int, Any] = {}
        for path, module in users_modules(model):
            self._follow(f"{path}." if path else "model.", module)
        for other in others:
            self._argument(other)
        for mapping, names in reads.of_globals.values():
            for name in sorted(names):
                self._value("", mapping, mapping, name, mapping.get(name, MISSING))
        for cell, name in reads.of_cells.values():
            self._value("", cell, Cell(cell), name, Cell(cell).get(name, MISSING))
        while self._todo:
            self._attributes(*self._todo.pop())
        self._of_modules: list[_GuardedValues] = []
        self._others: list[_GuardedValues | _Entries] = [*self._containers]
        for key, found in self._by_mapping.items():
            is_module = isinstance(self._mappings[key], weakref.ref)
            (self._of_modules if is_module else self._others).append(_GuardedValues(self._mappings[key], found))
        self._parents = [weakref.ref(module) for _, module in users_modules(model) if module._modules]
        self._children = [_no_layer if layer is None else weakref.ref(layer) for layer in self._layers()]
        self._parameters = {id(p) for p in model.parameters()}
        self._flatten()
        del self._reads, self._seen, self._todo, self._by_mapping, self._mappings, self._of_model, self._containers

    @property
    def num_values(self) -> int:
        """Number of values that are compared at each call."""
        of_others = sum(len(group.values or ()) for group in self._others)
        return len(self._flat) + of_others + len(self._tensors)

    def _flatten(self) -> None:
        """Collect the guarded values of all modules in one list, so that hundreds are compared quickly."""
        self._getters = [(group.mapping, group.get) for group in self._of_modules]
        self._flat = [*chain.from_iterable(group.values for group in self._of_modules)]

    def _layers(self) -> list[Any]:
        """Return the children of all modules; [] if the user has deleted the model."""
        try:
            return [*chain.from_iterable([parent()._modules.values() for parent in self._parents])]
        except AttributeError:
            return []

    def _has_same_layers(self) -> bool:
        layers = self._layers()
        return len(layers) == len(self._children) and all(map(is_, layers, [child() for child in self._children]))

    def hold(self) -> bool:
        """Return True if every guarded value equals its value in the trace."""
        if not self._has_same_layers() and self._has_other_layers():
            return False
        try:
            now = [get(module().__dict__) for module, get in self._getters]
            of_modules = all(map(is_, chain.from_iterable(now), self._flat))
        except (AttributeError, KeyError):  # the user has deleted the model or an attribute
            of_modules = False
        if not of_modules:
            if not all([group.hold() for group in self._of_modules]):
                return False
            self._of_modules = [group for group in self._of_modules if group.mapping() is not None]
            self._flatten()
        for group in self._others:
            if not group.hold():
                return False
        return all([version(tensor) == then for _, tensor, then in self._tensors])

    def _has_other_layers(self) -> bool:
        """Return True if the user replaced a layer of the model; False if the user has deleted the model.

        Raises UsageError if a new layer has parameters that the traced model does not have.
        """
        parents = [parent() for parent in self._parents]
        if any(parent is None for parent in parents):
            self._parents, self._children = [], []
            return False
        others = [n for p in parents if p is not None for n, t in p.named_parameters() if id(t) not in self._parameters]
        if others:
            raise UsageError(
                f"the model has a new layer: its parameter '{others[0]}' did not exist when the model was traced",
                why="the partitioned model trains only the parameters of the traced model",
                hint="change layers before parallelize()",
            )
        return True

    def changes(self) -> Iterator[Change]:
        """Yield a Change for every value that differs from the trace."""
        if not self._has_same_layers() and self._has_other_layers():
            yield Change("the model's list of layers", "the traced one", "another", None)
        for group in (*self._of_modules, *self._others):
            yield from group.changes()
        for path, tensor, then in self._tensors:
            if version(tensor) != then:
                yield Change(path, "a tensor", "other values", None)

    def changed_numbers(self) -> dict[str, NumberSlot]:
        """Return {path: `NumberSlot`} of the numbers that changed; {} if any other value changed too."""
        changes = [*self.changes()]
        if not all(is_number(c.now) and type(c.before) is type(c.now) for c in changes):
            return {}
        return {change.path: change.slot for change in changes if change.slot is not None}

    def _follow(self, path: str, thing: Any) -> None:
        if id(thing) not in self._seen and not isinstance(thing, types.BuiltinFunctionType):
            self._seen.add(id(thing))
            self._todo.append((path, thing))

    def _argument(self, thing: Any) -> None:
        """Guard the attributes of a loss function or option.

        For a method, the attributes of its object are guarded; for a function, its closure variables and defaults.
        """
        if isinstance(thing, functools.partial):
            for part in (thing.func, *thing.args, *thing.keywords.values()):
                self._argument(part)
        elif isinstance(thing, types.MethodType):
            self._argument(thing.__func__)
            self._argument(thing.__self__)
        elif isinstance(thing, types.FunctionType):
            if id(thing) not in self._seen:
                self._seen.add(id(thing))
                for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
                    value = Cell(cell).get(name, MISSING)
                    self._value("", cell, Cell(cell), name, value)
                    if isinstance(value, FUNCTIONS):
                        self._argument(value)
                for value in (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()):
                    self._argument(value)
        elif isinstance(thing, (dict, list, tuple)):
            self._contents(type(thing).__name__, thing)
        elif not is_terminal(thing):
            self._follow(f"{getattr(thing, '__qualname__', type(thing).__qualname__)}.", thing)

    def _attributes(self, path: str, holder: Any) -> None:
        if isinstance(holder, (type, types.ModuleType)):
            path = f"{holder.__name__}."
            names = self._reads.of_holder.get(id(holder), (holder, set[str]()))[1]
        else:
            names = self._reads.of_type.get(type(holder), set[str]())
        if ALL_NAMES in names:
            names = names | getattr(holder, "__dict__", {}).keys()
        for name in sorted(names - {ALL_NAMES}):
            if isinstance(holder, nn.Module) and (name in _MODULES_OWN or name in holder._modules):
                continue
            mapping = where(holder, name)
            own = getattr(holder, "__dict__", None)
            if mapping is None:
                if isinstance(own, dict) and is_absent(holder, name):
                    self._watch(f"{path}{name}", own, holder, name, MISSING)
                continue
            if mapping is not own and isinstance(own, dict) and not isinstance(mapping, Computed):
                # An instance attribute of this name would hide it.
                self._watch(f"{path}{name}", own, holder, name, MISSING)
            self._value(path, holder, mapping, name, mapping.get(name, MISSING))

    def _value(self, path: str, holder: Any, mapping: Any, name: str, value: Any) -> None:
        """Guard a Python value, and the attributes that the user's code read from the value."""
        if value is MISSING or (isinstance(value, _CODE) and not isinstance(holder, nn.Module)):
            return
        if isinstance(value, types.ModuleType):
            if is_watched(value.__name__):
                self._follow("", value)
            return
        if isinstance(value, type):
            if is_watched(value.__module__):
                self._follow("", value)
            return
        if id(value) in self._of_model:
            return
        if (identity_of(holder), name) in self._reads.changed and (id(mapping), name) not in self._updated:
            is_left = self._reads.is_left_changed(holder, name, value)
            if is_left and not isinstance(holder, nn.Module):  # `PythonState` checks attributes of modules
                self.unstable.append(f"{path}{name}")
                return
            if not _is_data(value):
                return
        if isinstance(value, nn.Module):
            return self._follow(f"{path}{name}.", value)
        has_reads = type(value) in self._reads.of_type
        if is_terminal(value) or (has_reads and not isinstance(mapping, Computed)):
            self._watch(f"{path}{name}", mapping, holder, name, value)
        if not is_terminal(value):
            self._follow(f"{path}{name}.", value)

    def _watch(self, path: str, mapping: Any, holder: Any, name: str, value: Any) -> None:
        is_module = isinstance(holder, nn.Module) and mapping is vars(holder)
        slot = _slot_of(mapping, name)
        if slot is not None and slot.identity in self._inputs:
            return
        self._mappings[id(mapping)] = weakref.ref(holder) if is_module else mapping
        self._by_mapping.setdefault(id(mapping), {})[name] = path, value
        self._contents(path, value)

    def _contents(self, path: str, value: Any) -> None:
        if type(value) in (Tensor, nn.Parameter):
            if value.device != self._device and id(value) not in self._of_model:
                self._tensors.append((path, value, version(value)))
        elif isinstance(value, (dict, list, tuple, set, frozenset)) and id(value) not in self._seen:
            self._seen.add(id(value))
            for entry in entries_of(value) if len(value) <= MAX_ENTRIES else ():
                self._contents(path, entry)
            if not isinstance(value, (tuple, frozenset)):
                self._containers.append(_Entries(value, path, self._inputs))


def _is_data(value: Any) -> bool:
    """Return True for numbers, flags, strings and the like, and for short containers of these."""
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return len(value) <= MAX_ENTRIES and all(map(_is_data, entries_of(value)))
    return isinstance(value, PLAIN)


def _no_layer() -> None:
    """Return None, like a weak reference to a child module that is None."""


class _GuardedValues:
    """Guarded values that are stored in one mapping, such as an object's `__dict__`, and are read by name."""

    def __init__(self, mapping: Any, found: Mapping[str, tuple[str, Any]]):
        self.mapping, self.names = mapping, [*found]
        self.paths, self.values = [path for path, _ in found.values()], tuple(value for _, value in found.values())
        if len(found) == 1:  # `itemgetter` returns a tuple for several names
            self.names, self.paths, self.values = self.names * 2, self.paths * 2, self.values * 2
        is_dict = isinstance(mapping, (weakref.ref, dict, types.MappingProxyType))
        has_all = not any(value is MISSING for value in self.values)
        self.get: Callable[[Any], Any] = itemgetter(*self.names) if is_dict and has_all else self._get
        self.keys = [_identity_key(value) for value in self.values]

    def _get(self, mapping: Any) -> list[Any]:
        get = mapping.get
        return [get(name, MISSING) for name in self.names]

    def hold(self) -> bool:
        mapping = self.mapping
        if type(mapping) is weakref.ref:
            module = mapping()
            if module is None:  # the user has deleted the model
                return True
            mapping = module.__dict__
        try:
            now = self.get(mapping)
        except KeyError:
            return False
        return all(map(is_, now, self.values)) or self._hold_anew(now)

    def _hold_anew(self, now: Sequence[Any]) -> bool:
        """Return True if the values are new objects that equal the guarded ones. Then guard the new objects."""
        if [_identity_key(value) for value in now] != self.keys:
            return False
        self.values = tuple(now)
        return True

    def changes(self) -> Iterator[Change]:
        mapping = self.mapping
        if type(mapping) is weakref.ref:
            module = mapping()
            if module is None:
                return
            mapping = vars(module)
        for place, name in enumerate(dict.fromkeys(self.names)):
            now = mapping.get(name, MISSING)
            if _identity_key(now) != self.keys[place]:
                yield Change(self.paths[place], self.values[place], now, _slot_of(mapping, name))


class _Entries:
    """Guards of the entries of one list, dict or set.

    Args:
        inputs: ids of the numbers that are inputs of the program, so that they are not guarded.
    """

    def __init__(self, container: Any, path: str, inputs: Collection[tuple[int, Any]] = ()):
        self.container, self.path, self.length = container, path, len(container)
        names = list(container) if isinstance(container, dict) else range(self.length)
        self.skipped = (
            {place for place, name in enumerate(names) if (id(container), name) in inputs} if inputs else set()
        )
        self.values: tuple[Any, ...] | None = None
        if self.length <= MAX_ENTRIES and any(
            not isinstance(v, _CODE) and is_terminal(v) for v in entries_of(container)
        ):
            self.values, self.keys, self.names = self._entries(), self._keys(), self._names()

    def _entries(self) -> tuple[Any, ...]:
        entries = entries_of(self.container)
        return tuple(e for place, e in enumerate(entries) if place not in self.skipped) if self.skipped else entries

    def _names(self) -> list[Any]:
        return names_of(self.container) if isinstance(self.container, dict) else []

    def _keys(self) -> list[Hashable]:
        return [_identity_key(entry) for entry in self._entries()]

    def hold(self) -> bool:
        if self.values is None or len(self.container) != self.length:
            return len(self.container) == self.length
        return all(map(is_, self._entries(), self.values)) or self._hold_anew()

    def _hold_anew(self) -> bool:
        is_same = self._keys() == self.keys and self._names() == self.names
        if is_same:
            self.values = self._entries()
        return is_same

    def changes(self) -> Iterator[Change]:
        if self.hold():
            return
        names = [*self.container] if isinstance(self.container, dict) else [*range(len(self.container))]
        entries = entries_of(self.container)
        is_indexed = isinstance(self.container, (dict, list)) and self.values is not None and not self.skipped
        if not is_indexed or len(names) != self.length or self._names() != self.names:
            yield Change(self.path, f"{self.length} entries", entries, None)
            return
        for name, entry, before, key in zip(names, entries, self.values or (), self.keys, strict=True):
            if _identity_key(entry) != key:
                yield Change(f"{self.path}[{name!r}]", before, entry, entry_slot(self.container, name))


def _slot_of(mapping: Any, name: str) -> NumberSlot | None:
    """Return the `NumberSlot` that reads and replaces an entry of a mapping.

    None if the entry cannot be replaced.
    """
    if isinstance(mapping, Cell):
        return cell_slot(mapping.cell)
    if isinstance(mapping, Computed):
        return attribute_slot(mapping.holder, name)
    return entry_slot(mapping, name) if isinstance(mapping, dict) else None


def _identity_key(value: Any) -> Hashable:
    """Return a comparison key: `value_key` of plain values, the identity of tensors and other objects."""
    is_object = isinstance(value, (Tensor, dict, list, set)) or not is_terminal(value)
    return id(value) if is_object else value_key(value, tensors=False)


def shown(value: Any) -> str:
    """Return a short text of a value. The text of a tensor has only its type, not its values."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {shown(entry)}" for key, entry in list(value.items())[:4]) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return f"[{', '.join(map(shown, list(value)[:4]))}]"
    if value is MISSING:
        return "nothing"
    is_plain = is_terminal(value) and not isinstance(value, (Tensor, *FUNCTIONS))
    text = repr(value) if is_plain else getattr(value, "__qualname__", None) or f"a {type(value).__qualname__}"
    return text[:40]


def warn_of_change(change: Change) -> None:
    """Warn that a Python value of the user's code changed, so that the call is traced again."""
    warnings.warn(
        f"{change.path} changed from {shown(change.before)} to {shown(change.now)} since it was traced: autopart "
        "traces the call again for each new value. Pass a value that changes often as a tensor input.",
        stacklevel=2,
    )


def check_unstable(model: nn.Module, paths: list[str], first: Trace, second: Trace) -> None:
    """Raise TraceError if two traces of a call differ because forward changes Python values that it reads.

    Args:
        paths: paths of the values that changed during the first trace.
    """
    if str(first.graph) != str(second.graph):
        raise TraceError(
            f"{type(users_model(model)).__name__} computes something different in every call", refusal=Refusal.STATE,
            why=f"it changes {', '.join(sorted(paths)[:3])} and branches on it",
            hint="change it in the training loop, which starts a new trace; or keep it as a tensor in a buffer "
            "(register_buffer)",
        )  # fmt: skip
