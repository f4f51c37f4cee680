"""Gradient norm of a partitioned model.

Every element counts once; the result is bitwise identical on every rank.

Each rank computes the norm of the shards that it owns (`shard_owners.py`). The ranks exchange these norms, and each
rank combines the same numbers in the same order. Calls of `torch.nn.utils` whose lists contain tensors of a
partitioned model are redirected to this file.
"""

from __future__ import annotations

import math
import types
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.compat.torch_function_internals import on_local_values
from autopart.compat.training_internals import norms_of_each, redirect_norms
from autopart.errors import InputError, OptionError
from autopart.ir.program import Program
from autopart.runtime.comm.process_mesh import Process, reduce_over_all
from autopart.runtime.comm.stage_ranks import owners
from autopart.runtime.comm.watchdog import sum_over
from autopart.runtime.gradients.no_sync import check_reduced
from autopart.runtime.shards.shard_owners import (
    ShardInfo,
    is_owner_at,
    process_of,
    registered_parameters,
    registered_processes,
    shard_info_of,
)
from autopart.runtime.shards.shared_parameters import check_not_originals

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that a norm can have.

Ranks exchange a set of these dtypes as an integer with one bit per dtype.
"""


# --- The arithmetic, without process groups.


def local_norm(tensors: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all elements of these tensors: a float64 scalar on their device.

    The norm of each tensor is computed in its dtype, but at least in float32. Without tensors the result is 0, or
    infinity if `norm_type` is negative.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.tensor(_empty_norm(norm_type), dtype=torch.float64)
    with torch.no_grad():
        norms = [of_kind.to(filled[0].device, torch.float64) for of_kind in norms_of_each(filled, norm_type)]
        return torch.linalg.vector_norm(torch.cat(norms), norm_type)


def norm_of(norms: Iterable[float], norm_type: float = 2.0) -> float:
    """Return the norm of a tensor from the norms of its shards (Shoeybi et al. 2019, arXiv:1909.08053).

    Equal inputs give equal results on every machine, and no intermediate value overflows.

    >>> norm_of([3.0, 4.0]), norm_of([3.0, 4.0], math.inf), norm_of([3e300, 4e300])
    (5.0, 4.0, 5e+300)
    """
    values = list(norms)
    if any(math.isnan(value) for value in values):
        return math.nan
    extreme = (max if norm_type > 0 else min)(values, default=_empty_norm(norm_type))
    if math.isinf(norm_type) or extreme == 0 or math.isinf(extreme):
        return float(extreme)
    total = math.fsum((value / extreme) ** norm_type for value in values)
    return float(extreme * (math.sqrt(total) if norm_type == 2 else total ** (1 / norm_type)))


def norm_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype of torch's norm of tensors with these dtypes; float32 without tensors."""
    real_dtypes = [dtype.to_real() for dtype in dtypes]
    result = real_dtypes[0] if real_dtypes else torch.float32
    for dtype in real_dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result


def grad_norm_lockstep(
    parameters: Mapping[int, Mapping[str, Tensor]], program: Program, norm_type: float = 2.0, stage_style: str = "loop"
) -> Tensor:
    """Compute `grad_norm` for all ranks in one process.

    Args:
        parameters: {rank: {name: local parameter}}.
    """
    power = _check_norm_type(norm_type)
    norms, dtypes = [], []
    for rank, local in parameters.items():
        coordinates = program.mesh.coordinates(rank)
        counted = []
        for name, parameter in local.items():
            stored = program.parameters[name]
            if parameter.grad is not None and is_owner_at(
                stored, program.mesh, coordinates, owners(program, stored, stage_style)
            ):
                counted.append(parameter.grad)
        norms.append(local_norm(counted, power).item())
        dtypes += [grad.dtype for grad in counted]
    return torch.tensor(norm_of(norms, power), dtype=norm_dtype(dtypes))


def _empty_norm(norm_type: float) -> float:
    return 0.0 if norm_type > 0 else math.inf


def _check_norm_type(norm_type: float) -> float:
    power = float(norm_type)
    if power == 0 or math.isnan(power):
        raise OptionError(
            f"norm_type={norm_type!r} is not supported on a mesh",
            why="for 0, torch counts the tensors with a nonzero norm, and a rank holds shards of tensors",
            hint="norm_type=2.0, or math.inf for the largest element",
        )
    return power


# --- With process groups.


def grad_norm(parameters: Iterable[Tensor], process: Process, norm_type: float = 2.0) -> Tensor:
    """Return the norm of the gradients of these parameters over all ranks. A collective call.

    The result is a scalar, equal on every rank.
    """
    grads = [(parameter.grad, shard_info_of(parameter)) for parameter in parameters if parameter.grad is not None]
    parts = [NormShard(grad, shard_info) for grad, shard_info in grads if shard_info is not None]
    return _norm(parts, [], process, _check_norm_type(norm_type))


@dataclass(frozen=True)
class NormShard:
    """A local parameter or gradient that goes into a norm, with the shard info of the parameter."""

    tensor: Tensor
    shard_info: ShardInfo


