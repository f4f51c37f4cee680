"""Attention masks recognised by value: what is a band, attention to a window, and models with masks of every kind."""

import copy
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
import zoo
from context_models import stage_modules
from dist import run_ranks
from process_checks import same_step
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from traced import plan_of, run_of, verified

import autopart
from autopart.ir.facts import facts
from autopart.ir.mask_structure import MaskWindow
from autopart.ir.mesh import Mesh
from autopart.ops.masked_attention import blocks_fit, mask_window_of, window_attention
from autopart.ops.stage_masks import is_attention, mask_of, masks_of, with_mask_structure
from autopart.options import Options
from autopart.passes.facts import mask_facts
from autopart.passes.write.lower import lower
from autopart.recipe.make_plan import drafted, plan_outputs, prepare
from autopart.runtime.graphs import mask_kernels
from autopart.tracing.trace_model import bind_call

ROWS, SEQ, HIDDEN, HEADS, GROUPS = 4, 24, 16, 4, 2
POSITION = torch.arange(SEQ)
QUERY, KEY = POSITION[:, None], POSITION[None, :]
CAUSAL = KEY <= QUERY
WINDOW = CAUSAL & (KEY > QUERY - 8)
BOTH_SIDES = (KEY - QUERY).abs() <= 8
FULL = torch.ones(SEQ, SEQ, dtype=torch.bool)


def rows_of(lengths, left=False):
    """[rows, 1, 1, keys]: which keys of rows of these lengths are there."""
    lengths = torch.tensor(lengths)[:, None, None, None]
    return SEQ - lengths <= POSITION if left else lengths > POSITION


def documents():
    """[rows, 1, queries, keys]: queries see their own document, of which each row has others."""
    numbers = (POSITION[None] + 7 * torch.arange(ROWS)[:, None]) // 9
    return (numbers[:, None, :, None] == numbers[:, None, None, :]) & CAUSAL


MASKS = {
    "causal": (CAUSAL, MaskWindow(SEQ - 1, 0)),
    "causal of every row": (CAUSAL.expand(ROWS, 1, SEQ, SEQ), MaskWindow(SEQ - 1, 0)),
    "causal copied": (CAUSAL.repeat(ROWS, 1, 1, 1), MaskWindow(SEQ - 1, 0)),
    "causal, nothing padded": (CAUSAL & rows_of([SEQ] * ROWS), MaskWindow(SEQ - 1, 0)),
    "window": (WINDOW, MaskWindow(7, 0)),
    "window to both sides": (BOTH_SIDES, MaskWindow(8, 8)),
    "all": (FULL, MaskWindow(SEQ - 1, SEQ - 1)),
    "all keys of every row": (rows_of([SEQ] * ROWS), MaskWindow(SEQ - 1, SEQ - 1)),
    "padded right": (CAUSAL & rows_of([SEQ, 20, 1, SEQ]), None),
    "padded left": ((CAUSAL & rows_of([SEQ, 20, 12, SEQ], left=True)) | (QUERY == KEY), None),
    "encoder, padded": (rows_of([SEQ, 20, 12, SEQ]), None),
    "documents": (documents(), None),
    "prefix": (CAUSAL | (KEY < 5), None),
    "one pair less": (CAUSAL & ~((QUERY == 12) & (KEY == 3)), None),
    "one pair more": (CAUSAL | ((QUERY == 12) & (KEY == 17)), None),
    "one row differs": (torch.stack([CAUSAL, CAUSAL, WINDOW, CAUSAL])[:, None], None),
    "without itself": (KEY < QUERY, None),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_a_band_or_not(name):
    mask, band = MASKS[name]
    assert mask_window_of(mask, SEQ, SEQ) == band
    for hidden in (-torch.inf, torch.finfo(torch.float32).min):
        assert mask_window_of(torch.where(mask, 0.0, hidden), SEQ, SEQ) == band


def test_numbers_that_are_neither_seen_nor_hidden_are_no_band():
    slopes = torch.where(CAUSAL, -0.5 * (QUERY - KEY), -torch.inf)
    assert mask_window_of(slopes, SEQ, SEQ) is None
    assert mask_window_of(torch.where(CAUSAL, 0.0, -1e4), SEQ, SEQ) is None  # scores may be as large
    assert mask_window_of(torch.zeros(1, SEQ), SEQ, SEQ) == MaskWindow(SEQ - 1, SEQ - 1)


@pytest.mark.whole
@pytest.mark.parametrize(("queries", "keys"), [(3, 7), (7, 3), (1, 5), (5, 1), (1, 1)])
def test_bands_of_unequal_queries_and_keys(queries, keys):
    query, key = torch.arange(queries)[:, None], torch.arange(keys)[None]
    for band in (MaskWindow(0, 0), MaskWindow(2, 0), MaskWindow(0, 1), MaskWindow(queries - 1, keys - 1)):
        mask = (key >= query - band.before) & (key <= query + band.after)
        found = mask_window_of(mask, queries, keys)
        if not mask.any(1).all():
            assert found is None  # a query that sees nothing
        else:
            again = (key >= query - found.before) & (key <= query + found.after)
            assert torch.equal(again, mask)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("length", "before", "after"), [(37, 5, 0), (300, 70, 0), (257, 64, 64), (130, 0, 3), (64, 10, 70)]
)
def test_window_attention_is_attention_with_its_mask(length, before, after, groups):
    torch.manual_seed(0)
    query = torch.randn(2, 4, length, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, groups, length, 8, dtype=torch.float64, requires_grad=True) for _ in "kv")
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    mask = (j >= i - before) & (j <= i + after)
    expected = F.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
    made = window_attention(query, key, value, before, after, 0.3, True)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-12)
    weights, inputs = torch.randn_like(made), (query, key, value)
    grads = (torch.autograd.grad((out * weights).sum(), inputs) for out in (made, expected))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


