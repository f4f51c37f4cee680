"""`step(..., on_nonfinite=, locate=)`: NaN and infinity are found on every rank, named, and leave nothing behind."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import dist
import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.errors import InputError, NonFiniteError, UsageError
from autopart.runtime.training.nonfinite import all_finite


class Rooted(nn.Module):
    """The loss is NaN if an entry of `scale` is negative; only the gradient of `root` is NaN if `root` is zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        self.root, self.norm = nn.Parameter(torch.ones(8)), nn.BatchNorm1d(8)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        x = x * torch.sqrt(scale)[:, None]
        return {"loss": (torch.sqrt(self.root) * self.norm(x)).square().mean()}


class Drawn(nn.Module):
    """The loss is infinite if dropout draws a zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": torch.log(nn.functional.dropout(x * self.weight, 0.2)).mean()}


def place_of(code: str) -> str:
    """Return the place of the first line of this file that has this code, as errors show it."""
    lines = Path(__file__).read_text().splitlines()
    return f"test_nonfinite.py:{1 + next(index for index, line in enumerate(lines) if code in line)}"


SCALED, ROOT, LOG = place_of("torch.sqrt(scale)"), place_of("torch.sqrt(self.root)"), place_of("torch.log(")


def batch(scale: float = 1.0) -> dict[str, Tensor]:
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values = torch.ones(8, dtype=torch.float64)
    values[3] = scale
    return {"x": x, "scale": values}


def located(mesh, options):
    """Return the errors of a forward that is not finite, of a backward, and of a weight."""
    model = Rooted().double()
    pm = autopart.parallelize(model, mesh, example_kwargs=batch(), **options)
    buffers = {name: buffer.clone() for name, buffer in pm.named_buffers()}
    root = dict(pm.named_parameters()).get("root")
    errors = []
    for given, value in ((-1.0, 1.0), (1.0, 0.0), (1.0, float("nan"))):
        with torch.no_grad():
            if root is not None:
                root.fill_(value)
        with pytest.raises(NonFiniteError) as error:
            pm.step(**batch(given), locate=True)
        errors.append(str(error.value))
        assert all(parameter.grad is None for parameter in pm.parameters())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in pm.named_buffers())
    return errors


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "options"), [
    ("tp2", {}),
    ("dp2", {"zero": 3}),
    ("dp2", {"recompute": "full"}),
    pytest.param("dp2", {"compile": True}, marks=pytest.mark.large),
    ("pp2", {"schedule": "gpipe", "microbatches": 1}),
])  # fmt: skip
def test_the_operator_is_named(mesh, options):
    ranks = dist.run_ranks(located, 2, mesh, options, timeout_s=240)
    assert ranks[0] == ranks[1]
    forward, backward, weight = ranks[0]
    assert forward.startswith("the loss or a gradient is not finite\n  why    the loss is nan; the gradient of '")
    assert f"sqrt at {SCALED} computes nan from finite numbers\n" in forward
    assert "why    the gradient of 'root' holds" in backward
    assert f"the backward of sqrt at {ROOT} computes nan from finite numbers\n" in backward
    assert "'root' holds 8 nan of 8 before the step" in weight or "'root' holds 4 nan of 4 before the step" in weight
    assert weight.endswith("an epsilon there; on_nonfinite='skip' drops such batches")


def skips(mesh):
    model = Rooted().double()
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch())
    for given in (1.0, -1.0, 2.0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = pm.step(**batch(given), on_nonfinite="skip")
        mine = [warning for warning in caught if "skipped a batch: the loss is nan" in str(warning.message)]
        assert loss.isfinite() == (given > 0)
        assert len(mine) == (given < 0 and torch.distributed.get_rank() == 0)
        assert all(warning.filename == __file__ for warning in mine)
        if given > 0:
            model(**batch(given))["loss"].backward()
    assert pm.skipped_steps == 1
    for name, grad in pm.full_grads().items():
        torch.testing.assert_close(grad, model.get_parameter(name).grad, atol=1e-10, rtol=0)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(dict(pm.named_buffers())[name], buffer, atol=1e-10, rtol=0)


def skips_without_sync():
    model = Rooted().double()
    pm = autopart.parallelize(copy.deepcopy(model), "dp2", example_kwargs=batch())
    with pm.no_sync():
        pm.step(**batch())
        pm.step(**batch(-1.0), on_nonfinite="skip", locate=True)
    pm.step(**batch(2.0), on_nonfinite="raise")
    for given in (1.0, 2.0):
        model(**batch(given))["loss"].backward()
    for name, grad in pm.full_grads().items():
        torch.testing.assert_close(grad, model.get_parameter(name).grad, atol=1e-10, rtol=0)


@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_a_skipped_batch_leaves_nothing(mesh):
    dist.run_ranks(skips, 2, mesh)


def test_a_batch_is_skipped_inside_no_sync():
    dist.run_ranks(skips_without_sync, 2)


def test_a_skipped_batch_ends_no_sync():
    dist.run_ranks(skips_after_no_sync, 2)


def skips_after_no_sync():
    """The last of two accumulated batches is skipped: the gradients of the first are still reduced."""
    model = Rooted().double()
    pm = autopart.parallelize(copy.deepcopy(model), "dp2", example_kwargs=batch())
    with pm.no_sync():
        pm.step(**batch())
    pm.step(**batch(-1.0), on_nonfinite="skip")
    model(**batch())["loss"].backward()
    for name, grad in pm.full_grads().items():
        torch.testing.assert_close(grad, model.get_parameter(name).grad, atol=1e-10, rtol=0)


class Decayed(nn.Module):
    """The forward scales its own weight. The loss is NaN if an input is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return {"loss": (torch.sqrt(x) @ self.weight.t()).square().mean()}