@dataclass(frozen=True)
class _Row:
    """Values that a rank sends to all ranks for a norm: its local norm, and checks of the call.

    Attributes:
        present: 1 if the rank takes part.
        norm: norm of the shards that the rank owns.
        dtypes: set of dtypes of the rank's tensors, one bit per dtype.
        names: checksum of the parameter names in the rank's list.
        stages: checksum of the mesh and the rank's `pp` coordinate.
        one_of_many: 1 if the rank's list has only one parameter, although more of the rank's parameters have gradients.
    """

    present: float = 0.0
    norm: float = 0.0
    dtypes: float = 0.0
    names: float = 0.0
    stages: float = 0.0
    one_of_many: float = 0.0


def _norm(
    parts: Sequence[NormShard], others: Sequence[Tensor], process: Process, norm_type: float, *, of_one: bool = False
) -> Tensor:
    """Return the norm of the shards of all ranks and of `others`. A shard on several ranks counts once.

    Args:
        others: replicated tensors that belong to no partitioned model.
        of_one: True if the caller passed one parameter, not a list. Only ranks of the parameter's stage then take part.
    """
    check_reduced(process, "the norm of the gradients")
    counted = [
        part.tensor for part in parts if (part.shard_info.is_owner_in_stage if of_one else part.shard_info.is_owner)
    ]
    row = _Row(
        present=1.0,
        dtypes=sum({2 ** DTYPES.index(norm_dtype([dtype])) for dtype in {part.tensor.dtype for part in parts}}),
        names=sum(part.shard_info.checksum for part in parts),
        stages=_stages([part.shard_info.process for part in parts] or [process]),
        one_of_many=len(parts) == 1 and not of_one and _holds_more(parts[0].shard_info),
    )
    norm = local_norm(counted, norm_type)
    rows = _exchange(row, norm, process, of_one)
    _check_lists(rows)
    norms = [row.norm for row in rows]
    dtypes = [dtype for index, dtype in enumerate(DTYPES) if any(int(row.dtypes) >> index & 1 for row in rows)]
    if others:
        norms.append(local_norm(others, norm_type).item())
        dtypes += [tensor.dtype for tensor in others]
    return torch.tensor(norm_of(norms, norm_type), dtype=norm_dtype(dtypes), device=process.device)


def _exchange(row: _Row, norm: Tensor, process: Process, of_one: bool) -> list[_Row]:
    """All-gather the `_Row` (values for a norm) of each rank that takes part in the norm.

    The all-gather is an all-reduce of a matrix that is zero except for this rank's row. Adding zeros leaves the values
    bitwise unchanged.

    Args:
        row: this rank's values. The function replaces its field `norm`.
        norm: norm of this rank's shards, a scalar.
        process: this rank. If `dp_sync` lets replicas have different weights, the result has only the rows of ranks
            of this rank's replica.
        of_one: True if only the ranks of this rank's pipeline stage exchange values; False for all ranks of the mesh.
    """
    numbers = [float(value) for value in astuple(replace(row, norm=norm.item()))]
    values = torch.zeros(process.mesh.num_ranks, len(numbers), dtype=torch.float64)
    values[process.rank] = torch.tensor(numbers, dtype=torch.float64)
    if of_one:
        values = values.to(process.device)
        for axis, group in process.groups.items():
            if axis != "pp":
                sum_over(group, values)
    else:
        reduce_over_all(values, dist.ReduceOp.SUM, process)
    mesh, coordinates = process.mesh, process.coordinates
    is_local = [
        all(mesh.coordinates(rank)[axis] == coordinates[axis] for axis in process.apart)
        for rank in range(mesh.num_ranks)
    ]
    rows = [_Row(*numbers) for numbers, is_in_model in zip(values.tolist(), is_local, strict=True) if is_in_model]
    return [row for row in rows if row.present]


def _check_lists(rows: Sequence[_Row]) -> None:
    """Raise InputError on every rank if ranks passed lists of different parameters."""
    lists: dict[float, set[float]] = {}
    for row in rows:
        lists.setdefault(row.stages, set()).add(row.names)
    if any(len(names) > 1 for names in lists.values()):
        raise InputError(
            "the ranks request the norm of different parameters",
            why="ranks of one stage hold the same parameters, but the names in their lists differ",
            hint="pass the same list on every rank, with the same gradients present",
        )
    if len(lists) > 1 and all(row.one_of_many for row in rows):
        raise InputError(
            "every rank requests the norm of a single parameter, each rank of a different one",
            why="ranks of other stages hold other parameters, so their loops do not match",
            hint="clip_grad_norm_(p, ...) without a list, or pm.clip_grad_norm_(...)",
        )


def _stages(processes: Sequence[Process]) -> int:
    """Return a checksum that is equal on ranks that store the same pipeline stages."""
    distinct = {id(process): process for process in processes}.values()
    return zlib.crc32(repr(sorted({(str(process.mesh), process.pp) for process in distinct})).encode())


