"""Inputs of a search: the batch size of its example call, and mesh axes with a fixed size."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autopart.errors import InputError, OptionError

SEARCHED_AXES = ("pp", "dp", "cp", "ep", "tp")


def fixed_axes(mesh: str | Mapping[str, int] | None, devices: int) -> dict[str, int]:
    """Return {axis: size} of the axes that a search must not change.

    Raises OptionError for unknown axes, and for sizes that do not divide the number of devices.
    """
    if mesh is None:
        return {}
    text = mesh if isinstance(mesh, str) else ",".join(f"{axis}={size}" for axis, size in mesh.items())
    hint = "--mesh tp2, or pp=1,tp=8; the search chooses the other axes"
    matches = [re.fullmatch(r"([a-z]+)=?(\d+)", part.strip()) for part in text.split(",")]
    if not all(matches):
        raise OptionError(f"mesh={text!r} names no axes with a size", hint=hint)
    fixed = {match[1]: int(match[2]) for match in matches if match}
    for axis, size in fixed.items():
        if axis not in SEARCHED_AXES:
            raise OptionError(
                f"the search has no mesh axis {axis}", why=f"it tries {', '.join(SEARCHED_AXES)}", hint=hint
            )
        if size < 1 or devices % size:
            raise OptionError(f"{axis}={size} is not possible", why=f"it does not divide {devices} devices", hint=hint)
    ranks = math.prod(fixed.values())
    if devices % ranks:
        why = f"its {ranks} ranks do not divide {devices} devices"
        raise OptionError(f"mesh={text!r} is not possible", why=why, hint=hint)
    return fixed


def batch_size(example: Mapping[str, Any]) -> int:
    """Return the batch size of an example call: the most frequent first dim of its tensors.

    Raises InputError if no tensor has dims.
    """
    sizes = [x.shape[0] for x in example.values() if isinstance(x, Tensor) and x.dim()]
    if not sizes:
        raise InputError("search() needs an example call with a batch dim", hint="example_kwargs={'input_ids': ids}")
    return max(sizes, key=sizes.count)


def with_batch_size(x: Any, rows: int, wanted: int) -> Any:
    """Shorten or extend the batch dim of a tensor from `rows` to `wanted` samples.

    Added samples repeat the first sample. Tensors with another first dim are returned unchanged.
    """
    if not isinstance(x, Tensor) or not x.dim() or x.shape[0] != rows:
        return x
    return x[:wanted] if rows >= wanted else x[:1].expand(wanted, *x.shape[1:]).contiguous()


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
