"""Detection of functions in the user's code that compute with numpy or scipy on activations.

A trace has no values, so Python code cannot compute with an array of activations. If such code runs in a function that
received the array, or is a library's function (`linear_sum_assignment(cost)`), the call is traced again, with this
function as a host function (`host_functions.py`).
"""

from __future__ import annotations

import ast
import gc
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from autopart.tracing.trace_errors import NOT_THE_USERS, TraceAgain, is_entry

_KEPT = nn.Module, Tensor


class ReadsArray(TraceAgain):
    """Exception: a function computes with an array of activations.

    The model is traced again, with this function as a host function.
    """


class FoundFunctions:
    """Record of the functions that compute with arrays of activations."""

    def __init__(self) -> None:
        self.functions: list[Any] = []

    def may_be_added(self, frame: FrameType, is_array: Callable[[Any], bool]) -> bool:
        """Record the function that computes with an array. Return False if no new function is found.

        Args:
            frame: frame in which the values of an array are needed.
            is_array: returns True for an array of activations.
        """
        frames = list(_users_frames(frame))
        receivers = [one for one in frames if _receives(one, is_array)]
        if receivers:
            callers = frames[frames.index(receivers[-1]) + 1 :]
            functions = _functions_of(receivers[-1]) or _called_by(callers)
        else:
            functions = _called_by(frames)
        new = [one for one in functions if not any(one is known for known in self.functions) and not _keeps(one)]
        self.functions += new
        return bool(new)

    @contextmanager
    def given(self, marked: Callable[[Any], Any]) -> Iterator[None]:
        """Replace the recorded functions by `marked(function)`, inside a `with` block."""
        references = [(function, list(_references(function))) for function in self.functions]
        try:
            for function, found in references:
                replacement = marked(function)
                for holder, name in found:
                    _put(holder, name, replacement)
            yield
        finally:
            for function, found in references:
                for holder, name in found:
                    _put(holder, name, function)


def _users_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the user's code and its libraries, innermost first, up to the call of the model."""
    while frame is not None and not is_entry(frame):
        if not frame.f_code.co_filename.startswith(NOT_THE_USERS):
            yield frame
        frame = frame.f_back


def _receives(frame: FrameType, is_array: Callable[[Any], bool]) -> bool:
    """Return True if a frame's function has an array of activations, and no module, as an argument."""
    code = frame.f_code
    given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
    return any(map(is_array, given)) and not any(isinstance(value, nn.Module) for value in given)


def _functions_of(frame: FrameType) -> list[Any]:
    return [one for one in gc.get_referrers(frame.f_code) if isinstance(one, FunctionType)]


def _called_by(frames: Sequence[FrameType]) -> list[Any]:
    """Return [function] for the call that the innermost frame runs, such as `np.argmax(x)`.

    Returns [] if the source does not name the function.
    """
    if not frames:
        return []
    frame = frames[0]
    first, last, begin, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if first is None or last is None or begin is None or end is None:
        return []
    lines = [linecache.getline(frame.f_code.co_filename, line).encode() for line in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    try:
        call = ast.parse(b"".join(lines).strip(), mode="eval").body
    except SyntaxError:
        return []
    path = ast.unparse(call.func).split(".") if isinstance(call, ast.Call) else []
    function = frame.f_locals.get(path[0], frame.f_globals.get(path[0])) if path else None
    for name in path[1:]:
        function = getattr(function, name, None)
    return [function] if callable(function) and not isinstance(function, (type, nn.Module)) else []


def _keeps(function: Any) -> bool:
    """Return True if a function reads modules or tensors that are not among its arguments."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    read = [function.__globals__.get(name) for name in names]
    return any(isinstance(value, _KEPT) for value in (*cells, *read))


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _references(function: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the objects that refer to a function: (dict, key) and (cell of a closure, None)."""
    referrers = gc.get_referrers(function)
    yield from [(holder, None) for holder in referrers if isinstance(holder, CellType)]
    of_modules = [vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    dicts = {id(holder): holder for holder in (*referrers, *of_modules) if type(holder) is dict}  # gc.freeze hides some
    for holder in dicts.values():
        yield from [(holder, name) for name, value in list(holder.items()) if value is function]


def _put(holder: Any, name: Any, value: Any) -> None:
    if isinstance(holder, CellType):
        holder.cell_contents = value
    else:
        holder[name] = value
