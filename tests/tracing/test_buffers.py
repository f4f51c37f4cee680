"""Buffers that a model writes in its forward: batch-norm statistics, counters, moving averages, caches.

After every call they hold what they hold on one device, on every rank and under every mesh.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext

import dist
import pytest
import torch
import zoo
from buffer_models import MODELS, ROWS, SIZE, batch, build
from torch import Tensor, nn
from traced import run_of, verified

import autopart
from autopart.errors import InputError, TraceError
from autopart.ir.mesh import Mesh
from autopart.passes.normalize import batch_norm_forms
from autopart.recipe.make_plan import prepare
from autopart.tracing.trace_model import bind_call

WRITES_NOTHING = ("batch norm without buffers",)
MESHES = ("tp2", "pp2", "dp2", "dp2,tp2", "dp2,pp2,tp2")


def on_one_device(model: nn.Module) -> nn.Module:
    """The model as it runs without processes: a SyncBatchNorm is a batch norm there."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.SyncBatchNorm):
            plain = nn.BatchNorm2d(module.num_features).to(module.weight.dtype)
            plain.load_state_dict(module.state_dict())
            model.set_submodule(name, plain)
    return model


@pytest.mark.few
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_new_values_are_exact(name, mesh):
    found = verified(run_of(built, name=name), mesh)
    assert found.ok, str(found)
    assert found.max_error < 1e-12
    written = {error.removeprefix("buffer ") for error in found.errors if error.startswith("buffer ")}
    assert written == changed(*built(name))


def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    return on_one_device(build(name)), batch(name)


