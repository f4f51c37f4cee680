"""Rules of operators whose factors depend on their arguments: views, reductions, joins and cuts.

Each function takes the node and gives its `Pattern`, or None where no sharding is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch import fx

from autopart.graph import shape, tensor_inputs, value

from .notation import Dim, Pattern

UNARY_LINEAR = ((0,),)


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _names(count: int, prefix: str = "d") -> list[Dim]:
    return [(f"{prefix}{i}",) for i in range(count)]


def _pattern(node: fx.Node, inputs: Sequence, outputs: Sequence, whole: Sequence[str] = (), **options: Any) -> Pattern:
    sizes: dict[str, int] = {}
    shapes = [shape(n) for n in tensor_inputs(node)] + _output_shapes(node)
    for dims, sizes_of in zip((*inputs, *outputs), shapes, strict=True):
        for dim, size in zip(dims, sizes_of, strict=True):
            if len(dim) == 1:
                sizes.setdefault(dim[0], size)
    return Pattern(
        tuple(map(tuple, inputs)), tuple(map(tuple, outputs)), sizes, frozenset(whole), **{"linear": (), **options}
    )


def _output_shapes(node: fx.Node) -> list[tuple[int, ...]]:
    outputs = value(node)
    return [tuple(t.shape) for t in (outputs if isinstance(outputs, (tuple, list)) else [outputs])]


def view(node: fx.Node) -> Pattern | None:
    """`view`/`reshape`: dims are merged and split; the common refinement of both shapes gives the factors."""
    before, after = shape(node.args[0]), shape(node)
    inputs, outputs, sizes, whole = refine(before, after)
    return Pattern((inputs,), (outputs,), sizes, frozenset(whole), UNARY_LINEAR)


def refine(before: Sequence[int], after: Sequence[int]) -> tuple[tuple, tuple, dict[str, int], list[str]]:
    """Factors such that both shapes are groups of them, e.g. (4, 12, 32) -> (48, 4, 8) over 4, 12, 4, 8.

    Where a stretch of dims has no common refinement (6, 4 -> 8, 3) its dims become factors that stay whole.
    """
    sizes: dict[str, int] = {}
    whole: list[str] = []

    def new(size: int, keep: bool = False) -> str:
        name = f"f{len(sizes)}"
        sizes[name] = size
        if keep:
            whole.append(name)
        return name

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
    cuts = sorted(
        {math.prod(left[k:]) for k in range(len(left) + 1)} | {math.prod(right[k:]) for k in range(len(right) + 1)}
    )
    if any(b % a for a, b in pairwise(cuts)):
        inputs.extend((new(size, True),) for size in left)
        outputs.extend((new(size, True),) for size in right)
        return
    factors = {(a, b): new(b // a) for a, b in pairwise(cuts)}
    for dims, target in ((left, inputs), (right, outputs)):
        inner = math.prod(dims)
        for size in dims:
            outer, inner = inner, inner // size
            target.append(tuple(f for (a, b), f in reversed(factors.items()) if inner <= a and b <= outer and a < b))


def expand(node: fx.Node) -> Pattern:
    """`expand`: new dims and dims of size 1 become factors of the output alone."""
    before, after = shape(node.args[0]), shape(node)
    outputs = _names(len(after))
    kept = outputs[len(after) - len(before) :]
    inputs = [dim if a == b else () for dim, a, b in zip(kept, before, after[len(after) - len(before) :], strict=True)]
    sizes = {dim[0]: size for dim, size in zip(outputs, after, strict=True)}
    return Pattern((tuple(inputs),), (tuple(outputs),), sizes, linear=UNARY_LINEAR)


def permuted(order: Callable[[fx.Node, int], Sequence[int]]) -> Callable[[fx.Node], Pattern]:
    """An operator that reorders dims; `order(node, ndim)` lists the input dim of every output dim."""

    def rule(node: fx.Node) -> Pattern:
        dims = _names(len(shape(node.args[0])))
        return _pattern(node, [dims], [[dims[i] for i in order(node, len(dims))]], linear=UNARY_LINEAR)

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
    dims = _names(len(shape(node.args[0])))
    at = node.args[1] % (len(dims) + 1)
    return _pattern(node, [dims], [[*dims[:at], (), *dims[at:]]], linear=UNARY_LINEAR)


def squeeze(node: fx.Node) -> Pattern:
    before = shape(node.args[0])
    chosen = _argument(node, 1, "dim")
    chosen = range(len(before)) if chosen is None else [chosen] if isinstance(chosen, int) else chosen
    gone = {d % len(before) for d in chosen if before[d] == 1}
    dims = _names(len(before))
    return _pattern(node, [dims], [[d for i, d in enumerate(dims) if i not in gone]], linear=UNARY_LINEAR)


def reduction(node: fx.Node) -> Pattern:
    """`sum` and `mean`: reduced factors are summed over, so sharding one leaves a partial sum."""
    return _reduce(node, whole=False)


def whole_reduction(node: fx.Node) -> Pattern:
    """`amax`, `argmax`, `std`, ...: the reduced dims stay whole."""
    return _reduce(node, whole=True)


def _reduce(node: fx.Node, whole: bool, position: int = 1) -> Pattern:
    before, after = shape(node.args[0]), _output_shapes(node)
    dims = _names(len(before))
    chosen = _argument(node, position, "dim")
    everything = chosen is None or chosen == [] or isinstance(chosen, bool)
    chosen = range(len(before)) if everything else [chosen] if isinstance(chosen, int) else chosen
    gone = {d % len(before) for d in chosen} if before else set()
    keep = len(after[0]) == len(before)
    output = [() if i in gone else d for i, d in enumerate(dims) if keep or i not in gone]
    stay = [dims[i][0] for i in gone] if whole else []
    return _pattern(node, [dims], [output] * len(after), stay, linear=() if whole else UNARY_LINEAR)


def norm_reduction(node: fx.Node) -> Pattern:
    """`linalg_vector_norm`: like `amax`, its dims in the third argument."""
    return _reduce(node, whole=True, position=2)


def along_dim(position: int, default: int | tuple[int, ...] = -1, linear: tuple = ()) -> Callable[[fx.Node], Pattern]:
    """An operator that keeps its input's shape and needs one dim whole (`softmax`, `cumsum`, `flip`)."""

    def rule(node: fx.Node) -> Pattern:
        dims = _names(len(shape(node.args[0])))
        chosen = _argument(node, position, "dim", default)
        chosen = [chosen] if isinstance(chosen, int) else chosen or range(len(dims))  # none named: the flattened tensor
        stay = [dims[d][0] for d in chosen]
        return _pattern(node, [dims], [dims], stay, linear=linear)

    return rule