def test_the_search_does_not_change_weights_again():
    pm = autopart.parallelize(Decayed().double(), "dp1", example_kwargs={"x": torch.ones(4, 8).double()})
    pm.step(-torch.ones(4, 8).double(), on_nonfinite="skip", locate=True)
    assert torch.equal(pm.full_state_dict()["weight"], torch.full((4, 8), 0.5).double())


def draws(rng):
    pm = autopart.parallelize(Drawn().double(), "dp2", rng=rng, example_kwargs={"x": torch.ones(8, 32).double()})
    torch.manual_seed(5)
    with pytest.raises(NonFiniteError) as error:
        pm.step(torch.ones(8, 32).double(), locate=True)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    pm.step(torch.ones(8, 32).double())
    assert torch.equal(after, torch.get_rng_state())
    return str(error.value)


@pytest.mark.parametrize("rng", ["exact", "fast"])
def test_the_search_draws_the_same_numbers(rng):
    text = dist.run_ranks(draws, 2, rng)[0]
    assert "why    the loss is -inf" in text
    assert f"computes nan from infinities, which log at {LOG} computes\n" in text


def test_a_skipped_batch_runs_no_hook():
    pm = autopart.parallelize(Rooted().double(), "dp1", example_kwargs=batch())
    calls = []
    for parameter in pm.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    pm.step(**batch())
    num_calls = len(calls)
    pm.step(**batch(-1.0), on_nonfinite="skip")
    assert len(calls) == num_calls > 0


def test_one_rank_needs_no_processes():
    pm = autopart.parallelize(Rooted().double(), "dp1", example_kwargs=batch())
    with pytest.raises(NonFiniteError, match=r"try    step\(\.\.\., locate=True\) names the operator"):
        pm.step(**batch(-1.0), on_nonfinite="raise")
    with pytest.raises(NonFiniteError, match=f"where  sqrt at {SCALED} computes nan from finite numbers"):
        pm.step(**batch(-1.0), locate=True)
    with pytest.raises(InputError, match="on_nonfinite='drop' is not known"):
        pm.step(**batch(), on_nonfinite="drop")
    with pytest.raises(InputError, match="locate=1 is neither True nor False"):
        pm.step(**batch(), locate=1)


def test_sparse_gradients_may_be_empty():
    process = autopart.parallelize(Rooted().double(), "dp1", example_kwargs=batch())._process
    empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (3,))
    assert all_finite([empty], process)
    assert not all_finite([empty, torch.tensor([float("nan")]).to_sparse()], process)


def test_a_loss_scale_that_is_too_large_is_no_error():
    good, bad = ({name: value.float() for name, value in batch(scale).items()} for scale in (1.0, -1.0))
    pm = autopart.parallelize(Rooted(), "dp1", precision="fp16", example_kwargs=good)
    pm._loss_scaling.scale = 2.0**60
    assert pm.step(**good, on_nonfinite="raise").isfinite()
    assert (pm.skipped_steps, pm.loss_scale) == (1, 2.0**59)
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        pm.step(**bad, on_nonfinite="raise")
    assert pm.loss_scale == 2.0**59


def refuses():
    model = Rooted().double()
    model.norm = nn.Identity()  # its statistics would rule out the schedule
    pm = autopart.parallelize(model, "pp2", schedule="1f1b_2bw", example_kwargs=batch())
    with pytest.raises(UsageError, match="on_nonfinite= and locate= are not supported with schedule='1f1b_2bw'"):
        pm.step(**batch(), on_nonfinite="skip")


@pytest.mark.large
def test_a_schedule_with_delayed_gradients_refuses():
    dist.run_ranks(refuses, 2)


def train(pm, batches):
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    for one in batches:
        pm.step(**one, on_nonfinite="skip")
        optimizer.step()
        optimizer.zero_grad()


def test_a_loop_with_the_check_equals_one_process():
    batches = [batch(scale) for scale in (1.0, 2.0)]
    report = autopart.verify_loop(train, "dp2", Rooted().double(), batches, example_kwargs=batch())
    assert report.ok, str(report)
