"""Context parallelism: the sequence of every value on the axis `cp`, exact on any mesh with it, and cut wherever it can
be."""

from __future__ import annotations

import copy
import re
from collections import Counter
from unittest import mock

import dist
import pytest
import torch
import torch.nn.functional as F
import zoo
from context_models import DISPATCHED, SEQUENCES, UNEVEN, given, plain, stage_modules
from expert_models import mixture
from process_checks import same_everything
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopart
from autopart.errors import LayoutError, OptionError, StageError, TraceError
from autopart.ir.graph import operator_name
from autopart.ir.mesh import Mesh
from autopart.options import Options
from autopart.plans.plan import Plan
from autopart.proof.verify import VerificationRun
from autopart.runtime.comm import collectives
from autopart.runtime.graphs import mask_kernels
from autopart.tracing.trace_model import bind_call


class Mixed(nn.Module):
    """Nothing but a convolution over the positions, and a mean."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv1d(4, 4, 3)

    def forward(self, x):
        return self.mix(x).mean()


MESHES = [
    ("cp2", {}), ("cp4", {}), ("cp2,tp2", {}), ("cp2,tp2", {"sequence_parallel": True}), ("pp2,cp2", {}),
    ("dp2,cp2", {"zero": 3, "recompute": "full"}), ("dp2,cp2", {"zero": 1}), ("cp2", {"precision": "bf16"}),
    ("pp2,cp2", {"schedule": "zbv", "microbatches": 4}), ("dp2,pp2,cp2,tp2", {"zero": 2}),
]  # fmt: skip


@pytest.mark.few
@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize(("mesh", "options"), MESHES, ids=str)
def test_it_is_exact(name, mesh, options):
    model, batch = given(name)
    report = autopart.verify(model, mesh, example_kwargs=batch, **options)
    assert report.ok, report


@pytest.mark.large
@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("mesh", ["cp3", "cp4", "cp3,tp2"])
def test_sequences_need_not_divide(name, mesh):
    model, batch = given(name, UNEVEN)
    report = autopart.verify(model, mesh, example_kwargs=batch)
    assert report.ok, report


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["cp2", "cp3", "dp2,cp2,tp2"])
@pytest.mark.parametrize("seq", [24, UNEVEN])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_all_of_the_sequence_is_cut(name, seq, mesh):
    """Attention brings keys and values together, whose heads are repeated then, and nothing else is."""
    model, batch = given(name, seq)
    plan = autopart.plan(model, mesh, example_kwargs=batch)
    for operator, on in plan.operators.items():
        made = on.get("cp", "R").partition("-> ")[2].split(", ")
        repeats = operator.rpartition("/")[2].partition("#")[0] in ("unsqueeze", "expand", "reshape")
        assert (repeats and "self_attn" in operator) or all(place.startswith("S(") or place == "P" for place in made), (
            operator,
            on,
        )
    moved = {(row["axis"], row["kind"]) for stage in plan.timing["stages"] for row in stage["collectives"]}
    assert {kind for axis, kind in moved if axis == "cp"} <= {"all_gather", "reduce_scatter", "all_reduce"}


@pytest.mark.few
@pytest.mark.parametrize("ignored", ["the second half", "all but one"])
def test_labels_are_counted_over_the_whole_sequence(ignored):
    """A rank whose labels are all ignored has no share in the loss, and the mean is that of the global batch."""
    model, batch = zoo.llama()
    labels = batch["labels"].clone()
    if ignored == "the second half":
        labels[:, 6:] = -100
    else:
        labels[:] = -100
        labels[3, 2] = 5
    report = autopart.verify(model, "dp2,cp2", example_kwargs={**batch, "labels": labels})
    assert report.ok, report


def test_what_mixes_positions_is_brought_together():
    model, batch = zoo.conv_net()
    plan = autopart.plan(model, "cp2", example_kwargs=batch)
    assert plan.operators["conv1/conv2d"]["cp"].endswith("-> R(grad P)")
    assert any(row.axis == "cp" and row.forward == "all_gather" for row in plan.collectives)
    report = autopart.verify(model, "cp2", example_kwargs=batch)
    assert report.ok, report


@pytest.mark.large
@pytest.mark.parametrize(("name", "mesh"), [("llama", "cp2"), ("t5", "cp2"), ("gpt2", "cp2,tp2"), ("llama", "dp2,cp2")])
def test_on_processes(name, mesh):
    ranks = 2 if mesh == "cp2" else 4
    dist.run_ranks(same_everything, ranks, name, mesh, timeout_s=120.0)


@pytest.mark.large
def test_padding_and_packed_documents_are_cut_with_the_rows_they_belong_to():
    model, batch = zoo.llama()
    mask = torch.ones_like(batch["input_ids"])
    mask[:3, 9:] = 0  # on the right
    mask[3:5, :4] = 0  # on the left
    positions = torch.arange(12).expand(8, 12).clone()
    positions[5:, 7:] -= 7  # two documents in a row
    for more in ({"attention_mask": mask}, {"position_ids": positions}):
        report = autopart.verify(model, "cp2", example_kwargs={**batch, **more})
        assert report.ok, report


class Positioned(nn.Module):
    """Attention with positions as an argument, or as a slice of a parameter."""

    def __init__(self):
        super().__init__()
        self.embed, self.slots = nn.Embedding(50, 8), nn.Embedding(32, 8)
        self.qkv, self.table = nn.Linear(8, 24), nn.Parameter(torch.randn(32, 8))

    def forward(self, ids, positions=None):
        at = self.table[: ids.shape[1]] if positions is None else self.slots(positions)
        q, k, v = self.qkv(self.embed(ids) + at).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


@pytest.mark.parametrize("mesh", ["cp2", "dp2,cp2"])
@pytest.mark.parametrize("batch", [{}, {"positions": torch.arange(4)}], ids=["sliced", "passed"])
def test_a_sequence_can_be_as_long_as_the_batch(mesh, batch):
    batch = {"ids": torch.randint(50, (4, 4)), **batch}
    report = autopart.verify(Positioned(), mesh, example_kwargs=batch)
    assert report.ok, report


@pytest.mark.parametrize(("made", "mesh", "text"), [
    (zoo.skip_mlp, "cp2", "cp=2 has nothing to shard\n"
     "  why    no matrix product of the model has a sequence dim: its inputs are x [8, 32], y [8, 32]\n"
     "  try    leave cp out of the mesh; dp shards any batch"),
    (lambda: (Mixed(), {"x": torch.randn(4, 4, 10)}), "cp2", "cp=2 shards nothing of the model\n"
     "  why    its operators need the full sequence at once\n"
     "  where  conv1d at test_context.py:LINE (mix)\n"
     "  try    leave cp out of the mesh; dp shards any batch"),
    (lambda: zoo.llama(seq=5), "cp8", "cp=8 cannot shard a sequence of 5\n"
     "  why    every rank needs a shard of the longest sequence; the inputs are input_ids [8, 5], labels [8, 5]\n"
     "  where  linear at modeling_llama.py:LINE (model.layers.0.self_attn.q_proj)\n  try    cp=5"),
])  # fmt: skip
def test_what_has_no_sequence_is_told(made, mesh, text):
    model, batch = made()
    with pytest.raises(LayoutError) as error:
        autopart.plan(model, mesh, example_kwargs=batch)
    assert re.sub(r"\.py:\d+", ".py:LINE", str(error.value)) == text


class Sorted(nn.Module):
    """Operators along the sequence of which no rank can do a part."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).cumsum(1).roll(1, 1).sort(1).values).square().mean()


