"""`float(tensor)` and `int(tensor)` in a model's code, traced as `tensor.item()`.

Python requires `float()` to return a float, but a trace has only a symbolic scalar. So during a trace, Python modules
that call `float(tensor)` get a replacement of `float` as a global. The replacement differs from `float` only for
traced tensors, symbolic scalars and sizes. `int` is replaced in the same way.
"""

from __future__ import annotations

import builtins
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor

from autopart.tracing.python.size_conditions import TracedFloat, TracedSize, as_float, as_integer
from autopart.tracing.trace_errors import TraceAgain

_AS_DTYPE = r"dtype\s*=\s*{0}\b|\b(to|type|astype|view)\(\s*{0}\s*[,)]"


class _FloatMeta(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, (builtins.float, torch.SymFloat))

    def __call__(cls, *args: Any) -> Any:
        if args and isinstance(args[0], Tensor):
            return torch.sym_float(args[0].item())
        if args and isinstance(args[0], (torch.SymInt, torch.SymFloat)):
            return torch.sym_float(args[0])
        if args and isinstance(args[0], (TracedSize, TracedFloat)):
            return as_float(args[0])
        return builtins.float(*args)


class _Float(builtins.float, metaclass=_FloatMeta):
    """Replacement of `float` during a trace."""


class _IntMeta(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, (builtins.int, torch.SymInt))

    def __call__(cls, *args: Any) -> Any:
        if args and isinstance(args[0], (TracedSize, TracedFloat)):
            return as_integer(args[0])
        number = args[0].item() if args and isinstance(args[0], Tensor) else args[0] if args else 0
        return torch.sym_int(number) if isinstance(number, (torch.SymInt, torch.SymFloat)) else builtins.int(*args)


class _Int(builtins.int, metaclass=_IntMeta):
    """Replacement of `int` during a trace."""


_REPLACEMENTS = {"float": _Float, "int": _Int}


class Floats:
    """Record of the Python modules whose functions call `float` or `int` with a tensor or a size."""

    _of_sizes: ClassVar[set[tuple[str, str]]] = set()
    """{(Python module, "int" or "float")}: modules that convert sizes, as earlier traces in this process found."""

    def __init__(self) -> None:
        modules = [(vars(sys.modules[module]), name) for module, name in self._of_sizes if module in sys.modules]
        self.modules: list[tuple[dict[str, Any], str]] = [(names, name) for names, name in modules if name not in names]

    def replace_for_sizes(self, frame: FrameType, name: str) -> None:
        """Raise ReadsFloat if this frame converts a size by `float` or `int`, and the call can be replaced.

        `name`: "float" or "int". The model is then traced again with the replacement.
        """
        if self.may_be_added(frame, name):
            self._of_sizes.add((frame.f_globals["__name__"], name))
            raise ReadsFloat

    def may_be_added(self, frame: FrameType, name: str = "float") -> bool:
        """Record the Python module of a frame. Return True if `float` or `int` can be replaced in it."""
        names = frame.f_globals
        is_added = any(known is names and name == other for known, other in self.modules)
        if name in names or is_added or "/torch/" in frame.f_code.co_filename:
            return False
        try:
            source = inspect.getsource(sys.modules[names["__name__"]])
        except (OSError, TypeError, KeyError):
            return False
        if re.search(_AS_DTYPE.format(name), source):  # torch identifies the dtype by Python's own `float` or `int`
            return False
        self.modules.append((names, name))
        return True

    @contextmanager
    def given(self) -> Iterator[None]:
        """Replace `float` and `int` by their replacements in the recorded modules, inside a `with` block."""
        for names, name in self.modules:
            names[name] = _REPLACEMENTS[name]
        try:
            yield
        finally:
            for names, name in self.modules:
                names.pop(name, None)


class ReadsFloat(TraceAgain):
    """Exception: code calls `float` or `int` with a traced value. The next trace replaces the function."""
