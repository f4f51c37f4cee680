"""Optimizers that need more than a rank holds: refused by name at their first step on a partitioned model.

An optimizer that updates each element by its own history, as SGD and Adam do, runs on local values. Any other runs on
parameters that behave as the full tensors, so sums and norms are right; under pp it must treat tensors one by one.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopart.compat.torch_function_internals import local_values, on_local_values
from autopart.errors import OptionError
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.gradients.no_sync import check_summed
from autopart.runtime.sharded_tensor.sharded_tensor import allow_reductions_in
from autopart.runtime.shards.shard_owners import Home, home_of, parameters_of, process_among
from autopart.runtime.shards.shared_parameters import check_not_originals

ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
"""Of torch.optim: each element's step depends on that element alone."""

OF_A_TENSOR = {
    "muon": "it orthogonalises whole matrices",
    "adafactor": "it keeps means of a matrix's rows and columns",
    "lamb$": "it scales a tensor's step by the tensor's norm",
    "lars$|larc$": "it scales a tensor's step by the tensor's norm",
    "novograd": "it scales a tensor's step by its gradient's norm",
    "shampoo|^soap$": "it keeps a matrix for each dim of a tensor",
    "galore|apollo": "it projects each matrix on a smaller one",
    "adammini": "it keeps one step size for each block of a tensor",
    "^came$|^sm3": "it keeps means of a matrix's rows and columns",
}
"""{what the class's name matches, in lower case without underscores: why a part of a tensor is not enough}."""

OF_THE_MODEL = {
    "lbfgs": "its step follows from all parameters together",
    "prodigy|dadapt": "its step size follows from all parameters together",
    "^sam$": "it moves all parameters by the norm of all gradients",
    "zeroredundancy|localsgd": "it takes every rank's parameters for the same",
}
"""{the same: why a part of the model is not enough}."""


@cache
def watch_optimizers() -> None:
    """From now on an optimizer that cannot work on parts raises OptionError at its first `step()` with such."""
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _check(optimizer))
    for name in ELEMENTWISE:
        step_on_shards(getattr(torch.optim, name))


def step_on_shards(kind: Any) -> None:
    """Have an elementwise class step on local values, inside of torch's hooks: these are the user's code, which reads
    full tensors."""
    if getattr(kind.step, "hooked", False):  # an optimizer of this class was made before
        kind.step = kind.profile_hook_step(_on_shards(kind.step.__wrapped__))
        kind.step.hooked = True
    else:
        kind.step = _on_shards(kind.step)


