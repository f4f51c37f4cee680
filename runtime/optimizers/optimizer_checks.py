"""Rejection of optimizers that cannot train the shards of a rank, at the optimizer's first step.

Elementwise optimizers, such as SGD and Adam, run on local shards. For all other optimizers, parameters behave as full
tensors, so that sums and norms over parameters are correct. With pipeline stages, these optimizers must also treat each
tensor separately. Optimizers that `pm.optimizer` creates update full tensors and are not rejected.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopart.compat.torch_function_internals import local_values, on_local_values
from autopart.errors import OptionError
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.gradients.no_sync import check_reduced
from autopart.runtime.optimizers.optimizer_trial import is_separable
from autopart.runtime.optimizers.partitioned_optimizer import PartitionedOptimizer
from autopart.runtime.sharded_tensor.sharded_tensor import allow_reductions_in
from autopart.runtime.shards.shard_owners import ShardInfo, parameters_of, process_among, shard_info_of
from autopart.runtime.shards.shared_parameters import check_not_originals

ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
"""Classes of torch.optim that update each element without using other elements."""

OF_A_TENSOR = {
    "muon": "it orthogonalises full matrices",
    "adafactor": "it keeps means of a matrix's rows and columns",
    "lamb$": "it scales a tensor's step by the tensor's norm",
    "lars$|larc$": "it scales a tensor's step by the tensor's norm",
    "novograd": "it scales a tensor's step by its gradient's norm",
    "shampoo|^soap$": "it keeps a matrix for each dim of a tensor",
    "galore|apollo": "it projects each matrix on a smaller one",
    "adammini": "it keeps one step size for each block of a tensor",
    "^came$|^sm3": "it keeps means of a matrix's rows and columns",
}
"""{pattern of the class name: why a shard of a tensor is not enough}, for optimizers such as Muon.

Patterns are in lower case without underscores.
"""

OF_THE_MODEL = {
    "lbfgs": "its step follows from all parameters together",
    "prodigy|dadapt": "its step size follows from all parameters together",
    "^sam$": "it moves all parameters by the norm of all gradients",
    "zeroredundancy|localsgd": "it assumes equal parameters on every rank",
}
"""{pattern of the class name: why the parameters of one rank are not enough}.

