"""Bytes of parameters on a rank, and bytes that data-parallel ranks exchange to synchronize gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from autopart.cost.predict.dp_sync_costs import carried
from autopart.ir.layout import local_shape
from autopart.ir.program import Program, StoredTensor
from autopart.ir.run.sync_option import MethodParameters, SyncMethod
from autopart.ir.trace import Trace


def reduce_dtype_of(stored: torch.dtype, program: Program) -> torch.dtype:
    """Return the dtype in which gradients of parameters with dtype `stored` are reduced."""
    reduce = program.reduce_dtype
    return reduce if reduce is not None and stored.is_floating_point else stored


def exchanged_by_method(trace: Trace, program: Program, names: Iterable[str]) -> list[MethodParameters]:
    """Return the bytes of the rank's parameters that each data-parallel method (`dp_sync`) synchronizes.

    Parameters without such a method, whose gradients are all-reduced, are left out.
    """
    rows: dict[SyncMethod, list[tuple[float, int, tuple[int, ...]]]] = {}
    for name in names:
        stored, itemsize = program.parameters[name], trace.parameters[name].dtype.itemsize
        if stored.method is not None:
            size = local_bytes(trace, program, stored.unsharded_to_sync(program.mesh) or stored)
            rows.setdefault(stored.method, []).append((size / itemsize, itemsize, stored.shape))
    return [carried(method, sizes) for method, sizes in rows.items()]


def local_bytes(trace: Trace, program: Program, stored: StoredTensor) -> int:
    """Return the bytes of a rank's shard of a parameter."""
    sizes = {axis: program.mesh.size(axis) for axis in stored.layout}
    return math.prod(local_shape(stored.shape, stored.layout, sizes)) * trace.parameters[stored.name].dtype.itemsize
