"""Rows of a `Table`, the parameters and operators of a model, and sums over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopart.cost.predict.operator_work import NOTHING, Size, Sizes, Work


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
        contiguous: True if the unsharded parameter is its ZeRO shards concatenated.
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
    contiguous: bool = True

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
        after_backward: memory after its backward, beyond the tensors that earlier operators save.
        delayed: gradients that a split backward keeps from its input part to its weight part.
        crossing: bytes that a stage boundary before it sends; None if no stage may begin here.
        load: FLOPs by which stages are balanced.
        parameters: parameters that it reads.
        reads_also: parameters that it reads through a view, or that another row gathers.
        recomputed: buffers that are recomputed before its backward, if it is the last operator of a region; else None.
        alike: the part of `crossing` that may be sent as shards (`send_costs.BoundaryBytes`).
        inputs: values that it reads and that depend on the call's inputs alone (`Table.prologue`).
        unkept: the part of `crossing` that no earlier operator saves, and no earlier stage receives.
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
    inputs: tuple[str, ...] = ()
    recomputed: Size | None = None
    after_backward: Size = NOTHING
    delayed: Size = NOTHING
    alike: Size = NOTHING
    unkept: Size = NOTHING
    kept_later: Size = NOTHING

    @property
    def temporary(self) -> Size:
        """The larger of its memory in forward and in backward."""
        return max(self.in_forward, self.in_backward, key=lambda size: size.value)


class RowBytes(NamedTuple):
    """Arrays of bytes of operators, with the names of the fields of `OperatorRow`."""

    kept: np.ndarray
    in_forward: np.ndarray
    in_backward: np.ndarray
    after_backward: np.ndarray
    delayed: np.ndarray
    recomputed: np.ndarray

    def of(self, positions: np.ndarray) -> RowBytes:
        """Return the bytes of the operators whose rows are at these positions."""
        return RowBytes(*(sizes[positions] for sizes in self))


class ShardedBytes(NamedTuple):
    """Parameters that ZeRO shards over the same axes.

    Args:
        size: their bytes, unsharded.
        number: number of parameters.
        cast: bytes that casts of them and of their gradients move in a microbatch, if unsharded.
    """

    size: Size
    number: int
    cast: Size


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Work of one microbatch of the full model on the ranks of one pipeline, and memory in bytes.

    Args:
        works: {(part of a step, work): count}.
        stored: parameters.
        trained: the parameters that get a gradient.
        cut: {flattened axes: the parameters that ZeRO shards over them}.
        gathers: True if `works` includes ZeRO's collectives.
        cast: traffic of casts of the other parameters and their gradients in a microbatch.
        read, summed: as in `Parameter`, averaged over all parameters.
        kept: activations saved by all operators.
        temporary: peak workspace beyond them.
        sent: values sent between two stages.
        buffers: buffers of the model.
        summed_over: {axis: bytes of the parameters whose gradients are reduced over it, by the axes ZeRO shards
            them over}.
        hidden: share of gradients outside the bucket that completes last.
        at: the reference sizes.
    """

    works: Mapping[tuple[str, Work], int]
    stored: Size
    trained: Size
    cut: Mapping[tuple[str, ...], ShardedBytes]
    gathers: bool
    cast: Size
    read: float
    summed: float
    kept: Size
    temporary: Size
    sent: Size
    buffers: float
    summed_over: Mapping[str, Mapping[tuple[str, ...], Size]]
    hidden: float
    at: Sizes


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