# --- Models.


class Masked(nn.Module):
    """Two blocks of attention with fewer heads of keys, which reads a mask that is given or made of positions."""

    def __init__(self, made="given", repeated=True, dropout=0.0):
        super().__init__()
        size = HIDDEN // HEADS
        self.made, self.repeated, self.dropout = made, repeated, dropout
        self.q = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.kv = nn.ModuleList(nn.Linear(HIDDEN, 2 * GROUPS * size) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))

    def forward(self, x, mask=None, memory=None):
        rows, seq, _ = x.shape
        if self.made == "from positions":
            mask = (torch.arange(seq)[None, :] <= torch.arange(seq)[:, None])[None, None]
        for q, kv, out in zip(self.q, self.kv, self.out, strict=True):
            read = x if memory is None else memory
            query = q(x).view(rows, seq, HEADS, -1).transpose(1, 2)
            key, value = kv(read).view(rows, read.size(1), 2, GROUPS, -1).permute(2, 0, 3, 1, 4)
            if self.repeated:
                key, value = (heads.repeat_interleave(HEADS // GROUPS, 1) for heads in (key, value))
            tell = {"is_causal": True} if self.made == "told" else {"attn_mask": mask}
            tell["dropout_p"] = self.dropout
            seen = F.scaled_dot_product_attention(query, key, value, **tell, enable_gqa=not self.repeated)
            x = x + out(seen.transpose(1, 2).flatten(2))
        return x.square().mean()


@cache
def masked(name):
    """A model and a batch whose mask is of this name."""
    torch.manual_seed(0)
    model = Masked().double()
    x = torch.randn(ROWS, SEQ, HIDDEN, dtype=torch.float64)
    if name == "cross":
        return model, {"x": x[:, :7], "mask": rows_of([SEQ, 20, 12, SEQ]), "memory": x}
    mask = MASKS[name][0]
    if mask.ndim == 2:
        mask = mask.expand(ROWS, 1, SEQ, SEQ).contiguous()  # the rows of the batch, as all inputs have them
    return model, {"x": x, "mask": mask}


def build(name):
    return copy.deepcopy(masked(name)[0]), masked(name)[1]


KINDS = ["causal", "all", "padded right", "padded left", "encoder, padded", "documents", "prefix", "cross"]
ON = dict(zip(KINDS, ("dp2,tp2", "tp2", "dp2,tp2", "pp2", "tp2", "dp2,tp2", "pp2", "dp2,tp2"), strict=True))


@pytest.mark.few
@pytest.mark.parametrize("name", KINDS)
def test_masks_of_every_kind_are_exact(name):
    options = {"microbatches": 2} if ON[name] == "pp2" else {}
    assert verified(run_of(partial(build, name)), ON[name], **options).ok


def test_and_so_they_are_where_nothing_is_recognised(monkeypatch):
    monkeypatch.setattr(mask_kernels, "mask_window_of", lambda *_: None)
    assert verified(run_of(partial(build, "causal")), "dp2,tp2").ok


def a_window():
    """A mask of a window that is narrow enough for blocks."""
    torch.manual_seed(0)
    i, j = torch.arange(256)[:, None], torch.arange(256)[None]
    mask = ((j <= i) & (j > i - 20)).expand(2, 1, 256, 256).contiguous()
    return Masked().double(), {"x": torch.randn(2, 256, HIDDEN, dtype=torch.float64), "mask": mask}


@pytest.mark.few
@pytest.mark.parametrize("where", [FakeTensorMode(), torch.device("meta")], ids=["fake", "meta"])
def test_inputs_without_values_leave_their_masks_as_they_are(where):
    model, batch = masked("causal")
    if isinstance(where, torch.device):
        model = copy.deepcopy(model).to(where)
    with where:
        batch = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in batch.items()}
    assert autopart.plan(model, "tp2", example_kwargs=batch).notes == (
        "attention by the masks of this call: 2 with its mask as it is",
    )


def test_a_mask_that_is_learned_is_read():
    """Zeros that have a gradient are no mask that hides nothing."""
    torch.manual_seed(0)
    model, x = Masked(repeated=False).double(), torch.randn(ROWS, SEQ, HIDDEN, dtype=torch.float64)
    bias = torch.zeros(1, 1, SEQ, SEQ, dtype=torch.float64, requires_grad=True)
    assert verified(run_of(lambda: (model, {"x": x, "mask": bias})), "tp2").ok
    pm = autopart.parallelize(model, "dp1", example_kwargs={"x": x, "mask": bias})
    pm(x=x, mask=bias).backward()
    assert bias.grad is not None and bias.grad.abs().max() > 0


@pytest.mark.large
def test_a_window_is_run_by_blocks():
    assert blocks_fit(MaskWindow(19, 0), 256) and not blocks_fit(MaskWindow(19, 0), 128)
    run = run_of(a_window)
    assert verified(run, "tp2").ok
    (stage,) = drafted(run.traced, Mesh.parse("tp2"), Options()).program.stages
    assert [n.target for n in stage.graph.graph.nodes if "attention" in str(n.target)] == [
        torch.ops.autopart.window_attention.default
    ] * 2
    assert [stage_input.name for stage_input in stage.inputs] == ["x_0"]  # the mask is not even held


def input_independent_masks(made, repeated=True, dropout=0.0):
    torch.manual_seed(0)
    return Masked(made, repeated, dropout).double(), {"x": torch.randn(ROWS, SEQ, HIDDEN, dtype=torch.float64)}


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "dp2,pp2"])
def test_a_causal_mask_costs_what_the_causal_kernel_costs(mesh):
    """FLOPs, time and memory are those of a model that calls the kernel itself, with keys and values as they are."""
    made, told = (
        plan_of(run_of(partial(input_independent_masks, *how)), mesh) for how in (("from positions",), ("told", False))
    )
    prices = ("objective", "lower_bound", "memory_traffic_s")  # the solver's, of the graph as it was traced
    assert {k: v for k, v in made.cost.items() if k not in prices} == {
        k: v for k, v in told.cost.items() if k not in prices
    }
    assert made.memory == told.memory


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["dp1", "tp2", "dp2,pp2"])
@pytest.mark.parametrize("how", [("from positions",), ("told", False)], ids=str)
def test_attention_that_drops_weights_costs_what_the_kernel_costs(how, mesh):
    """FLOPs, time and memory are those of a model that drops nothing, but for the seeds of microbatches."""
    plain, drops = (plan_of(run_of(partial(input_independent_masks, *how, dropout=p)), mesh) for p in (0.0, 0.1))
    assert drops.cost["parts_s"]["attention"] == pytest.approx(plain.cost["parts_s"]["attention"], rel=1e-12)
    assert drops.cost["step_time_s"] == pytest.approx(plain.cost["step_time_s"], rel=1e-12)
    assert drops.memory == plain.memory


