"""Inputs of a search: the batch size of its example call, and mesh axes with a fixed size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autopart.errors import InputError, OptionError
from autopart.ir.mesh import AXES, Mesh

SEARCHED_AXES = ("pp", "dp", "cp", "ep", "tp")


def fixed_axes(mesh: Mesh | Mapping[str, int] | str | None, devices: int) -> dict[str, int]:
    """Return {axis: size} of the axes that a search must not change.

    Raises MeshError for unknown axes, and OptionError for sizes that do not divide the number of devices.
    """
    if mesh is None:
        return {}
    fixed = Mesh.parse(mesh, tuple(axis for axis in AXES if axis.name in SEARCHED_AXES))
    if devices % fixed.num_ranks:
        raise OptionError(
            f"mesh={str(fixed)!r} is not possible",
            why=f"its {fixed.num_ranks} ranks do not divide {devices} devices",
            hint="mesh='tp2', or 'pp1,tp8'; the search chooses the other axes",
        )
    return dict(fixed.sizes)


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
