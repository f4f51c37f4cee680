"""Rows of a cost table (`Table`): the operators and parameters of a model, and sums over them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autopart.cost.predict.operator_work import NOTHING, Size, Sizes, Work
from autopart.cost.update_rules import ADAMW

if TYPE_CHECKING:
    from autopart.cost.predict.table import Table


@dataclass(frozen=True)
class Parameter:
    """A parameter of a cost table, without ZeRO sharding.

    Args:
        size: its bytes on a rank.
        axes: mesh axes over which its gradient is reduced once a step.
        trained: True if it gets a gradient.
        over: mesh axes over which ZeRO-3 shards it, as one flattened axis; empty if it stays unsharded.
        read: element size of its compute dtype, divided by that of its stored dtype; 1 without mixed precision.
        summed: element size of the dtype in which its gradient is reduced, divided by that of its stored dtype; 1
            without mixed precision.
        cast_again: True if the backward casts it to the compute dtype again, instead of saving the cast copy.
        itemsize: bytes of an element; 4, unless a data-parallel method (`dp_sync`) replaces the gradient all-reduce.
        rows: size of a matrix's first dim; 0 for a vector, or if no data-parallel method replaces the all-reduce.
        contiguous: True if the unsharded parameter is its ZeRO shards concatenated.
        full: True if the optimizer's update needs the full tensor (`cost.update_cost`).
        matrix: (rows, columns) of the full tensor, if the update orthogonalizes it.
        joined: True if several axes shard one dim, so that they are flattened into one axis.
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
    full: bool = False
    matrix: tuple[int, ...] = ()
    joined: bool = False

    @property
    def cut(self) -> bool:
        """True if ZeRO-3 shards the parameter."""
        return bool(self.over)

    @property
    def casts(self) -> int:
        """Number of casts of the parameter and of its gradient per microbatch."""
        return (1 + self.trained + self.cast_again) * (self.read != 1)

    def cast(self, ranks: int) -> Work:
        """Return the memory traffic of one cast of the parameter or of its gradient.

        Args:
            ranks: number of ranks over which ZeRO shards the parameter.
        """
        return Work("other", self.size * ((1 + self.read) / ranks))


@dataclass(frozen=True, eq=False)
class OperatorRow:
    """Work and memory of one operator for one microbatch, in a cost table. Sizes are bytes unless noted.

    Args:
        works: {part of a step, such as "forward": kernels and collectives}. The parts are the fields of
            `count.operator_counts.OperatorWork`.
        kept: tensors that it is the first operator to save for backward.
        in_forward, in_backward: memory while its forward or backward runs, in addition to the tensors that this
            operator and earlier ones save. Weights that are being gathered and weight gradients are excluded. May be
            negative.
        after_backward: memory after its backward, in addition to the tensors that earlier operators save.
        delayed: output gradients that a split backward (zero-bubble schedules) keeps until it computes the gradients
            of weights.
        crossing: values that are sent to the next stage if it begins at this operator; None if no stage may begin here.
        load: FLOPs by which stages are balanced.
        parameters: names of the parameters that it reads.
        reads_also: names of the parameters that it reads through a view, or that another row gathers.
        recomputed: buffers that are recomputed before its backward, if it is the last operator of a recomputed region;
            else None.
        alike: the values of `crossing` that can be sent as shards, because all ranks of `tp` have equal copies.
        inputs: names of values that it reads and that depend only on the model's inputs (`Table.prologue`).
        unkept: the values of `crossing` that stay in the sending stage's memory only because they are sent: no
            operator of the sending stage saves them for backward.
        kept_later: the values of `crossing` that this operator or a later one saves for backward, but no earlier one.
        once: True if the operator is in the tail, which runs once per step. Its sizes then count all microbatches.
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
    once: bool = False

    def gathers(self, axis: str) -> tuple[Work, ...]:
        """Return the forward's all-gathers over a mesh axis, if the operator has a backward."""
        if not {"input_backward", "weight_backward"} & self.works.keys():
            return ()
        return tuple(work for work in self.works.get("forward", ()) if (work.kind, work.axis) == ("all_gather", axis))

    @property
    def temporary(self) -> Size:
        """The larger of the operator's memory in forward and in backward."""
        return max(self.in_forward, self.in_backward, key=lambda size: size.value)