@pytest.mark.few
@pytest.mark.parametrize("as_numbers", [False, True])
@pytest.mark.parametrize("name", [*KINDS[:3], "window", "told"])
def test_attention_that_drops_weights_is_told_what_its_mask_is(name, as_numbers):
    """Causal, or that nothing is hidden, and with keys as they are; other masks stay, and their values are the same."""
    torch.manual_seed(0)
    made, mask = ("told", None) if name == "told" else ("given", MASKS[name][0].expand(ROWS, 1, SEQ, SEQ).contiguous())
    if mask is not None and as_numbers:
        mask = torch.where(mask, 0.0, -torch.inf).double()
    model = Masked(made, dropout=0.2).double()
    batch = {"x": torch.randn(ROWS, SEQ, HIDDEN, dtype=torch.float64)} | ({} if mask is None else {"mask": mask})
    found = []
    for recognises in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not recognises:
                patch.setattr(mask_kernels, "mask_window_of", lambda *_: None)
            torch.manual_seed(1)
            pm = autopart.parallelize(model, "dp1", example_kwargs=batch)
            loss = pm.step(**batch)
        found.append((loss, pm.full_grads()))
        (module,) = stage_modules(pm)
        *_, written = module.specialized_graphs.values()  # the last is that of this batch
        calls = [node for node in written.graph.graph.nodes if is_attention(node)]
        assert [node.target for node in calls] == [torch.ops.autopart.attention_dropout.default] * 2
        told = {"causal": True, "told": True, "all": False}.get(name) if recognises else None
        for call in calls:
            assert (mask_of(call) is None) == (told is not None)
            assert call.kwargs.get("is_causal", None) == told
            assert call.kwargs.get("enable_gqa", False) == (told is not None)
    program = drafted(prepare(model, bind_call(model, (), batch)), Mesh.parse("dp1"), Options()).program
    planned = [node for stage in program.stages for node in stage.graph.graph.nodes if is_attention(node)]
    assert [call.kwargs.get("is_causal") for call in planned] == [
        {"causal": True, "told": True, "all": False}.get(name)
    ] * 2
    (loss, grads), (read, of_read) = found
    torch.testing.assert_close(loss, read, rtol=0, atol=1e-12)
    for key, grad in grads.items():
        torch.testing.assert_close(grad, of_read[key], rtol=0, atol=1e-12)


