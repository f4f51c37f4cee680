"""Example calls with other sequence lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from autopart.errors import InputError, OptionError
from autopart.recipe.sizes.call_family import resized
from autopart.tracing.call_cache import format_call
from autopart.tracing.trace_model import flatten_call
from autopart.tracing.with_loss import inputs_with_loss

_EXAMPLE = "sequence_dims={'input_ids': 1}, which names the dims that change"


class ExampleLengths:
    """An example call that can be given other sequence lengths.

    `sequence_dims` names the sequence dims of the inputs. Without this option, dim 1 of the integer inputs gives the
    sequence length. If there are no integer inputs, dim 1 of floating-point inputs with three or more dims gives it.
    All dims of this length, except dim 0, are then sequence dims.

    Args:
        arguments: {name: argument} of the call.
        named: the option `sequence_dims`: {input: index of its sequence dim}.
    Raises:
        InputError: it is not clear which dims are sequences.
    """

    def __init__(self, arguments: Mapping[str, Any], named: Mapping[str, int] | None = None):
        call = flatten_call(arguments)
        names = inputs_with_loss(call.names)
        self._tensors = dict(zip(names, call.tensors, strict=True))
        dims = self._named(named) if named else self._equal_dims(self._own_lengths())
        self.length = next(iter({tensor.size(dim) for tensor, dim in _pairs(self._tensors, dims)}))
        self._of_length = dims

    def _named(self, named: Mapping[str, int]) -> dict[str, list[int]]:
        unknown = [name for name in named if name not in self._tensors]
        if unknown or not all(
            -self._tensors[name].dim() <= dim < self._tensors[name].dim() for name, dim in named.items()
        ):
            raise InputError(
                f"sequence_dims={dict(named)} names no dims of this call", why=f"its inputs are {self._text()}",
                hint=_EXAMPLE,
            )  # fmt: skip
        return self._one_length({name: [dim % self._tensors[name].dim()] for name, dim in named.items()})

    def _one_length(self, dims: dict[str, list[int]]) -> dict[str, list[int]]:
        lengths = {f"{name} {self._tensors[name].size(dim)}": self._tensors[name].size(dim)
                   for name, found in dims.items() for dim in found}  # fmt: skip
        if len({*lengths.values()}) == 1:
            return dims
        what = "has several sequence lengths" if lengths else "has no sequence length"
        raise InputError(
            f"lengths= is ambiguous: the example {what}",
            why=f"its inputs are {self._text()}", hint=_EXAMPLE,
        )  # fmt: skip

    def _own_lengths(self) -> dict[str, list[int]]:
        """Return {input: [1]} for the inputs whose dim 1 gives the sequence length. Their lengths are equal."""
        integers = [name for name, t in self._tensors.items() if t.dim() >= 2 and not t.is_floating_point()]
        floats = [name for name, t in self._tensors.items() if t.dim() >= 3 and t.is_floating_point()]
        return self._one_length({name: [1] for name in integers or floats})

    def _equal_dims(self, own: dict[str, list[int]]) -> dict[str, list[int]]:
        length = next(self._tensors[name].size(1) for name in own)
        dims = {name: [dim for dim in range(1, t.dim()) if t.size(dim) == length] for name, t in self._tensors.items()}
        for name, found in dims.items():
            tensor = self._tensors[name]
            if len(found) > 1 and tensor.dim() == 3 and tensor.is_floating_point():
                raise InputError(
                    f"lengths= is ambiguous: dims {found[0]} and {found[1]} of '{name}' both have size {length}",
                    why=f"its inputs are {self._text()}", hint=_EXAMPLE,
                )  # fmt: skip
        return {name: found for name, found in dims.items() if found}

    def _text(self) -> str:
        return format_call([*self._tensors], [*self._tensors.values()])

    def at(self, arguments: Any, length: int) -> Any:
        """Return the arguments of the example, with another sequence length.

        A tensor that gets shorter loses values at its end. A tensor that gets longer repeats its values from the start.

        Args:
            arguments: the arguments of the example, or some of them.
        """

        tensors = [*self._tensors.values()]
        changed = {(id(tensor), dim) for tensor, dim in _pairs(self._tensors, self._of_length)}
        sizes = tuple(
            length if (id(tensor), dim) in changed else size
            for tensor in tensors for dim, size in enumerate(tensor.shape)
        )  # fmt: skip
        return resized(arguments, tensors, sizes)


def _pairs(tensors: Mapping[str, Tensor], dims: Mapping[str, Sequence[int]]) -> Iterable[tuple[Tensor, int]]:
    return ((tensors[name], dim) for name, found in dims.items() for dim in found)


def read_lengths(lengths: Iterable[int] | str | None) -> list[int]:
    """Return the sequence lengths of the option `lengths=`: integers, a range, or the text `17,64,77`.

    Raises OptionError if it is something else.
    """
    if lengths is None:
        return []
    entries = [*(lengths.split(",") if isinstance(lengths, str) else lengths)] if hasattr(lengths, "__iter__") else []
    numbers = [int(entry) if str(entry).strip().isdecimal() else 0 for entry in entries]
    if not numbers or min(numbers) < 1:
        raise OptionError(f"lengths={lengths!r} names no sequence lengths", why="they are integers from 1",
                          hint="lengths=[17, 64, 77], or lengths=range(16, 65, 16)")  # fmt: skip
    return list(dict.fromkeys(numbers))
