"""Operators that mix samples run once, on all microbatches of the last stage."""

import copy

import dist
import held
import pytest
import tail_models
import torch
import zoo
from torch import nn

import autopart
from autopart.cost.predict.timeline import Durations, timeline
from autopart.errors import StageError
from autopart.plans.plan import Plan

SGD = {"lr": 1e-2, "momentum": 0.9}  # AdamW would amplify the rounding of gradients that are zero


def assert_trains_exactly(model, mesh, batch, loss_fn=None, target=None, **options):
    """Loss, gradients and three optimizer steps on processes are those of the model."""
    kwargs = {} if loss_fn is None else {"loss_fn": loss_fn, "target": target}
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch, **options)
    optimizers = torch.optim.SGD(pm.parameters(), **SGD), torch.optim.SGD(model.parameters(), **SGD)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        found = pm.step(**batch, **kwargs)
        out = model(**batch, **zoo.no_cache(model))
        loss = loss_fn(out, target) if loss_fn is not None else out[0] if isinstance(out, tuple) else out
        loss.backward()
        zoo.assert_close_outputs(found, loss.detach(), where=f"loss on {mesh}")
        zoo.assert_same_grads(pm.full_grads(), {name: p.grad for name, p in model.named_parameters()})
        for optimizer in optimizers:
            optimizer.step()
    expected, found = model.state_dict(), pm.full_state_dict()
    for name, value in expected.items():
        zoo.assert_close_outputs(found[name], value, where=name)
    model.eval(), pm.eval()
    with torch.no_grad():
        zoo.assert_close_outputs(pm(**batch), model(**batch, **zoo.no_cache(model)), where=f"outputs on {mesh}")
    return pm


def all_models_train(mesh, microbatches, names, **options):
    for name in names:
        model, batch = tail_models.build(name)
        pm = assert_trains_exactly(model, mesh, batch, microbatches=microbatches, **options)
        assert pm.plan.schedule.name == "gpipe" and "tail" in pm.plan.stages[-1], name


def dpo_trains(meshes):
    for mesh, microbatches in meshes.items():
        model, batch, loss_fn, target = tail_models.dpo()
        assert_trains_exactly(model, mesh, batch, loss_fn, target, microbatches=microbatches, schedule="gpipe")


@pytest.mark.large
@pytest.mark.parametrize("mesh, microbatches", [("pp2", 4), ("dp2,pp2", 2), ("pp2,tp2", 4)])
def test_losses_of_the_batch_train_exactly(mesh, microbatches):
    ranks = 2 if mesh == "pp2" else 4
    dist.run_ranks(all_models_train, ranks, mesh, microbatches, [*tail_models.MODELS], timeout_s=200.0)


@pytest.mark.large
def test_pairs_of_answers_train_exactly():
    dist.run_ranks(dpo_trains, 4, {"dp2,pp2": 2, "pp2,tp2": 4}, timeout_s=200.0)


def other_calls_of_a_plan(folder):
    """Batches of other sizes, gradients of several steps, all outputs, and a plan from a file."""
    model, batch = tail_models.build("hardest")
    options = {"example_kwargs": batch, "microbatches": 2}
    pm = autopart.parallelize(copy.deepcopy(model), "dp2,pp2", **options)
    for rows in (8, 4, 12):
        x = torch.randn(rows, tail_models.SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
        expected = model(x)
        expected[0].backward()
        loss, outputs = pm.step(x=x, outputs=True)
        zoo.assert_close_outputs(loss, expected[0].detach(), where=f"loss of {rows} rows")
        zoo.assert_close_outputs(outputs, tuple(value.detach() for value in expected), where=f"outputs of {rows} rows")
        zoo.assert_same_grads(pm.full_grads(), {name: p.grad for name, p in model.named_parameters()})
    path = f"{folder}/plan.json"
    if torch.distributed.get_rank() == 0:
        pm.plan.save(path)
    torch.distributed.barrier()
    loaded = autopart.parallelize(copy.deepcopy(model), "dp2,pp2", plan=path, example_kwargs=batch)
    assert "tail" in loaded.plan.stages[-1]
    zoo.assert_close_outputs(loaded.step(**batch), model(**batch)[0].detach(), where="loss of a plan from a file")


@pytest.mark.large
def test_other_calls_of_a_plan_are_exact(tmp_path):
    dist.run_ranks(other_calls_of_a_plan, 4, str(tmp_path), timeout_s=120.0)


def planned_at_the_first_step():
    model, batch = tail_models.build("hardest")
    pm = autopart.parallelize(copy.deepcopy(model), "pp2", microbatches=2)
    expected = model(**batch)
    expected[0].backward()
    zoo.assert_close_outputs(pm.step(**batch), expected[0].detach())
    zoo.assert_same_grads(pm.full_grads(), {name: p.grad for name, p in model.named_parameters()})
    assert pm.plan.schedule.name == "gpipe"


def test_a_plan_of_the_first_step():
    dist.run_ranks(planned_at_the_first_step, 2, timeout_s=120.0)


@pytest.mark.large
@pytest.mark.parametrize("zero", [1, 3])
def test_sharded_parameters_train_exactly(zero):
    dist.run_ranks(all_models_train, 4, "dp2,pp2", 2, ["two uses", "contrastive"], zero=zero, timeout_s=120.0)


class AuxiliaryLosses(nn.Module):
    """Every block has a loss of the batch, as the routers of experts have."""

    def __init__(self, num_blocks=6):
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(tail_models.SIZE, 3) for _ in range(num_blocks))
        self.layers = nn.ModuleList(nn.Linear(tail_models.SIZE, tail_models.SIZE) for _ in range(num_blocks))

    def forward(self, x):
        balance = 0.0
        for gate, layer in zip(self.gates, self.layers, strict=True):
            shares = gate(x).softmax(-1)
            balance = balance + shares.mean(0).square().sum()
            x = x + layer(x).tanh() * shares.square().sum(-1, keepdim=True)
        return x.square().mean() + balance


