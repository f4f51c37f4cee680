"""`float(tensor)` in a model's code, as the number that `tensor.item()` is in a trace.

Python insists that `float()` gives a float, which no trace has. So the functions of a module that calls it so find
another `float` under that name while the model is traced: the same for everything but tensors and numbers of a trace.
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


class _Kind(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, (builtins.float, torch.SymFloat))

    def __call__(cls, *args: Any) -> Any:
        if args and isinstance(args[0], Tensor):
            return torch.sym_float(args[0].item())
        if args and isinstance(args[0], (torch.SymInt, torch.SymFloat)):
            return torch.sym_float(args[0])
        return builtins.float(*args)


class _Float(builtins.float, metaclass=_Kind):
    """`float`, for a trace."""


class Floats:
    """The modules of Python whose functions call `float(tensor)`."""

    def __init__(self) -> None:
        self.modules: list[dict[str, Any]] = []

    def may_be_added(self, frame: FrameType) -> bool:
        """Whether the code that runs in a frame can be given another `float`; notes its module."""
        names = frame.f_globals
        if "float" in names or any(names is known for known in self.modules) or "/torch/" in frame.f_code.co_filename:
            return False
        try:
            source = inspect.getsource(sys.modules[names["__name__"]])
        except (OSError, TypeError, KeyError):
            return False
        if _AS_DTYPE.search(source):  # torch knows the dtype by the object that Python's own name stands for
            return False
        self.modules.append(names)
        return True

    @contextmanager
    def given(self) -> Iterator[None]:
        """Inside, these modules have the other `float`."""
        for names in self.modules:
            names["float"] = _Float
        try:
            yield
        finally:
            for names in self.modules:
                names.pop("float", None)


class ReadsFloat(Exception):
    """The model's code calls `float(tensor)`: it has to be traced again."""
