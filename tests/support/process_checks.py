"""Checks on processes: a partitioned model trains as the unpartitioned one."""

import copy

import torch
import zoo

import autopart
from autopart.ir.mesh import Mesh

SIZES = {"t5": {"num_layers": 1}}  # a layer of each stack: it takes as long as two of the others


def same_everything(name, mesh):
    model, batch = zoo.ZOO[name](**SIZES.get(name, {}))
    outputs, loss, grads = zoo.reference(model, batch)
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch)

    zoo.assert_close_outputs(pm(**batch), outputs)
    assert all(p.grad is None for p in pm.parameters()), "a call alone left gradients"
    same_step(pm, batch, loss, grads)
    if Mesh.parse(mesh).size("pp") == 1:
        same_own_loop(pm, batch, grads)
    same_training(pm, model, batch)


def same_step(pm, batch, loss, grads, times=1, **options):
    """A step's loss and gradients, `times` what was in `.grad` before."""
    found = pm.step(**batch, **options)
    assert not found.requires_grad
    zoo.assert_close_outputs(found, loss, where="loss")
    same_grads(pm, grads, times)


def same_grads(pm, grads, times=1):
    found = pm.full_grads()
    expected = {name: None if grad is None else grad * times for name, grad in grads.items()}
    zoo.assert_same_grads(found, expected)
    assert set(found) == {name for name, grad in expected.items() if grad is not None}


def same_own_loop(pm, batch, grads):
    """The user's own `loss.backward()` leaves complete gradients, and adds to what was there."""
    pm.zero_grad()
    for times in (1, 2):
        out = pm(**batch)
        (out if isinstance(out, torch.Tensor) else out.loss).backward()
        same_grads(pm, grads, times)
    pm.step(**batch)
    same_grads(pm, grads, times=3)


def same_training(pm, model, batch):
    """Two AdamW steps end in the same weights, and change them."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"lr": 1e-2, "weight_decay": 0.1}
    optimizers = torch.optim.AdamW(pm.parameters(), **options), torch.optim.AdamW(model.parameters(), **options)
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        pm.step(**batch)
        out = model(**batch, **zoo.no_cache(model))
        (out if isinstance(out, torch.Tensor) else out.loss).backward()
        for optimizer in optimizers:
            optimizer.step()
    expected, found = model.state_dict(), pm.full_state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        zoo.assert_close_outputs(found[name], value, where=name)
    trained = [name for name, p in model.named_parameters() if p.grad is not None]
    assert all(not torch.equal(found[name], before[name]) for name in trained)
