"""Cache keys of calls: calls with equal keys share one trace."""

from __future__ import annotations

import functools
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from autopart.compat.torch_internals import structure_of
from autopart.ir.graph import DTYPE_NAMES
from autopart.ir.mesh import Mesh
from autopart.ir.trace import Call
from autopart.tracing.python.eager_semantics import ambient_autocast
from autopart.tracing.python.number_inputs import is_number
from autopart.tracing.python.recorded_reads import PLAIN, Same
from autopart.tracing.with_loss import criterion_key

MAX_CALLS = 32
"""Maximum number of cached traces of a model, for calls with different shapes or options (LRU)."""

MANY_CALLS = 8
"""Number of traced calls that triggers a warning."""

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)

Made = TypeVar("Made")


class Recent(Generic[Made]):
    """Cache that keeps the `size` most recently used entries (LRU). A key can have several entries.

    >>> recent = Recent(2)
    >>> for key in "abac": recent.get(key, key.upper)
    'A'
    'B'
    'A'
    'C'
    >>> "b" in recent
    False
    """

    def __init__(self, size: int):
        self.size = size
        self._entries: OrderedDict[Hashable, list[Made]] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def find(self, key: Hashable, fits: Callable[[Made], bool]) -> Made | None:
        """Return the first entry of a key for which `fits` returns True; None if there is no such entry."""
        entries = self._entries.get(key, [])
        for place, entry in enumerate(entries):
            if fits(entry):
                if place:
                    entries.insert(0, entries.pop(place))
                self._entries.move_to_end(key)
                return entry
        return None

    def add(self, key: Hashable, entry: Made) -> Made:
        """Add an entry to a key, before the key's other entries."""
        while len(self) >= self.size:
            self._drop_oldest()
        self._entries.setdefault(key, []).insert(0, entry)
        self._entries.move_to_end(key)
        return entry

    def get(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the entry of a key; create it if the key has none."""
        if key not in self._entries:
            return self.add(key, make())
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def of(self, key: Hashable) -> Sequence[Made]:
        """Return all entries of a key, most recently used first."""
        return self._entries.get(key, ())

    def _drop_oldest(self) -> None:
        key, entries = next(iter(self._entries.items()))
        entries.pop()
        if not entries:
            del self._entries[key]

    def values(self) -> list[Made]:
        return [entry for entries in self._entries.values() for entry in entries]

    def clear(self) -> None:
        self._entries.clear()


def call_key(
    arguments: Mapping[str, Any], call: Call, training: bool, loss_fn: Callable[..., Any] | None, numbers: bool = True,
    sizes: bool = True,
) -> Hashable:  # fmt: skip
    """Return the cache key of a call: input metadata, options, autocast, train/eval mode, loss function.

    Args:
        call: `arguments` flattened.
        numbers: True to include the values of Python numbers. False to include only their types.
        sizes: True to include the sizes of the tensors. False to include only their numbers of dims.
    """
    tensors = tuple((t.shape if sizes else t.dim(), t.dtype, t.requires_grad) for t in call.tensors)
    options = tuple((name, _value_key(option, numbers)) for name, option in call.options.items())
    options += tuple((kind, ambient_autocast(kind)) for kind in ("cpu", "cuda"))
    return training, _function_key(loss_fn, numbers), criterion_key(loss_fn), structure_of(arguments), tensors, options


def _value_key(value: Any, numbers: bool) -> Hashable:
    """Return a comparison key of an argument. Arguments with equal keys give equal traces.

    An object that is not plain data equals only itself.
    """
    if not numbers and is_number(value):
        return type(value), "a number"
    if isinstance(value, PLAIN):
        return type(value), value  # 1 == True == 1.0, but a trace distinguishes them
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_value_key(entry, True) for entry in value)
    return _function_key(value, numbers) if isinstance(value, _FUNCTIONS) else Same(value)


def _function_key(function: Callable[..., Any] | None, numbers: bool) -> Hashable:
    """Return a comparison key of a function: its code, defaults and closure.

    So a lambda has the same key in every step, even if each step creates it again.
    """
    if isinstance(function, types.MethodType):
        return _function_key(function.__func__, numbers), Same(function.__self__)
    if isinstance(function, functools.partial):
        keywords = tuple((name, _value_key(value, numbers)) for name, value in function.keywords.items())
        return _function_key(function.func, numbers), _value_key(function.args, True), keywords
    if not isinstance(function, types.FunctionType):
        return _value_key(function, numbers)
    try:
        closure = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # the closure variable is not set yet
        return Same(function)
    inside = (*closure, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return function.__code__, Same(function.__globals__), tuple(_value_key(value, numbers) for value in inside)


def format_call(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> str:
    """Return the inputs of a call as text: `input_ids i64[8,12], labels i64[8,12]`."""
    return ", ".join(
        f"{name} {DTYPE_NAMES.get(t.dtype, t.dtype)}[{','.join(map(str, t.shape))}]"
        for name, t in zip(names, tensors, strict=True)
    )


def warn_of_many(number: int, seconds: float, values: Mapping[tuple[str, str], Collection[str]]) -> None:
    """Warn, once per model, that a suspiciously large number of different calls was traced.

    Args:
        number: traced calls so far. The warning is given when it reaches `MANY_CALLS`.
        seconds: duration of one trace.
        values: {(expression, source line): its values in these calls} of expressions that read an input's value.
    """
    if number != MANY_CALLS:
        return
    differs = "shapes, options or loss function"
    hint = "Pad sequences to a few lengths, and pass the same loss_fn object."
    (text, where), most = max(values.items(), key=lambda item: len(item[1]), default=(("", ""), ()))
    if len(most) > 1:
        differs = f"values that the model reads, shapes or options: `{text}` at {where} had {len(most)} values"
        hint = "Pad batches so that this value changes rarely, or compute with it as a tensor."
    warnings.warn(
        f"autopart has traced {number} calls that differ in {differs}; each new one takes "
        f"about {seconds:.1f} s, and {MAX_CALLS} are kept. {hint}", stacklevel=2,
    )  # fmt: skip


def warn_of_copies(rows: int, mesh: Mesh) -> None:
    """Warn that every data rank computes the full batch, because the batch size is not divisible."""
    axes = mesh.along("rows")
    over = ", ".join(f"{axis}={mesh.size(axis)}" for axis in axes)
    warnings.warn(
        f"a batch of {rows} samples does not divide over {over}: every rank of {', '.join(axes)} computes the "
        f"full batch, which is correct but no faster than one rank. Use batches of a multiple of "
        f"{mesh.data_parallel_size} samples (DataLoader: drop_last=True).",
        stacklevel=2,
    )
