"""Layers that a random number skips: LayerDrop, stochastic depth, by `if torch.rand(...) < p` or Python's `random`."""

from __future__ import annotations

import random
from typing import Any

import dist
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from traced import verified
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

import autopart
from autopart.errors import OptionError, Refusal, TraceError
from autopart.proof.verify import VerificationRun
from autopart.tracing.trace_model import bind_call

MESHES = ["tp2", "dp2", "pp2"]
ROWS, SIZE = 8, 8


class Net(nn.Module):
    def __init__(self, forward: Any, depth: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()) for _ in range(depth))
        self.first, self.head, self.run = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), forward

    def forward(self, x: Tensor) -> Any:
        return self.head(self.run(self, self.first(x)))


def skipped(m, x):
    for layer in m.layers:
        if torch.rand([]) < 0.5:
            continue
        x = layer(x)
    return x


def run_where_larger(m, x):
    for layer in m.layers:
        if torch.rand(1) > 0.5:
            x = x + layer(x)
    return x


def by_item(m, x):
    for layer in m.layers:
        if torch.rand(1).item() < 0.5:
            x = layer(x)
    return x


def either(m, x):
    x = m.layers[0](x)
    x = m.layers[1](x) if torch.rand(()) < 0.5 else m.layers[2](x).relu()
    return m.layers[3](x)


def two_states(m, x):
    y = x
    for layer in m.layers:
        if torch.rand([]) > 0.3:
            x, y = layer(y) + x, x
    return x * y


def all_states(m, x):
    states = [x]
    for layer in m.layers:
        if torch.rand([]) < 0.5:
            x = layer(x)
        states.append(x)
    return torch.stack(states).mean(0)


def scaled(m, x):
    """The number that decides is used, too."""
    for layer in m.layers:
        depth = torch.rand([])
        if depth > 0.5:
            x = layer(x) * depth
    return x


def by_a_permutation(m, x):
    if torch.randint(2, (1,)) == 0:
        x = m.layers[0](x)
    if torch.randperm(3)[0] > 0:
        x = m.layers[1](x)
    return x


def by_python(m, x):
    for layer in m.layers:
        if random.random() > 0.5:
            x = layer(x)
    return x


def by_uniform(m, x):
    for layer in m.layers:
        if random.uniform(0, 2) < 1:
            x = layer(x)
    return x


def by_numpy(m, x):
    for layer in m.layers:
        if np.random.rand() + np.random.uniform(1, 3) < 2.5:
            x = layer(x)
    return x


CHANCES = [
    skipped, run_where_larger, by_item, either, two_states, all_states, scaled, by_a_permutation, by_python,
    by_uniform, by_numpy,
]  # fmt: skip


@pytest.mark.few
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("forward", CHANCES, ids=lambda forward: forward.__name__)
def test_what_numbers_decide_is_exact(forward, mesh):
    """The model itself draws the same numbers, so that both run the same layers."""
    torch.manual_seed(0)
    report = autopart.verify(Net(forward), mesh, example_args=(torch.randn(ROWS, SIZE),))
    assert report.ok, report


@pytest.mark.few
@pytest.mark.parametrize("forward", [skipped, either, all_states], ids=lambda forward: forward.__name__)
def test_every_choice_of_layers_happens_and_is_one_of_the_model(forward):
    torch.manual_seed(0)
    model, x = Net(forward, depth=4).double(), torch.randn(ROWS, SIZE, dtype=torch.float64)

    def found(module: Any) -> set[tuple[float, tuple[float, ...]]]:
        results = set()
        for _ in range(150):
            module.zero_grad()
            y = module(x)
            y.square().sum().backward()
            grads = module.full_grads() if module is pm else {n: p.grad for n, p in model.named_parameters()}
            norms = [0.0 if grads.get(n) is None else round(grads[n].norm().item(), 6) for n, _ in
                     model.named_parameters()]  # fmt: skip
            results.add((round(y.sum().item(), 6), tuple(norms)))
        return results

    pm = autopart.parallelize(model, "dp1", example_args=(x,))
    ours, own = found(pm), found(model)
    assert ours == own and len(own) == (2 if forward is either else 16)


