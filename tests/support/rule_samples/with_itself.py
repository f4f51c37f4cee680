"""Calls that pass one tensor as several operands. Each operand may need another placement of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from autopart.compat.torch_internals import tree_flatten, tree_map
from autopart.passes.rules import has_rule

from .sample import Sample, bools, call, data, ints, x


def repeated(name: str, tensor: Tensor, times: int = 2, *rest: object, **options: object) -> Sample:
    return call(name, *(times * (tensor,)), *rest, **options)


def with_repeated_tensors(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples of rules that have tensors of equal form, with one tensor in their place."""
    changed: list[Sample] = []
    for sample in samples:
        first_of: dict[object, Tensor] = {}

        def first(argument: object, first_of: dict[object, Tensor] = first_of) -> object:
            if not isinstance(argument, Tensor):
                return argument
            return first_of.setdefault((argument.shape, argument.dtype, argument.requires_grad), argument)

        args, kwargs = tree_map(first, (sample.args, sample.kwargs))
        tensors = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, Tensor)]
        name = sample.operator.partition(".")[0]
        if has_rule(name if "::" in name else f"aten::{name}") and len(set(map(id, tensors))) < len(tensors):
            changed.append(Sample(sample.operator, args, kwargs))
    return changed


def permutations(rows: int, size: int) -> Tensor:
    """Integers [rows, size] below `size`, with no integer twice in a row."""
    return torch.stack([(torch.arange(size) + row) % size for row in range(rows)])


LIST, SQUARE, CUBE = ints(6, below=6), permutations(6, 6), ints(6, 6, 6, below=6)
ORDER, LENGTHS, MATRIX = SQUARE[1], ints(6, below=2) + 3, x(6, 4)
ORDERED, ORDERED_ROWS = data(6).sort().values, data(6, 6).sort(-1).values

