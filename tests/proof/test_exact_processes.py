"""Every model of the zoo, partitioned over real processes, computes what it computes on one device.

Outputs, loss, complete gradients and two optimizer steps, in double precision, for every kind of mesh of up to four
ranks. Every model meets some of them here; every model on every kind is run in one process (test_exact_lockstep.py).
"""

import copy
from unittest import mock

import dist
import pytest
import torch
import torch.nn.functional as F
import zoo
from process_checks import same_everything, same_grads, same_own_loop, same_step, same_training
from torch import nn

import autopart
from autopart.ir.mesh import Mesh

MESHES = ("tp2", "tp4", "pp2", "pp4", "dp2", "dp4", "dp2,tp2", "pp2,tp2", "dp2,pp2")
ON = {  # every mesh has two models of different kinds, every model has meshes of different kinds
    "gpt2": ("tp2", "pp4", "dp2,tp2"),  # pp4: its tied weight is on two stages
    "llama": ("tp4", "dp2,pp2"),  # tp4: more ranks than key-value heads
    "bert": ("pp2", "dp4"),
    "t5": ("pp2", "dp2"),
    "phi3": ("tp2", "pp2,tp2"),
    "skip_mlp": ("pp2", "pp4", "dp2,tp2"),
    "transformer_encoder": ("tp4", "dp2,pp2"),
    "conv_net": ("dp2", "dp4", "pp2,tp2"),
}
LABELS = {"gpt2": "labels", "llama": "labels", "bert": "labels", "t5": "labels", "phi3": "labels"}
LABELS |= {"transformer_encoder": "targets"}
TIMEOUT_S = 120.0


def run(fn, mesh, *args):
    """`fn(*args, mesh)` on all ranks of a mesh."""
    return dist.run_ranks(fn, Mesh.parse(mesh).num_ranks, *args, mesh, timeout_s=TIMEOUT_S)


# --- What the ranks do ---------------------------------------------------------------------------------------------


def train_and_eval(mesh):
    """Both modes give what the model gives in them; a mode is traced when it is first asked for."""
    model, batch = zoo.gpt2()
    outputs, loss, grads = zoo.reference(model, batch)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    with mock.patch("autopart.recipe.make_plan.trace", wraps=autopart.recipe.make_plan.trace) as traces:
        pm = autopart.parallelize(model, mesh, example_kwargs=batch)
        assert (pm.training, traces.call_count) == (True, 1)
        dropped = pm.step(**batch)
        assert dropped.isfinite() and abs(dropped - loss) > 1e-3, "nothing was dropped in training"
        assert traces.call_count == 1
        pm.eval()
        assert traces.call_count == 1
        zoo.assert_close_outputs(pm(**batch), outputs)
        pm.zero_grad()
        same_step(pm, batch, loss, grads)
        assert traces.call_count == 2
        pm.train()
        assert pm(**batch).logits.sub(outputs.logits).abs().max() > 1e-3
        pm.eval()
        zoo.assert_close_outputs(pm(**batch), outputs)
        assert traces.call_count == 2
    assert model.training, "the user's model was left in another mode"


class Logits(nn.Module):
    """A plain model without a loss: a dict with one tensor, and a constant."""

    def __init__(self, vocab=64, hidden=32):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.down(F.gelu(self.up(x)))
        return {"logits": self.head(x), "kind": "logits"}


def token_loss(outputs, target):
    return F.cross_entropy(outputs["logits"].flatten(0, 1), target.flatten(), ignore_index=zoo.IGNORED)


def without_loss(mesh):
    """`loss_fn(outputs, target)` is part of the partitioned program; both may change from step to step."""
    torch.manual_seed(0)
    model = Logits().double()
    batch = zoo.causal_batch(8, 12, 64)
    tokens, target = batch["input_ids"], batch["labels"]
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs={"tokens": tokens})
    zoo.assert_close_outputs(pm(tokens=tokens), model(tokens=tokens))
    with pytest.raises(autopart.AutopartError, match="no loss"):
        pm.step(tokens=tokens)
    for rows in (target, target.flip(0)):
        model.zero_grad()
        loss = token_loss(model(tokens), rows)
        loss.backward()
        pm.zero_grad()
        grads = {name: p.grad for name, p in model.named_parameters()}
        same_step(pm, {"tokens": tokens}, loss.detach(), grads, loss_fn=token_loss, target=rows)


def odd_vocabulary(mesh):
    model, batch = zoo.transformer_encoder(vocab=97)
    outputs, loss, grads = zoo.reference(model, batch)
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch)
    zoo.assert_close_outputs(pm(**batch), outputs)
    same_step(pm, batch, loss, grads)
    same_own_loop(pm, batch, grads)
    same_training(pm, model, batch)
    names = ("embedding.weight", "head.weight", "head.bias")
    return [pm.get_parameter(name).to_local().shape[0] for name in names]


def traced_at_first_call(mesh):
    """Without an example: the same module, traced by its first call, whichever that is."""
    model, batch = zoo.bert()
    _, loss, grads = zoo.reference(model, batch)
    pm = autopart.parallelize(copy.deepcopy(model), mesh)
    with pytest.raises(autopart.AutopartError, match="first call"):
        list(pm.parameters())
    same_step(pm, batch, loss, grads)
    same_training(pm, model, batch)


# --- The tests -----------------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize(("name", "mesh"), [(name, mesh) for name, meshes in ON.items() for mesh in meshes])
def test_zoo_model_on_mesh(name, mesh):
    run(same_everything, mesh, name)


def test_every_model_and_every_mesh_is_run():
    assert set(ON) == set(zoo.ZOO)
    assert all(sum(mesh in meshes for meshes in ON.values()) >= 2 for mesh in MESHES)


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
@pytest.mark.parametrize("check", [train_and_eval, without_loss, traced_at_first_call])
def test_modes_and_losses(check, mesh):
    run(check, mesh)


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["dp2", "dp2,tp2"])
def test_loss_fn_with_data_parallelism(mesh):
    run(without_loss, mesh)


@pytest.mark.large
def test_odd_vocabulary_has_unequal_shards():
    assert run(odd_vocabulary, "tp2") == [[49, 49, 49], [48, 48, 48]]


@pytest.mark.parametrize("name", LABELS)
def test_label_counts_differ_per_row_and_part(name):
    """Else a mean of means would pass for the mean."""
    _, batch = zoo.ZOO[name]()
    counts = (batch[LABELS[name]] != zoo.IGNORED).sum(1)
    assert len(set(counts.tolist())) > 1
    for parts in (2, 4, 8):  # of data parallelism and microbatches
        assert len(set(counts.reshape(parts, -1).sum(1).tolist())) > 1, f"{parts} parts have equal label counts"
    assert (counts < batch[LABELS[name]].shape[1]).any()


def test_a_wrong_gradient_is_noticed():
    model, batch = zoo.skip_mlp()
    _, _, grads = zoo.reference(model, batch)
    pm = mock.Mock(full_grads=lambda: {name: grad * (1 + 1e-8) for name, grad in grads.items()})
    with pytest.raises(AssertionError, match="is off by"):
        same_grads(pm, grads)
    pm = mock.Mock(full_grads=lambda: {name: grad for name, grad in grads.items() if name != "head.bias"})
    with pytest.raises(AssertionError, match=r"missing \['head.bias'\]"):
        same_grads(pm, grads)