def inside(process: Process, doing: str) -> AbstractContextManager[None]:
    """Context manager: if a collective in it hangs, the watchdog's error has the text `doing`."""
    return nullcontext() if process.watch is None else process.watch.inside(doing)


def _holds_more(shard_info: ShardInfo) -> bool:
    with_grad = [other for parameter, other in registered_parameters() if parameter.grad is not None]
    return sum(other.process is shard_info.process for other in with_grad) > 1


# --- Replacements of functions of torch.nn.utils.


def patch_gradient_norms() -> None:
    """Patch `torch.nn.utils.clip_grad_norm_` and `get_total_norm` for tensors of partitioned models."""
    redirect_norms(_clip_grad_norm, _get_total_norm)


@on_local_values
def _clip_grad_norm(
    original: Callable[..., Tensor],
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip by the norm over all ranks, in place of torch's function `original`."""
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    process = _process_among(listed)
    if process is None:
        check_not_originals(listed, "clip_grad_norm_")
        unconsumed = (parameter for parameter in listed) if isinstance(parameters, types.GeneratorType) else listed
        return original(unconsumed, max_norm, norm_type, error_if_nonfinite, foreach)
    parts, others = [], []
    for parameter in listed:
        shard_info = shard_info_of(parameter)
        if parameter.grad is not None and shard_info is not None and shard_info.process.groups:
            parts.append(NormShard(parameter.grad, shard_info))
        elif parameter.grad is not None:
            others.append(parameter.grad)
    check_max_norm(max_norm)
    with inside(process, "clip_grad_norm_"):
        total = _norm(parts, others, process, _check_norm_type(norm_type), of_one=isinstance(parameters, Tensor))
    check_finite(total, error_if_nonfinite)
    torch.nn.utils.clip_grads_with_norm_(listed, max_norm, total, foreach)
    return total


@on_local_values
def _get_total_norm(
    original: Callable[..., Tensor],
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Return the norm over all ranks, in place of torch's function `original`."""
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    shard_infos = _shard_infos_by_memory()
    with_homes = [(tensor, shard_infos.get(_memory(tensor)) if shard_infos else None) for tensor in listed]
    parts = [NormShard(tensor, shard_info) for tensor, shard_info in with_homes if shard_info is not None]
    process = parts[0].shard_info.process if parts else _process_among(listed)
    if process is None:
        return original(listed, norm_type, error_if_nonfinite, foreach)
    others = [tensor for tensor, shard_info in with_homes if shard_info is None]
    with inside(process, "get_total_norm"):
        total = _norm(parts, others, process, _check_norm_type(norm_type), of_one=isinstance(tensors, Tensor))
    check_finite(total, error_if_nonfinite)
    return total


def check_max_norm(max_norm: Any) -> None:
    """Raise OptionError for an invalid `max_norm`. NaN would silently turn all gradients into NaN."""
    number = float(max_norm) if isinstance(max_norm, (int, float, Tensor)) else math.nan
    if math.isnan(number) or number < 0:
        raise OptionError(f"max_norm={max_norm!r} is not a norm to clip gradients to",
                          why="it must be a number, 0 or more", hint="pm.clip_grad_norm_(1.0)")  # fmt: skip


def check_finite(total: Tensor, asked: bool) -> None:
    """Raise RuntimeError, as torch does, if the norm is not finite and `error_if_nonfinite` is set."""
    if asked and not math.isfinite(total):
        raise RuntimeError(
            f"the norm of the gradients is {total.item()}: not finite, so nothing was clipped\n"
            "  (error_if_nonfinite=False scales them by it anyway)"
        )


def _process_among(tensors: Sequence[Tensor]) -> Process | None:
    """Return the `Process` (rank) of the first tensor of a model that is partitioned over several ranks.

    A rank without gradients passes an empty list, but must still take part in the norm. For an empty list, the function
    assumes the model that was partitioned last. Earlier models may exist on only some of the ranks, because Python can
    free them at different times. Returns None if there is no such model.
    """
    processes = (process_of(tensor) for tensor in tensors)
    process = next((process for process in processes if process is not None and process.groups), None)
    if process is not None or tensors or not dist.is_initialized():
        return process
    over_many = [process for process in registered_processes() if process.groups]
    return max(over_many, key=lambda process: process.serial, default=None)


def _shard_infos_by_memory() -> dict[tuple[int, int, torch.dtype], ShardInfo]:
    """Return {memory location of a parameter or its gradient: shard info of the parameter}.

    `get_total_norm` receives only gradients. It finds their parameters in this dict.
    """
    shard_infos = {}
    for parameter, shard_info in registered_parameters():
        if not shard_info.process.groups:
            continue
        shard_infos[_memory(parameter)] = shard_info
        if parameter.grad is not None:
            shard_infos[_memory(parameter.grad)] = shard_info
    shard_infos.pop(_NO_MEMORY, None)
    return shard_infos


_NO_MEMORY = (0, 0, torch.float32)


def _memory(tensor: Tensor) -> tuple[int, int, torch.dtype]:
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return _NO_MEMORY
    return tensor.data_ptr(), tensor.numel(), tensor.dtype
