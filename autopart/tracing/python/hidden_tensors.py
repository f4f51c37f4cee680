"""Tensors that a model's code stores outside of module attributes.

Code can store tensors in globals, classes, closures, objects, containers and `functools.lru_cache`. A trace runs the
code once on fake tensors. Fake tensors that the code stored are removed again, so that the user's model and the next
trace do not find them.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor, nn

_FOREIGN = frozenset({"torch", "torchgen", "numpy", "autopart"}) | sys.stdlib_module_names
"""Packages whose code stores no tensors of a model, so that it is not searched."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, Tensor)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_CONTAINERS = (list, dict, set, deque)
_TORCH_OWN = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes in which a module stores its own tensors.

The program returns new values assigned to them.
"""
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has, such as hooks. `PythonState` restores them."""
LruCache: Any = type(functools.lru_cache(lambda: None))


class ReplacedTensor(NamedTuple):
    """A tensor that a forward removed or replaced. `name`: text of the variable that stored it."""

    name: str
    tensor: Tensor


class Left(NamedTuple):
    """A value with tensors that a forward stored in a variable. `name`: text of the variable."""

    name: str
    place: Any
    key: Any
    value: Any


class HiddenTensors:
    """Context manager that removes the tensors that a forward stored in globals, objects and containers.

    Values without tensors are not removed.

    Attributes:
        replaced: tensors that the forward removed or replaced by another tensor.
        left: values with tensors that the forward stored in variables that had no tensor before.
        start: values that variables listed in `left` get before the next forward.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.replaced: list[ReplacedTensor] = []
        self.left: list[Left] = []
        self.start: list[Left] = []

    def __enter__(self) -> HiddenTensors:
        self.replaced.clear()
        self.left.clear()
        self._before = [(place, content_of(place)) for place in places_of(self.model)]
        for one in self.start:
            put_content(one.place, {**content_of(one.place), one.key: one.value}, [one.key])
        return self

    def __exit__(self, *error: object) -> None:
        for place, before in self._before:
            self._restore(place, before)
        del self._before

    def _restore(self, place: Any, before: Mapping[Any, Any]) -> None:
        if isinstance(place, LruCache):
            if place.cache_info().misses != before["misses"] and any(map(_holds_tensors, gc.get_referents(place))):
                place.cache_clear()
            return
        now = content_of(place)
        changed = [key for key in {**before, **now} if before.get(key, now) is not now.get(key, before)]
        if not any(_holds_tensors(now.get(key)) or _holds_tensors(before.get(key)) for key in changed):
            return
        for key in changed:
            value = before.get(key)
            if isinstance(value, Tensor):
                self.replaced.append(ReplacedTensor(f"{_name_of(place)}{key}", value))
            elif not _holds_tensors(value) and _holds_tensors(now.get(key)):
                self.left.append(Left(f"{_name_of(place)}{key}", place, key, now[key]))
        put_content(place, before, changed)


def places_of(model: nn.Module) -> list[Any]:
    """Return the objects in which a forward can store a value, found by the names in its code.

    These are dicts of globals and attributes, classes, closures, other containers, and caches of functions.
    """
    return _Walk(model).places


class _Walk:
    """Search, starting at a model, for the objects in which its code can store a value.

    To skip the parts of a library that the forward does not use, the search follows a method or attribute of a class
    only if code that it has searched uses its name.
    """

    def __init__(self, model: nn.Module):
        self.places: list[Any] = []
        self._seen: dict[int, Any] = {}
        self._names = {"forward"}
        self._waiting: defaultdict[str, list[Any]] = defaultdict(list)
        self._todo: list[Any] = []
        self._add(model.modules())
        while self._todo:
            thing = self._todo.pop()
            if _is_place(thing):
                self.places.append(thing)
            self._follow(thing)

    def _add(self, things: Iterable[Any]) -> None:
        for thing in things:
            if id(thing) not in self._seen and not isinstance(thing, _PLAIN):
                self._seen[id(thing)] = thing
                self._todo.append(thing)

    def _add_named(self, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            if name in self._names or (name.startswith("__") and isinstance(value, types.FunctionType)):
                self._add((value,))
            else:
                self._waiting[name].append(value)

    def _add_names(self, names: frozenset[str]) -> None:
        for name in names - self._names:
            self._names.add(name)
            self._add(self._waiting.pop(name, ()))

    def _follow(self, thing: Any) -> None:
        if isinstance(thing, nn.Module):
            attributes = {name: part for name, part in vars(thing).items() if name not in _TORCH_OWN}
            self._add(part for name, part in attributes.items() if name not in _OF_MODULES or part)
            self._add((type(thing),))
        elif isinstance(thing, types.FunctionType):
            self._follow_function(thing)
        elif isinstance(thing, type):
            if _is_own(thing):
                self._add_named(vars(thing))
                self._add(thing.__mro__[1:])
        elif isinstance(thing, dict) and "__builtins__" in thing:
            pass  # of globals, only the names that functions use
        elif (_is_own(type(thing)) or isinstance(thing, _NAMESPACES)) and not isinstance(thing, types.ModuleType):
            self._add((type(thing), getattr(thing, "__dict__", None)))
        else:
            self._add(_parts(thing))

    def _follow_function(self, function: types.FunctionType) -> None:
        """Search a function's closure, defaults, attributes, and the globals that its code names."""
        if not _is_own(function):
            return
        names = _names(function.__code__)
        self._add_names(names)
        self._add((*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__, vars(function)))
        spaces = [function.__globals__]
        for space in spaces:
            self._add((space,))
            for name in names & space.keys():
                part = space[name]
                if not isinstance(part, types.ModuleType):
                    self._add((part,))
                elif _is_own_name(part.__name__) and not any(vars(part) is s for s in spaces):
                    spaces.append(vars(part))