class RowBytes(NamedTuple):
    """Bytes of operators, as arrays with one entry per operator.

    Each array has the values of the `OperatorRow` field of the same name.
    """

    kept: np.ndarray
    in_forward: np.ndarray
    in_backward: np.ndarray
    after_backward: np.ndarray
    delayed: np.ndarray
    recomputed: np.ndarray

    @staticmethod
    def of_rows(rows: Sequence[OperatorRow], times_of: Callable[[OperatorRow], Sizes]) -> RowBytes:
        """Return the arrays of rows. `times_of` returns the sizes of a setting for a row."""
        sizes = ([float((getattr(row, name) or NOTHING).at(times_of(row))) for row in rows]
                 for name in RowBytes._fields)  # fmt: skip
        return RowBytes(*map(np.array, sizes))

    def of(self, positions: np.ndarray) -> RowBytes:
        """Return the arrays for selected operators. `positions` has the index of each operator's row."""
        return RowBytes(*(sizes[positions] for sizes in self))

    def without(self, gathered: np.ndarray, ranks: int) -> RowBytes:
        """Return the arrays if gathered values are not saved, but gathered again from a shard in the backward.

        Args:
            gathered: bytes of these values.
            ranks: number of ranks over which they are gathered.
        """
        saved = self.kept - gathered * (1 - 1 / ranks)
        return self._replace(kept=saved, in_backward=self.in_backward + gathered)


class FullTotals(NamedTuple):
    """Total sizes of parameters whose update needs the full tensor, for equal axes of ZeRO.

    Args:
        size: bytes on a rank without ZeRO sharding.
        full_bytes: bytes of the full tensors.
        matrices: {(rows, columns): number of matrices that the update orthogonalizes}.
    """

    size: Size
    full_bytes: float
    matrices: Mapping[tuple[int, ...], int]