@pytest.mark.few
@pytest.mark.parametrize("name", ["causal", "all", "padded right"])
def test_numbers_as_masks_of_attention_that_drops_weights_are_exact(name):
    """The formula of it, with the masks of one device."""

    def drops():
        model, batch = build("all")
        mask = torch.where(MASKS[name][0], 0.0, -torch.inf).double().expand(ROWS, 1, SEQ, SEQ).contiguous()
        for module in model.modules():
            module.dropout = 0.2
        return model.train(), {**batch, "mask": mask}

    assert verified(run_of(drops), "dp2,tp2").ok


def test_causal_attention_takes_what_the_profile_says():
    """Of the time of attention to all keys, where its products take that time."""

    def attention_s(made):
        with torch.device("meta"):
            model, x = Masked(made, repeated=False).double(), torch.randn(8, 2048, HIDDEN, dtype=torch.float64)
        return autopart.plan(model, "dp1", example_kwargs={"x": x}, hardware="cpu-gloo").cost["parts_s"]["attention"]

    causal, whole = attention_s("told"), attention_s("given")
    assert causal / whole == pytest.approx((2048 + 512) / (2 * 2048), rel=0.02)


def test_a_mask_of_positions_is_looked_at_once():
    """Other calls neither make it nor hold it."""
    model, batch = input_independent_masks("from positions")
    pm = autopart.parallelize(model, "dp1", example_kwargs=batch)
    torch.testing.assert_close(pm.step(**batch), model(**batch).detach(), rtol=1e-12, atol=0)
    (module,) = stage_modules(pm)
    assert module.masks.make is None
    assert [node.target for node in module.stage.prologue.graph.nodes if node.op == "call_function"] == []