@pytest.mark.whole
@pytest.mark.parametrize(("made", "mesh", "notes"), [
    (zoo.conv_net, "cp2", [
        "cp=2 divides no matrix product of the model, whose inputs are image [8, 3, 8, 8], target [8]: every rank runs "
        "all of them; dp shards any batch",
        "cp: every rank gathers the full sequence for 2 conv2d, 2 group_norm, 2 max_pool2d, "
        "1 linear"]),
    (lambda: (Sorted(), {"x": torch.randn(2, 12, 4)}), "cp2", [
        "cp: every rank gathers the full sequence for 1 cumsum, 1 roll, 1 sort"]),
    (lambda: zoo.llama(seq=13), "cp4", [
        "cp=4: the largest shard of a sequence of 13 is 23% above the mean; 16 would divide evenly"]),
    (lambda: zoo.llama(seq=16), "cp4", []),
])  # fmt: skip
def test_what_is_whole_or_unequal_is_noted(made, mesh, notes):
    model, batch = made()
    plan = autopart.plan(model, mesh, example_kwargs=batch)
    assert [note for note in plan.notes if note.startswith("cp")] == notes


def test_what_takes_all_positions_is_exact():
    report = autopart.verify(Sorted(), "cp2", example_kwargs={"x": torch.randn(2, 12, 4)})
    assert report.ok, report


