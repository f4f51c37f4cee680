"""Hooks on gradients, frozen parameters, and `backward` where a pipeline runs: complete gradients, or a clear error.

Within a step every microbatch adds to `.grad`, and what ranks hold in parts is summed at its end: hooks on parameters
are held back until then, and see the gradient that one device would give them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Function

from autopart.compat.torch_function_internals import full_values
from autopart.errors import UsageError
from autopart.ir.facts import facts
from autopart.ir.program import Program
from autopart.runtime.shards.shard_owners import home_of


def gradient_hooks(tensor: Tensor) -> dict[int, Callable[..., Any]]:
    """The hooks of `Tensor.register_hook`, in a dict that may be changed."""
    hooks: Any = tensor._backward_hooks
    return {} if hooks is None else hooks


def accumulation_hooks(tensor: Tensor) -> dict[int, Callable[..., Any]]:
    """The hooks of `Tensor.register_post_accumulate_grad_hook`, in a dict that may be changed."""
    hooks: Any = tensor._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


def module_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that run when it is called."""
    kinds = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(map(len, kinds))


def check_model_hooks(model: nn.Module) -> None:
    """Raises UsageError for hooks on the parameters of a model that is to be partitioned: the copies have none."""
    for name, parameter in model.named_parameters():
        if gradient_hooks(parameter) or accumulation_hooks(parameter):
            raise UsageError(
                f"parameter '{name}' has a hook on its gradient", why="what trains are copies of its parts",
                hint=f"register it after parallelize(): pm.get_parameter('{name}')",
            )  # fmt: skip


def trained_names(model: nn.Module, program: Program, known: Collection[str], trained: Collection[str]) -> set[str]:
    """The parameters of a program that were not frozen when it was traced.

    `trained` has those of the `known` parameters, which earlier programs read. Raises UsageError, the same on every
    rank, where the user's model was frozen or unfrozen since.
    """
    trained_now = {name for name in program.parameters if model.get_parameter(name).requires_grad}
    for name in known:
        if (name in trained_now) != (name in trained):
            _refuse_flag(name, "unfrozen" if name in trained_now else "frozen")
    return trained_now


def _refuse_flag(name: str, how: str) -> NoReturn:
    raise UsageError(
        f"the model's '{name}' was {how} after parallelize()",
        why="this call is traced with it, and the calls before were not",
        hint="freeze the parameters of pm instead",
    )


def problem_of(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], trained: Collection[str], in_step: bool
) -> UsageError | None:
    """What would make a backward of these local parameters wrong; the ranks tell each other before they raise it.

    `trained`: the parameters that were not frozen when the model was traced. The others have no sums of gradients over
    ranks. `in_step`: hooks of the module itself would not run.
    """
    if in_step and module_hooks(module):
        return UsageError("pm has a hook, and step() would not run it", why="hooks of a module run around pm(...)",
                          hint="remove it; step(..., outputs=True) returns what the model returns")  # fmt: skip
    for name, parameter in parameters.items():
        if parameter.requires_grad and name not in trained:
            return UsageError(
                f"parameter '{name}' was frozen when the model was traced, and is to be trained now",
                why="the program computes no gradient for it",
                hint="unfreeze it before parallelize(), and freeze it on pm: p.requires_grad_(False)",
            )
        if parameter._backward_hooks and (home := home_of(parameter)) is not None and home.cuts:
            axes = ", ".join(axis for axis, _ in home.cuts)
            return UsageError(
                f"'{name}' has a hook on its gradient (register_hook), and is cut over {axes}",
                why="the hook would see this rank's part for the gradient of the whole",
                hint="change p.grad between step() and optimizer.step(), or use "
                "register_post_accumulate_grad_hook, which is given the part knowingly",
            )
    return None


def nothing_to_train(model: nn.Module, program: Program) -> UsageError | None:
    """Return what is wrong with a step if the model was frozen when it was partitioned: no gradient is computed."""
    if any(model.get_parameter(name).requires_grad for name in program.parameters):
        return None
    return UsageError(
        "step() has nothing to train", why="every parameter of the model was frozen at parallelize()",
        hint="pm(...) for the loss alone, under torch.no_grad(); or unfreeze what is to be trained before",
    )  # fmt: skip


def trains(parameters: Mapping[str, Tensor], inputs: Sequence[Any]) -> bool:
    """Return True if a step computes a gradient that this rank holds. Before the first call it has no parameters."""
    return not parameters or any(t.requires_grad for t in (*parameters.values(), *inputs) if isinstance(t, Tensor))


class HeldHooks:
    """The hooks of parameters, held back while a step runs."""

    def __init__(self, parameters: Mapping[str, Tensor]):
        self.parameters = [p for p in parameters.values() if p._backward_hooks or p._post_accumulate_grad_hooks]
        """Those that have hooks."""
        self._of_gradients = [dict(gradient_hooks(p)) for p in self.parameters]
        self._of_accumulation = [dict(accumulation_hooks(p)) for p in self.parameters]
        for parameter in self.parameters:
            gradient_hooks(parameter).clear()
            accumulation_hooks(parameter).clear()

    def release(self) -> None:
        """From now on they run by themselves."""
        kept = zip(self.parameters, self._of_gradients, self._of_accumulation, strict=True)
        for parameter, of_gradient, of_accumulation in kept:
            gradient_hooks(parameter).update(of_gradient)
            accumulation_hooks(parameter).update(of_accumulation)

    def see_gradients(self) -> None:
        """Give every hook on a gradient the step's own, complete one; what it returns takes its place."""
        for parameter, hooks in zip(self.parameters, self._of_gradients, strict=True):
            for hook in hooks.values():
                with torch.no_grad(), full_values():
                    changed = hook(parameter.grad) if parameter.grad is not None else None
                if changed is not None:
                    parameter.grad = changed

    def see_accumulated(self) -> None:
        """Run those that come after a gradient was added to `.grad`."""
        for parameter, hooks in zip(self.parameters, self._of_accumulation, strict=True):
            for hook in hooks.values() if parameter.grad is not None else ():
                with full_values():
                    hook(parameter)


@contextmanager
def held_back(parameters: Mapping[str, Tensor]) -> Iterator[HeldHooks]:
    """Inside, no hook of the parameters runs by itself."""
    held = HeldHooks(parameters)
    try:
        yield held
    finally:
        held.release()


def without_backward(outputs: Sequence[Any], program: Program, parameters: Iterable[Tensor]) -> list[Any]:
    """The outputs of a call through a pipeline: those that have a gradient in the model raise UsageError for it.

    They depend on `parameters`, so `torch.autograd.grad` for these raises it too.
    """
    sent: Any = program.stages[-1].graph.graph.output_node().args[0]
    anchors = [torch.zeros((), requires_grad=True), *parameters]
    guarded = []
    for output, value in zip(program.outputs, outputs, strict=True):
        node = sent[output.position] if output.position is not None else None
        differentiable = node is not None and facts(node).get("needs_grad", True)
        if differentiable and isinstance(value, Tensor) and value.is_floating_point():
            value = _UseStep.apply(value, *anchors)
        guarded.append(value)
    return guarded


class _UseStep(Function):
    """Identity, whose backward says what to do."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *anchors: Tensor) -> Tensor:
        return value.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise UsageError(
            "backward() does not go through a pipeline", why="pm(...) runs the stages forward only",
            hint="loss = pm.step(**batch); with outputs=True it returns both",
        )  # fmt: skip
