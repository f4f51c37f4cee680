"""Values of the call's inputs that a model's Python reads: lengths, masks, indices.

`n = int(mask.sum(1).max())` and `if mask.any():` depend on inputs alone, and the batch is known before the call. The
value is computed from the real inputs, and becomes a guard of the program (`ir/run/value_guards.py`): the call is
traced again for another value. So a value is only read if a symbolic trace is impossible. Numbers that are used
only in arithmetic stay symbolic, and so do sizes of selections. If the trace with symbols fails, the call is traced
again, and the source lines that failed get the real values.
"""

from __future__ import annotations

import dis
import linecache
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from autopart.compat.symbolic_shape_internals import expression, fix_size, is_symbol
from autopart.compat.torch_internals import outside_of_tracing
from autopart.errors import Refusal, TraceError
from autopart.ir.run.value_guards import ValueCall, ValueGuard, ValueGuards, ValueProgram, shown_value
from autopart.tracing.dynamic.numpy_memory import NumpyMemory
from autopart.tracing.python.concrete_constants import READING, UNKNOWN, Call, ConcreteConstants, tensors_in
from autopart.tracing.trace_errors import NOT_THE_USERS

_SYMBOLIC = frozenset({"item", "tolist", "__float__"})
"""Functions for whose results a trace has symbols."""
_POINTERS = frozenset({"__int__", "__index__"})
"""Functions for whose results a trace has symbols, if they read a buffer."""
_ARRAYS = frozenset({"numpy", "__array__"})
"""Functions that return numpy arrays. Python gets arrays of integers; each entry becomes a guard."""
_REFUSALS = Refusal.DECISION, Refusal.SIZE, None
"""Reasons of errors that real values in place of symbols can avoid.

None: an error of the model's own code on a symbol.
"""
_MAX_SINGLE = 4
"""Maximum number of repeated traces that each replace the symbol of one read by its real value.

The next trace replaces the symbols of all reads of integers and sizes.
"""
_SYMBOL = re.compile(r"\b[uz]+f?\d+\b")

Site = tuple[CodeType, int]
"""Position of a call in the user's code: the function's code, and the index of the instruction."""


