"""Attention whose keys and values go around the ranks of `cp` (`context="ring"`): exact, with all masks, and no more
sent than the plan says."""

from __future__ import annotations

import copy
from unittest import mock

import dist
import pytest
import torch
import torch.nn.functional as F
import zoo
from context_models import UNEVEN, calls, given, instead, plain, stage_modules
from process_checks import same_own_loop, same_step, same_training
from torch import nn

import autopart
from autopart.errors import LayoutError
from autopart.ir.graph import argument, operator_name
from autopart.ir.mask_structure import QueryRun
from autopart.ir.mesh import Mesh
from autopart.ir.sharding import DimSharding
from autopart.ops.blockwise_attention import KeyBlockVisit, attend_visits, visit_backward
from autopart.ops.operators import autopart_ops
from autopart.runtime.comm import ring_attention
from autopart.runtime.graphs import mask_kernels


class Attends(nn.Module):
    """Attention over a sequence [b, s, 16], as it is asked for."""

    def __init__(self, attend):
        super().__init__()
        self.qkv, self.attend = nn.Linear(16, 48), attend

    def forward(self, x):
        q, k, v = (x.unflatten(-1, (4, 4)).transpose(1, 2) for x in self.qkv(x).chunk(3, -1))
        return self.attend(q, k, v).square().mean()


def written_out(q, k, v):
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


def window(q, k, v):
    at = torch.arange(q.size(-2))
    return F.scaled_dot_product_attention(q, k, v, (at[:, None] - at).abs() <= 5)


def biased(q, k, v):
    at = torch.arange(q.size(-2), dtype=q.dtype)
    return F.scaled_dot_product_attention(q, k, v, -0.1 * (at[:, None] - at).abs(), scale=0.3)


def sequence(attend):
    torch.manual_seed(0)
    return Attends(attend).double(), {"x": torch.randn(2, 24, 16, dtype=torch.double)}


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["cp2", "cp4", "dp2,cp2", "pp2,cp2", "cp2,tp2"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "phi3"])
def test_it_is_exact(name, mesh):
    model, batch = given(name)
    assert autopart.verify(model, mesh, example_kwargs=batch, context="ring").ok


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "options"), [
    ("cp3", {}), ("cp4", {}), ("dp2,cp3", {"zero": 3, "recompute": "full"}), ("cp3", {"recompute": "selective"}),
    ("cp3,tp2", {"sequence_parallel": True}), ("cp2", {"precision": "bf16"}),
], ids=str)  # fmt: skip
def test_sequences_need_not_divide(mesh, options):
    model, batch = given("llama", UNEVEN)
    report = autopart.verify(model, mesh, example_kwargs=batch, context="ring", **options)
    assert report.ok, report


@pytest.mark.few
@pytest.mark.parametrize("attend", [window, biased, F.scaled_dot_product_attention], ids=lambda x: x.__name__)
def test_any_mask_goes_with_it(attend):
    model, batch = sequence(attend)
    plan = autopart.plan(model, "cp3", example_kwargs=batch, context="ring")
    assert {row["kind"] for stage in plan.timing["stages"] for row in stage["collectives"]} == {"send", "all_reduce"}
    assert autopart.verify(model, "cp3", example_kwargs=batch, context="ring").ok


def same(name, mesh, seq, largest):
    """Rows are padded in turn, so that masks are causal in one call and not in the next."""
    mask_kernels._LARGE = largest
    model, batch = given(name, seq) if name != "plain" else plain(seq)
    _, loss, grads = zoo.reference(model, batch)
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch, context="ring")
    same_step(pm, batch, loss, grads)
    if "pp" not in mesh:
        same_own_loop(pm, batch, grads)
    same_training(pm, model, batch)
    found = [n for ran in stage_modules(pm) for n in ran.stage.graph.graph.nodes if n.op == "call_function"]
    rings = [node for node in found if operator_name(node) == "autopart::ring_attention"]
    return [bool(argument(node, "runs")) for node in rings]