def cut(node: fx.Node) -> Pattern:
    """`slice`, `narrow`, `select`: the cut dim stays whole."""
    dims = _names(len(shape(node.args[0])))
    at = _argument(node, 1, "dim", 0) % len(dims)
    removed = len(shape(node)) < len(dims)
    output = [("cut",) if i == at else d for i, d in enumerate(dims) if not (removed and i == at)]
    return _pattern(node, [dims], [output], [dims[at][0], "cut"], linear=UNARY_LINEAR)


def split(node: fx.Node) -> Pattern:
    """`split_with_sizes`: the cut dim is a concatenation; sharding it shards every section (factor `cut`)."""
    dims = _names(len(shape(node.args[0])))
    at = _argument(node, 2, "dim", 0) % len(dims)
    dims[at] = ("cut",)
    pattern = _pattern(node, [dims], [dims] * len(node.args[1]), linear=UNARY_LINEAR)
    return pattern


def join(node: fx.Node) -> Pattern:
    """`cat`: the joined dim stays whole."""
    inputs = tensor_inputs(node)
    dims = _names(len(shape(node)))
    at = _argument(node, 1, "dim", 0) % len(dims)
    given = [[(f"part{i}",) if k == at else d for k, d in enumerate(dims)] for i in range(len(inputs))]
    stay = [dims[at][0], *(f"part{i}" for i in range(len(inputs)))]
    return _pattern(node, given, [dims], stay, linear=(tuple(range(len(inputs))),))


