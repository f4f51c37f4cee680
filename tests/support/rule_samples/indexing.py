"""Calls that read and write at places given by another tensor."""

import torch

from .sample import bools, call, data, ints, x


def places(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def columns(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


TWICE = columns([0, 1], [1, 2], [3, 0], [2, 3], [0, 2], [1, 3])

SAMPLES = [
    call("gather", x(6, 4), -1, ints(6, 2, below=4)),
    call("gather", x(6, 4), 1, ints(1, 2, below=4)),
    call("gather", x(6, 4), 0, ints(2, 4, below=6)),
    call("gather", x(6, 4), 1, ints(2, 2, below=4)),
    call("gather", x(6, 12, 4), 1, ints(6, 4, 4, below=12)),
    call("take_along_dim", x(6, 4), ints(6, 2, below=4), 1),
    call("take_along_dim", x(6, 4), ints(1, 2, below=4), 1),
    call("index_select", x(6, 4), 1, ints(3, below=4)),
    call("index_select", x(12, 6, 4), 0, ints(6, below=12)),
    # index: one place, one list, lists side by side, lists apart, numbers that broadcast
    call("index.Tensor", x(12, 6), [ints(6, below=12)]),
    call("index.Tensor", x(12, 6), [ints(4, 6, below=12)]),
    call("index.Tensor", x(6, 12, 4), [None, ints(6, below=12)]),
    call("index.Tensor", x(6, 12, 4), [None, ints(6, below=12), ints(6, below=4)]),
    call("index.Tensor", x(6, 12, 4), [ints(6, below=6), None, ints(6, below=4)]),
    call("index.Tensor", x(6, 12, 4), [None, ints(6, 1, below=12), ints(4, below=4)]),
    call("index.Tensor", x(6, 12), [None, places(3)]),
    # scatter
    call("scatter.src", x(6, 4), 1, TWICE, x(6, 2)),
    call("scatter.src", x(6, 4), 1, TWICE[:2], x(2, 2)),
    call("scatter.value", x(6, 4), 1, TWICE, 0.0),
    call("scatter.value", x(6, 4), 1, TWICE, 2.0),
    call("scatter.reduce", data(6, 4), 1, TWICE, data(6, 2), reduce="multiply"),
    call("scatter_add", x(6, 4), 1, ints(6, 2, below=4), x(6, 2)),
    call("scatter_add", x(6, 4), 0, ints(4, 4, below=6), x(4, 4)),
    call("scatter_reduce.two", x(6, 4), 1, ints(6, 2, below=4), x(6, 2), "sum"),
    call("scatter_reduce.two", x(6, 4), 1, ints(6, 2, below=4), x(6, 2), "amax", include_self=False),
    call("index_add", x(6, 12, 4), 1, ints(6, below=12), x(6, 6, 4)),
    call("index_add", x(6, 4), 0, ints(2, below=6), x(2, 4), alpha=2.0),
    call("index_copy", x(6, 12, 4), 1, places(3, 1, 0, 7), x(6, 4, 4)),
    call("index_fill.int_Scalar", x(6, 4), 1, places(0, 2), 3.0),
    call("index_fill.int_Tensor", x(6, 4), 1, places(0, 2), x()),
    call("index_put", x(12, 6), [places(3, 1, 0, 7)], x(4, 6)),
    call("index_put", x(12, 6), [places(3, 1, 0, 3)], x(6), True),
    call("index_put", x(6, 12, 4), [None, places(3, 1)], x(6, 2, 4)),
    call("index_put", x(6, 12, 4), [None, places(3, 1), places(0, 2)], x(6, 2)),
    call("index_put", x(6, 12, 4), [places(3, 1), None, places(0, 2)], x(1, 12)),
    call("index_put", x(6, 12, 4), [places(3, 1)], x()),
    call("slice_scatter", x(6, 4), x(6, 2), 1, 1, 3),
    call("slice_scatter", x(12, 4), x(6, 4), 0, 0, 12, 2),
    call("select_scatter", x(2, 6, 4), x(2, 4), 1, -2),
    call("searchsorted.Tensor", data(6, 4).sort(-1).values, data(6, 12)),
    call("searchsorted.Tensor", data(4).sort().values, data(6, 12)),
    call("bucketize.Tensor", data(6, 4), data(12).sort().values),
    call("isin.Tensor_Tensor", ints(6, 4), ints(2)),
    call("one_hot", ints(6, 4), 12),
    # ranking
    call("topk", x(6, 4), 2),
    call("topk", x(6, 12, 4), 3, 1, False),
    call("sort", x(6, 4)),
    call("sort", x(6, 4), 0, True),
    call("sort.stable", x(6, 4), stable=True, dim=0),
    call("argsort", x(6, 4), 1),
    *(call(f"{name}.dim", x(6, 4), 1) for name in ("max", "min", "median", "nanmedian")),
    call("max.dim", x(6, 4), 0, True),
    call("median", x(6, 4)),
    call("nanmedian", x(6, 4)),
    call("mode", x(6, 4), 1),
    call("kthvalue", x(6, 4), 2, 1),
    call("argmin", x(6, 4), 1),
    *(call(name, x(6, 4), 1) for name in ("cumprod", "cummax", "cummin", "logcumsumexp")),
    call("diagonal", x(6, 4, 4), 0, 1, 2),
    call("diagonal", x(6, 4, 12), 1, 0, -1),
    call("diag_embed", x(6, 4)),
    call("masked_fill.Scalar", x(6, 4), bools(6, 1), 2.0),
]