def test_rows_that_do_not_divide_are_told_of_positions():
    model, batch = zoo.llama(rows=1)
    with pytest.raises(StageError) as error:
        autopart.plan(model, "dp2,cp2", example_kwargs=batch)
    assert str(error.value) == (
        "a batch of 1 samples cannot be split into dp=2 x microbatches=1 equal parts\n"
        "  why    1 is not a multiple of 2\n"
        "  try    a batch size that is a multiple of 2, or cp in place of dp: it shards the sequence of a sample"
    )


def test_a_cache_is_refused():
    model, batch = zoo.llama()
    with pytest.raises(
        TraceError, match=r"it returns a .*DynamicCache.*\n  try    return its tensors .*use_cache=False"
    ):
        autopart.plan(model, "cp2", example_kwargs={**batch, "use_cache": True})


def whole_outputs(mesh, options):
    """What a call returns of every layer, beside the model's own; pieces are put together in the model's order."""
    model, batch = zoo.llama(seq=UNEVEN, rows=2)
    model.set_attn_implementation("eager")
    call = {"input_ids": batch["input_ids"], "use_cache": False, "output_hidden_states": True}
    call["output_attentions"] = True
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=call, **options)
    expected, got = model(**call), pm(**call)
    zoo.assert_close_outputs(got, expected)
    return [list(x.shape) for x in (*got.hidden_states, *got.attentions)]


class OfDims(nn.Module):
    """Attention of three dims, without heads, or of five: groups of positions and heads, as in Twins."""

    def __init__(self, dims: int, kind: str):
        super().__init__()
        self.dims, self.kind, self.inner, self.out = dims, kind, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        if self.dims == 5:
            query, key, value = self.inner(x).unflatten(-1, (3, 2, 4)).permute(3, 0, 1, 4, 2, 5)
        else:
            query, key, value = self.inner(x[:, 0]).chunk(3, -1)
        places = torch.arange(x.shape[2])
        mask = (places[:, None] - places).clamp(0, 3).to(x.dtype) if self.kind == "bias" else None
        y = F.scaled_dot_product_attention(query, key, value, mask, is_causal=self.kind == "causal")
        return self.out(y.transpose(2, 3).flatten(3) if self.dims == 5 else y).square().mean()


@pytest.mark.parametrize("mesh", ["tp2", "cp2", "dp2", "cp2,tp2", "cp3"])
@pytest.mark.parametrize("kind", ["full", "causal", "bias"])
@pytest.mark.parametrize("dims", [3, 5])
def test_attention_has_any_number_of_dims(dims, kind, mesh):
    """Heads that are the third dim are not its positions: keys and values go round along these alone."""
    torch.manual_seed(0)
    assert autopart.verify(OfDims(dims, kind), mesh, example_args=(torch.randn(4, 3, 6, 8),)).ok


@pytest.mark.large
def test_a_mesh_is_planned_alike_after_another():
    model, batch = zoo.gpt2()
    alone = autopart.plan(model, "cp2", example_kwargs=batch)
    run = VerificationRun(model, bind_call(model, (), batch))
    arranged = [run.arrange(Mesh.parse(mesh), None, Options(rng="exact")) for mesh in ("tp2", "cp2")]
    assert arranged[1].plan.operators == alone.operators and "zigzag" in str(alone.operators)