def stack(node: fx.Node) -> Pattern:
    inputs = tensor_inputs(node)
    dims = _names(len(shape(node)))
    at = _argument(node, 1, "dim", 0) % len(dims)
    given = [d for i, d in enumerate(dims) if i != at]
    return _pattern(node, [given] * len(inputs), [dims], [dims[at][0]], linear=(tuple(range(len(inputs))),))


def pad(node: fx.Node) -> Pattern:
    dims = _names(len(shape(node.args[0])))
    touched = {len(dims) - 1 - i // 2 for i, p in enumerate(node.args[1]) if p}
    output = [(f"padded{i}",) if i in touched else d for i, d in enumerate(dims)]
    return _pattern(node, [dims], [output], [n for i in touched for n in (dims[i][0], f"padded{i}")])


def unbind(node: fx.Node) -> Pattern:
    dims = _names(len(shape(node.args[0])))
    at = _argument(node, 1, "dim", 0) % len(dims)
    output = [d for i, d in enumerate(dims) if i != at]
    return _pattern(node, [dims], [output] * len(value(node)), [dims[at][0]], linear=UNARY_LINEAR)


def group_norm(node: fx.Node) -> Pattern:
    """Channels are `groups` x `channels of a group`; whole groups may be sharded."""
    batch, channels, *rest = shape(node.args[0])
    inner = _names(len(rest))
    dims = [("b",), ("g", "r"), *inner]
    sizes = {"b": batch, "g": node.args[1], "r": channels // node.args[1]}
    sizes |= {d[0]: size for d, size in zip(inner, rest, strict=True)}
    weights = [(("g", "r"),)] * (len(tensor_inputs(node)) - 1)
    stay = frozenset({"r", *(d[0] for d in inner)})
    return Pattern((tuple(dims), *weights), (tuple(dims),), sizes, stay)


BUILDERS: dict[str, Callable[[fx.Node], Pattern | None]] = {
    "aten::reshape": view,
    "aten::expand": expand,
    "aten::transpose": permuted(_transpose_order),
    "aten::t": permuted(lambda node, ndim: range(ndim)[::-1]),
    "aten::swapaxes": permuted(_transpose_order),
    "aten::swapdims": permuted(_transpose_order),
    "aten::numpy_T": permuted(lambda node, ndim: range(ndim)[::-1]),
    "aten::mT": permuted(lambda node, ndim: [*range(ndim - 2), ndim - 1, ndim - 2]),
    "aten::movedim": permuted(_movedim_order),
    "aten::permute": permuted(lambda node, ndim: [d % ndim for d in node.args[1]]),
    "aten::unsqueeze": unsqueeze,
    "aten::squeeze": squeeze,
    "aten::sum": reduction,
    "aten::mean": reduction,
    "aten::amax": whole_reduction,
    "aten::amin": whole_reduction,
    "aten::argmax": whole_reduction,
    "aten::any": whole_reduction,
    "aten::all": whole_reduction,
    "aten::var": whole_reduction,
    "aten::std": whole_reduction,
    "aten::logsumexp": whole_reduction,
    "aten::linalg_vector_norm": norm_reduction,
    "aten::softmax": along_dim(1),
    "aten::_softmax": along_dim(1),
    "aten::log_softmax": along_dim(1),
    "aten::_log_softmax": along_dim(1),
    "aten::cumsum": along_dim(1, linear=UNARY_LINEAR),
    "aten::flip": along_dim(1, linear=UNARY_LINEAR),
    "aten::roll": along_dim(2, default=(), linear=UNARY_LINEAR),
    "aten::slice": cut,
    "aten::narrow": cut,
    "aten::select": cut,
    "aten::split_with_sizes": split,
    "aten::cat": join,
    "aten::stack": stack,
    "aten::pad": pad,
    "aten::constant_pad_nd": pad,
    "aten::unbind": unbind,
    "aten::group_norm": group_norm,
}