@pytest.mark.large
@pytest.mark.parametrize(("name", "mesh", "seq", "largest", "told"), [
    ("llama", "cp2", 24, 2**24, True), ("plain", "cp2", 25, 16, True), ("llama", "cp3", UNEVEN, 16, True),
    ("bert", "cp2", 12, 2**24, False), ("gpt2", "cp2,tp2", 12, 2**24, True), ("llama", "pp2,cp2", 12, 2**24, True),
])  # fmt: skip
def test_on_processes(name, mesh, seq, largest, told):
    found = dist.run_ranks(same, Mesh.parse(mesh).num_ranks, name, mesh, seq, largest, timeout_s=120.0)
    assert all(rings and (all(rings) or not told) for rings in found), found


def padded_in_turn():
    """A call with padding has its mask, the one before and the one behind it have none."""
    model, batch = zoo.llama()
    mask = torch.ones_like(batch["input_ids"])
    mask[2, 7:] = 0
    whole, padded = ({**batch, "attention_mask": m} for m in (torch.ones_like(mask), mask))
    pm = autopart.parallelize(copy.deepcopy(model), "cp2", example_kwargs=whole, context="ring")
    for call in (whole, padded, whole):
        pm.zero_grad()
        _, loss, grads = zoo.reference(model, call)
        same_step(pm, call, loss, grads)


@pytest.mark.large
def test_a_mask_is_that_of_the_call():
    dist.run_ranks(padded_in_turn, 2, timeout_s=120.0)


def sent_in_a_step(name, mesh):
    """Bytes that go around on a rank in a step, and what the plan says of them."""
    sent, begin = [0], ring_attention._Rotation.__init__

    def counted(self, group, tensors, length):
        sent[0] += sum(x.numel() * x.element_size() for x in tensors)
        begin(self, group, tensors, length)

    model, batch = given(name)
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, context="ring")
    with mock.patch.object(ring_attention._Rotation, "__init__", counted):
        pm.step(**batch)
    rows = [row for stage in pm.plan.timing["stages"] for row in stage["collectives"]]
    return sent[0], sum(row["bytes"] for row in rows if (row["axis"], row["kind"]) == ("cp", "send"))


@pytest.mark.few
@pytest.mark.parametrize(("name", "mesh"), [("gpt2", "cp2"), ("llama", "cp3")])
def test_what_is_sent_is_what_the_plan_says(name, mesh):
    """Of llama two heads of keys and values, not the four of queries that they are repeated for."""
    for found, expected in dist.run_ranks(sent_in_a_step, Mesh.parse(mesh).num_ranks, name, mesh, timeout_s=120.0):
        assert found == expected


OTHER = "ring attention needs scaled_dot_product_attention without dropout, and this is another operator"


@pytest.mark.parametrize(("made", "why"), [
    (lambda: given("t5"), "this attention has a learned bias, whose gradient would have to circulate too"),
    (lambda: sequence(written_out), OTHER),
    (lambda: sequence(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)), OTHER),
])  # fmt: skip
def test_what_has_no_ring_is_refused_by_name(made, why):
    model, batch = made()
    with pytest.raises(LayoutError) as error:
        autopart.plan(model, "cp2", example_kwargs=batch, context="ring")
    lines = str(error.value).splitlines()
    assert lines[:2] == ["context='ring' is not possible on cp", f"  why    {why}"]
    assert lines[2].startswith("  where  ") and lines[3] == "  try    context='gather'"


def keys_stay(program, parameters):
    """Every rank's queries see the keys of its own rank alone."""
    for _, node in calls(program, "autopart::ring_attention"):
        instead(node, torch.ops.aten.scaled_dot_product_attention.default, *(node.args[i] for i in (0, 2, 3)))


def scaled_twice(program, parameters):
    for _, node in calls(program, "autopart::ring_attention"):
        instead(node, autopart_ops.ring_attention.default, *node.args[:7], 0.1)


