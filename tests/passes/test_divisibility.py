"""Sizes that do not divide: exact, or refused when the plan is made, with what would do. Nothing fails later.

One trace of a model serves all meshes: its whole program, forward and all gradients, on all ranks in one process.
"""

from dataclasses import replace

import dist
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

import autopart
from autopart.errors import LayoutError, StageError
from autopart.ir.layout import shard_sizes
from autopart.ir.mesh import Mesh
from autopart.proof.verify import VerificationRun
from autopart.tracing.trace_model import bind_call

TENSOR = ("tp2", "tp3", "tp4", "tp8")


def small(builder, **sizes):
    return lambda: builder(num_layers=1, rows=2, seq=7, **sizes)


CASES = {
    **{
        f"{kv} kv heads of {heads}": small(zoo.llama, hidden=2 * heads, heads=heads, kv_heads=kv, vocab=31)
        for heads in (4, 6, 8, 12)
        for kv in (1, 2, 3)
        if heads % kv == 0
    },
    "2 fused kv heads of 6": small(zoo.phi3, hidden=12, heads=6, kv_heads=2, vocab=31),
    "5 fused heads of 5": small(zoo.gpt2, hidden=25, heads=5, vocab=101),
    "6 fused heads of 5, vocabulary 97": small(zoo.gpt2, hidden=30, heads=6, vocab=97),
    "3 heads of bert": small(zoo.bert, hidden=30, heads=3, vocab=97),
    "5 heads of t5": small(zoo.t5, hidden=30, heads=5, vocab=31),
    "hidden 30, 10 heads": small(zoo.transformer_encoder, hidden=30, heads=10, vocab=50),
    "intermediate 50": lambda: zoo.skip_mlp(num_layers=2, hidden=50, rows=2),
    "channels 6": lambda: zoo.conv_net(channels=12, classes=10, rows=2, size=4),
}


def outcome(run, mesh):
    """`exact`, or the first line of why not."""
    try:
        arrangement = run.arrange(mesh)
    except LayoutError as error:
        assert "  why" in str(error) and "  try" in str(error), error
        return f"refused: {error}".splitlines()[0]
    found = run.check(arrangement)
    assert found.ok and found.max_error < 1e-12, f"{mesh}: {found}"
    return "exact"


@pytest.mark.large
@pytest.mark.parametrize("case", CASES)
def test_every_size_is_exact_or_refused_by_the_plan(case):
    model, batch = CASES[case]()
    run = VerificationRun(model, bind_call(model, (), batch))
    outcomes = {mesh: outcome(run, mesh) for mesh in TENSOR}
    assert outcomes["tp2"] == "exact" or all(p.shape[0] % 2 for p in model.parameters()), outcomes
    assert {text for text in outcomes.values() if text != "exact"} <= {
        f"refused: tp={n} divides no weight of the model" for n in (2, 3, 4, 8)
    }


def test_rows_that_do_not_divide_are_refused():
    model, batch = zoo.gpt2(num_layers=1, rows=6)
    with pytest.raises(StageError, match="a batch size that is a multiple of 4"):
        VerificationRun(model, bind_call(model, (), batch)).arrange(Mesh.parse("dp4"))


class Inner(nn.Module):
    """An MLP whose inner width does not divide, with a mean over it."""

    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.again, self.back = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x, y):
        x = x + self.down(F.gelu(self.up(x)))
        inner = F.gelu(self.again(x))
        return F.mse_loss(self.back(inner), y) + inner.mean(-1).pow(2).mean()


def inner(width=8, inner=50):
    torch.manual_seed(0)
    return Inner(width, inner).double(), {"x": torch.randn(4, width).double(), "y": torch.randn(4, width).double()}


@pytest.mark.parametrize(("tp", "shards"), [(2, (25, 25)), (3, (17, 17, 16)), (4, (13, 13, 13, 11))])
def test_an_inner_width_is_cut_unevenly(tp, shards):
    model, batch = inner(width=12)
    plan = autopart.plan(model, f"tp{tp}", example_kwargs=batch, sequence_parallel=False)
    assert {name: entry["tp"] for name, entry in plan.parameters.items()} == {
        "up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)", "down.bias": "R",
        "again.weight": "S(0)", "again.bias": "S(0)", "back.weight": "S(1)", "back.bias": "R",
    }  # fmt: skip
    assert shard_sizes(50, tp) == shards
    found = autopart.verify(model, f"tp{tp}", plan=plan, example_kwargs=batch)
    assert found.ok and found.max_error < 1e-12


def cut_through_it(mesh):
    """Stages between which an uneven shard travels."""
    model, batch = inner(inner=51)
    _, loss, grads = zoo.reference(model, batch)
    plan = autopart.plan(model, mesh, example_kwargs=batch, microbatches=2)
    plan = replace(plan, cuts=("back/linear",))
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, plan=plan)
    (received, *_) = pm.graph(1).graph.find_nodes(op="placeholder")
    assert received.meta["val"].shape == (2, 26)
    zoo.assert_close_outputs(pm.step(**batch), loss)
    zoo.assert_same_grads(pm.full_grads(), grads)
    zoo.assert_close_outputs(pm(**batch), loss)


def test_uneven_shards_travel_between_stages():
    dist.run_ranks(cut_through_it, 4, "pp2,tp2", timeout_s=120.0)


def notes_of(build, mesh, **sizes):
    model, batch = build(**sizes)
    plan = autopart.plan(model, mesh, example_kwargs=batch)
    assert all(note in " ".join(str(plan.explain()).split()) for note in plan.notes)
    return [note for note in plan.notes if "on tp" in note]


@pytest.mark.large
def test_the_plan_says_what_does_not_divide():
    cut, few = notes_of(zoo.gpt2, "tp4", vocab=97), notes_of(zoo.llama, "tp8", heads=8, kv_heads=2)
    assert cut == ["transformer.wte.weight: dim 0 of size 97 on tp=4: shards of 25, 25, 25, 22"]
    (few,) = few
    assert few.startswith(
        "model.layers.*.self_attn: 2 x 4 features on tp=8: sharded up to this split, which gathers them, "
    )
    assert few.endswith(" MB sent per rank and microbatch; tp=2 would divide")
    assert notes_of(zoo.gpt2, "tp4") == notes_of(zoo.llama, "dp2", heads=8, kv_heads=2) == []
