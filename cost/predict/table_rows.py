"""What a `Table` says of a model: its parameters and its operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from autopart.cost.predict.operator_work import NOTHING, Size, Work


@dataclass(frozen=True)
class Parameter:
    """A parameter as a rank of `tp` stores it. `axes`: those that its gradient is summed over once a step. `over`:
    those that ZeRO-3 cuts it over, joined as one; none where it stays whole.

    In mixed precision: `read` and `summed`, bytes that are read or gathered of it, and summed of its gradient, for each
    that is stored; `cast_again`: whether the backward reads it too. Where data-parallel ranks send something else than
    gradients: `itemsize`, bytes of an element, and `rows`, the size of the first dim of a matrix.
    """

    size: Size
    axes: tuple[str, ...]
    trained: bool
    over: tuple[str, ...]
    read: float = 1.0
    summed: float = 1.0
    cast_again: bool = False
    itemsize: int = 4
    rows: int = 0

    @property
    def cut(self) -> bool:
        """Whether ZeRO-3 cuts it."""
        return bool(self.over)

    @property
    def casts(self) -> int:
        """How often a microbatch casts it, or its gradient."""
        return (1 + self.trained + self.cast_again) * (self.read != 1)

    def cast(self, ranks: int) -> Work:
        """Casting it, or its gradient, where it is cut over so many ranks."""
        return Work("other", self.size * ((1 + self.read) / ranks))


@dataclass(frozen=True, eq=False)
class Row:
    """One operator of a microbatch.

    `works`: what it does by part of a step, `count.counting.Counted`'s names. `kept`: bytes that are held from its
    forward to its backward. `in_forward`, `in_backward`: what is there while either runs beyond what this operator and
    those before it keep, without weights on their way and gradients of weights; a term may be negative. `crossing`:
    what a cut before it would send, None where none can be; of that `alike`: what may be sent in parts
    (`sends.StageCrossing`), `unkept`: what no operator before it keeps, `kept_later`: what one after it keeps first.
    `load`: what stages are balanced by. `parameters`: those that it reads; `reads_also`: those of which it reads a
    view, or the whole that another row gathers.
    """

    works: Mapping[str, tuple[Work, ...]]
    kept: Size
    in_forward: Size
    in_backward: Size
    crossing: Size | None
    load: Size
    parameters: tuple[str, ...] = ()
    reads_also: tuple[str, ...] = ()
    alike: Size = NOTHING
    unkept: Size = NOTHING
    kept_later: Size = NOTHING

    @property
    def temporary(self) -> Size:
        """The larger of what is there in its forward and its backward."""
        return max(self.in_forward, self.in_backward, key=lambda size: size.value)


def named_in(name: str, path: str, number: int) -> str:
    """A name for a parameter that is read by a block of the model, one name a block."""
    return f"{path}.{number} {name}" if path and name.startswith(f"{path}.") else name


def cast_bytes(parameters: Iterable[Parameter]) -> Size:
    """Bytes that casting parameters and their gradients moves."""
    return Size.sum(p.size * ((1 + p.read) * p.casts) for p in parameters)


def mean_share(weighted: Iterable[tuple[float, float]]) -> float:
    """The mean of shares, each of so many bytes."""
    weights, shares = zip(*weighted, strict=True)
    return shares[0] if len(set(shares)) == 1 else float(np.average(shares, weights=weights))


def summed_over(trained: Iterable[Parameter]) -> dict[str, dict[tuple[str, ...], Size]]:
    """`Totals.summed_over`, of the parameters that get a gradient."""
    sizes_by_axis: dict[str, dict[tuple[str, ...], Size]] = {}
    for parameter in trained:
        for axis in parameter.axes:
            sizes = sizes_by_axis.setdefault(axis, {})
            sizes[parameter.over] = sizes.get(parameter.over, NOTHING) + parameter.size
    return sizes_by_axis