class ShardedBytes(NamedTuple):
    """Total bytes of the parameters that ZeRO shards over the same axes.

    Args:
        size: bytes of the unsharded parameters.
        number: number of parameters.
        cast: bytes that casts of the unsharded parameters and gradients read and write in a microbatch.
    """

    size: Size
    number: int
    cast: Size


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Work of one microbatch of the full model on the ranks of one pipeline, and memory in bytes.

    Args:
        works: {(part of a step, such as "forward"; kernel or collective): number of runs}.
        stored: all parameters.
        trained: the parameters that get a gradient.
        cut: {flattened axes: the parameters that ZeRO shards over them}.
        gathers: True if `works` includes ZeRO's collectives.
        cast: memory traffic of casts, per microbatch, of the parameters that ZeRO does not shard and of their
            gradients.
        read: bytes of an element in the compute dtype divided by bytes of a stored element, on average.
        summed: bytes of an element of a reduced gradient divided by bytes of a stored element, on average.
        kept: activations saved by all operators.
        temporary: peak workspace in addition to the saved activations.
        sent: values that are sent between two stages, at the boundary where they have the fewest bytes.
        buffers: buffers of the model.
        summed_over: {axis of a gradient reduction: {axes of ZeRO's shards: bytes of parameters}}.
        hidden: share of gradients that can be reduced during backward: all but the bucket that completes last.
        at: the samples, tokens and ranks for which the table was counted.
        optimizer: optimizer of the step.
        full: {flattened axes of ZeRO: the parameters whose update needs the full tensor}.
    """

    works: Mapping[tuple[str, Work], float]
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
    optimizer: str = ADAMW
    full: Mapping[tuple[str, ...], FullTotals] = field(default_factory=dict)


def named_in(name: str, path: str, number: int) -> str:
    """Return a key that identifies a parameter in the full model.

    A cost table has the operators of one block for all equal blocks, so its parameters have the names of this block.
    The key therefore begins with the block that uses the parameter. A parameter outside of blocks keeps its name.

    Args:
        name: name of the parameter in the table.
        path: module path of the list of blocks, such as "layers"; "" for an operator outside of blocks.
        number: index in that list of the block that uses the parameter.

    >>> named_in("layers.0.norm.weight", "layers", 3), named_in("embedding.weight", "layers", 3)
    ('layers.3 layers.0.norm.weight', 'embedding.weight')
    """
    return f"{path}.{number} {name}" if path and name.startswith(f"{path}.") else name


def cast_bytes(parameters: Iterable[Parameter]) -> Size:
    """Return the bytes that casts of parameters and of their gradients read and write per microbatch."""
    return Size.sum(p.size * ((1 + p.read) * p.casts) for p in parameters)


def mean_share(weighted: Iterable[tuple[float, float]]) -> float:
    """Return the mean of shares, weighted by bytes.

    Args:
        weighted: pairs (bytes, share).
    """
    weights, shares = zip(*weighted, strict=True)
    return shares[0] if len(set(shares)) == 1 else float(np.average(shares, weights=weights))


def summed_over(trained: Iterable[Parameter]) -> dict[str, dict[tuple[str, ...], Size]]:
    """Return the bytes of parameters whose gradients are reduced over each mesh axis.

    The result is {mesh axis: {mesh axes over which ZeRO shards the parameters: their bytes}}.

    Args:
        trained: the parameters that get a gradient.
    """
    sizes_by_axis: dict[str, dict[tuple[str, ...], Size]] = {}
    for parameter in trained:
        for axis in parameter.axes:
            sizes = sizes_by_axis.setdefault(axis, {})
            sizes[parameter.over] = sizes.get(parameter.over, NOTHING) + parameter.size
    return sizes_by_axis


def totals_of(table: Table) -> Totals:
    """Return the sums over all operators of a cost table."""
    held = {name: table.parameters[known] for name, known in table.held.items()}
    trained = [parameter for parameter in held.values() if parameter.trained]
    cut = {p.over: [one for one in held.values() if one.over == p.over] for p in held.values() if p.cut}
    return Totals(
        works=table.counts,
        stored=Size.sum(parameter.size for parameter in held.values()),
        trained=Size.sum(parameter.size for parameter in trained),
        cut={over: _cut(group) for over, group in cut.items()},
        gathers=table.gathers,
        cast=cast_bytes(p for p in held.values() if not p.cut),
        read=mean_share((p.size.value, p.read) for p in held.values()),
        summed=mean_share((p.size.value, p.summed) for p in held.values()),
        kept=Size.sum(row.kept * number for row, number in zip(table.rows, table.often, strict=True)),
        temporary=max((row.temporary for row in table.rows), key=lambda size: size.value),
        sent=min((row.crossing for row in table.rows if row.crossing and row.crossing.terms),
                 key=lambda size: size.value, default=NOTHING),
        buffers=table.buffer_bytes,
        summed_over=summed_over(trained),
        hidden=table.hidden_sums,
        at=Sizes(table.b, table.s, table.tp, table.cp, table.ep),
        optimizer=table.optimizer,
        full={over: _full(group, table) for over in {p.over for p in trained if p.full}
              if (group := [p for p in trained if p.full and p.over == over])},
    )  # fmt: skip


def _full(parameters: Sequence[Parameter], table: Table) -> FullTotals:
    whole = sum(p.size.value * math.prod(getattr(table, axis) for axis in p.size.tensor_axes) for p in parameters)
    matrices = Counter(p.matrix for p in parameters if p.matrix)
    return FullTotals(Size.sum(p.size for p in parameters), whole, matrices)


def _cut(parameters: Sequence[Parameter]) -> ShardedBytes:
    return ShardedBytes(Size.sum(parameter.size for parameter in parameters), len(parameters), cast_bytes(parameters))
