"""Optimizers that compute with full tensors, and models for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MOST = 64
"""Dims above this size are not preconditioned."""


class Shampoo(torch.optim.Optimizer):
    """Preconditions a matrix on both sides (Gupta et al. 2018, arXiv:1802.09568), with inverses in place of roots.

    Its state has matrices of other shapes than the parameter's. Some have the shape of a shard.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state, grad = self.state[parameter], parameter.grad.reshape(parameter.shape[0], -1)
                update = grad
                if not state:
                    state["left"], state["right"] = (torch.eye(min(n, MOST), dtype=grad.dtype) for n in grad.shape)
                if grad.shape[0] <= MOST:
                    state["left"] += grad @ grad.T
                    update = torch.linalg.solve(state["left"], update)
                if grad.shape[1] <= MOST:
                    state["right"] += grad.T @ grad
                    update = update @ torch.linalg.inv(state["right"])
                parameter.sub_(update.reshape(parameter.shape), alpha=group["lr"])


class TrustRatio(torch.optim.Optimizer):
    """A user's optimizer: an elementwise step, scaled by numbers that it reads from the parameter's tensors."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                ratio = parameter.norm().item() / (parameter.grad.norm().item() + 1.0)
                if parameter.grad.abs().max() > 1e-9:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * min(ratio, 1.0))


class GlobalScale(torch.optim.Optimizer):
    """Scales all steps by the norm of all gradients, of which it makes a number."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = 0.0
        for parameter in parameters:
            total += float(parameter.grad.norm())
        if total > 1000:  # not in the first steps of most models
            for parameter in parameters:
                parameter.grad.mul_(1000 / total)
        for parameter in parameters:
            parameter.sub_(parameter.grad, alpha=self.defaults["lr"])


class WithClosure(torch.optim.Optimizer):
    """Runs the model again in its step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Tensor:
        loss: Tensor = closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=self.defaults["lr"])
        return loss