class InputDecisions:
    """The values of inputs that Python reads in one trace. Each becomes a guard or a symbol.

    Args:
        arrays: records the numpy arrays that Python gets.
        check: called before every read. Raises an exception if the trace must begin again.

    Attributes:
        guards: the values that Python got.
        sites: code positions of the reads for which Python gets real values in place of symbols.
        symbolic: the reads for which Python got a symbol, as {source location: True if floats are read there}.
    """

    def __init__(self, known: ConcreteConstants, arrays: NumpyMemory, check: Callable[[], None]):
        self.known, self.arrays, self.check = known, arrays, check
        self.symbolic: dict[Site, bool] = {}
        self.sites: set[Site] = set()
        self._attempts = 0
        self._site_of: dict[str, Site] = {}
        self._guards: dict[Any, ValueGuard] = {}

    @property
    def guards(self) -> ValueGuards:
        return ValueGuards(list(self._guards.values()))

    def notes(self) -> list[str]:
        """Return a note for each expression of the inputs on whose value the trace depends."""
        values: dict[tuple[str, str], dict[str, None]] = {}
        for guard in self.guards:
            values.setdefault((guard.text, guard.where), {})[shown_value(guard.value)] = None
        return [
            f"traced for {text} = {' and '.join(list(shown)[:3])}{', ...' * (len(shown) > 3)} ({where}); each other "
            "value is traced again"
            for (text, where), shown in values.items()
        ]

    def answer(self, call: Call, inputs: Sequence[Tensor], frame: FrameType) -> Any:
        """Return the value that Python gets for a call such as `item()`.

        Returns UNKNOWN if the trace must handle the call itself.
        """
        name = getattr(call[0], "__name__", "")
        if name in _ARRAYS and not inputs[0].is_floating_point():
            entries = self.read(frame, Tensor.tolist, inputs[0])
            if entries is UNKNOWN:
                return UNKNOWN
            self.arrays.add(inputs[0], array := _as_array(inputs[0], entries))
            return array
        if name not in READING or not inputs or not all(map(self.known.is_recorded, inputs)):
            return UNKNOWN
        users_frame = _users_frame(frame)
        is_pointer = name in _POINTERS and self.known.reads_buffers(inputs[0])
        if (name in _SYMBOLIC or is_pointer) and _site(users_frame) not in self.sites:
            self.symbolic[_site(users_frame)] = inputs[0].is_floating_point()
            return UNKNOWN
        recorded = self.known.recorded(call)
        return UNKNOWN if recorded is None else self._guarded(recorded, users_frame)

    def decide(self, formula: Any, frame: FrameType) -> Any:
        """Evaluate a formula of torch's symbols for the real inputs. Returns None if the value is unknown."""
        recorded = self.known.formula(formula)
        if recorded is None:
            return None
        value = self._guarded(recorded, _users_frame(frame))
        return None if value is UNKNOWN else value

    def read(self, frame: FrameType, func: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        """Return `func(tensor)` for the real inputs; UNKNOWN if the tensor's values are unknown."""
        recorded = self.known.recorded((func, (tensor,), {}))
        return UNKNOWN if recorded is None else self._guarded(recorded, _users_frame(frame))

    def note(self, call: Call, output: Any, frame: FrameType) -> Any:
        """Record how the symbols in the result of a call are computed from the inputs. Return the result.

        For code positions that `specialise` chose, the result has real sizes in place of symbols.
        """
        is_list = isinstance(output, list)
        for place, leaf in enumerate(output if is_list else [output]):
            if isinstance(leaf, (torch.SymInt, torch.SymFloat)) and is_symbol(symbol := expression(leaf)):
                recorded = self.known.recorded(call)
                if recorded is not None and is_list:
                    recorded = ValueCall(list.__getitem__, (recorded, place), {}, None, True)
                self._symbol(symbol, recorded, _users_frame(frame))
        for tensor in tensors_in(output):
            for dim, size in enumerate(tensor.shape if not tensor.is_nested else ()):
                if is_symbol(symbol := expression(size)):
                    self._note_size(call, tensor, dim, symbol, frame)
        return output

    def _note_size(self, call: Call, tensor: Tensor, dim: int, symbol: Any, frame: FrameType) -> None:
        if symbol in self.known.symbols:
            return
        recorded, users_frame = self.known.size(call, tensor, dim), _users_frame(frame)
        self._symbol(symbol, recorded, users_frame)
        if recorded is None or _site(users_frame) not in self.sites:
            return
        value = self._guarded(recorded, users_frame)
        if value is not UNKNOWN:
            fix_size(tensor.shape[dim], value)

    def _symbol(self, symbol: Any, recorded: ValueCall | None, users_frame: FrameType | None) -> None:
        if recorded is not None:
            self.known.symbols[symbol] = recorded
            self._site_of[str(symbol)] = _site(users_frame)

    def _guarded(self, recorded: ValueCall, frame: FrameType | None) -> Any:
        value = self.known.value(recorded)
        if value is not UNKNOWN and (recorded.of_inputs or ValueProgram([recorded]).buffers):
            self.check()
            guard = ValueGuard(*_text(frame), recorded, value)
            self._guards.setdefault((ValueProgram([recorded]).key, repr(value)), guard)
        return value

    def specialise(self, error: TraceError) -> bool:
        """Choose, after a failed trace, the code that gets real values in place of symbols in the next trace.

        Returns False if no other trace can avoid this error.
        """
        named = set(_SYMBOL.findall(_full_text(error)))
        if error.refusal not in _REFUSALS and not named:
            return False
        symbols = {self._site_of[name] for name in named & self._site_of.keys()}
        integers = {site for site, is_float in self.symbolic.items() if not is_float}
        sizes = {*self._site_of.values()} - self.symbolic.keys()
        self._attempts += 1
        first = symbols if self._attempts <= _MAX_SINGLE else symbols | integers | sizes
        groups = (first, integers, sizes, self.symbolic.keys())
        chosen = next((new for sites in groups if (new := sites - self.sites)), None)
        self.sites |= chosen or set()
        self._guards.clear()
        self._site_of.clear()
        self.symbolic.clear()
        return chosen is not None


def _as_array(tensor: Tensor, entries: Any) -> Any:
    with outside_of_tracing():
        return torch.tensor(entries, dtype=tensor.dtype).reshape(tuple(tensor.shape)).numpy()


def _full_text(error: BaseException | None) -> str:
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__
    return "\n".join(texts)


def _users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
        frame = frame.f_back
    return frame


def _site(frame: FrameType | None) -> Site:
    return (frame.f_code, frame.f_lasti) if frame is not None else (_site.__code__, 0)


def _text(frame: FrameType | None) -> tuple[str, str]:
    """Return the source text of the expression that a frame evaluates, and its line, as `model.py:12`."""
    if frame is None:
        return "a value", "?"
    file = frame.f_code.co_filename
    # The jump of an `if`: the instruction before it computes the condition.
    is_jump = "JUMP" in dis.opname[frame.f_code.co_code[frame.f_lasti]]
    first, last, begin, end = list(frame.f_code.co_positions())[frame.f_lasti // 2 - is_jump]
    where = f"{Path(file).name}:{frame.f_lineno}"
    if first is None or last is None or begin is None or end is None:
        return linecache.getline(file, frame.f_lineno).strip(), where
    lines = [linecache.getline(file, line).encode() for line in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return " ".join(line.decode(errors="replace").strip() for line in lines), where