def _is_place(thing: Any) -> bool:
    if isinstance(thing, type):
        return _is_own(thing)
    return isinstance(thing, (*_CONTAINERS, types.CellType, LruCache))


def _is_own(thing: Any) -> bool:
    return _is_own_name(getattr(thing, "__module__", None))


def _is_own_name(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] not in _FOREIGN


def _parts(thing: Any) -> Iterable[Any]:
    """Return the objects that an object contains or wraps, such as entries or attributes."""
    if isinstance(thing, dict):
        return dict.values(thing)
    if isinstance(thing, Mapping):
        return (thing.__dict__,) if hasattr(thing, "__dict__") else ()
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        return thing
    if isinstance(thing, types.CellType):
        return content_of(thing).values()
    if isinstance(thing, types.MethodType):
        return thing.__self__, thing.__func__
    if isinstance(thing, (staticmethod, classmethod)):
        return (thing.__func__,)
    if isinstance(thing, property):
        return thing.fget, thing.fset
    if isinstance(thing, functools.cached_property):
        return (thing.func,)
    if isinstance(thing, functools.partial):
        return thing.func, thing.args, thing.keywords
    if isinstance(thing, LruCache):
        return (thing.__wrapped__,)
    has_attributes = (_is_own(type(thing)) and hasattr(thing, "__dict__")) or isinstance(thing, _NAMESPACES)
    return vars(thing).values() if has_attributes else ()


@functools.lru_cache(100_000)
def _names(code: CodeType) -> frozenset[str]:
    """Return the global and attribute names that a function's bytecode (and nested functions) reads."""
    inside = (_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(code.co_names).union(*inside)


def content_of(place: Any) -> dict[Any, Any]:
    """Return the content of a container, class or closure cell as {key: value}.

    For a `functools.lru_cache`, whose entries cannot be read, returns its number of misses.
    """
    if isinstance(place, LruCache):
        return {"misses": place.cache_info().misses}
    if isinstance(place, type):
        return dict(vars(place))
    if isinstance(place, types.CellType):
        try:
            return {"": place.cell_contents}
        except ValueError:  # the closure variable is not set yet
            return {}
    if isinstance(place, dict):
        return dict(dict.items(place))  # a user's class may create an entry on access
    return {id(value): value for value in place} if isinstance(place, set) else dict(enumerate(place))


def put_content(place: Any, content: Mapping[Any, Any], changed: list[Any]) -> None:
    """Set the entries of a container, class or closure cell. `changed`: the keys of entries that differ."""
    if isinstance(place, (list, deque, set)):
        fill: Callable[[Any], None] = place.update if isinstance(place, set) else place.extend
        place.clear()
        fill(content.values())
    elif isinstance(place, types.CellType):
        place.cell_contents = content.get("")
    elif isinstance(place, OrderedDict):
        place.clear()
        place.update(content)
    else:
        _put_back(place, content, changed)


def _put_back(place: Any, before: Mapping[Any, Any], changed: list[Any]) -> None:
    for key in changed:
        if isinstance(place, type):
            setattr(place, key, before[key]) if key in before else delattr(place, key)
        elif key in before:
            place[key] = before[key]
        else:
            del place[key]


def _holds_tensors(value: Any) -> bool:
    """Return True if a value contains a tensor, in containers or objects."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        thing = todo.pop()
        if isinstance(thing, Tensor):
            return True
        if id(thing) in seen or isinstance(thing, (*_PLAIN, nn.Module, type, types.FunctionType, types.MethodType)):
            continue
        seen.add(id(thing))
        todo += _parts(thing)
    return False


def _name_of(place: Any) -> str:
    if isinstance(place, type):
        return f"{place.__qualname__}."
    return f"{place['__name__']}." if isinstance(place, dict) and "__name__" in place else ""
