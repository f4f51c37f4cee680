"""Experts that are modules, run one by one in a loop over the rows that chose them: whole on `ep`, and exact."""

from __future__ import annotations

import copy

import dist
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

import autopart
from autopart.errors import TraceError
from autopart.ir.mesh import Mesh

WIDTH, EXPERTS, TIMES = 8, 4, 2


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Looped(nn.Module):
    """`towards`: what is added to the router's logits. `form`: how the rows of an expert are found."""

    def __init__(self, form, towards=(0.0,) * EXPERTS):
        super().__init__()
        self.form = form
        self.embed, self.router = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, 32)
        self.register_buffer("towards", torch.tensor(towards))

    def forward(self, ids, labels=None):
        rows = self.embed(ids).reshape(-1, WIDTH)
        gates, chosen = (self.router(rows) + self.towards).softmax(-1).topk(TIMES)
        mixed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            if self.form == "where":
                token, choice = torch.where(chosen == number)
                mixed[token] += gates[token, choice, None] * expert(rows[token])
            elif self.form == "list":
                choice, token = torch.where((chosen == number).t())
                if token.shape[0] == 0:
                    continue
                places, choices = token.tolist(), choice.tolist()
                products = expert(rows[None, places].reshape(-1, WIDTH)) * gates[places, choices, None]
                mixed.index_add_(0, token, products)
            elif self.form == "nonzero":
                token, choice = (chosen == number).nonzero(as_tuple=True)
                mixed.index_add_(0, token, expert(rows[token]) * gates[token, choice, None])
            else:
                of_expert = chosen == number
                mask = of_expert.any(-1)
                mixed[mask] += expert(rows[mask]) * (gates * of_expert).sum(-1)[mask].unsqueeze(-1)
        logits = self.head(rows + mixed)
        return logits if labels is None else F.cross_entropy(logits, labels.flatten())


def looped(form, **options):
    torch.manual_seed(0)
    model = Looped(form, **options).double()
    return model, {"ids": torch.randint(0, 32, (8, 6)), "labels": torch.randint(0, 32, (8, 6))}


MESHES = ["ep2", "ep4", "dp2,ep2", "ep2,tp2", "cp2,ep2", "pp2,ep2"]


@pytest.mark.large
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("form", ["where", "nonzero", "mask", "list"])
def test_a_loop_is_exact(form, mesh):
    model, batch = looped(form)
    report = autopart.verify(model, mesh, example_kwargs=batch)
    assert report.ok, report


@pytest.mark.large
def test_a_loop_that_skips_experts_before_a_loss_function():
    model, batch = looped("list")
    report = autopart.verify(
        model, "dp2,tp2", example_kwargs={"ids": batch["ids"]}, target=batch["labels"],
        loss_fn=lambda logits, target: F.cross_entropy(logits, target.flatten()),
    )  # fmt: skip
    assert report.ok, report


@pytest.mark.parametrize("use", [
    len, sorted, lambda places: [0, *places], lambda places: places[0], lambda places: [0] + places,  # noqa: RUF005
    lambda places: places.count(3), lambda places: places.copy(), lambda places: [*reversed(places)],
])  # fmt: skip
def test_a_list_of_places_only_indexes(use):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            hidden = self.linear(x)
            (places,) = torch.where(hidden[:, 0] > 0)
            use(places.tolist())
            return hidden

    with pytest.raises(TraceError) as caught:
        autopart.plan(Net(), "tp2", example_kwargs={"x": torch.rand(4, WIDTH)})
    assert str(caught.value).startswith("the length of the list that tolist() returns depends on tensor values\n")


@pytest.mark.large
@pytest.mark.parametrize("options", [{"recompute": "full"}, {"zero": 3}, {"zero": 3, "recompute": "full"}], ids=str)
def test_beside_other_options(options):
    model, batch = looped("where", towards=(99.0, 98.0, 0.0, 0.0))  # no row for two of the experts
    report = autopart.verify(model, "dp2,ep2", example_kwargs=batch, **options)
    assert report.ok, report


@pytest.mark.large
def test_the_plan_says_that_they_are_whole():
    model, batch = looped("where")
    plan = autopart.plan(model, "ep2", example_kwargs=batch)
    (note,) = (note for note in plan.notes if note.startswith("ep:"))
    assert "are replicated, and their tokens are sharded as over dp" in note and "(experts.0.gate)" in note
    assert {on["ep"] for name, on in plan.parameters.items() if name.startswith("experts")} == {"R(grad P)"}


def three_steps(mesh):
    """AdamW on processes, as on one device."""
    model, batch = looped("where")
    alone, whole = copy.deepcopy(model), copy.deepcopy(model)
    pm = autopart.parallelize(whole, mesh, example_kwargs=batch)
    mine, theirs = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (pm, alone))
    for _ in range(3):
        pm.step(**batch)
        mine.step()
        mine.zero_grad()
        alone(**batch).backward()
        theirs.step()
        theirs.zero_grad()
    zoo.assert_close_outputs(pm.step(**batch), alone(**batch), where="loss")


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["ep2", "dp2,ep2"])
def test_on_processes(mesh):
    dist.run_ranks(three_steps, Mesh.parse(mesh).num_ranks, mesh, timeout_s=120.0)
