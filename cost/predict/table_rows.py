"""Rows of a `Table`: the parameters and operators of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from autopart.cost.predict.operator_work import NOTHING, Size, Work


@dataclass(frozen=True)
class Parameter:
    """A parameter as a rank of `tp` stores it.

    Args:
        size: bytes.
        axes: axes over which its gradient is reduced once a step.
        over: axes over which ZeRO-3 shards it, flattened; empty if it stays unsharded.
        read: bytes in the compute dtype per byte stored (mixed precision).
        summed: bytes of the reduced gradient per byte stored (mixed precision).
        cast_again: True if backward casts it too.
        itemsize: bytes of an element, if a data-parallel method replaces the all-reduce.
        rows: size of the first dim of a matrix, if a data-parallel method replaces the all-reduce.
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
        """True if ZeRO-3 shards it."""
        return bool(self.over)

    @property
    def casts(self) -> int:
        """Number of casts of it, or of its gradient, per microbatch."""
        return (1 + self.trained + self.cast_again) * (self.read != 1)

    def cast(self, ranks: int) -> Work:
        """Return the work of one cast of it, or of its gradient, sharded over `ranks` ranks."""
        return Work("other", self.size * ((1 + self.read) / ranks))


@dataclass(frozen=True, eq=False)
class OperatorRow:
    """One operator of a microbatch. Sizes are bytes unless noted.

    Args:
        works: its work by part of a step, with the names of `count.operator_counts.OperatorWork`.
        kept: tensors saved from its forward to its backward.
        in_forward, in_backward: memory while either runs, beyond the tensors that this operator and earlier ones
            save. In-flight weights and weight gradients are excluded. A term may be negative.
        crossing: bytes that a stage boundary before it sends; None if no stage may begin here.
        load: FLOPs by which stages are balanced.
        parameters: parameters that it reads.
        reads_also: parameters that it reads through a view, or that another row gathers.
        alike: the part of `crossing` that may be sent as shards (`send_costs.BoundaryBytes`).
        unkept: the part of `crossing` that no earlier operator saves.
        kept_later: the part of `crossing` that a later operator saves first.
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
        """The larger of its memory in forward and in backward."""
        return max(self.in_forward, self.in_backward, key=lambda size: size.value)


def named_in(name: str, path: str, number: int) -> str:
    """Return the unique name of a parameter that a block of the model reads."""
    return f"{path}.{number} {name}" if path and name.startswith(f"{path}.") else name


def cast_bytes(parameters: Iterable[Parameter]) -> Size:
    """Return the bytes moved by casts of parameters and of their gradients, per microbatch."""
    return Size.sum(p.size * ((1 + p.read) * p.casts) for p in parameters)


def mean_share(weighted: Iterable[tuple[float, float]]) -> float:
    """Return the mean of shares, weighted by bytes, from pairs (bytes, share)."""
    weights, shares = zip(*weighted, strict=True)
    return shares[0] if len(set(shares)) == 1 else float(np.average(shares, weights=weights))


def summed_over(trained: Iterable[Parameter]) -> dict[str, dict[tuple[str, ...], Size]]:
    """Return `Totals.summed_over` of the parameters that get a gradient."""
    sizes_by_axis: dict[str, dict[tuple[str, ...], Size]] = {}
    for parameter in trained:
        for axis in parameter.axes:
            sizes = sizes_by_axis.setdefault(axis, {})
            sizes[parameter.over] = sizes.get(parameter.over, NOTHING) + parameter.size
    return sizes_by_axis