@pytest.mark.large
def test_outputs_of_layers_are_whole():
    shapes = dist.run_ranks(whole_outputs, 2, "cp2", {}, timeout_s=120.0)
    assert shapes == [[[2, UNEVEN, 32]] * 3 + [[2, 4, UNEVEN, UNEVEN]] * 2] * 2


def long_causal(seq, mesh, made, largest):
    """Attention of a rank's queries reads no key that none of them sees; masks that are too large are not made."""
    mask_kernels._LARGE = largest
    model, batch = CAUSAL[made](seq)
    loss, grads = zoo.reference(model, batch)[1:]
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch)
    zoo.assert_close_outputs(pm.step(**batch), loss, where="loss")
    zoo.assert_same_grads(pm.full_grads(), {n: g for n, g in grads.items() if g is not None})
    (ran,) = stage_modules(pm)
    names = [operator_name(node) for node in ran.stage.graph.graph.nodes if node.op == "call_function"]
    return names.count("autopart::attention_runs"), names.count("aten::scaled_dot_product_attention")


CAUSAL = {"llama": lambda seq: zoo.llama(seq=seq, rows=2), "plain": plain}


@pytest.mark.few
@pytest.mark.parametrize("largest", [2**24, 16], ids=["masks are made", "masks are too large"])
@pytest.mark.parametrize(("made", "seq", "mesh"), [("llama", 24, "cp2"), ("plain", 25, "cp2"), ("plain", 24, "cp3")])
def test_a_rank_leaves_out_what_its_queries_do_not_see(made, seq, mesh, largest):
    found = dist.run_ranks(long_causal, int(mesh[-1]), seq, mesh, made, largest, timeout_s=120.0)
    layers = 2 if made == "llama" else 1
    assert found[:-1] == [(layers, 0)] * (len(found) - 1), found  # the last of the ranks may see all


@pytest.mark.large
@pytest.mark.parametrize(("context", "exchanges"), [("gather", False), ("ulysses", True)])
@pytest.mark.parametrize(("name", "mesh"), [("gpt2", "cp2"), ("bert", "cp2"), ("t5", "cp2"), ("llama", "cp2,tp2")])
def test_what_attention_does_can_be_asked_for(name, mesh, context, exchanges):
    model, batch = given(name)
    plan = autopart.plan(model, mesh, example_kwargs=batch, context=context)
    moved = {row["kind"] for stage in plan.timing["stages"] for row in stage["collectives"] if row["axis"] == "cp"}
    assert ("all_to_all" in moved) == exchanges
    report = autopart.verify(model, mesh, example_kwargs=batch, context=context)
    assert report.ok, report


@pytest.mark.parametrize("mesh", ["cp3", "cp3,tp2", "cp4,tp2"])
def test_heads_that_are_too_few_to_exchange_are_told(mesh):
    """Of four heads, two are on a rank of tp."""
    model, batch = given("llama")
    with pytest.raises(LayoutError) as error:
        autopart.plan(model, mesh, example_kwargs=batch, context="ulysses")
    assert re.sub(r"\.py:\d+", ".py:LINE", str(error.value)) == (
        "context='ulysses' is not possible\n  why    the heads of this attention cannot be divided evenly over cp\n"
        "  where  scaled_dot_product_attention at modeling_llama.py:LINE (model.layers.0.self_attn)\n"
        "  try    context='auto', or 'gather'"
    )


def heads_of(heads, kv_heads, seq=16, rows=2, layers=2):
    """A Llama with so many heads of queries, and of keys and values."""
    config = LlamaConfig(
        hidden_size=8 * heads, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=48, use_cache=False, max_position_embeddings=4096,
    )  # fmt: skip
    ids = torch.randint(0, 48, (rows, seq))
    return LlamaForCausalLM(config).double(), {"input_ids": ids, "labels": ids.clone()}