def _on_shards(step: Callable[..., Any]) -> Callable[..., Any]:
    """Let an elementwise step run on local values: each call on a parameter would go through Python otherwise.

    A closure is the user's code, which reads full tensors.
    """

    @functools.wraps(step)
    def run(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        if closure is not None:
            return step(self, closure)
        with local_values():
            return step(self)

    return run


_CHECKED: Any = WeakIdKeyDictionary()
"""{optimizer: how many parameters it had when it was looked at}."""


@on_local_values
def _check(optimizer: torch.optim.Optimizer) -> None:
    """Raises OptionError where the optimizer needs more than this rank holds of what it was given, UsageError where
    its gradients are not summed yet."""
    parameters = parameters_of(optimizer)
    process = process_among(parameters)
    if process is None:
        check_not_originals(parameters, f"{type(optimizer).__name__}.step()")
    else:
        check_summed(process, f"{type(optimizer).__name__}.step()")
    if _CHECKED.get(optimizer) == len(parameters):
        return
    if process is not None and process.groups:
        homes = [home for home in map(home_of, parameters) if home is not None]
        cut = next((home for home in homes if home.cuts), None)
        _check_class(optimizer, cut, process)
    _CHECKED[optimizer] = len(parameters)


def _check_class(optimizer: torch.optim.Optimizer, cut: Home | None, process: Process) -> None:
    name = type(optimizer).__name__
    why = _reason(optimizer, OF_A_TENSOR)
    of_model = _reason(optimizer, OF_THE_MODEL)
    if of_model and (cut is not None or "pp" in process.groups):
        where = f"'{cut.name}', cut by {_axes(cut)}" if cut is not None else "pp: a stage's parameters on each rank"
        raise OptionError(
            f"{name} cannot train a part of a model",
            why=f"{of_model}, and a rank has a part",
            where=where,
            hint="torch.optim.AdamW, or a mesh of dp alone with zero=0",
        )
    if cut is not None and why:
        raise OptionError(
            f"{name} cannot train '{cut.name}' in parts",
            why=why,
            where=f"this one is cut by {_axes(cut)}",
            hint=f"torch.optim.AdamW for it, or leave it whole: {_whole(cut)}",
        )
    if "pp" in process.groups and not _known_elementwise(optimizer):
        separable = is_separable(optimizer, process.device)
        if separable is False:
            raise OptionError(
                f"{name} cannot train the stages of a pipeline one by one",
                why="of two matrices together it made something else than of each alone",
                where="pp: a stage's parameters on each rank",
                hint="torch.optim.AdamW, or a mesh without pp",
            )
        if separable:
            allow_reductions_in(optimizer)


def is_elementwise(optimizer: torch.optim.Optimizer, device: torch.device) -> bool | None:
    """Whether an optimizer of this class does on two halves of a matrix what it does on the matrix, with the same
    options; None where it cannot be tried. Three steps, and no random number of the user's is drawn."""
    matrix = torch.arange(24.0, device=device).reshape(6, 4)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            (whole,) = _movements(optimizer, [matrix])
            halves = [torch.cat(_movements(optimizer, list(matrix.chunk(2, dim))), dim) for dim in (0, 1)]
    except Exception:  # whatever a class unknown to us raises, of a constructor called in another way
        return None
    if not whole.any():
        return None
    return all(torch.allclose(moved, whole, rtol=1e-3, atol=1e-6) for moved in halves)


def is_separable(optimizer: torch.optim.Optimizer, device: torch.device) -> bool | None:
    """Return whether an optimizer of this class does the same to two matrices as two of them do to one each.

    Three steps with the same options; None if it cannot be tried. No random number of the user's is drawn.
    """
    matrices = [torch.arange(24.0, device=device).reshape(6, 4), torch.arange(10.0, device=device).reshape(2, 5) + 1]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            together = _movements(optimizer, matrices)
            alone = [_movements(optimizer, [matrix])[0] for matrix in matrices]
    except Exception:  # whatever a class unknown to us raises, of a constructor called in another way
        return None
    return all(torch.allclose(*pair, rtol=1e-3, atol=1e-6) for pair in zip(together, alone, strict=True))


def _movements(optimizer: torch.optim.Optimizer, places: list[Tensor]) -> list[Tensor]:
    """Return how far three steps move these matrices; values and gradients follow from their elements."""
    parameters = [nn.Parameter(place.sin()) for place in places]
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    if "lr" in options:
        options["lr"] = 0.01  # a schedule may begin with 0
    accepted = inspect.signature(type(optimizer).__init__).parameters
    accepted_options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    kind: Any = type(optimizer)
    another = kind([{**options, "params": [parameter]} for parameter in parameters], **accepted_options)
    for step in range(3):
        for parameter, place in zip(parameters, places, strict=True):
            parameter.grad = (place * 0.7 + step).cos()
        another.step()
    return [parameter.detach() - place.sin() for parameter, place in zip(parameters, places, strict=True)]


def _reason(optimizer: torch.optim.Optimizer, reasons: dict[str, str]) -> str:
    names = [kind.__name__.lower().replace("_", "") for kind in type(optimizer).__mro__]
    matching = [why for pattern, why in reasons.items() for name in names if re.search(pattern, name)]
    return matching[0] if matching else ""


def _known_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is one of torch's own that is."""
    step = inspect.unwrap(type(optimizer).step)
    return any(step is inspect.unwrap(getattr(torch.optim, name).step) for name in ELEMENTWISE)


def _axes(home: Home) -> str:
    return " and ".join(axis for axis, _ in home.cuts)


def _whole(home: Home) -> str:
    return "zero=0" if all(home.process.mesh.stores(axis) for axis, _ in home.cuts) else "dp with zero=0, or pp"
