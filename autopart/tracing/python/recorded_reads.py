"""Record of the attributes and globals that the user's code reads while a model is traced.

A program holds the values that Python read as constants. `record_reads` watches the frames of the user's code and
records the names that their bytecode reads, such as `args.beta`, `SETTINGS["beta"]` or a closure variable.
`autopart.tracing.python.guards` compares the values of these names at each call.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopart.tracing.python.size_conditions import SizeConditions
from autopart.tracing.python.unrecorded_sizes import Spot, check_operation, spots_of

ALL_NAMES = "*"
"""Name that represents every attribute of an object.

Used if the code computes the name that it passes to `getattr`.
"""
MISSING = object()
MAX_ENTRIES = 1024
"""Maximum length of a container whose entries are compared.

Longer containers are data rather than settings: only their length is compared.
"""

_LIBRARIES = frozenset({"torch", "torchgen", "numpy", "autopart"}) | sys.stdlib_module_names
_LAYERS = "torch.nn.modules."
_NOT_LAYERS = frozenset({"torch.nn.modules.module", "torch.nn.modules.container"})
PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.memory_format,
    types.EllipsisType,
)  # fmt: skip
"""Types that guards compare by value, because a trace cannot distinguish equal values of these types."""
_CONTAINERS = (dict, list, tuple, set, frozenset)
_DEPTH, _MAX_NOTED = 3, 64
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


class Name(NamedTuple):
    """A variable name in bytecode, with the chain of attributes that the code reads from it.

    `self.config.tau` is ("self", ("config", "tau")).
    """

    root: str
    is_global: bool
    attributes: tuple[str, ...]


class WatchedCode(NamedTuple):
    """Code of a function, with the names that it reads and its operations on sizes.

    `spots` is {offset of an instruction: operation on a size}. For libraries, `names` and `spots` are empty.
    """

    code: types.CodeType
    names: tuple[Name, ...]
    spots: Mapping[int, Spot]


class RecordedReads:
    """Names that the user's code read in one trace.

    Attributes:
        of_type: {class: attributes read from its instances}.
        of_holder: {id: (class or Python module, attributes read from it)}.
        of_globals: {id: (globals of a function, names read from them)}.
        of_cells: {id: (closure cell, name of its variable)}.
        sizes: the record of operations on sizes of the current trace.
        changed: values that changed while the code ran, as {(`identity_of` the object, attribute)}.
    """

    def __init__(self) -> None:
        self.sizes: SizeConditions | None = None
        self.of_type: dict[type, set[str]] = {}
        self.of_holder: dict[int, tuple[Any, set[str]]] = {}
        self.of_globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self.of_cells: dict[int, tuple[types.CellType, str]] = {}
        self.changed: set[tuple[int, str]] = set()
        self._values: dict[tuple[int, str], Hashable] = {}
        self._holders: dict[int, Any] = {}
        self._returned: dict[int, dict[int, Any]] = {}
        self._watched: dict[int, WatchedCode] = {}

    def on_call(self, frame: types.FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        """Record the names that a called function reads, if it is the user's code or a torch layer."""
        code = frame.f_code
        watched = self._watched.get(id(code))
        if watched is None:
            is_users = is_watched(frame.f_globals.get("__name__"))
            watched = WatchedCode(code, names_in(code), spots_of(code)) if is_users else WatchedCode(code, (), {})
            self._watched[id(code)] = watched
        returns = self.sizes is not None and frame.f_back is not None and id(frame.f_back) in self._returned
        watches_sizes = self.sizes is not None and bool(watched.spots)
        if not watched.names and not watches_sizes and not returns:
            return None
        frame.f_trace_lines = False
        if watches_sizes:
            self._returned[id(frame)] = {}
            frame.f_trace_opcodes = True
            if sys.version_info >= (3, 12):  # opcode events begin when the trace function is set again
                sys.settrace(sys.gettrace())
        self._cells_of(frame)
        self._read(frame, watched.names)
        return self._on_event

    def _on_event(self, frame: types.FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        watched = self._watched[id(frame.f_code)]
        if event == "opcode":
            spot = watched.spots.get(frame.f_lasti)
            if spot is not None and self.sizes is not None:
                check_operation(frame, spot, self.sizes, self._returned[id(frame)])
        elif event == "return":
            returned = self._returned.pop(id(frame), {})
            if self.sizes is not None and sys.version_info >= (3, 13):  # which may have sent no opcode events
                for spot in watched.spots.values():
                    check_operation(frame, spot, self.sizes, returned)
            if id(frame.f_back) in self._returned:
                self._returned[id(frame.f_back)][frame.f_back.f_lasti] = argument
            self._read(frame, watched.names)
        return self._on_event

    def _read(self, frame: types.FrameType, names: tuple[Name, ...]) -> None:
        variables, own_globals = frame.f_locals, frame.f_globals
        for name in names:
            if not name.is_global:
                value = variables.get(name.root, MISSING)
            else:
                value = own_globals.get(name.root, MISSING)
                if value is not MISSING:
                    self.of_globals.setdefault(id(own_globals), (own_globals, set()))[1].add(name.root)
                    self._note(own_globals, name.root, value)
            for attribute in name.attributes:
                if value is MISSING or is_terminal(value):
                    break
                value = self._attribute(value, attribute)

    def _attribute(self, holder: Any, name: str) -> Any:
        if isinstance(holder, (type, types.ModuleType)):
            self.of_holder.setdefault(id(holder), (holder, set()))[1].add(name)
        else:
            self.of_type.setdefault(type(holder), set()).add(name)
        if name == ALL_NAMES:
            return MISSING
        mapping = where(holder, name)
        value = MISSING if mapping is None else mapping.get(name, MISSING)
        if value is not MISSING:
            self._note(holder, name, value)
        return value

    def _note(self, holder: Any, name: str, value: Any) -> None:
        key = id(holder), name
        self._holders[id(holder)] = holder  # keep the object alive, so that its id stays unique
        noted = value_key(value, tensors=False)
        if self._values.setdefault(key, noted) != noted:
            self.changed.add((identity_of(holder), name))

    def is_left_changed(self, holder: Any, name: str, value: Any) -> bool:
        """Return True if `value`, read after the forward, differs from the value that user code read first.

        Args:
            holder: the object with the attribute or entry.
            name: its name.
        """
        noted = self._values.get((id(holder), name))
        return noted is not None and noted != value_key(value, tensors=False)

    def _cells_of(self, frame: types.FrameType) -> None:
        code = frame.f_code
        if not code.co_freevars or code.co_freevars == ("__class__",):
            return
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        candidates = [frame.f_globals.get(code.co_name), getattr(first, "__dict__", {}).get(code.co_name)]
        candidates += [vars(kind).get(code.co_name) for kind in type(first).__mro__]
        for candidate in candidates:
            function = getattr(candidate, "__func__", candidate)
            if isinstance(function, types.FunctionType) and function.__code__ is code:
                for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                    self.of_cells[id(cell)] = cell, name


class _OutsideTorch(TorchFunctionMode):
    """Torch function mode that stops watching frames inside torch functions, which run no user code."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            return func(*args, **kwargs or {})
        finally:
            sys.settrace(tracer)


class _Recording:
    reads: RecordedReads | None = None


@contextmanager
def record_reads() -> Iterator[RecordedReads]:
    """Record the names that user code reads in the traces inside this `with` block."""
    before, _Recording.reads = _Recording.reads, RecordedReads()
    try:
        yield _Recording.reads
    finally:
        _Recording.reads = before


@contextmanager
def watched_frames(sizes: SizeConditions | None = None) -> Iterator[None]:
    """Watch the frames of the user's code inside this `with` block. Without `record_reads`, does nothing.

    A debugger's trace function still runs.

    Args:
        sizes: record that receives the operations that `TracedSize` objects cannot record themselves.
    """
    reads, debugger = _Recording.reads, sys.gettrace()
    if reads is None:
        yield
        return
    reads.sizes = sizes
    sys.settrace(reads.on_call if debugger is None else _with_debugger(reads, debugger))
    try:
        with _OutsideTorch():
            yield
    finally:
        sys.settrace(debugger)


def _with_debugger(reads: RecordedReads, debugger: Callable[..., Any]) -> Callable[..., Any]:
    def on_call(frame: types.FrameType, event: str, argument: Any) -> Any:
        local, of_debugger = reads.on_call(frame, event, argument), debugger(frame, event, argument)
        if local is None or of_debugger is None:
            return local or of_debugger
        frame.f_trace_lines = True

        def both(frame: types.FrameType, event: str, argument: Any) -> Any:
            local(frame, event, argument)
            of_debugger(frame, event, argument)
            return both

        return both

    return on_call


def identity_of(holder: Any) -> int:
    """Return the id of a class, Python module or globals dict; for an instance, the id of its class."""
    return id(holder if isinstance(holder, (type, types.ModuleType, dict, types.CellType)) else type(holder))


def is_watched(module: Any) -> bool:
    """Return True for the name of a Python module of the user, of a model library, or of torch's layers."""
    if not isinstance(module, str):
        return False
    if module.startswith(_LAYERS):
        return module not in _NOT_LAYERS
    return module.partition(".")[0] not in _LIBRARIES


def is_terminal(value: Any) -> bool:
    """Return True for a value that guards compare by value.

    For all other objects, guards compare only the attributes that the user's code read.
    """
    return isinstance(value, (*PLAIN, *_CONTAINERS, Tensor, np.ndarray, np.generic, *FUNCTIONS))


def names_in(code: types.CodeType) -> tuple[Name, ...]:
    """List the variables that code reads, each with the chain of attributes that the code reads from it.

    >>> names_in(compile("a.b.c + f(d)", "", "eval"))
    (Name(root='a', is_global=True, attributes=('b', 'c')), Name(root='f', ...), Name(root='d', ...))
    """
    names: dict[Name, None] = {}
    current: Name | None = None
    uses_getattr = bool({"getattr", "hasattr", "vars", "__dict__"} & {*code.co_names})
    previous = ""
    for instruction in dis.get_instructions(code):
        operation, argument = instruction.opname, instruction.argval
        if operation in ("LOAD_ATTR", "LOAD_METHOD") and current is not None:
            names.pop(current, None)
            if argument.startswith("__") and argument != "__dict__":
                current = None
                continue
            name = ALL_NAMES if argument == "__dict__" else argument
            current = current._replace(attributes=(*current.attributes, name))
            names[current] = None
            continue
        if operation == "STORE_ATTR" and current is not None:  # record this too: code may set a value and then read it
            names[current._replace(attributes=(*current.attributes, argument))] = None
        if operation == "STORE_GLOBAL":
            names[Name(argument, True, ())] = None
        if operation in ("CACHE", "PRECALL", "PUSH_NULL", "RESUME"):
            continue
        if uses_getattr and current is not None and previous in ("getattr", "hasattr", "vars"):
            is_name = operation == "LOAD_CONST" and isinstance(argument, str)
            names[current._replace(attributes=(*current.attributes, argument if is_name else ALL_NAMES))] = None
        previous = current.root if current is not None and not current.attributes and current.is_global else ""
        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            current = Name(argument, True, ())
        elif operation.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF")):
            both = argument if isinstance(argument, tuple) else (argument,)  # LOAD_FAST_LOAD_FAST
            names |= dict.fromkeys(Name(one, False, ()) for one in both[:-1])
            current = Name(both[-1], False, ())
        else:
            current = None
        if current is not None:
            names[current] = None
    is_free = frozenset(code.co_freevars)
    return tuple(n for n in names if n.is_global or n.attributes or n.root in is_free)


class Computed:
    """Mapping view of an object whose attributes `__getattr__` computes or `__slots__` stores."""

    def __init__(self, holder: Any):
        self.holder = holder

    def get(self, name: str, default: Any) -> Any:
        try:
            return getattr(self.holder, name, default)
        except Exception:  # the user's own `__getattr__`
            return default


class Cell:
    """A closure cell as a mapping with one entry, its variable."""

    def __init__(self, cell: types.CellType):
        self.cell = cell

    def get(self, name: str, default: Any) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # the variable is not set yet
            return default


_CLASS_ATTRIBUTES = WeakKeyDictionary[type, Mapping[str, Any]]()


def class_attributes(kind: type) -> Mapping[str, Any]:
    """Return `vars(kind)`, as the same mapping object in every call, so that its id identifies the class."""
    return _CLASS_ATTRIBUTES.setdefault(kind, vars(kind))


def where(holder: Any, name: str) -> Any:
    """Return the mapping that stores an object's attribute; None for a method, property or parameter."""
    if isinstance(holder, types.ModuleType):
        return vars(holder)
    if isinstance(holder, type):
        return next((class_attributes(kind) for kind in holder.__mro__ if name in vars(kind)), None)
    attributes = getattr(holder, "__dict__", None) or {}
    if name in attributes:
        return attributes
    if isinstance(holder, nn.Module) and name in (modules := attributes.get("_modules", {})):
        return modules
    for kind in type(holder).__mro__:
        if name in vars(kind):
            value = vars(kind)[name]
            if isinstance(value, types.MemberDescriptorType):  # __slots__
                return Computed(holder)
            return None if hasattr(type(value), "__get__") else class_attributes(kind)
    has_own = hasattr(type(holder), "__getattr__") and not isinstance(holder, nn.Module)
    return Computed(holder) if has_own else None


def is_absent(holder: Any, name: str) -> bool:
    """Return True if an object has no attribute of this name."""
    own = [*type(holder).__mro__, holder]
    of_module = (holder._parameters, holder._buffers, holder._modules) if isinstance(holder, nn.Module) else ()
    return not any(name in vars(kind) for kind in own) and not any(name in tensors for tensors in of_module)


class Same:
    """Key that compares an object by identity, and keeps it alive so that its id stays unique."""

    def __init__(self, thing: object):
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


def value_key(value: Any, tensors: bool = True, depth: int = _DEPTH) -> Any:
    """Return a comparison key of a value.

    Keys are equal only if traces would be equal: 1, True and 1.0 differ.

    Args:
        tensors: compare tensors in the value by identity and version counter.
        depth: levels of nested containers to compare.
    """
    if isinstance(value, PLAIN):
        return type(value), value if value == value else "nan"
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    if isinstance(value, np.ndarray):
        return np.ndarray, value.shape, value.dtype.str, value.tobytes() if value.size <= _MAX_NOTED else Same(value)
    if isinstance(value, Tensor):
        return (Tensor, Same(value), version(value)) if tensors else Tensor
    if isinstance(value, _CONTAINERS):
        entries = entries_of(value)
        if len(entries) > _MAX_NOTED or not depth:
            return type(value), len(entries)
        keys = [value_key(entry, tensors, depth - 1) for entry in entries]
        if isinstance(value, dict):
            return dict, tuple(zip(names_of(value), keys, strict=True))
        return type(value), frozenset(keys) if isinstance(value, (set, frozenset)) else tuple(keys)
    if isinstance(value, types.FunctionType):
        return value.__code__
    if isinstance(value, functools.partial):
        return tuple(value_key(part, tensors, depth) for part in (value.func, value.args, value.keywords))
    if isinstance(value, types.MethodType):
        return value.__func__.__code__, Same(value.__self__)
    return Same(value) if isinstance(value, types.BuiltinFunctionType) else type(value)


def names_of(container: dict) -> list[Any]:
    """Return the keys of a dict in comparable form: tensors and the like are replaced by their ids."""
    return [name if isinstance(name, PLAIN) else id(name) for name in container]


def entries_of(container: Any) -> tuple:
    return tuple(container.values()) if isinstance(container, dict) else tuple(container)


def version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
