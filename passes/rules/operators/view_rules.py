"""Rules of views and permutations: dims are merged, split, reordered, added and dropped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import fx

from autopart.ir.graph import argument, shape
from autopart.ir.pattern import Dim, Pattern
from autopart.passes.rules.factors import UNARY_LINEAR, names, pattern
from autopart.passes.rules.local_forms import shape_argument


def view(node: fx.Node) -> Pattern | None:
    """Return the rule of `view`, `reshape`, with factors that are common to both shapes (`refine`)."""
    before, after = shape(node.args[0]), shape(node)
    inputs, outputs, sizes, whole = refine(before, after)
    return Pattern((inputs,), (outputs,), sizes, frozenset(whole), UNARY_LINEAR, local=shape_argument)


def refine(before: Sequence[int], after: Sequence[int]) -> tuple[tuple, tuple, dict[str, int], list[str]]:
    """Split the dims of two shapes into common factors.

    For example, (4, 12, 32) and (48, 4, 8) have the factors 4, 12, 4, 8. If dims have no common factors, as (6, 4) and
    (8, 3), each dim stays one factor, which cannot be sharded. The same holds for all dims if one dim has size 0.

    Returns:
        Factors of each dim before, factors of each dim after, {factor: size}, and the factors that cannot be sharded.
    """
    sizes: dict[str, int] = {}
    whole: list[str] = []

    def new(size: int, keep: bool = False) -> str:
        name = f"f{len(sizes)}"
        sizes[name] = size
        if keep:
            whole.append(name)
        return name

    if 0 in before:
        unsharded = [tuple((new(size, True),) for size in dims) for dims in (before, after)]
        return unsharded[0], unsharded[1], sizes, whole
    inputs: list[Dim] = []
    outputs: list[Dim] = []
    i = j = 0
    while i < len(before) or j < len(after):
        first_i, first_j = i, j
        left = right = 1
        if i < len(before) and before[i] == 1 and (j >= len(after) or after[j] != 1):
            i, left = i + 1, 1
        elif j < len(after) and after[j] == 1 and (i >= len(before) or before[i] != 1):
            j, right = j + 1, 1
        else:
            left, right, i, j = before[i], after[j], i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        _refine_stretch(before[first_i:i], after[first_j:j], inputs, outputs, new)
    return tuple(inputs), tuple(outputs), sizes, whole


def _refine_stretch(left: Sequence[int], right: Sequence[int], inputs: list, outputs: list, new: Callable) -> None:
    boundaries = sorted(
        {math.prod(left[k:]) for k in range(len(left) + 1)} | {math.prod(right[k:]) for k in range(len(right) + 1)}
    )
    if any(b % a for a, b in pairwise(boundaries)):
        inputs.extend((new(size, True),) for size in left)
        outputs.extend((new(size, True),) for size in right)
        return
    factors = {(a, b): new(b // a) for a, b in pairwise(boundaries)}
    for dims, target in ((left, inputs), (right, outputs)):
        inner = math.prod(dims)
        for size in dims:
            outer, inner = inner, inner // size
            target.append(tuple(f for (a, b), f in reversed(factors.items()) if inner <= a and b <= outer and a < b))


def expand(node: fx.Node) -> Pattern:
    """Return the rule of `expand`. Only the output has the letters of new and expanded dims."""
    before, after = shape(node.args[0]), shape(node)
    outputs = names(len(after))
    aligned = outputs[len(after) - len(before) :]
    inputs = [
        dim if a == b else () for dim, a, b in zip(aligned, before, after[len(after) - len(before) :], strict=True)
    ]
    sizes = {dim[0]: size for dim, size in zip(outputs, after, strict=True)}
    return Pattern((tuple(inputs),), (tuple(outputs),), sizes, linear=UNARY_LINEAR, local=shape_argument)


def permuted(order: Callable[[fx.Node, int], Sequence[int]]) -> Callable[[fx.Node], Pattern]:
    """Return a function that derives the sharding rule (`Pattern`) of a call that reorders dims.

    Args:
        order: `order(node, ndim)` lists the input dim of every output dim.
    """

    def rule(node: fx.Node) -> Pattern:
        dims = names(len(shape(node.args[0])))
        reordered = [dims[i] for i in order(node, len(dims))] if dims else []
        return pattern(node, [dims], [reordered], linear=UNARY_LINEAR)

    return rule


def _movedim_order(node: fx.Node, ndim: int) -> list[int]:
    sources, targets = ([d] if isinstance(d, int) else d for d in node.args[1:3])
    moved = {t % ndim: s % ndim for s, t in zip(sources, targets, strict=True)}
    rest = iter(d for d in range(ndim) if d not in moved.values())
    return [moved[i] if i in moved else next(rest) for i in range(ndim)]


def _transpose_order(node: fx.Node, ndim: int) -> list[int]:
    order = list(range(ndim))
    a, b = node.args[1] % ndim, node.args[2] % ndim
    order[a], order[b] = order[b], order[a]
    return order


def unsqueeze(node: fx.Node) -> Pattern:
    dims = names(len(shape(node.args[0])))
    at = node.args[1] % (len(dims) + 1)
    return pattern(node, [dims], [[*dims[:at], (), *dims[at:]]], linear=UNARY_LINEAR)


def squeeze(node: fx.Node) -> Pattern:
    before = shape(node.args[0])
    chosen = argument(node, "dim")
    chosen = range(len(before)) if chosen is None else [chosen] if isinstance(chosen, int) else chosen
    removed = {d % len(before) for d in chosen if before[d] == 1} if before else set()
    dims = names(len(before))
    return pattern(node, [dims], [[d for i, d in enumerate(dims) if i not in removed]], linear=UNARY_LINEAR)


def diagonal(node: fx.Node) -> Pattern:
    """Return the rule of `diagonal`: two dims, which cannot be sharded, become the last output dim."""
    dims = names(len(shape(node.args[0])))
    merged = [argument(node, name) % len(dims) for name in ("dim1", "dim2")]
    output = [d for i, d in enumerate(dims) if i not in merged]
    whole = [*(dims[i][0] for i in merged), "diagonal"]
    return pattern(node, [dims], [[*output, ("diagonal",)]], whole, linear=UNARY_LINEAR)


reverse = permuted(lambda node, ndim: range(ndim)[::-1])
permute = permuted(lambda node, ndim: [d % ndim for d in node.args[1]])
transpose = permuted(_transpose_order)
matrix_transpose = permuted(lambda node, ndim: [*range(ndim - 2), ndim - 1, ndim - 2])
movedim = permuted(_movedim_order)