SAMPLES = [
    repeated("clamp.Tensor", x(6, 4), 3),
    repeated("clamp_min.Tensor", x(6, 4)),
    repeated("clamp_max.Tensor", x(6, 4)),
    repeated("lerp.Tensor", x(6, 4), 3),
    repeated("addcmul", x(6, 4), 3),
    repeated("addcdiv", x(6, 4), 3),
    repeated("floor_divide", data(6, 4)),
    repeated("heaviside", data(6, 4)),
    repeated("special_zeta", data(6, 4, low=1.5, high=3.0)),
    repeated("where.self", bools(6, 4), 3),
    repeated("masked_fill.Scalar", bools(6, 4), 2, True),
    repeated("fill.Tensor", x()),
    repeated("div.Tensor", data(6, 4)),  # the gradient of x / x is rounding alone
    repeated("autopart::drop", data(6, 4), 2, 0.25),
    call("autopart::ctc_loss", x(9, 6, 5, low=-3, high=-1), ints(6, 4, below=4) + 1, LENGTHS, LENGTHS, 0, True),
    # products of a value with itself
    repeated("linear", x(6, 6)),
    repeated("linear", x(6, 4)),
    repeated("bmm", x(2, 6, 6)),
    repeated("matmul", x(2, 4, 6, 6)),
    repeated("matmul", x(6)),
    repeated("_cdist_forward", x(6, 4), 2, 2.0, None),
    repeated("cdist", x(2, 6, 4)),
    call("einsum", "bik,bjk->bij", 2 * [x(2, 6, 4)]),
    call("einsum", "ij,jk->ik", 2 * [x(6, 6)]),
    call("einsum", "ij,jk,kl->il", 3 * [x(6, 6)]),
    repeated("scaled_dot_product_attention", x(2, 4, 6, 6), 3),
    repeated("scaled_dot_product_attention", x(2, 4, 6, 6), 3, None, 0.0, True),
    repeated("scaled_dot_product_attention", x(2, 4, 6, 6), 4),
    repeated("conv1d", x(6, 4, 3), 2, None, [1], [1]),
    repeated("conv2d", x(6, 4, 3, 3), 2, None, [1, 1], [1, 1]),
    repeated("conv3d", x(2, 4, 3, 2, 2), 2, None, [1, 1, 1], [1, 1, 1]),
    repeated("conv_transpose1d", x(4, 4, 3)),
    repeated("conv_transpose2d.input", x(4, 4, 2, 2)),
    repeated("conv_transpose3d.input", x(4, 4, 2, 2, 2)),
    repeated("convolution", x(6, 4, 3), 2, None, [1], [1], [1], False, [0], 1),
    repeated("grid_sampler_2d", x(2, 6, 4, 2), 2, 0, 0, False),
    repeated("grid_sampler_3d", x(2, 6, 4, 2, 3), 2, 0, 0, False),
    call("rms_norm", MATRIX, [6, 4], MATRIX),
    repeated("autopart::to_experts", LIST, 2, 1, 6),
    repeated("autopart::from_experts", LIST, 2, 1, 6),
    # integers that index themselves
    call("embedding", SQUARE, SQUARE),
    call("gather", SQUARE, 0, SQUARE),
    call("gather", SQUARE, 1, SQUARE),
    call("take_along_dim", SQUARE, SQUARE, 1),
    call("index_select", LIST, 0, LIST),
    call("index.Tensor", LIST, [LIST]),
    call("index.Tensor", SQUARE, [SQUARE]),
    call("index.Tensor", CUBE, [None, CUBE]),
    call("index.Tensor", SQUARE, [LIST, LIST]),
    call("scatter.src", SQUARE, 1, SQUARE, SQUARE),
    call("scatter_add", SQUARE, 0, SQUARE, SQUARE),
    call("scatter_reduce.two", SQUARE, 1, SQUARE, SQUARE, "sum"),
    call("index_add", LIST, 0, LIST, LIST),
    call("index_copy", ORDER, 0, ORDER, ORDER),
    call("index_fill.int_Scalar", LIST, 0, LIST, 3),
    call("index_put", ORDER, [ORDER], ORDER),
    call("index_put", LIST, [LIST], LIST, True),
    call("slice_scatter", MATRIX, MATRIX, 1, 0, 4),
    repeated("searchsorted.Tensor", ORDERED),
    repeated("searchsorted.Tensor", ORDERED_ROWS),
    repeated("bucketize.Tensor", ORDERED),
    repeated("isin.Tensor_Tensor", ints(6, 4)),
]

_LIBRARY = torch.library.Library("autopart_with_itself", "DEF")


def program(name: str, function: Callable[[Tensor], Tensor]) -> Sample:
    """Return a call of an operator that PyTorch decomposes into the operators of a function."""
    _LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    return call(f"autopart_with_itself::{name}", x(6, 6))


PROGRAMS = [
    program("gather_by_order", lambda x: x.gather(1, x.argsort(1))),
    program("gather_by_order_of_columns", lambda x: x.gather(0, x.argsort(0))),
    program("take_by_order", lambda x: torch.take_along_dim(x, x.argsort(-1), -1)),
    program("index_by_order", lambda x: x[x[0].argsort()]),
    program("index_by_two_orders", lambda x: x[x[0].argsort(), x[:, 0].argsort()]),
    program("search_in_own_order", lambda x: torch.searchsorted(x.sort(-1).values, x) * x),
    program("bucketize_by_own_row", lambda x: torch.bucketize(x, x[0].sort().values) * x),
    program("entropy", lambda x: F.cross_entropy(x, x.softmax(-1))),
    program("gram", lambda x: x @ x.T),
    program("gram_of_columns", lambda x: x.T @ x),
    program("distances", lambda x: torch.cdist(x, x.flip(0))),
    program("attention", lambda x: F.scaled_dot_product_attention(x[None], x[None], x.T[None])[0]),
    program("outer", lambda x: torch.einsum("ij,ik->ijk", x, x.softmax(0))),
]
"""Calls in which a value meets a function of itself. Each may need another placement of the value."""
