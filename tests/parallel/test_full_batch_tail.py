"""Operators that mix samples run once, on all microbatches of the last stage."""

import copy

import dist
import pytest
import tail_models
import torch
import zoo

import autopart
from autopart.errors import StageError

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
