"""Guards on values of buffers: each value of a buffer that Python reads is another trace."""

from __future__ import annotations

from collections.abc import Callable

import dist
import pytest
import torch
from torch import Tensor, nn

import autopart


class Net(nn.Module):
    def __init__(self, compute: Callable[[Net, Tensor], Tensor], **buffers: Tensor) -> None:
        super().__init__()
        self.a, self.b, self.compute = nn.Linear(8, 8), nn.Linear(8, 8), compute
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, self.a(x)).square().mean()


def flag(m: Net, h: Tensor) -> Tensor:
    return torch.cat([h, m.b(h)], 1) if m.count else h


def number(m: Net, h: Tensor) -> Tensor:
    return h[:, : int(m.count)]


def loop(m: Net, h: Tensor) -> Tensor:
    for _ in range(m.count.item()):
        h = m.b(h).tanh()
    return h


def sizes(m: Net, h: Tensor) -> Tensor:
    return torch.stack([part.mean() for part in h.split([*m.count.view(1).tolist(), 8 - int(m.count)], 1)])


def number_with_an_input(m: Net, h: Tensor) -> Tensor:
    return h[:, : int(m.count + m.count.new_ones(2).sum())]


def first_batch(m: Net, h: Tensor) -> Tensor:
    """Take the scale from the first batch, as an actnorm does."""
    if not m.count:
        m.scale.copy_(h.detach().std(0))
        m.count.fill_(1)
    return h / m.scale


def warm_up(m: Net, h: Tensor) -> Tensor:
    if m.count > 2:
        h = m.b(h).exp()
    m.count += 1
    return h


def schedule(m: Net, h: Tensor) -> Tensor:
    """Read the number of steps after this step was counted."""
    m.count += 1
    return h * min(1.0, m.count.item() / 3)


def net(compute: Callable[[Net, Tensor], Tensor], count: int) -> Net:
    torch.manual_seed(0)
    return Net(compute, count=torch.tensor(count), scale=torch.ones(8)).double()


@pytest.mark.parametrize("compute", [flag, number, loop, sizes, number_with_an_input], ids=lambda f: f.__name__)
def test_values_of_buffers_decide(compute):
    result = autopart.verify(net(compute, 2), "tp2", example_args=(torch.randn(4, 8),))
    assert result.ok, result
    assert any("each other value is traced again" in note for note in result.notes), result.notes
    assert not any("not compared" in note for note in result.notes), result.notes


def test_steps_of_a_model_that_is_initialised_by_its_first_batch():
    batches = [{"x": torch.randn(4, 8)} for _ in range(3)]
    result = autopart.verify(net(first_batch, 0), "tp2", example_kwargs=batches[0], steps=3, batches=batches)
    assert result.ok, result


def trained(mesh: str, compute: Callable[[Net, Tensor], Tensor], start: int, values: list[int | None]):
    """Return the largest difference of losses and buffers from the model's, and how many traces were made."""
    model = net(compute, start)
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = net(compute, start)
    pm = autopart.parallelize(model, mesh, example_args=(batch,), microbatches=1)
    worst = 0.0
    for value in values:
        if value is not None:
            pm.get_buffer("count").fill_(value)
            own.count.fill_(value)
        found, expected = pm.step(batch), own(batch)
        gradients = torch.autograd.grad(expected, list(own.parameters()), allow_unused=True)
        differences = [
            found - expected.detach(),
            pm.get_buffer("count") - own.count,
            pm.get_buffer("scale") - own.scale,
        ]
        full = pm.full_grads()
        for (name, _), gradient in zip(own.named_parameters(), gradients, strict=True):
            if gradient is not None:
                differences.append(full[name] - gradient)
        worst = max(worst, *(float(difference.abs().max()) for difference in differences))
        pm.zero_grad()
    return worst, pm._compiler._num_traces


@pytest.mark.whole
@pytest.mark.parametrize(("compute", "start", "values", "traces"), [
    (number, 2, [None, 5, 2, 5], 2), (first_batch, 0, [None, None, None], 2), (warm_up, 0, [None] * 5, 2),
    (schedule, 0, [None] * 5, 2),
])  # fmt: skip
def test_each_value_is_traced_once(compute, start, values, traces):
    worst, counted = trained("dp1", compute, start, values)
    assert worst < 1e-10
    assert counted == traces


def several(cases):
    return [trained(*case) for case in cases]


def test_buffers_that_another_stage_writes_are_guarded_on_all_ranks():
    cases = [(mesh, *case) for mesh in ("pp2", "dp2") for case in ((first_batch, 0, [None] * 3), (loop, 1, [None, 2]))]
    for results in dist.run_ranks(several, 2, cases, timeout_s=300):
        assert max(worst for worst, _ in results) < 1e-10
        assert [traces for _, traces in results] == [2] * 4
