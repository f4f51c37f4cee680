"""Rows sent to the ranks of their experts and back: exact wherever they go, chosen by price, counted as they travel."""

from __future__ import annotations

import copy
import itertools

import dist
import expert_models
import pytest
import torch
import torch.distributed as td
import torch.nn.functional as F
import zoo
from expert_models import BACK, EXPERTS, TIMES, TO, WAYS, WIDTH, Mixture, mixture, small

import autopart
import autopart.runtime.comm.collectives  # which does them on process groups
from autopart.errors import LayoutError
from autopart.ir.layout import DISPATCHED, Placement
from autopart.ir.mesh import Mesh
from autopart.runtime.lockstep import convert_list

SPREADS = {"spread": (0.0,) * EXPERTS, "one rank": (99.0, 99.0, 0.0, 0.0), "one of each": (0.0, 99.0, 0.0, 98.0)}


def rows_of(rank):
    """Tokens of a rank and the experts of their rows: of 6 experts on 3 ranks, none of the second's from rank 0."""
    generator = torch.Generator().manual_seed(rank)
    experts = torch.randint(0, 6, (8 + 2 * rank,), generator=generator)
    experts = torch.where(experts // 2 == 1, 5, experts) if rank == 0 else experts
    return torch.randn(4 + rank, 3, dtype=torch.float64, generator=generator), experts


def moved_on_this_rank():
    group, (x, experts) = td.group.WORLD.group_name, rows_of(td.get_rank())
    x.requires_grad_()
    counts = torch.ops.autopart.exchange_counts(experts, group, 6, 3)
    there = torch.ops.autopart.dispatch(x, group, experts, counts, 2, 6)
    numbers = torch.ops.autopart.dispatch(experts, group, experts, counts, 1, 6)
    back = torch.ops.autopart.combine(there * (numbers + 1).unsqueeze(1), group, experts, counts, 2, 6)
    back.square().sum().backward()
    return counts, numbers, back.detach(), x.grad


def test_rows_of_processes_and_of_lists_go_there_and_back():
    """Every row times one more than the number of its expert, summed over the rows of a token."""
    tokens, experts = zip(*map(rows_of, range(3)), strict=True)
    leaves = [x.clone().requires_grad_() for x in tokens]
    counts = convert_list("exchange_counts", experts, 6, 3)
    there = convert_list("dispatch", leaves, experts, counts, 2, 6)
    numbers = convert_list("dispatch", experts, experts, counts, 1, 6)
    scaled = [x * (n + 1).unsqueeze(1) for x, n in zip(there, numbers, strict=True)]
    back = convert_list("combine", scaled, experts, counts, 2, 6)
    sum(x.square().sum() for x in back).backward()
    processes = dist.run_ranks(moved_on_this_rank, 3)
    for rank, (x, expert) in enumerate(zip(tokens, experts, strict=True)):
        assert set((numbers[rank] // 2).tolist()) <= {rank}, "a row is on another rank than its expert"
        assert numbers[rank].numel() == sum((e // 2 == rank).sum() for e in experts)
        factor = (expert + 1).view(-1, 2).sum(1, keepdim=True)
        want = counts[rank], numbers[rank], x * factor, 2 * x * factor**2
        for got in (processes[rank], (counts[rank], numbers[rank], back[rank], leaves[rank].grad)):
            for value, expected in zip(got, want, strict=True):
                torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


@pytest.mark.few
@pytest.mark.parametrize("towards", SPREADS.values(), ids=SPREADS)
@pytest.mark.parametrize("mesh", ["ep2", "ep4", "dp2,ep2", "cp2,ep2"])
@pytest.mark.parametrize("way", WAYS)
def test_either_way_is_exact(way, mesh, towards):
    model, batch = mixture(towards=towards)
    report = autopart.verify(model, mesh, example_kwargs=batch, pins=WAYS[way])
    assert report.ok, report


@pytest.mark.few
@pytest.mark.parametrize("options", [{"zero": 3, "recompute": "full"}, {"zero": 1}], ids=str)
def test_rows_are_sent_beside_other_options(options):
    model, batch = mixture(form="matrix first")
    report = autopart.verify(model, "dp2,ep2", example_kwargs=batch, pins=WAYS["sent"], **options)
    assert report.ok, report


@pytest.mark.large
@pytest.mark.parametrize(("name", "mesh"), [
    *itertools.product(["mixtral", "gpt_oss", "deepseek_v3"], ["ep2", "ep4", "dp2,ep2", "cp2,ep2", "pp2,ep2"]),
    ("mixtral", "ep2,tp2"), ("deepseek_v3", "ep2,tp2"),
])  # fmt: skip
def test_mixtures_of_transformers_send_rows_exactly(name, mesh):
    model, batch = small(name)
    report = autopart.verify(model, mesh, example_kwargs=batch, pins=WAYS["sent"])
    assert report.ok, report


def same_step(towards, mesh):
    model, batch = mixture(towards=towards)
    loss, expected = zoo.reference(model, batch)[1:]
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch, pins=WAYS["sent"])
    assert any(on["ep"] == BACK for on in pm.plan.operators.values())
    zoo.assert_close_outputs(pm.step(**batch), loss, where="loss")
    zoo.assert_same_grads(pm.full_grads(), {n: g for n, g in expected.items() if g is not None})


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "towards"), [("ep2", "spread"), ("dp2,ep2", "one rank"), ("cp2,ep2", "one of each")])
def test_on_processes(mesh, towards):
    dist.run_ranks(same_step, Mesh.parse(mesh).num_ranks, SPREADS[towards], mesh, timeout_s=120.0)


class Normed(Mixture):
    """A mixture whose rows are normed in parts at their experts."""

    def forward(self, ids, labels):
        rows = self.embed(ids).reshape(-1, WIDTH)
        gates, chosen = self.router(rows).softmax(-1).topk(TIMES)
        each = rows.unsqueeze(1).expand(-1, TIMES, -1).reshape(-1, WIDTH)
        hidden = torch.bmm(each.unsqueeze(1), self.up[chosen.reshape(-1)]).squeeze(1)
        parts = F.layer_norm(hidden.view(-1, 3, WIDTH), (WIDTH,)).reshape(-1, 3 * WIDTH)
        made = torch.bmm(parts.unsqueeze(1), self.down[chosen.reshape(-1)]).squeeze(1)
        mixed = (made * gates.reshape(-1, 1)).view(-1, TIMES, WIDTH).sum(1)
        return F.cross_entropy(self.head(rows + mixed), labels.flatten())


@pytest.mark.few
@pytest.mark.parametrize("way", WAYS)
def test_views_of_rows_leave_open_how_many_there_are(way):
    torch.manual_seed(0)
    batch = {"ids": torch.randint(0, 32, (8, 6)), "labels": torch.randint(0, 32, (8, 6))}
    report = autopart.verify(Normed().double(), "ep2", example_kwargs=batch, pins=WAYS[way])
    assert report.ok, report


@pytest.mark.few
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_rows_are_sent_where_a_token_has_fewer_than_there_are_ranks(times, ranks, monkeypatch):
    """Of T tokens with k rows a rank of e sends T k / e by all-to-all, and T where tokens are gathered."""
    monkeypatch.setattr(expert_models, "WIDTH", 512)
    monkeypatch.setattr(expert_models, "TIMES", times)
    with torch.device("meta"):
        model, ids = Mixture(towards=(0.0,) * 8, experts=8), torch.zeros(32, 64, dtype=torch.long)
    plan = autopart.plan(model, f"ep{ranks}", example_kwargs={"ids": ids, "labels": ids})
    assert plan.operators["/from_experts"]["ep"] == (BACK if ranks > times else "E(0), R -> P")


def test_a_pair_is_not_mixed_up():
    """Rows that were sent do not come back as if they had been taken out of all ranks'."""
    model, batch = mixture()
    mixed = {"*/to_experts": {"ep": TO}, "*/from_experts": {"ep": "E(0), R -> P"}}
    with pytest.raises(LayoutError, match="these pins conflict"):
        autopart.plan(model, "ep2", example_kwargs=batch, pins=mixed)


def test_the_counts_of_rows_are_told_once_and_bytes_are_counted():
    """On ep2 a rank has 24 tokens with 2 rows of 8 float64; half of its rows go to the other rank."""
    model, batch = mixture()
    plan = autopart.plan(model, "ep2", example_kwargs=batch, pins=WAYS["sent"])
    moved = {c.backward: (c.count, c.bytes) for c in plan.collectives if c.forward == "all_to_all"}
    rows = 24 * TIMES // 2
    there_and_back, gates = 2 * 2 * rows * WIDTH * 8, 2 * rows * 8
    told = 2 * 2 * 8 // 2  # how many it sends and receives, where it is told the latter
    assert moved == {"all_to_all": (3, there_and_back + gates), "": (2, rows * 8 + told)}


def test_placements_of_rows_are_read_as_they_are_written():
    assert str(DISPATCHED) == "E(0; sent)" and Placement.parse(str(DISPATCHED)) == DISPATCHED
    assert DISPATCHED.is_partitioned and not DISPATCHED.is_shard
