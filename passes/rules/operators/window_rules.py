"""Rules of convolutions and other operators over spatial windows.

Spatial dims cannot be sharded: a shard would need the borders of the neighbouring shards (halo exchange).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from autopart.ir.graph import argument, operator_name, shape, tensor_inputs
from autopart.ir.pattern import Dim, Dims, Pattern
from autopart.passes.rules.factors import UNARY_LINEAR, names, names_and_dim, pattern
from autopart.passes.rules.local_forms import group_argument


def convolution(node: fx.Node) -> Pattern | None:
    """Return the rule of convolutions. The groups can be sharded, or the channels of each group.

    The channel dims have the factors (groups, channels per group). None if the call has a bias: a pass moves the bias
    to a separate addition.
    """
    (x, weight), y = (shape(n) for n in tensor_inputs(node)[:2]), shape(node)
    if len(tensor_inputs(node)) > 2:  # a pass moves the bias to a separate add, after the reduction of partial sums
        return None
    transposed = "transpose" in operator_name(node) or bool(argument(node, "transposed"))
    groups, num_space = argument(node, "groups"), len(weight) - 2
    batch = [("b",)] if len(x) == len(weight) else []
    outer, inner = (x[-num_space - 1] // groups, weight[1]) if transposed else (weight[0] // groups, weight[1])
    sizes = {"g": groups, ("i" if transposed else "o"): outer, ("o" if transposed else "i"): inner}
    space, window, places = names(num_space, "x"), names(num_space, "k"), names(num_space, "y")
    for dims, extents in ((space, x[-num_space:]), (window, weight[-num_space:]), (places, y[-num_space:])):
        sizes |= {dim[0]: size for dim, size in zip(dims, extents, strict=True)}
    sizes |= {"b": x[0]} if batch else {}
    first, second = ("i", "o") if transposed else ("o", "i")
    inputs = (
        (*batch, _merged(("g", "i"), sizes), *space),
        (_merged(("g", first), sizes), _merged((second,), sizes), *window),
    )
    moved = x[-num_space:] if transposed else y[-num_space:]
    flops = 2 * sizes.get("b", 1) * groups * outer * inner * math.prod(weight[2:]) * math.prod(moved)
    whole = frozenset(dim[0] for dim in (*space, *window, *places))
    output = (*batch, _merged(("g", "o"), sizes), *places)
    return Pattern(inputs, (output,), sizes, whole, ((0,), (1,)), flops=flops, local=group_argument)


def _merged(factors: Dim, sizes: dict[str, int]) -> Dim:
    return tuple(f for f in factors if sizes[f] > 1)


def pad(node: fx.Node) -> Pattern:
    """Return the rule of `pad`: padded dims cannot be sharded. Padding with 0 allows partial sums."""
    dims = names(len(shape(node.args[0])))
    padded = {len(dims) - 1 - i // 2 for i, p in enumerate(node.args[1]) if p}
    output = [(f"padded{i}",) if i in padded else d for i, d in enumerate(dims)]
    whole = [n for i in padded for n in (dims[i][0], f"padded{i}")]
    return pattern(node, [dims], [output], whole, linear=() if argument(node, "value") else UNARY_LINEAR)


def unfold(node: fx.Node) -> Pattern | None:
    """Return the rule of `Tensor.unfold`: the dim that it splits into windows cannot be sharded."""
    if not shape(node.args[0]):
        return None
    dims, at = names_and_dim(node, "dimension")
    output = [("windows",) if i == at else d for i, d in enumerate(dims)]
    whole = [dims[at][0], "windows", "window"]
    return pattern(node, [dims], [[*output, ("window",)]], whole, linear=UNARY_LINEAR)


def im2col(node: fx.Node) -> Pattern:
    """Return the rule of `im2col`, which copies every window of an image to a column of the output.

    Only the batch and the channels can be sharded.
    """
    space, columns, sizes = _columns(shape(node.args[0]), shape(node))
    return Pattern((space,), (columns,), sizes, frozenset("xykl"), UNARY_LINEAR)


def col2im(node: fx.Node) -> Pattern:
    """Return the rule of `col2im`, the inverse of `im2col`: elements of overlapping windows are added."""
    space, columns, sizes = _columns(shape(node), shape(node.args[0]))
    return Pattern((columns,), (space,), sizes, frozenset("xykl"), UNARY_LINEAR)


def _columns(space: Sequence[int], columns: Sequence[int]) -> tuple[Dims, Dims, dict[str, int]]:
    channels, x, y = space[-3:]
    sizes = {"b": space[0], "c": channels, "x": x, "y": y, "k": columns[-2] // channels, "l": columns[-1]}
    batch: Dims = (("b",),) if len(space) == 4 else ()
    return (*batch, ("c",), ("x",), ("y",)), (*batch, _merged(("c", "k"), sizes), ("l",)), sizes