Lists optimizers that need the parameters of all ranks, such as LBFGS.
"""


@cache
def patch_optimizers() -> None:
    """Patch torch, so that elementwise optimizers run on local shards, and all optimizers are checked.

    An optimizer that cannot train shards then raises OptionError at its first step on shards.
    """
    register_optimizer_step_pre_hook(_before_step)
    for name in ELEMENTWISE:
        step_on_shards(getattr(torch.optim, name))


def step_on_shards(kind: Any) -> None:
    """Patch an elementwise optimizer class, so that its step runs on local shards.

    In step hooks, which are user code, parameters still behave as full tensors.
    """
    if getattr(kind.step, "hooked", False):  # torch has already wrapped the class when an earlier optimizer was created
        kind.step = kind.profile_hook_step(_on_shards(kind.step.__wrapped__))
        kind.step.hooked = True
    else:
        kind.step = _on_shards(kind.step)


def _on_shards(step: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the step of an elementwise optimizer, so that it runs on local shards.

    In a closure, which is user code, parameters still behave as full tensors.
    """

    @functools.wraps(step)
    def run(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with local_values():
            step(self)
        return loss

    return run


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Check an optimizer before its step, as a hook of torch.

    If the step has a closure, which computes the gradients, return arguments with a closure that also checks the
    gradients. Otherwise return None.
    """
    is_keyword = kwargs.get("closure") is not None
    closure = kwargs["closure"] if is_keyword else args[1] if len(args) > 1 else None
    _check(optimizer, has_gradients=not callable(closure))
    if not callable(closure):
        return None

    def checked() -> Any:
        loss = closure()
        _check(optimizer)
        return loss

    return (args, {**kwargs, "closure": checked}) if is_keyword else ((args[0], checked, *args[2:]), kwargs)


_CHECKED: Any = WeakIdKeyDictionary()
"""{optimizer: number of its parameters at the last check}. It is checked again if parameters are added."""


@on_local_values
def _check(optimizer: torch.optim.Optimizer, has_gradients: bool = True) -> None:
    """Raise OptionError if an optimizer cannot train shards, UsageError if gradients are unreduced.

    `has_gradients`: False if a closure will compute the gradients later.
    """
    parameters = parameters_of(optimizer)
    process = process_among(parameters)
    if process is None:
        check_not_originals(parameters, f"{type(optimizer).__name__}.step()")
    elif has_gradients:
        check_reduced(process, f"{type(optimizer).__name__}.step()")
    if _CHECKED.get(optimizer) == len(parameters):
        return
    if process is not None and process.groups and not isinstance(optimizer, PartitionedOptimizer):
        shard_infos = [shard_info for shard_info in map(shard_info_of, parameters) if shard_info is not None]
        sharded = next((shard_info for shard_info in shard_infos if shard_info.cuts), None)
        _check_class(optimizer, sharded, process)
    _CHECKED[optimizer] = len(parameters)


def _check_class(optimizer: torch.optim.Optimizer, sharded: ShardInfo | None, process: Process) -> None:
    name = type(optimizer).__name__
    why = reason_of(type(optimizer), OF_A_TENSOR)
    of_model = reason_of(type(optimizer), OF_THE_MODEL)
    if of_model and (sharded is not None or "pp" in process.groups):
        where = (
            f"'{sharded.name}', sharded over {_axes(sharded)}"
            if sharded is not None
            else "pp: a stage's parameters on each rank"
        )
        raise OptionError(
            f"{name} cannot train a shard of a model", why=f"{of_model}, and a rank has a shard",
            where=where, hint="torch.optim.AdamW, or a mesh of dp alone with zero=0",
        )  # fmt: skip
    if sharded is not None and why:
        raise OptionError(
            f"{name} cannot train a shard of '{sharded.name}'",
            why=why,
            where=f"it is sharded over {_axes(sharded)}",
            hint=f"pm.optimizer({name}, ...), or {_unsharded_hint(sharded)}",
        )
    if "pp" in process.groups and not is_elementwise_class(type(optimizer)):
        separable = is_separable(optimizer, process.device)
        if separable is False:
            raise OptionError(
                f"{name} cannot train the stages of a pipeline separately",
                why="its update of a matrix depends on matrices of other stages",
                where="pp: a stage's parameters on each rank", hint="torch.optim.AdamW, or a mesh without pp",
            )  # fmt: skip
        if separable:
            allow_reductions_in(optimizer)


def reason_of(kind: type, reasons: dict[str, str]) -> str:
    """Return the first of `reasons` whose pattern matches the class's name or a base class's; else "".

    `reasons`: {pattern of class names: reason why the optimizer cannot train shards}.
    """
    names = [base.__name__.lower().replace("_", "") for base in kind.__mro__]
    matching = [why for pattern, why in reasons.items() for name in names if re.search(pattern, name)]
    return matching[0] if matching else ""


def is_elementwise_class(kind: type) -> bool:
    """Return True if a class is, or inherits its step from, an elementwise optimizer of torch."""
    step = inspect.unwrap(kind.step)  # type: ignore[attr-defined]
    return any(step is inspect.unwrap(getattr(torch.optim, name).step) for name in ELEMENTWISE)


def _axes(shard_info: ShardInfo) -> str:
    return " and ".join(axis for axis, _ in shard_info.cuts)


def _unsharded_hint(shard_info: ShardInfo) -> str:
    return (
        "zero=0"
        if all(shard_info.process.mesh.stores(axis) for axis, _ in shard_info.cuts)
        else "dp with zero=0, or pp"
    )
