"""Loss scaling: an infinity in one rank's gradients is every rank's, with torch's scaler and with ours."""

from __future__ import annotations

import copy
import math
from typing import Any

import dist
import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import autopart
from autopart import GradScaler
from autopart.errors import InputError
from autopart.ir.mesh import Mesh

TIMEOUT_S = 120.0
OPTIONS: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2}
STEPS = 5
BROKEN_AT = 2
"""The step in which one element of one gradient is infinite."""


def same_training(mesh: str, dtype: torch.dtype, zero: int, kind: str, fused: bool) -> list[float]:
    """Steps with clipping, one of them skipped, end where one device ends; this rank's scale after each."""
    model, batch = zoo.gpt2(num_layers=1, hidden=16, heads=2, vocab=32, rows=4, seq=6)
    model.to(dtype)
    fresh = copy.deepcopy(model)
    pm = autopart.parallelize(fresh, mesh, example_kwargs=batch, **({"zero": zero} if zero else {}))
    scalers = [torch.amp.GradScaler("cpu", **OPTIONS), made(kind)]
    modules = [model, pm]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, fused=fused) for module in modules]
    scales = []
    for step in range(STEPS):
        for module, scaler, optimizer in zip(modules, scalers, optimizers, strict=True):
            optimizer.zero_grad()
            if module is pm and "pp" in pm.mesh.sizes:
                if kind == "stock":
                    scaler.scale(torch.zeros(()))  # which makes its scale
                pm.step(**batch, loss_scale=scaler.get_scale())
            else:
                scaler.scale(module(**batch).loss).backward()
            if step == BROKEN_AT:
                break_one(module)
            if not fused:
                scaler.unscale_(optimizer)
                clip_grad_norm_(module.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        scales.append(scalers[1].get_scale())
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for name, value in pm.full_state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=tolerance, atol=tolerance, msg=name)
    assert scalers[0].state_dict() == scalers[1].state_dict()
    return scales


def made(kind: str) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **OPTIONS) if kind == "stock" else GradScaler("cpu", **OPTIONS)


def break_one(module: nn.Module) -> None:
    """An infinity in the last row of a weight that `tp` and ZeRO cut, and that is on the last stage."""
    (parameter,) = [p for name, p in module.named_parameters() if name.endswith("mlp.c_proj.weight")] or [None]
    last = not isinstance(module, autopart.ParallelModule) or torch.distributed.get_rank() == module.mesh.num_ranks - 1
    if parameter is not None and last:
        assert parameter.grad is not None
        getattr(parameter.grad, "to_local", lambda: parameter.grad)()[-1, -1] = math.inf


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "dtype", "zero", "kind", "fused"), [
    ("tp2", torch.float64, 0, "stock", False), ("tp2", torch.float32, 0, "ours", False),
    ("pp2", torch.float64, 0, "ours", False), ("pp2", torch.float64, 0, "stock", False),
    ("dp2", torch.float64, 3, "stock", False), ("tp2", torch.float32, 0, "ours", True),
    ("pp2,tp2", torch.float64, 0, "ours", False),
])  # fmt: skip
def test_every_rank_skips_the_step_that_one_device_skips(mesh, dtype, zero, kind, fused):
    ranks = Mesh.parse(mesh).num_ranks
    found = dist.run_ranks(same_training, ranks, mesh, dtype, zero, kind, fused, timeout_s=TIMEOUT_S)
    assert found == [[1024.0, 2048.0, 1024.0, 1024.0, 2048.0]] * ranks


class Quiet(nn.Module):
    """A model whose second half has no parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.weight)
        for _ in range(6):
            x = torch.tanh(x @ x.transpose(0, 1) @ x)
        return x.square().mean()


def without_parameters(mesh: str) -> list[Any]:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pm = autopart.parallelize(Quiet(), mesh, example_args=(x,))
    optimizer, scaler = torch.optim.SGD(pm.parameters(), lr=0.1), GradScaler("cpu", **OPTIONS)
    scaler.get_scale()
    with pytest.raises(AssertionError, match="No inf checks"):  # as on one device: there is no gradient
        scaler.step(optimizer)
    scaler, seen = GradScaler("cpu", **OPTIONS), []
    for value in (1.0, math.nan):
        pm.step(x, loss_scale=scaler.get_scale())
        for parameter in pm.parameters():
            if parameter.grad is not None:
                parameter.grad[0, 0] *= value
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.get_scale())
    pm.step(x)
    with pytest.raises(InputError) as failure:
        scaler.step(optimizer)
    pm.step(x)
    GradScaler("cpu", enabled=False).step(optimizer)
    return [*seen, {name: p.numel() for name, p in pm.named_parameters()}, str(failure.value)]


def test_a_rank_without_parameters_decides_with_the_others():
    first, second = dist.run_ranks(without_parameters, 2, "pp2", timeout_s=TIMEOUT_S)
    assert first[:2] == second[:2] == [1024.0, 512.0]
    assert {"weight": 64} in (first[2], second[2]) and {"no_parameters_here": 0} in (first[2], second[2])
    assert first[3] == second[3] and "the gradients were not multiplied by the scaler's 512" in first[3]
    assert "loss_scale=scaler.get_scale()" in first[3]


def test_a_scaler_of_ours_is_torchs_without_a_partitioned_model():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler(init_scale=8.0)
    assert (scaler.where == "cuda") == torch.cuda.is_available()
    assert scaler.get_scale() == 8.0
    parameter.grad = torch.full((3,), 8.0, device=parameter.device)
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(parameter.detach(), torch.zeros(3))
    again = GradScaler(init_scale=2.0)
    again.load_state_dict(scaler.state_dict())
    assert again.get_scale() == 8.0 and GradScaler(enabled=False).get_scale() == 1.0