@pytest.mark.large
def test_masks_that_layers_make_alike_are_made_once(monkeypatch):
    """Every layer of T5's decoder makes a mask of its own for what it reads of the encoder."""
    looked_at = []
    monkeypatch.setattr(
        mask_kernels, "mask_window_of", lambda mask, *scores: looked_at.append(mask) or mask_window_of(mask, *scores)
    )
    model, batch = zoo.t5(num_layers=4)
    pm = autopart.parallelize(model, "dp1", example_kwargs=batch)
    pm.step(**batch)
    assert len(looked_at) == 3  # the encoder's own, the decoder's own, and that between them
    pm.step(**batch)
    assert len(looked_at) == 3


@pytest.mark.parametrize(("device", "dtype", "grouped"), [
    ("cpu", torch.float32, True), ("cuda", torch.float32, False), ("cuda", torch.bfloat16, True),
])  # fmt: skip
def test_heads_are_grouped_where_a_kernel_takes_groups(device, dtype, grouped):
    model, batch = input_independent_masks("told")
    traced = prepare(model.to(dtype), bind_call(model, (), {"x": batch["x"].to(dtype)}))
    decisions = drafted(traced, Mesh.parse("dp1"), Options()).decisions
    program = lower(traced, decisions, plan_outputs(traced), whole_outputs=False)
    (stage,) = program.stages
    stage = with_mask_structure(
        stage, {mask.name: MaskWindow(SEQ - 1, 0) for mask in masks_of(stage)}, torch.device(device)
    )
    calls = [node for node in stage.graph.graph.nodes if is_attention(node)]
    assert [bool(call.kwargs.get("enable_gqa")) for call in calls] == [grouped] * 2


@pytest.mark.large
def test_a_large_batch_is_looked_at_by_rows_that_differ(monkeypatch):
    """For a plan one row of each kind is enough: all of them would not fit."""
    monkeypatch.setattr(mask_facts, "_LARGEST", 3 * 12 * 12)
    model, batch = zoo.bert()
    padded = batch["attention_mask"].unique(dim=0)
    for mask, band in (
        (torch.ones_like(batch["attention_mask"]), MaskWindow(11, 11)),
        (padded[:1].expand(8, -1), None),
    ):
        traced = prepare(model, bind_call(model, (), {**batch, "attention_mask": mask.clone()}))
        masks_read = {mask_of(node) for node in traced.graph.nodes if is_attention(node)}
        assert [facts(node).get("band") for node in masks_read] == [band]


# --- On processes.


def alternating(mesh):
    """A batch without padding, one with, and so on: each is run by what its own mask is."""
    model, batch = zoo.bert()
    full = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch)
    for call in (batch, full, batch, full):
        model.zero_grad()
        pm.zero_grad()
        _, loss, grads = zoo.reference(model, call)
        same_step(pm, call, loss, grads)
    return [len(module.specialized_graphs) for module in stage_modules(pm)]


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "dp2", pytest.param("pp2", marks=pytest.mark.whole)])
def test_batches_with_and_without_padding_in_turn(mesh):
    written = run_ranks(alternating, 2, mesh)
    assert any(count > 1 for counts in written for count in counts)


def test_a_batch_as_large_as_its_sequences_is_no_sequence():
    model, batch = zoo.bert(num_layers=1, rows=8, seq=8)  # `arange(8)` numbers the rows and the positions
    assert autopart.verify(model, "dp2", example_kwargs=batch).ok
