"""Rules of convolutions and of other operators over windows of space.

Space stays whole: a shard of it would need the rows at its neighbours' edges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from autopart.ir.graph import argument, operator_name, shape, tensor_inputs
from autopart.ir.pattern import Dim, Dims, Pattern
from autopart.passes.rules.factors import UNARY_LINEAR, names, names_and_place, pattern
from autopart.passes.rules.local_forms import group_argument


def convolution(node: fx.Node) -> Pattern | None:
    """Channels are `groups` times `channels of a group`: whole groups may be sharded, or the channels of all groups."""
    (x, weight), y = (shape(n) for n in tensor_inputs(node)[:2]), shape(node)
    if len(tensor_inputs(node)) > 2:  # a bias is added outside, after a partial sum is whole
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
    """The factors of a dim, without those that count one thing."""
    return tuple(f for f in factors if sizes[f] > 1)


def pad(node: fx.Node) -> Pattern:
    """The padded dims stay whole; padding with anything but numbers keeps partial sums."""
    dims = names(len(shape(node.args[0])))
    touched = {len(dims) - 1 - i // 2 for i, p in enumerate(node.args[1]) if p}
    output = [(f"padded{i}",) if i in touched else d for i, d in enumerate(dims)]
    whole = [n for i in touched for n in (dims[i][0], f"padded{i}")]
    return pattern(node, [dims], [output], whole, linear=() if argument(node, "value") else UNARY_LINEAR)


def unfold(node: fx.Node) -> Pattern | None:
    """`Tensor.unfold`: one dim becomes the number of windows, and a new last dim the places in a window."""
    if not shape(node.args[0]):
        return None
    dims, at = names_and_place(node, "dimension")
    output = [("windows",) if i == at else d for i, d in enumerate(dims)]
    whole = [dims[at][0], "windows", "window"]
    return pattern(node, [dims], [[*output, ("window",)]], whole, linear=UNARY_LINEAR)


def im2col(node: fx.Node) -> Pattern:
    """Every window becomes a column of `channels` times `places in a window`."""
    space, columns, sizes = _columns(shape(node.args[0]), shape(node))
    return Pattern((space,), (columns,), sizes, frozenset("xykl"), UNARY_LINEAR)


def col2im(node: fx.Node) -> Pattern:
    """The inverse of `im2col`: windows are summed where they overlap."""
    space, columns, sizes = _columns(shape(node), shape(node.args[0]))
    return Pattern((columns,), (space,), sizes, frozenset("xykl"), UNARY_LINEAR)


def _columns(space: Sequence[int], columns: Sequence[int]) -> tuple[Dims, Dims, dict[str, int]]:
    channels, x, y = space[-3:]
    sizes = {"b": space[0], "c": channels, "x": x, "y": y, "k": columns[-2] // channels, "l": columns[-1]}
    batch: Dims = (("b",),) if len(space) == 4 else ()
    return (*batch, ("c",), ("x",), ("y",)), (*batch, _merged(("c", "k"), sizes), ("l",)), sizes