def exchanged(plan):
    """{kind: bytes that a rank sends on `cp` in a microbatch for attention}, both ways."""
    found = Counter()
    for row in plan.collectives:
        if row.axis == "cp" and row.where.endswith("self_attn"):
            found[row.forward or row.backward] += row.bytes
    return {kind: size for kind, size in found.items() if size}


@pytest.mark.few
@pytest.mark.parametrize("seq", [16, UNEVEN])
@pytest.mark.parametrize(("heads", "kv_heads", "mesh"), [
    (8, 4, "cp2,tp2"), (8, 8, "cp4,tp2"), (8, 2, "cp2,tp2"), (8, 1, "cp2,tp2"), (8, 4, "dp2,cp2,tp2"),
])  # fmt: skip
def test_heads_that_tp_cuts_are_cut_again(heads, kv_heads, mesh, seq):
    model, batch = heads_of(heads, kv_heads, seq)
    plan = autopart.plan(model, mesh, example_kwargs=batch, context="ulysses")
    on = plan.operators["model.layers.*.self_attn/scaled_dot_product_attention"]
    assert (on["tp"].partition("-> ")[2], on["cp"].partition("-> ")[2]) == ("S(1)", "S(1; sections=2)")
    assert "all_to_all" in exchanged(plan)
    report = autopart.verify(model, mesh, example_kwargs=batch, plan=Plan.from_json(plan.to_json()))
    assert report.ok, report


@pytest.mark.large
def test_heads_are_cut_again_where_that_sends_less():
    """Of as many heads of keys as of queries, more than two ranks exchange less than they would gather."""
    for mesh, way in [("cp2,tp2", "all_gather"), ("cp4,tp2", "all_to_all")]:
        with torch.device("meta"):
            model, batch = heads_of(64, 64 if way == "all_to_all" else 16, seq=4096, rows=32)
        plan = autopart.plan(model, mesh, example_kwargs=batch, hardware="h100-80gb-sxm")
        assert way in exchanged(plan), exchanged(plan)


def test_what_is_not_a_way_is_told():
    model, batch = given("llama")
    with pytest.raises(OptionError) as error:
        autopart.plan(model, "cp2", example_kwargs=batch, context="rings")
    assert str(error.value) == "unknown context='rings'\n  try    'auto', 'gather', 'ulysses' or 'ring'"


def sent_in_a_step(made, mesh, options):
    """Bytes by kind that a rank sends for a microbatch, and what the plan says it does."""
    found, communicate = Counter(), collectives.communicate

    def counted(collective, x, *arguments):
        kind, share = DISPATCHED[collective.__name__.split(".")[0]]
        found[kind] += x.numel() * x.element_size() * share(max(Mesh.parse(mesh).sizes.values()))
        return communicate(collective, x, *arguments)

    model, batch = MADE[made]()
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, **options)
    with mock.patch.object(collectives, "communicate", counted):
        pm.step(**batch)
    expected = Counter()
    for stage in pm.plan.timing["stages"]:
        for row in stage["collectives"]:
            expected[row["kind"]] += row["bytes"]
    return dict(found), dict(expected)


MADE = {"llama": zoo.llama, "gpt2": zoo.gpt2, "mixture": mixture, "heads": lambda: heads_of(8, 4)}


@pytest.mark.large
@pytest.mark.parametrize(("made", "mesh", "options"), [
    ("llama", "cp2", {"context": "gather"}), ("gpt2", "cp2", {"context": "ulysses"}), ("mixture", "ep2", {}),
    ("heads", "cp2,tp2", {"context": "ulysses", "sequence_parallel": False}),
], ids=str)  # fmt: skip
def test_what_is_sent_is_what_the_plan_says(made, mesh, options):
    ranks = Mesh.parse(mesh).num_ranks
    for found, expected in dist.run_ranks(sent_in_a_step, ranks, made, mesh, options, timeout_s=120.0):
        assert found == pytest.approx(expected, rel=1e-9, abs=8), (found, expected)
