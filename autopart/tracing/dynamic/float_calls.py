"""`float(tensor)` in a model's code, traced as `tensor.item()`.

Python requires `float()` to return a float, which a trace does not have. So Python modules that call it get another
`float` under that name during a trace. It differs only for traced tensors and scalars.
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
    """The Python modules whose functions call `float(tensor)`, for the trace to record these calls."""

    def __init__(self) -> None:
        self.modules: list[dict[str, Any]] = []

    def may_be_added(self, frame: FrameType) -> bool:
        """Return True if a frame's module can get the replacement of `float`, and record the module."""
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
        """Replace `float` in these modules, for a `with` block."""
        for names in self.modules:
            names["float"] = _Float
        try:
            yield
        finally:
            for names in self.modules:
                names.pop("float", None)


class ReadsFloat(Exception):
    """Raised if the model's code calls `float(tensor)`, so that it must be traced again."""