@pytest.mark.parametrize("mesh", ["pp2", "pp3", "dp2,pp2"])
def test_losses_of_all_blocks_are_exact(mesh):
    torch.manual_seed(0)
    model, batch = AuxiliaryLosses().double(), tail_models.build("early")[1]
    found = autopart.verify(model, mesh, example_kwargs=batch, microbatches=2)
    assert found.ok, str(found)
    plan = autopart.plan(model, mesh, example_kwargs=batch, microbatches=2)
    assert len(plan.stages) == plan.mesh["pp"] and len(plan.stages[-1]["tail"]["receives"]) == 7


def test_a_wrong_merge_is_found(monkeypatch):
    model, batch = tail_models.build("contrastive")
    merge = autopart.runtime.lockstep.merge_for_tail
    monkeypatch.setattr(
        autopart.runtime.lockstep, "merge_for_tail", lambda program, sent: merge(program, [*reversed(sent)])
    )
    assert not autopart.verify(model, "pp2", example_kwargs=batch, microbatches=4).ok


def test_the_schedule_follows_from_the_loss():
    model, batch = tail_models.build("contrastive")
    plan = autopart.plan(model, "pp2", example_kwargs=batch)
    assert (plan.schedule.name, plan.schedule.microbatches) == ("gpipe", 8)
    assert "schedule='gpipe', because operators that mix samples" in plan.explain()
    assert "runs once on the whole batch" in plan.explain()
    named = autopart.plan(model, "pp2", example_kwargs=batch, schedule="gpipe")
    assert not any("because" in note for note in named.notes)
    assert autopart.plan(model, "pp2", example_kwargs=batch, microbatches=1).schedule.name == "1f1b"
    for schedule in ("1f1b", "zbv"):
        with pytest.raises(StageError, match=f"not with schedule='{schedule}'\n(.|\n)*try    schedule='gpipe'"):
            autopart.plan(model, "pp2", example_kwargs=batch, microbatches=4, schedule=schedule)


def test_a_statistic_of_an_early_layer_is_refused():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), *(nn.Linear(8, 8) for _ in range(6)))
    batch = {"input": torch.randn(8, 8)}
    with pytest.raises(StageError, match="too much of the model depends on it"):
        autopart.plan(model, "pp2", example_kwargs=batch, microbatches=2)
    assert autopart.plan(model, "pp2", example_kwargs=batch).schedule.microbatches == 1


# --- time and memory -------------------------------------------------------------------------------------------------


def test_the_tail_runs_between_forwards_and_backwards():
    durations = Durations(forward_s=[1, 1, 10], backward_s=[2, 2, 20])
    step = timeline("gpipe", 2, 2, 3, durations, has_tail=True)
    last = [f"{span.stage}{span.kind}{span.microbatch}" for span in step.spans[1]]
    assert last == ["1F0", "1F1", "1F2", "2F2", "2B2", "1B0", "1B1", "1B2"]
    assert step.step_time_s == 4 + 30 + 8


def test_plans_count_the_tail_once():
    model, batch = tail_models.build("contrastive")
    plans = [autopart.plan(model, "pp2", example_kwargs=batch, schedule="gpipe", microbatches=m) for m in (1, 4)]
    assert plans[0].cost["forward_flops"] == plans[1].cost["forward_flops"]
    tail = plans[1].timing["stages"][-1]
    assert tail["tail"] and tail["receives_s"] == 0
    spans = autopart.simulate(plans[1]).timeline.spans[1]
    assert [span.kind for span in spans if span.stage == 2] == ["F", "B"]
    loaded = Plan.from_json(plans[1].to_json())
    assert loaded.cost.at(m=4).step_time_s == pytest.approx(plans[1].cost["step_time_s"], rel=1e-6)


class CentredLogits(nn.Module):
    """A language model whose loss needs the logits of all samples."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        logits = self.model(input_ids=input_ids, use_cache=False).logits
        return (logits - logits.mean(0)).square().mean()


def peak_of_a_step():
    model, batch = zoo.gpt2(rows=64, vocab=256)
    batch = {"input_ids": batch["input_ids"]}
    pm = autopart.parallelize(CentredLogits(model), "pp2", example_kwargs=batch, microbatches=4)
    return held._peak_of_steps(pm, batch, "pp2", 4)


@pytest.mark.large
def test_a_real_step_takes_what_is_counted():
    for found, counted in dist.run_ranks(peak_of_a_step, 2, timeout_s=120.0):
        assert 0.95 * found <= counted <= 1.15 * found


class SlicedWeights(nn.Module):
    """Slices of parameters: their lengths equal the batch size by chance."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.weight, self.tokens = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(16, 8))

    def forward(self, x):
        h = self.lin(x) @ self.weight[:8].T
        return (torch.cat([self.tokens[:8].expand(len(x), 8, 8), h[:, None]], 1) @ self.weight[:8, :8]).square().mean()


def test_a_slice_of_a_parameter_is_no_batch():
    report = autopart.verify(SlicedWeights(), "dp2,pp2", example_args=(torch.randn(8, 8),), microbatches=2)
    assert report.ok, report
