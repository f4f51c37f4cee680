"""`float(tensor)` in a model's code, traced as `tensor.item()`.

Python requires `float()` to return a float, but a trace has only a symbolic scalar. So during a trace, Python modules
that call `float(tensor)` get a replacement of `float` as a global. It differs from `float` only for traced tensors and
symbolic scalars.
"""

from __future__ import annotations

import builtins
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

_AS_DTYPE = re.compile(r"dtype\s*=\s*float\b|\b(to|type|astype|view)\(\s*float\s*[,)]")


class _FloatMeta(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, (builtins.float, torch.SymFloat))

    def __call__(cls, *args: Any) -> Any:
        if args and isinstance(args[0], Tensor):
            return torch.sym_float(args[0].item())
        if args and isinstance(args[0], (torch.SymInt, torch.SymFloat)):
            return torch.sym_float(args[0])
        return builtins.float(*args)


class _Float(builtins.float, metaclass=_FloatMeta):
    """Replacement of `float` during a trace."""


class Floats:
    """Records the Python modules whose functions call `float(tensor)`."""

    def __init__(self) -> None:
        self.modules: list[dict[str, Any]] = []

    def may_be_added(self, frame: FrameType) -> bool:
        """Record the Python module of a frame. Return True if the module can get the replacement of `float`."""
        names = frame.f_globals
        if "float" in names or any(names is known for known in self.modules) or "/torch/" in frame.f_code.co_filename:
            return False
        try:
            source = inspect.getsource(sys.modules[names["__name__"]])
        except (OSError, TypeError, KeyError):
            return False
        if _AS_DTYPE.search(source):  # torch identifies the dtype by Python's own `float`
            return False
        self.modules.append(names)
        return True

    @contextmanager
    def given(self) -> Iterator[None]:
        """Replace `float` in the recorded modules inside a `with` block."""
        for names in self.modules:
            names["float"] = _Float
        try:
            yield
        finally:
            for names in self.modules:
                names.pop("float", None)


class ReadsFloat(Exception):
    """Raised if the model's code calls `float(tensor)`: the model is traced again with `float` replaced."""
