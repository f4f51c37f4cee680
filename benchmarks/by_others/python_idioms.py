"""The same for the Python around the tensors: scripts, checks, caches, and what a model does to its own training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from by_others.case import ROWS, VOCAB, Case, D, linear, rows, tokens, written

# Python around the tensors


def scripted_part() -> Case:
    return written(lambda self, x: self.a(x), a=torch.jit.script(linear()))


def square(x: Tensor) -> Tensor:
    return x * x


def scripted_function() -> Case:
    scripted = torch.jit.script(square)
    return written(lambda self, x: scripted(self.a(x)), a=linear())


def traced_by_script() -> Case:
    return Case(torch.jit.trace(linear(), rows()), (rows(),))


def exported_before() -> Case:
    return Case(torch.export.export(linear(), (rows(),)).module(), (rows(),))


def lazy_layer() -> Case:
    return Case(nn.Sequential(nn.LazyLinear(D), nn.ReLU(), nn.LazyLinear(D)), (rows(),))


def moved_in_forward() -> Case:
    return written(lambda self, x: self.a.to(x.device)(x), a=linear())


def distribution() -> Case:
    return written(
        lambda self, x: torch.distributions.Normal(self.a(x), torch.ones(ROWS, D).to(x)).log_prob(x), a=linear()
    )


def nan_check() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        assert not torch.isnan(h).any()
        return h

    return written(forward, a=linear())


def nan_check_that_raises() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        if torch.isnan(h).any():
            raise ValueError("not a number")
        return h

    return written(forward, a=linear())


@functools.lru_cache
def cached_mask(size: int) -> Tensor:
    return torch.ones(size, size).tril()


def lru_cached_mask() -> Case:
    return written(lambda self, x: self.a(x) @ cached_mask(D).to(x), a=linear())


MASKS: dict[str, Tensor] = {}


def global_cache() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        if "mask" not in MASKS:
            MASKS["mask"] = torch.ones(D, D).tril()
        return self.a(x) @ MASKS["mask"].to(x)

    return written(forward, a=linear())


def cache_filled_before() -> Case:
    case = global_cache()
    case.model(*case.args)
    return case


def kept_in_a_list() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.heads[0] = self.a(x)
        return self.heads[0]

    case = written(forward, a=linear())
    case.model.heads = [None]  # type: ignore[assignment]
    case.model(*case.args)
    return case


def known_values() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        times = torch.linspace(0, 1, 3)
        for before, after in zip(times[:-1], times[1:], strict=True):  # noqa: RUF007
            if after >= times[1]:
                x = x + (after - before) * self.a(x)
        return x

    return written(forward, a=linear())


def known_value_after_a_write() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        times, solution = torch.linspace(0, 1, 3), torch.zeros(3, ROWS, D).to(x)
        solution[0] = x
        if times[1] >= times[0]:
            x = self.a(x)
        return x + solution[0]

    return written(forward, a=linear())


# Training


def ema_teacher() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.a.weight, 0.1)
        return (self.a(x) - self.teacher(x)).square().mean()

    return written(forward, a=linear(), teacher=linear().requires_grad_(False))


def clamped_scale() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.scale.data.clamp_(max=2.0)
        return self.a(x) * self.scale.exp()

    return written(forward, a=linear(), scale=nn.Parameter(torch.tensor(3.0)))


def max_norm() -> Case:
    return written(
        lambda self, ids: self.a(self.words(ids)), tokens(), words=nn.Embedding(VOCAB, D, max_norm=1.0), a=linear()
    )


def reentrant_checkpoint() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.a(x) + checkpoint(self.b, self.a(x), use_reentrant=True)

    return written(forward, a=linear(), b=linear())


def backward_hook() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return self.b(h)

    return written(forward, a=linear(), b=linear())


class Sign(torch.autograd.Function):
    """The sign, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def straight_through() -> Case:
    return written(lambda self, x: self.b(Sign.apply(self.a(x))), a=linear(), b=linear())


def gradient_in_forward() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        energy = self.b(self.a(x).tanh()).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    return written(forward, a=linear(), b=linear())


def functional_gradient() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: self.b(self.a(row).tanh()).sum()))(x)

    return written(forward, a=linear(), b=linear())


def cond() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda h: self.a(h), lambda h: self.b(h), (x,))

    return written(forward, a=linear(), b=linear())


def spectral_norm() -> Case:
    return Case(nn.Sequential(nn.utils.parametrizations.spectral_norm(linear()), nn.ReLU(), linear()), (rows(),))


def weight_norm() -> Case:
    return Case(nn.Sequential(nn.utils.parametrizations.weight_norm(linear()), nn.ReLU(), linear()), (rows(),))


IDIOMS: dict[str, Callable[[], Case]] = {
    "a scripted module": scripted_part,
    "a scripted function": scripted_function,
    "a model of torch.jit.trace": traced_by_script,
    "a model of torch.export": exported_before,
    "lazy layers": lazy_layer,
    "a module moved in the forward": moved_in_forward,
    "torch.distributions": distribution,
    "an assert that nothing is NaN": nan_check,
    "an error where something is NaN": nan_check_that_raises,
    "a mask in an lru_cache": lru_cached_mask,
    "a mask in a global dictionary": global_cache,
    "a global dictionary filled before": cache_filled_before,
    "activations kept in a list": kept_in_a_list,
    "branches on known values": known_values,
    "a known value after a write": known_value_after_a_write,
    "a teacher averaged in the forward": ema_teacher,
    "a trained scale clamped in the forward": clamped_scale,
    "an embedding with max_norm": max_norm,
    "a reentrant checkpoint": reentrant_checkpoint,
    "a hook on a gradient": backward_hook,
    "a straight-through gradient": straight_through,
    "autograd.grad in the forward": gradient_in_forward,
    "torch.func.grad in the forward": functional_gradient,
    "torch.cond": cond,
    "spectral norm": spectral_norm,
    "weight norm": weight_norm,
}
MODELS = {f"plain: {name}": build for name, build in IDIOMS.items()}