@pytest.mark.large
def test_the_plan_says_what_it_computes_beside():
    (note,) = autopart.plan(Net(skipped), "tp2", example_args=(torch.randn(ROWS, SIZE),)).notes
    assert note.startswith(
        "code that a random branch skips is computed too: its parameters get a gradient of zero"
    ) and ("if torch.rand([]) < 0.5: (test_chances.py:" in note)
    notes = autopart.plan(Net(by_python), "tp2", example_args=(torch.randn(ROWS, SIZE),)).notes
    assert any(note == "the random numbers of Python and numpy are drawn by torch" for note in notes)


@pytest.mark.large
def test_a_transformers_model_with_layerdrop_trains():
    config = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, conv_dim=(8,),
        conv_stride=(4,), conv_kernel=(8,), num_feat_extract_layers=1, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, vocab_size=12, layerdrop=0.5, mask_time_prob=0.0, hidden_dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        feat_extract_norm="layer",
    )  # fmt: skip
    torch.manual_seed(0)
    call = {"input_values": torch.randn(4, 200)}
    model = Wav2Vec2ForCTC(config).train()
    run = VerificationRun(model, bind_call(model, (), call))
    for mesh in ("tp2", "dp2", "pp2"):
        report = verified(run, mesh)
        assert report.ok and any("code that a random branch skips" in note for note in report.notes), report


def trained(mesh):
    """Ranks draw alike: their losses and the layers that have gradients are the same in every step."""
    torch.manual_seed(0)
    model, x = Net(skipped).double(), torch.randn(ROWS, SIZE, dtype=torch.float64)
    pm = autopart.parallelize(model, mesh, example_args=(x,))
    steps = []
    for _ in range(6):
        pm.zero_grad()
        loss = pm.step(x, loss_fn=F.mse_loss, target=torch.zeros_like(x))
        steps.append((loss.item(), *(round(g.norm().item(), 9) for g in pm.full_grads().values())))
    return steps


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2"])
def test_ranks_draw_alike(mesh):
    first, second = dist.run_ranks(trained, 2, mesh, timeout_s=120.0)
    assert first == second and len(set(first)) > 1


def with_dropout(m, x):
    for layer in m.layers:
        if torch.rand([]) < 0.5:
            x = F.dropout(layer(x), 0.5)
    return x


@pytest.mark.large
def test_numbers_drawn_in_what_is_skipped_are_not_those_of_one_device():
    x = torch.randn(ROWS, SIZE)
    pm = autopart.parallelize(Net(with_dropout), "dp1", example_args=(x,), rng="fast")
    assert pm(x).isfinite().all()
    with pytest.raises(OptionError, match="a branch on a random number can skip this random operator"):
        autopart.verify(Net(with_dropout), "dp2", example_args=(x,), rng="exact")


def nested(m, x):
    if torch.rand([]) < 0.5:
        x = m.layers[0](x)
        if torch.rand([]) < 0.5:
            x = m.layers[1](x)
    return x


def counting(m, x):
    number = 0
    for layer in m.layers:
        if torch.rand([]) < 0.5:
            x, number = layer(x), number + 1
    return x * number


def by_both(m, x):
    first, second = torch.rand([]) < 0.5, torch.rand([]) < 0.5
    a, b = bool(first), bool(second)
    return m.layers[0](x) if a and b else m.layers[1](x)


def unlike(m, x):
    return x[:4] if torch.rand([]) < 0.5 else x


def until(m, x):
    while torch.rand([]) < 0.5:
        x = m.layers[0](x)
    return x


REFUSED = {
    nested: "the number of random branches depends on the outcome of another one",
    counting: "", by_both: "", unlike: "", until: "the number of random branches depends on the outcome of another one",
}  # fmt: skip


@pytest.mark.parametrize("forward", REFUSED, ids=lambda forward: forward.__name__)
def test_decisions_that_hang_together_are_refused(forward):
    with pytest.raises(TraceError) as error:
        autopart.plan(Net(forward), "tp2", example_args=(torch.randn(ROWS, SIZE),))
    assert error.value.refusal is Refusal.RANDOM and REFUSED[forward] in str(error.value), error.value
    assert "the branches of the forward on random numbers cannot be traced" in str(error.value)
    assert "(test_chances.py:" in str(error.value)
