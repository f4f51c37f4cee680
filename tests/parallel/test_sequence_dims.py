"""`sequence_dims=`: which dims of the inputs are the sequence that context parallelism cuts."""

from __future__ import annotations

import re

import pytest
import torch
import zoo
from torch import nn

import autopart
from autopart.errors import AutopartError, LayoutError, OptionError
from autopart.ir.mesh import Mesh
from autopart.options import Options
from autopart.passes.choose.plan_codec import decode
from autopart.plans.plan import Plan
from autopart.recipe.make_plan import prepare
from autopart.tracing.trace_model import bind_call


class Grid(nn.Module):
    """Rows of 6 places by 4, all of which go through the same weights, and a table of places."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.place = nn.Linear(8, 16), nn.Linear(16, 8), nn.Embedding(6, 16)

    def forward(self, x, scale=None):
        places = self.place(torch.arange(x.shape[1]))[:, None]
        y = self.down(torch.tanh(self.up(x) + places))
        return (y if scale is None else y * scale).square().mean()


class Convolved(nn.Module):
    """A convolution that sees what is before, as in Mamba, between matrix products."""

    def __init__(self):
        super().__init__()
        self.first, self.mix, self.last = nn.Linear(4, 8), nn.Conv1d(8, 8, 4, padding=3, groups=8), nn.Linear(8, 4)

    def forward(self, x):
        y = self.first(x).transpose(1, 2)
        y = self.mix(y)[..., : x.shape[1]].transpose(1, 2)
        return self.last(torch.tanh(y)).square().mean()


def grid():
    return Grid().double(), {"x": torch.randn(2, 6, 4, 8).double()}


def cuts(plan):
    """{operator: where its output lies on `cp`}."""
    return {name: on["cp"].partition("-> ")[2] for name, on in plan.operators.items() if "cp" in on}


@pytest.mark.few
@pytest.mark.parametrize("dim", [1, 2, -2])
def test_what_descends_from_it_is_cut_and_nothing_else(dim):
    model, batch = grid()
    plan = autopart.plan(model, "cp2", example_kwargs=batch, sequence_dims={"x": dim})
    where = cuts(plan)
    place = f"S({dim % 4})"
    assert {name: where[name] for name in ("up/linear", "/tanh", "down/linear")} == dict.fromkeys(
        ("up/linear", "/tanh", "down/linear"), place
    )
    assert where.get("place/embedding", "R(grad P)") == ("S(0)" if dim == 1 else "R(grad P)")
    report = autopart.verify(model, "cp2", example_kwargs=batch, sequence_dims=f"x={dim}")
    assert report.ok, report


@pytest.mark.large
@pytest.mark.parametrize("options", [{}, {"context": "ulysses"}, {"context": "ring"}], ids=str)
def test_of_a_language_model_it_says_what_is_found_without_it(options):
    model, batch = zoo.llama()
    named = {"input_ids": 1, "labels": 1}
    plans = [autopart.plan(model, "cp2", example_kwargs=batch, sequence_dims=s, **options) for s in (None, named)]
    assert plans[0].operators == plans[1].operators
    assert (plans[0].sequence_dims, plans[1].sequence_dims) == (None, named)


@pytest.mark.large
@pytest.mark.parametrize(("made", "named"), [
    (zoo.gpt2, {"input_ids": 1}), (zoo.t5, {"input_ids": 1}), (zoo.t5, {"input_ids": 1, "labels": 1}),
    (lambda: (Convolved().double(), {"x": torch.randn(2, 12, 4).double()}), {"x": 1}),
])  # fmt: skip
def test_it_is_exact(made, named):
    model, batch = made()
    report = autopart.verify(model, "cp2", example_kwargs=batch, sequence_dims=named)
    assert report.ok, report


def test_behind_a_convolution_it_is_cut_again():
    plan = autopart.plan(Convolved(), "cp2", example_kwargs={"x": torch.randn(2, 12, 4)}, sequence_dims={"x": 1})
    assert cuts(plan)["first/linear"] == cuts(plan)["last/linear"] == "S(1)"


@pytest.mark.large
def test_sequences_of_two_lengths_are_each_cut():
    model, batch = zoo.t5()
    batch["labels"] = batch["labels"][:, :10].contiguous()
    named = {"input_ids": 1, "labels": 1}
    report = autopart.verify(model, "cp2", example_kwargs=batch, sequence_dims=named)
    assert report.ok, report


@pytest.mark.large
def test_other_calls_follow_the_plan():
    """What a plan does not know of (a scale, more rows) is not cut along other dims either."""
    model, batch = grid()
    plan = autopart.plan(model, "cp2", example_kwargs=batch, sequence_dims={"x": 1})
    read = Plan.from_json(plan.to_json())
    assert read == plan
    call = {"x": torch.randn(2, 6, 2, 8).double(), "scale": torch.randn(2, 8).double()}
    traced = prepare(model, bind_call(model, (), call))
    found = decode(traced, read, Mesh.parse("cp2")).strategies["cp"].values()
    places = {place for strategy in found for place in strategy.outputs if place.is_shard}
    assert {place.dim for place in places} == {0, 1}  # of the table of places, and of all else
    with pytest.raises(OptionError, match=r"sequence_dims={'x': 2} contradicts the plan, which has {'x': 1}"):
        autopart.parallelize(model, "cp2", plan=read, sequence_dims={"x": 2})


@pytest.mark.large
def test_search_takes_it():
    model, batch = zoo.llama(seq=24)
    (best, *_) = autopart.search(
        model, 2, global_batch=1, example_kwargs={k: v[:1] for k, v in batch.items()}, count=1,
        sequence_dims={"input_ids": 1, "labels": 1},
    )  # fmt: skip
    assert best.sequence_dims == {"input_ids": 1, "labels": 1}


def test_it_is_read_from_text():
    assert Options(sequence_dims="input_ids=1, labels=-1").sequence_dims == {"input_ids": 1, "labels": -1}


GIVEN = "input_ids [8, 12], labels [8, 12]"


class Two(nn.Module):
    """A sequence, and features beside it that are brought together at once."""

    def __init__(self):
        super().__init__()
        self.mix, self.one = nn.Linear(8, 8), nn.Linear(3, 8)

    def forward(self, x, beside):
        return (self.mix(x) + self.one(beside)[:, None]).square().mean()


def two():
    return Two(), {"x": torch.randn(2, 6, 8), "beside": torch.randn(2, 3)}


@pytest.mark.whole
@pytest.mark.parametrize(("made", "mesh", "named", "kind", "text"), [
    (zoo.llama, "cp2", {"ids": 1}, OptionError,
     f"sequence_dims names 'ids', which is not an input of this call\n  why    its inputs are {GIVEN}\n"
     "  try    sequence_dims={'input_ids': 1}"),
    (zoo.llama, "dp2", {"input_ids": 2}, OptionError,
     "sequence_dims={'input_ids': 2} names no dim\n  why    input_ids has shape [8, 12]\n"
     "  try    a dim from 1 to 1"),
    (zoo.llama, "cp2", {"labels": 0}, OptionError,
     "sequence_dims={'labels': 0} names the batch dim\n  why    labels has shape [8, 12]; dp shards the batch "
     "dim and cp the sequence dim\n  try    sequence_dims={'labels': 1}"),
    (two, "cp2", {"x": 1, "beside": 1}, LayoutError,
     "sequence_dims names dims of unequal lengths\n  why    dim 1 of beside has size 3, dim 1 of x has size 6, and no "
     "operator can be sharded along dim 1 of beside\n  try    leave beside out, or name a dim of size 6"),
    (two, "cp2", {"beside": 1}, LayoutError,
     "sequence_dims={'beside': 1}: no operator can be sharded along it\n  why    no operator of the model treats "
     "the 3 entries of dim 1 independently\n  try    leave beside out; the inputs are "
     "x [2, 6, 8], beside [2, 3]"),
    (lambda: zoo.llama(seq=5), "cp8", {"input_ids": 1}, LayoutError,
     "cp=8 cannot shard a sequence of 5\n  why    every rank needs a shard of the longest sequence; "
     "the inputs are input_ids [8, 5], labels [8, 5]\n  where  linear at modeling_llama.py:LINE "
     "(model.layers.0.self_attn.q_proj)\n  try    cp=5"),
])  # fmt: skip
def test_what_cannot_be_is_told(made, mesh, named, kind, text):
    model, batch = made()
    with pytest.raises(AutopartError) as error:
        autopart.plan(model, mesh, example_kwargs=batch, sequence_dims=named)
    assert re.sub(r"\.py:\d+", ".py:LINE", str(error.value)) == text
    assert isinstance(error.value, kind)


@pytest.mark.whole
@pytest.mark.parametrize("given", [1, {}, "input_ids", {"x": True}, "x=1,y=one"], ids=str)
def test_what_is_not_one_is_told(given):
    with pytest.raises(OptionError) as error:
        Options(sequence_dims=given)
    assert str(error.value) == (
        f"sequence_dims={given!r} does not name the sequence dims of the inputs\n"
        "  why    it maps each input to the index of its sequence dim\n"
        "  try    sequence_dims={'input_ids': 1, 'labels': 1}, or 'input_ids=1,labels=1'"
    )
