"""Trial steps of an optimizer class, which show if it updates each tensor separately."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from autopart.compat.torch_internals import TorchDispatchMode

TRIAL_STEPS = 3

GRADIENT_SCALES = (1.0, 1e4)
"""Factors of the gradients in trial steps. The large factor triggers thresholds, such as those of clipping."""


def is_separable(optimizer: Optimizer, device: torch.device) -> bool | None:
    """Return True if an optimizer treats each tensor separately: updates do not depend on other tensors.

    The test takes three steps on two matrices together, and on each matrix alone, with the options of `optimizer`. The
    user's random state is not changed. Returns None if the test raises an exception.
    """
    try:
        for scale in GRADIENT_SCALES:
            together = _movements(optimizer, _matrices(device), scale)
            alone = [_movements(optimizer, [matrix], scale)[0] for matrix in _matrices(device)]
            for pair in zip(together, alone, strict=True):
                if not torch.allclose(*pair, rtol=1e-3, atol=1e-6, equal_nan=True):
                    return False
    except Exception:  # an unknown class may raise anything, for example from a constructor with other arguments
        return None
    return True


def failed_step(optimizer: Optimizer, device: torch.device) -> Exception | None:
    """Return the exception that a trial step without a closure raises, or None."""
    try:
        trial = _TrialSteps(optimizer, _matrices(device))
    except Exception:  # a user's constructor may need other arguments
        return None
    try:
        trial.step(0, 1.0)
    except Exception as error:
        return error
    return None


def line_that_combines(optimizer: Optimizer, device: torch.device) -> str:
    """Return the function and the line with which a step combines tensors of different parameters.

    If no function combines tensors, returns the line that reads the value of a tensor, such as `item()`. Returns "" if
    there is neither.
    """
    try:
        trial = _TrialSteps(optimizer, _matrices(device))
        with _Recorder(trial.parameters, _files_of(type(optimizer))) as recorder:
            for step in range(TRIAL_STEPS):
                trial.step(step, 1.0)
    except Exception:  # as in `is_separable`
        return ""
    return recorder.combines or recorder.reads


def line_of_step(kind: type, error: BaseException | None = None) -> str:
    """Return "file:line" of the step of an optimizer class, or of the line in it that raised `error`."""
    step = inspect.unwrap(kind.step)  # type: ignore[attr-defined]
    path, line = inspect.getsourcefile(step) or "", step.__code__.co_firstlineno
    traceback = None if error is None else error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == path:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f"{path}:{line}"


class _TrialSteps:
    """A new optimizer of the class and options of another one, for small matrices."""

    def __init__(self, optimizer: Optimizer, elements: Sequence[Tensor]) -> None:
        self.elements = elements
        self.parameters = [nn.Parameter(element.sin()) for element in elements]
        options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
        if "lr" in options:
            options["lr"] = 0.01  # a schedule may begin with learning rate 0
        accepted = inspect.signature(type(optimizer).__init__).parameters
        accepted_options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        make: Callable[..., Optimizer] = type(optimizer)
        with self._own_random_state():
            self.optimizer = make([{**options, "params": [p]} for p in self.parameters], **accepted_options)

    def step(self, number: int, scale: float) -> None:
        for parameter, element in zip(self.parameters, self.elements, strict=True):
            parameter.grad = (element * 0.7 + number).cos() * scale
        with self._own_random_state(), torch.enable_grad():
            self.optimizer.step()

    def _own_random_state(self) -> AbstractContextManager[None]:
        device = self.elements[0].device
        return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _matrices(device: torch.device) -> list[Tensor]:
    """Return a tensor of numbers for each trial matrix, which determine its values and gradients."""
    return [torch.arange(24.0, device=device).reshape(6, 4), torch.arange(10.0, device=device).reshape(2, 5) + 1]


def _movements(optimizer: Optimizer, elements: list[Tensor], scale: float) -> list[Tensor]:
    """Return by how much test matrices change in three steps of an optimizer."""
    trial = _TrialSteps(optimizer, elements)
    for step in range(TRIAL_STEPS):
        trial.step(step, scale)
    return [p.detach() - element.sin() for p, element in zip(trial.parameters, elements, strict=True)]


def _files_of(kind: type) -> set[str]:
    return {inspect.getsourcefile(base) or "" for base in kind.__mro__ if base not in (object, Optimizer)}


class _Recorder(TorchDispatchMode):
    """Dispatch mode that finds functions which combine tensors of different parameters.

    Attributes:
        combines: first function that combines tensors of two parameters, with its line; "" if there is none.
        reads: first function that reads the value of a tensor, with its line; "" if there is none.
    """

    def __init__(self, parameters: Sequence[Tensor], files: set[str]) -> None:
        super().__init__()
        self.files, self.combines, self.reads = files, "", ""
        self.origins: Any = WeakIdKeyDictionary()
        self.origins.update({parameter: frozenset([i]) for i, parameter in enumerate(parameters)})
        self.parameters = parameters

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.origins[parameter.grad] = frozenset([index])
        result = func(*args, **kwargs)
        name = func.__name__.partition(".")[0]
        if name.startswith("_foreach"):  # treats the tensors of a list separately
            return result
        origins = frozenset[int]().union(*(self.origins.get(t, frozenset()) for t in _tensors((args, kwargs))))
        for tensor in _tensors(result):
            self.origins[tensor] = origins
        if len(origins) > 1 and not self.combines:
            self.combines = self._line(f"{name}() combines tensors of two parameters")
        if origins and name in ("_local_scalar_dense", "is_nonzero") and not self.reads:
            self.reads = self._line("item() reads the value of a tensor")
        return result

    def _line(self, text: str) -> str:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename not in self.files:
            frame = frame.f_back  # type: ignore[assignment]
        return text if frame is None else f"{text}: {frame.f_code.co_filename}:{frame.f_lineno}"


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        return [tensor for value in values.values() for tensor in _tensors(value)]
    return [tensor for value in values for tensor in _tensors(value)] if isinstance(values, (list, tuple)) else []