@pytest.mark.few
@pytest.mark.parametrize("fault", [keys_stay, scaled_twice])
def test_a_fault_in_it_is_found_and_named(fault):
    model, batch = given("llama")
    report = autopart.verify(model, "cp2", example_kwargs=batch, context="ring", tamper=fault)
    assert "model.layers.0.self_attn/scaled_dot_product_attention" in report.first_mismatch.operator


def test_causal_keys_are_read_in_few_parts_by_a_kernel_and_in_small_ones_without():
    """In zigzag: this rank's own keys at once, and those of a rank before it."""
    cut = DimSharding(2, 24, (-1,), 2)
    runs = [QueryRun(count, 0, start + count, -24, start + 1) for start, count in cut.spans(1)]
    own, visiting = (
        [*KeyBlockVisit(cut, 1, rank, None, None, runs).parts(torch.device("cpu"), True)] for rank in (1, 0)
    )
    assert [part.is_causal for part in own] == [True] and not visiting[0].is_causal
    assert all(part.mask is None for part in (*own, *visiting)) and len(visiting) == 1
    with mock.patch("autopart.ir.mask_structure.ROWS", 5):
        without = [*KeyBlockVisit(cut, 1, 1, None, None, runs).parts(torch.device("cpu"), False)]
    assert max(part.queries[1] for part in without) == 5 and not any(part.is_causal for part in without)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "written out"])
@pytest.mark.parametrize("kind", ["none", "causal", "runs", "runs of a window", "some see nothing"])
@pytest.mark.parametrize("sections", [(), (-1,)], ids=["in order", "zigzag"])
def test_visits_together_are_attention(kind, kernel, sections):
    """Also where no kernel is, and where a query sees no key of a rank, or none at all."""
    torch.manual_seed(0)
    size, ranks = 13, 3
    cut = DimSharding(2, size, sections, ranks)
    whole = [torch.randn(2, heads, size, 4, dtype=torch.double, requires_grad=True) for heads in (4, 2, 2)]
    mask = torch.ones(size, size, dtype=torch.bool).tril() if kind != "none" else None
    before = 4 if kind == "runs of a window" else size
    if before < size:
        mask = mask.triu(-before)
    if kind == "some see nothing":
        mask = torch.rand(size, size) < 0.3
        mask[4], mask[5] = False, torch.arange(size) == 12
    seen = torch.ones(size, size, dtype=torch.bool) if mask is None else mask
    expected = F.scaled_dot_product_attention(*whole, seen, enable_gqa=True)
    grad = torch.randn_like(expected)
    of_whole = torch.autograd.grad(expected, whole, grad)
    with mock.patch("autopart.ops.blockwise_attention._has_kernel", lambda *sides: kernel), torch.no_grad():
        found = [torch.zeros_like(x) for x in whole]
        for here in range(ranks):
            query, of_made = (cut.take(x, here) for x in (whole[0], grad))
            rows = DimSharding(0, size, sections, ranks)
            by_runs = kind.startswith("runs")
            own = rows.take(mask, here) if mask is not None and not by_runs else None
            runs = [QueryRun(count, 0, start + count, start - before, start + 1) for start, count in cut.spans(here)]
            visits = [KeyBlockVisit(cut, here, i, own, None, runs if by_runs else ()) for i in range(ranks)]
            keys, values = ([cut.take(x, i) for i in range(ranks)] for x in whole[1:])
            made, total = attend_visits(query, zip(keys, values, visits, strict=True))
            torch.testing.assert_close(made, cut.take(expected, here), rtol=0, atol=1e-12)
            for i, (k, v, one) in enumerate(zip(keys, values, visits, strict=True)):
                parts = [torch.zeros_like(x) for x in (query, k, v)]
                visit_backward(parts, of_made, made, total, query, k, v, one)
                for side, part, rank in zip(found, parts, (here, i, i), strict=True):
                    side += cut.place(part, rank)
    for side, right in zip(found, of_whole, strict=True):
        torch.testing.assert_close(side, right, rtol=0, atol=1e-12)
