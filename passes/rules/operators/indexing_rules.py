"""Rules of operators that read or write a tensor at the positions in an index tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopart.ir.graph import argument, operator_name, shape, tensor_inputs, value
from autopart.ir.pattern import Dim, Pattern
from autopart.passes.rules.factors import UNARY_LINEAR, names, names_and_dim, pattern
from autopart.passes.rules.operators.selection_rules import tie


def gather(node: fx.Node) -> Pattern | None:
    """Return the rule of `gather`.

    The tensor's indexed dim cannot be sharded, but the index can be sharded along it. All other dims can be sharded if
    they have the same size in the index and the tensor.
    """
    source, index = node.args[0], node.args[2]
    dims, read, whole = _dims_of_source_and_index(shape(source), shape(index), argument(node, "dim"))
    if not dims:
        return None
    places = read[argument(node, "dim") % len(dims)][0]
    return pattern(node, [dims, read], [read], [name for name in whole if name != places], linear=UNARY_LINEAR)


def scatter(linear: Callable[[fx.Node], bool]) -> Callable[[fx.Node], Pattern | None]:
    """Return a function that derives the sharding rule (`Pattern`) of a scatter call.

    The indexed dim cannot be sharded. All other dims can be sharded if they have the same size in the index and the
    tensor.

    Args:
        linear: function that returns True if the target and the written values of a call may be partial sums.
    """

    def rule(node: fx.Node) -> Pattern | None:
        inputs = tensor_inputs(node)
        dims, written, whole = _dims_of_source_and_index(shape(inputs[0]), shape(inputs[1]), argument(node, "dim"))
        if not dims or any(shape(n) != shape(inputs[1]) for n in inputs[2:]):
            return None
        sums = ((0, 2) if len(inputs) == 3 else (0,),) if linear(node) else ()
        return pattern(node, [dims, *([written] * (len(inputs) - 1))], [dims], whole, linear=sums)

    return rule


def _dims_of_source_and_index(
    source: Sequence[int], index: Sequence[int], dim: int
) -> tuple[list[Dim], list[Dim], list[str]]:
    """Return dims of the tensor, dims of the index, and unshardable factors of `gather` or `scatter`.

    Each dim is a tuple of factors (letters of the rule).

    Args:
        source, index: shapes of the tensor and of the index.
        dim: the indexed dim.
    """
    dims = names(len(source))
    if not dims or len(index) != len(source):  # an empty index may have other dims
        return [], [], []
    at = dim % len(dims)
    read = [d if i != at and source[i] == index[i] else (f"at{i}",) for i, d in enumerate(dims)]
    whole = [name for d, r in zip(dims, read, strict=True) if d != r for name in (d[0], r[0])]
    return dims, read, whole


def index_select(node: fx.Node) -> Pattern | None:
    """Return the rule of `index_select`: the indexed dim cannot be sharded, but the index can."""
    if not shape(node.args[0]) or not shape(node.args[2]):
        return None
    dims, at = names_and_dim(node)
    dims, places, whole, tied = _factors_along(node, dims, at, node.args[2])
    output = [places if i == at else d for i, d in enumerate(dims)]
    return pattern(node, [dims, [places]], [output], whole, linear=UNARY_LINEAR, **tied)


def index_write(node: fx.Node) -> Pattern | None:
    """Return the rule of `index_add`, `index_copy`, `index_fill`.

    Neither the indexed dim nor the index can be sharded.
    """
    inputs = tensor_inputs(node)
    if not shape(inputs[0]) or not shape(inputs[1]):
        return None
    dims, at = names_and_dim(node)
    dims, places, whole, tied = _factors_along(node, dims, at, inputs[1])
    value_dims = [[places if i == at else d for i, d in enumerate(dims)] if shape(n) else [] for n in inputs[2:]]
    linear = ((0, 2),) if len(inputs) == 3 else ()
    whole = [*whole, "places"] if places == ("places",) else whole
    return pattern(node, [dims, [places], *value_dims], [dims], whole, linear=linear, **tied)


def _factors_along(
    node: fx.Node, dims: list[Dim], at: int, index: fx.Node
) -> tuple[list[Dim], Dim, list[str], dict[str, Any]]:
    """Return the components of the sharding rule of a call that indexes along one dim (`index_select`).

    Args:
        dims: dims of the first operand.
        at: the indexed dim.

    Returns:
        (dims of the operand, dim of the index, factors that cannot be sharded, options for `pattern`). The options are
        empty unless the index was computed by boolean indexing.
    """
    tied = tie(shape(node.args[0]), {at: index})
    if tied is None:
        return dims, ("places",), [dims[at][0]], {}
    dims = [tied.dims.get(i, d) for i, d in enumerate(dims)]
    return dims, tied.selected, [], {"tied": frozenset({1}), "known": tied.sizes}


def index(node: fx.Node) -> Pattern | None:
    """Return the rule of `x[i, :, j]`: the indices, and all dims except the indexed ones, can be sharded."""
    parts = _index_factors(node)
    if parts is None:
        return None
    dims, places, read, whole, tied = parts
    return pattern(node, [dims, *places], [read], whole, linear=UNARY_LINEAR, **tied)


def index_put(node: fx.Node) -> Pattern | None:
    """Return the rule of `x[i, :, j] = y`: neither the indexed dims nor the indices can be sharded."""
    parts = _index_factors(node)
    if parts is None:
        return None
    dims, places, written, whole, tied = parts
    sizes = shape(tensor_inputs(node)[-1])
    full = _index_shape(node)
    value_dims = [
        d if size == whole_size else ()
        for d, size, whole_size in zip(
            written[len(written) - len(sizes) :], sizes, full[len(full) - len(sizes) :], strict=True
        )
    ]
    if not tied:
        whole += [d[0] for index_dims in places for d in index_dims if d]
    last = len(places) + 1
    return pattern(node, [dims, *places, value_dims], [dims], whole, linear=((0, last),), **tied)


def _index_factors(node: fx.Node) -> tuple[list[Dim], list[list[Dim]], list[Dim], list[str], dict[str, Any]] | None:
    """Return the components of the sharding rule of a call with several indices; None if one is a mask.

    Returns:
        (dims of the tensor, dims of each index, dims of the result, factors that cannot be sharded, options for
        `pattern`).
    """
    before = shape(node.args[0])
    indices = {i: n for i, n in enumerate(node.args[1]) if n is not None}
    if not indices or any(value(n).dtype in (torch.bool, torch.uint8) for n in indices.values()):
        return None
    dims = names(len(before))
    tied = tie(before, indices)
    common = torch.broadcast_shapes(*(shape(n) for n in indices.values()))
    shared = names(len(common), "at") if tied is None else [tied.selected]
    places = [
        [
            d if size == full else ()
            for d, size, full in zip(shared[-len(sizes) :], sizes, common[-len(sizes) :], strict=True)
        ]
        if (sizes := shape(n))
        else []
        for n in indices.values()
    ]
    first, last = min(indices), max(indices)
    rest = [d for i, d in enumerate(dims) if i not in indices]
    at = first if last - first + 1 == len(indices) else 0  # adjacent index dims keep their position, others come first
    read = [*rest[:at], *shared, *rest[at:]]
    if tied is None:
        return dims, places, read, [dims[i][0] for i in indices], {}
    whole = [dims[i][0] for i in indices if i not in tied.dims]
    dims = [tied.dims.get(i, d) for i, d in enumerate(dims)]
    return dims, places, read, whole, {"tied": frozenset(range(1, len(places) + 1)), "known": tied.sizes}


def _index_shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of `x[i, :, j]` for a call `x[i, :, j] = y`."""
    dims, places, read, *_ = _index_factors(node) or ([], [], [])
    sizes = dict(zip(dims, shape(node.args[0]), strict=True))
    for index_dims, n in zip(places, [n for n in node.args[1] if n is not None], strict=True):
        sizes |= {d: size for d, size in zip(index_dims, shape(n), strict=True) if d}
    return tuple(sizes.get(d, 1) for d in read)


def searchsorted(node: fx.Node) -> Pattern | None:
    """Return the rule of `searchsorted`, `bucketize`: the sorted dim cannot be sharded.

    Batch dims can be sharded if each sample has its own sorted sequence.
    """
    inputs = tensor_inputs(node)
    if len(inputs) != 2:
        return None
    table_first = operator_name(node) == "aten::searchsorted"  # `bucketize` takes the table second
    table, values = inputs if table_first else reversed(inputs)
    dims = names(len(shape(values)))
    sorted_row = [*([] if len(shape(table)) == 1 else dims[:-1]), ("row",)]
    operands = [sorted_row, dims] if table_first else [dims, sorted_row]
    return pattern(node, operands, [dims], ["row"])


def isin(node: fx.Node) -> Pattern | None:
    """Return the rule of `isin`: the test elements cannot be sharded."""
    inputs = tensor_inputs(node)
    if len(inputs) != 2:
        return None
    dims, tested = names(len(shape(inputs[0]))), names(len(shape(inputs[1])), "test")
    return pattern(node, [dims, tested], [dims], [d[0] for d in tested])
