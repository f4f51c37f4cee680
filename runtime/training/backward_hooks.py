"""Gradient hooks, frozen parameters, and `backward` through a pipeline.

During a step every microbatch accumulates into `.grad`, and ranks reduce these gradients at the end of the step. Hooks
on parameters run after the reduction, so they get the gradient that a single device would pass to them.
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
from autopart.runtime.shards.shard_owners import shard_info_of


def gradient_hooks(tensor: Tensor) -> dict[int, Callable[..., Any]]:
    """Return the hooks of `Tensor.register_hook` as a mutable dict."""
    hooks: Any = tensor._backward_hooks
    return {} if hooks is None else hooks


def accumulation_hooks(tensor: Tensor) -> dict[int, Callable[..., Any]]:
    """Return the hooks of `Tensor.register_post_accumulate_grad_hook` as a mutable dict."""
    hooks: Any = tensor._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


def module_hooks(module: nn.Module) -> bool:
    """Return True if a module has hooks that run when it is called."""
    kinds = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(map(len, kinds))


def check_model_hooks(model: nn.Module) -> None:
    """Raise UsageError if a parameter of a model has hooks, because the partitioned model would lack them."""
    for name, parameter in model.named_parameters():
        if gradient_hooks(parameter) or accumulation_hooks(parameter):
            raise UsageError(
                f"parameter '{name}' has a hook on its gradient",
                why="the partitioned model trains copied shards, without this hook",
                hint=f"register it after parallelize(): pm.get_parameter('{name}')",
            )  # fmt: skip


def trained_names(model: nn.Module, program: Program, known: Collection[str], trained: Collection[str]) -> set[str]:
    """Return the names of the new program's parameters that require a gradient in the original model.

    Raises UsageError on every rank if a parameter was frozen or unfrozen since an earlier trace.

    Args:
        known: names of the parameters of programs that were traced earlier.
        trained: names in `known` whose parameters required a gradient.
    """
    trained_now = {name for name in program.parameters if model.get_parameter(name).requires_grad}
    for name in known:
        if (name in trained_now) != (name in trained):
            _refuse_flag(name, "unfrozen" if name in trained_now else "frozen")
    return trained_now


def _refuse_flag(name: str, how: str) -> NoReturn:
    raise UsageError(
        f"the model's '{name}' was {how} after parallelize()",
        why="this call is traced with the change, and earlier calls were traced without it",
        hint="freeze or unfreeze the parameters of pm instead",
    )


def backward_error(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], trained: Collection[str], in_step: bool
) -> UsageError | None:
    """Return an error if a backward would give these local parameters wrong gradients, else None.

    The caller raises the error on all ranks together.

    Args:
        trained: names of parameters that were not frozen at the trace. The program computes no gradients for others.
        in_step: True in `step`, which does not run hooks of the module.
    """
    if in_step and module_hooks(module):
        return UsageError(
            "pm has a hook, and step() would not run it", why="hooks of a module run only in calls of pm(...)",
            hint="remove it; step(..., outputs=True) returns what the model returns",
        )  # fmt: skip
    for name, parameter in parameters.items():
        if parameter.requires_grad and name not in trained:
            return UsageError(
                f"parameter '{name}' was frozen when the model was traced, and requires a gradient now",
                why="the program computes no gradient for it",
                hint="unfreeze it before parallelize(), and freeze it on pm: p.requires_grad_(False)",
            )
        if parameter._backward_hooks and (shard_info := shard_info_of(parameter)) is not None and shard_info.cuts:
            axes = ", ".join(axis for axis, _ in shard_info.cuts)
            return UsageError(
                f"'{name}' has a hook on its gradient (register_hook), and is sharded over {axes}",
                why="the hook would see this rank's shard of the gradient, not the full gradient",
                hint="change p.grad between step() and optimizer.step(), or use "
                "register_post_accumulate_grad_hook, which is passed the shard",
            )
    return None


def frozen_error(model: nn.Module, program: Program) -> UsageError | None:
    """Return an error if all of the model's parameters were frozen at `parallelize`, else None."""
    if any(model.get_parameter(name).requires_grad for name in program.parameters):
        return None
    return UsageError(
        "step() has nothing to train", why="every parameter of the model was frozen at parallelize()",
        hint="pm(...) for the loss alone, under torch.no_grad(); or unfreeze parameters before parallelize()",
    )  # fmt: skip


def trains(parameters: Mapping[str, Tensor], inputs: Sequence[Any]) -> bool:
    """Return True if a step computes a gradient of any local parameter or input.

    It is also True before the first call, when the rank has no parameters yet.
    """
    return not parameters or any(t.requires_grad for t in (*parameters.values(), *inputs) if isinstance(t, Tensor))


class DeferredHooks:
    """Gradient hooks of parameters, which are removed during a step and run at its end."""

    def __init__(self, parameters: Mapping[str, Tensor]):
        self.parameters = [p for p in parameters.values() if p._backward_hooks or p._post_accumulate_grad_hooks]
        """Parameters that have hooks."""
        self._of_gradients = [dict(gradient_hooks(p)) for p in self.parameters]
        self._of_accumulation = [dict(accumulation_hooks(p)) for p in self.parameters]
        for parameter in self.parameters:
            gradient_hooks(parameter).clear()
            accumulation_hooks(parameter).clear()

    def release(self) -> None:
        """Put the hooks back on their parameters."""
        deferred = zip(self.parameters, self._of_gradients, self._of_accumulation, strict=True)
        for parameter, of_gradient, of_accumulation in deferred:
            gradient_hooks(parameter).update(of_gradient)
            accumulation_hooks(parameter).update(of_accumulation)

    def run_gradient_hooks(self) -> None:
        """Run each gradient hook on the step's complete gradient. If a hook returns a gradient, store it."""
        for parameter, hooks in zip(self.parameters, self._of_gradients, strict=True):
            for hook in hooks.values():
                with torch.no_grad(), full_values():
                    changed = hook(parameter.grad) if parameter.grad is not None else None
                if changed is not None:
                    parameter.grad = changed

    def run_accumulate_hooks(self) -> None:
        """Run the post-accumulate-grad hooks on the step's complete gradients."""
        for parameter, hooks in zip(self.parameters, self._of_accumulation, strict=True):
            for hook in hooks.values() if parameter.grad is not None else ():
                with full_values():
                    hook(parameter)


@contextmanager
def defer_hooks(parameters: Mapping[str, Tensor]) -> Iterator[DeferredHooks]:
    """Context manager that removes all hooks of the parameters, and puts them back at its end."""
    hooks = DeferredHooks(parameters)
    try:
        yield hooks
    finally:
        hooks.release()


def without_backward(outputs: Sequence[Any], program: Program, parameters: Iterable[Tensor]) -> list[Any]:
    """Change the outputs of a call through a pipeline so that their backward raises UsageError.

    Returns the outputs. Outputs that need no gradient in the model are unchanged. The others depend on `parameters`, so
    that `torch.autograd.grad` with respect to parameters raises too.
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
    """Autograd function: identity whose backward raises an error that recommends `step`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *anchors: Tensor) -> Tensor:
        return value.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise UsageError(
            "backward() does not go through a pipeline", why="pm(...) runs the stages forward only",
            hint="loss = pm.step(**batch); with outputs=True it returns both",
        )  # fmt: skip