def changed(model: nn.Module, call: Mapping[str, Tensor]) -> set[str]:
    """The buffers that one call changes, each under its first name."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model = copy.deepcopy(model)
    model(**call)
    return {name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])}


# --- over processes ------------------------------------------------------------------------------------------------


def trains_and_evaluates(name, mesh):
    """Two steps, a call of its own in training, and what comes out in eval mode: all as on one device."""
    model = build(name)
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch(name))
    model = on_one_device(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, pm)]
    for seed in (1, 2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = loss_of(model(**batch(name, seed)))
        expected.backward()
        found = pm.step(**batch(name, seed))
        zoo.assert_close_outputs(found, expected.detach())
        for optimizer in optimizers:
            optimizer.step()
        same_state(pm, model)
    with torch.no_grad():
        zoo.assert_close_outputs(pm(**batch(name, 3)), model(**batch(name, 3)))
    same_state(pm, model)
    model.eval(), pm.eval()
    before = {n: b.clone() for n, b in model.named_buffers()}
    zoo.assert_close_outputs(loss_of(pm(**batch(name, 4))).detach(), loss_of(model(**batch(name, 4))).detach())
    same_state(pm, model)
    pm.train(), model.train()
    zoo.assert_close_outputs(loss_of(pm(**batch(name, 5))).detach(), loss_of(model(**batch(name, 5))).detach())
    same_state(pm, model)
    return any(not torch.equal(before[n], b) for n, b in model.named_buffers())


def loss_of(output):
    return output["loss"] if isinstance(output, dict) else output


def same_state(pm, model):
    """Parameters and buffers, those that a rank holds too: they are whole."""
    expected = model.state_dict()
    found = pm.full_state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        zoo.assert_close_outputs(found[name], value, where=name)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        zoo.assert_close_outputs(pm.get_buffer(name), buffer.detach(), where=name)


ON_TWO = {  # every model; those that sum over rows are on dp2, where the rows are on several ranks
    "dp2": ("batch norm", "batch norm without weights", "cumulative batch norm", "synchronised batch norm",
            "instance norm", "MovingMean", "WithGradient", "Cache"),
    "tp2": ("batch norm", "Codebook", "OfWeights", "Spectral"),
    "pp2": ("batch norm", "Assigned", "OfWeights", "Shared", "Returned"),
}  # fmt: skip
ON_FOUR = {"dp2,tp2": ("batch norm",), "pp2,tp2": ("Codebook",), "dp2,pp2": ("batch norm", "Cache")}


@pytest.mark.few
@pytest.mark.parametrize(("name", "mesh"), [(name, mesh) for mesh, names in ON_TWO.items() for name in names])
def test_training_over_processes(name, mesh):
    assert all(dist.run_ranks(trains_and_evaluates, 2, name, mesh)), "nothing was written"


def test_every_model_that_writes_trains_over_processes():
    assert {name for names in ON_TWO.values() for name in names} == set(MODELS) - set(WRITES_NOTHING)


@pytest.mark.large
@pytest.mark.parametrize(("name", "mesh"), [(name, mesh) for mesh, names in ON_FOUR.items() for name in names])
def test_training_over_four_processes(name, mesh):
    assert Mesh.parse(mesh).num_ranks == 4
    dist.run_ranks(trains_and_evaluates, 4, name, mesh)


# --- details -------------------------------------------------------------------------------------------------------


@pytest.mark.large
def test_a_wrong_new_value_is_found(monkeypatch):
    """The variance of running statistics is the unbiased one."""
    right = batch_norm_forms._BatchNormFormula._moved
    monkeypatch.setattr(batch_norm_forms._BatchNormFormula, "_moved", lambda self, *args: right(self, *args[:3], 1.0))
    found = autopart.verify(build("batch norm"), "dp2", example_kwargs=batch("batch norm"))
    assert not found.ok
    assert found.errors["buffer norm1.running_var"] > 1e-4
    assert found.errors["buffer norm1.running_mean"] < 1e-12


@pytest.mark.large
def test_a_buffer_that_the_trace_misses_is_found(monkeypatch):
    monkeypatch.setattr(autopart.tracing.trace_model, "traceable", lambda *given: nullcontext())
    monkeypatch.setattr(autopart.tracing.exported_graph, "writes", lambda node: False)
    found = autopart.verify(build("instance norm").eval().requires_grad_(), "dp2", example_kwargs=batch("batch norm"))
    assert found.ok, str(found)
    model = build("instance norm")
    model.norm3.eval()
    found = autopart.verify(model, "dp2", example_kwargs=batch("batch norm"))
    missed = {name for name, error in found.errors.items() if error == float("inf")}
    assert not found.ok and missed == {f"buffer norm{i}.running_{kind}" for i in "12" for kind in ("mean", "var")}


def test_a_statistic_is_reduced_once_in_either_direction():
    plan = autopart.plan(build("batch norm"), "dp2", example_kwargs=batch("batch norm"))
    counts = {(c.forward, c.backward): c.count for c in plan.collectives if c.where == "norm1"}
    assert counts == {("all_reduce", "all_reduce"): 2}


@pytest.mark.large
def test_microbatches_are_refused_and_none_are_chosen():
    model, call = build("batch norm"), batch("batch norm")
    with pytest.raises(autopart.AutopartError, match=r"batch_norm needs all samples .* a statistic of the batch"):
        autopart.plan(model, "pp2", example_kwargs=call, microbatches=2)
    assert autopart.plan(model, "pp2", example_kwargs=call).schedule.microbatches == 1


@pytest.mark.large
def test_float32_statistics_of_a_bfloat16_model():
    torch.manual_seed(0)
    model = nn.BatchNorm1d(SIZE)
    x = torch.randn(ROWS, SIZE).to(torch.bfloat16)
    traced = prepare(model, bind_call(model, (x,), {}))
    assert {str(n.meta["val"].dtype) for n in traced.buffer_updates.values()} == {"torch.float32", "torch.int64"}
    pm = autopart.parallelize(copy.deepcopy(model), "tp1", example_args=(x,))
    assert torch.allclose(pm(x).float(), model(x).float(), atol=2**-8)
    assert torch.allclose(pm.get_buffer("running_var"), model.running_var, atol=1e-6)


@pytest.mark.large
def test_tracing_and_verifying_leave_the_model_alone():
    model = build("cumulative batch norm")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    autopart.verify(model, "dp2", example_kwargs=batch("batch norm"))
    autopart.parallelize(model, "tp1", example_kwargs=batch("batch norm")).step(**batch("batch norm"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all("forward" not in vars(module) for module in model.modules())


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).square().mean()


@pytest.mark.filterwarnings("ignore")  # torch deprecates torch.ao.quantization
def test_fake_quantization_while_training():
    """Its first call changes the shape of buffers, and its operator accepts no float64."""
    quantization = pytest.importorskip("torch.ao.quantization")
    model, x = Quantized(), torch.randn(4, 8)
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    model = quantization.prepare_qat(model.train())
    text = r"changes the shape of its buffer 'linear.weight_fake_quant.scale'.*\n.*\n.*call the model once before"
    with pytest.raises(TraceError, match=text):
        autopart.parallelize(copy.deepcopy(model), "dp1", example_args=(x,)).step(x)
    with pytest.raises(TraceError, match=text):
        autopart.verify(model, "dp2", example_args=(x,))
    model(x)
    with pytest.raises(InputError, match=r"verify\(\) cannot run _fused_moving_avg_obs_fq_helper.* in float64"):
        autopart.verify(model, "dp2", example_args=(x,))
    module = autopart.parallelize(copy.deepcopy(model), "dp1", example_args=(x,))
    for _ in range(2):
        assert module.step(x) == pytest.approx(float(model(x)), rel=1e-6)
