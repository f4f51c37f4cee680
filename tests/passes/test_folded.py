"""A plan of a few blocks, one of which stands for all that are like it, is that of the whole model, byte for byte."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import autopart
from autopart.cost.count.tabulate import tabulate
from autopart.cost.predict.table_data import deduplicated_rows as order_of_whole
from autopart.errors import AutopartError
from autopart.ir.blocks.deduplication import (
    DeduplicatedBlock,
    NotDeduplicable,
    expand_blocks,
    later,
    names_of,
    original,
)
from autopart.ir.facts import facts
from autopart.ir.mesh import Mesh
from autopart.ir.run.mixed_precision import Precision
from autopart.options import Options
from autopart.passes.facts.deduplicated_blocks import beside, check_blocks, check_written
from autopart.plans.pins import Pins
from autopart.recipe import make_plan
from autopart.tracing.blocks.deduplicate import deduplicated
from autopart.tracing.trace_model import bind_call, trace


def tokens(rows=16):
    ids = torch.zeros(rows, 8, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def llama(layers=9, hidden=32, **changed):
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
        num_hidden_layers=layers, max_position_embeddings=8, **changed,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.loss_type = "ForCausalLM"
    return model, tokens()


def wide_llama():
    """Of which each block has several buckets of gradients, and the next begins in the last of them."""
    return llama(10, 1536)


def deep_llama():
    return llama(32)


def gpt2(layers=11):
    config = GPT2Config(n_embd=32, n_layer=layers, n_head=4, vocab_size=64, n_positions=8, attn_implementation="eager",
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model, tokens()


def deep_gpt2():
    return gpt2(24)


def t5(layers=9):
    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=layers, num_decoder_layers=layers + 1, num_heads=4,
                      vocab_size=64, decoder_start_token_id=0)  # fmt: skip
    return T5ForConditionalGeneration(config).eval(), tokens()


def deep_t5():
    """Of which all stages but the first read what the encoder makes."""
    return t5(18)


MODELS = {model.__name__: model for model in (llama, wide_llama, deep_llama, gpt2, deep_gpt2, t5, deep_t5)}
CASES = {
    "llama": [
        ("dp2,tp2", {}), ("tp2", {"sequence_parallel": True}), ("dp2,tp2", {"zero": 3, "recompute": "full"}),
        ("dp2", {"zero": 2, "microbatches": 4}), ("dp2,tp2", {"compile": True}), ("cp2", {"zero": 1}),
        ("cp2,tp2", {"sequence_dims": {"input_ids": 1, "labels": 1}, "context": "ulysses"}),
        ("dp2,tp2", {"zero": 3, "microbatches": 4}),
    ],
    "wide_llama": [("dp2", {"microbatches": 2}), ("dp2,tp2", {"zero": 1, "microbatches": 4})],
    "gpt2": [("tp2", {"recompute": "selective"}), ("dp2,tp2", {"microbatches": 2, "zero": 3}), ("tp3", {})],
    "t5": [("dp2,tp2", {}), ("tp2", {"recompute": "full"})],
}  # fmt: skip
IN_STAGES = {
    "deep_llama": [
        ("pp2", {"schedule": "gpipe", "microbatches": 8}), ("pp4,tp2", {"recompute": "selective"}),
        ("dp2,pp2", {"schedule": "interleaved_1f1b", "zero": 1}), ("dp2,pp2,tp2", {"zero": 3, "recompute": "full"}),
        ("pp2", {"schedule": "zbv", "microbatches": 4}),
    ],
    "deep_gpt2": [("pp2,tp2", {"sequence_parallel": True}), ("dp2,pp3", {"zero": 2})],
    "deep_t5": [("pp3", {}), ("pp3,tp2", {"recompute": "full"})],
}  # fmt: skip


@cache
def traces(name, precision=None):
    """A model, its folded and its whole trace."""
    with torch.device("meta"):
        model, batch = MODELS[name]()
    call, asked = bind_call(model, (), batch), Precision.parse(precision, None)
    few = make_plan.prepare(model, call, precision=asked, fold=True)
    return model, few, make_plan.unfolded(few)


def text_of(model, traced, mesh, options):
    return make_plan._best_plan(model, traced, Mesh.parse(mesh), Options(**options)).to_json()


@pytest.mark.large
@pytest.mark.parametrize(
    ("name", "mesh", "options"), [(name, *case) for name in CASES for case in CASES[name]], ids=str
)
def test_a_folded_trace_has_the_plan_of_the_whole(name, mesh, options):
    model, few, whole = traces(name)
    assert few.folds and not whole.folds
    assert text_of(model, few, mesh, options) == text_of(model, whole, mesh, options)


@pytest.mark.large
@pytest.mark.parametrize(
    ("name", "mesh", "options"), [(name, *case) for name in IN_STAGES for case in IN_STAGES[name]], ids=str
)
def test_in_stages_one_block_stands_for_those_of_its_own(name, mesh, options):
    model, few, whole = traces(name)
    few = make_plan._folded_in_stages(few, Mesh.parse(mesh), Options(**options))
    assert len({fold.path for fold in few.folds}) < len(few.folds)
    assert text_of(model, few, mesh, options) == text_of(model, whole, mesh, options)


@pytest.mark.large
def test_where_stages_are_short_all_blocks_are_planned():
    model, few, whole = traces("llama")
    assert not make_plan._folded_in_stages(few, Mesh.parse("pp2"), Options()).folds
    assert make_plan.make_plan(model, few, Mesh.parse("pp2"), Options()).to_json() == text_of(model, whole, "pp2", {})


@pytest.mark.large
def test_in_mixed_precision():
    model, few, whole = traces("llama", "bf16")
    options = {"zero": 1, "microbatches": 2}
    assert text_of(model, few, "dp2,tp2", options) == text_of(model, whole, "dp2,tp2", options)


@pytest.mark.large
def test_unfolded_is_what_a_plain_trace_is():
    model, few, whole = traces("llama")
    plain = make_plan.prepare(model, bind_call(model, (), tokens()))
    assert [n.format_node() for n in whole.graph.nodes] == [n.format_node() for n in plain.graph.nodes]
    assert [facts(n).get("key") for n in whole.graph.nodes] == [facts(n).get("key") for n in plain.graph.nodes]
    assert whole.parameters.keys() == plain.parameters.keys() and whole.notes == plain.notes
    assert len(few.graph.nodes) < len(plain.graph.nodes)


@pytest.mark.large
def test_two_chains_are_folded():
    assert traces("t5")[1].folds == (DeduplicatedBlock("encoder.block", 4, 2), DeduplicatedBlock("decoder.block", 4, 3))


def test_names():
    fold = DeduplicatedBlock("h", 3, 4)
    folds = (DeduplicatedBlock("other", 3, 9), fold)
    assert names_of(folds, "h.3.up/mul#1") == [f"h.{i}.up/mul#1" for i in (3, 4, 5, 6)]
    assert names_of(folds, "h.30.up") == ["h.30.up"] and names_of(folds, "hh.3") == ["hh.3"]
    assert [original(folds, f"h.{i}") for i in (2, 3, 6, 7)] == ["h.2", "h.3", "h.3", "h.7"]
    assert later(folds, "h.3.up", 2) == "h.5.up"
    assert [*expand_blocks((DeduplicatedBlock("h", 1, 3),), ["h.0", "h.1", "h.2"], str, lambda name, i:
    f"{name}+{i}")] == [
        "h.0", "h.1+0", "h.1+1", "h.1+2", "h.2"
    ]  # fmt: skip
    with pytest.raises(NotDeduplicable):
        [*expand_blocks((fold,), ["h.3", "a", "h.3"], str, lambda name, i: name)]


class Block(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.up, self.down = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x, scale=None):
        x = x + self.down(torch.relu(self.up(x)))
        return x if scale is None else x * scale


class Stack(nn.Module):
    """Like blocks, but for what `change` does to one of them, or with one."""

    def __init__(self, change=None, number=10):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(number))
        self.change = change
        if change == "untrained":
            self.layers[4].up.weight.requires_grad_(False)
        if change == "shared":
            self.layers[4].up.weight = self.layers[5].up.weight
        if change == "wider":
            self.layers[4].up, self.layers[4].down = nn.Linear(8, 16), nn.Linear(16, 8)
        if change == "constant":
            self.layers[4].forward = lambda x: Block.forward(self.layers[4], x) * 2.0

    def forward(self, x):
        seen = []
        for i, layer in enumerate(self.layers):
            if self.change == "between" and i == 4:
                x = x * 0.5
            scale = seen[0] if self.change == "reads the first" and i == 4 else None
            x = layer(x) if scale is None else layer(x, scale)
            seen.append(x)
        return x.sum() + seen[4].sum() if self.change == "read later" else x.sum()


def fold_of(model):
    return deduplicated(trace(model, bind_call(model, (torch.ones(4, 8),), {}))).folds


def test_blocks_alike_are_folded():
    assert fold_of(Stack()) == (DeduplicatedBlock("layers", 4, 3),)  # what the first block reads needs no gradient
    assert fold_of(Stack(number=9)) == (DeduplicatedBlock("layers", 4, 2),)
    assert fold_of(Stack(number=8)) == ()


@pytest.mark.parametrize(
    "change", ["untrained", "shared", "wider", "constant", "between", "reads the first", "read later"]
)
def test_a_block_that_differs_is_noticed(change):
    assert fold_of(Stack(change)) == ()


def test_a_chain_on_either_side_of_one_that_differs():
    model = Stack(number=19)
    model.layers[9].up, model.layers[9].down = nn.Linear(8, 16), nn.Linear(16, 8)
    assert fold_of(model) == (DeduplicatedBlock("layers", 4, 2), DeduplicatedBlock("layers", 13, 3))


def test_checks_of_a_block_can_fail():
    few = traces("llama")[1]
    check_blocks(few)
    node = next(node for node in beside(few.graph, few.folds[0])[1] if facts(node).get("place"))
    place = facts(node)["place"]
    try:
        facts(node)["place"] = place._replace(block=(place.block[0], 0))
        with pytest.raises(NotDeduplicable):
            check_blocks(few)
        facts(node)["place"], told = place, facts(node).pop("block")
        with pytest.raises(NotDeduplicable):
            check_blocks(few)
        facts(node)["block"], facts(node)["other_positions"] = told, frozenset("s")
        with pytest.raises(NotDeduplicable):
            check_blocks(few)
    finally:
        facts(node)["place"] = place
        facts(node).pop("other_positions", None)
    check_blocks(few)


def test_checks_of_a_program_can_fail():
    few = traces("llama")[1]
    draft = make_plan.drafted(few.without_values(), Mesh.parse("dp2,tp2"), Options())
    graph = draft.program.stages[0].graph.graph
    check_written(graph, few.folds)
    node = beside(graph, few.folds[0])[1][3]
    node.target = torch.ops.aten.sigmoid.default
    with pytest.raises(NotDeduplicable):
        check_written(graph, few.folds)


def test_checks_of_a_table_can_fail():
    few = traces("llama")[1]
    draft = make_plan.drafted(few.without_values(), Mesh.parse("dp2,tp2"), Options())
    table = tabulate(few, draft.program, draft.walks, {})
    (fold,) = few.folds
    assert len(order_of_whole(table, folds=few.folds).order) > len(table.order)
    row = next(row for row, *block in table.order if block == [fold.path, fold.number + fold.times])
    rows = [replace(one, kept=one.kept * 2 + one.in_forward) if i == row else one for i, one in enumerate(table.rows)]
    with pytest.raises(NotDeduplicable):
        order_of_whole(replace(table, rows=tuple(rows)), folds=few.folds)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [("tp2", {"pins": Pins.parse({"model.layers.4.mlp.up_proj.weight": {"tp": "R"}})}),
     ("tp2", {"recompute": {"model.layers.[0-4]": "full"}}), ("dp2", {"dp_sync": "powersgd:4"}),
     ("dp2", {"prefetch": 3})],
)  # fmt: skip
def test_what_tells_blocks_apart_is_planned_whole(mesh, options):
    assert not make_plan.can_be_folded(Mesh.parse(mesh), Options(**options))


@pytest.mark.large
def test_a_plan_explains_itself_by_the_whole_model():
    with torch.device("meta"):
        model, batch = llama()
    plan = autopart.plan(model, "dp2,tp2", example_kwargs=batch)
    name = "model.layers.4.mlp.up_proj.weight"
    whole = make_plan.make_plan(model, traces("llama")[2], Mesh.parse("dp2,tp2"), Options())
    assert plan.why(name) == whole.why(name)
    assert plan.why_not(name, {"tp": "R"}) == whole.why_not(name, {"tp": "R"})


@pytest.mark.large
def test_refused_in_the_same_words():
    model, few, whole = traces("llama")
    said = []
    for traced in (few, whole):
        with pytest.raises(AutopartError) as error:
            make_plan.make_plan(model, traced, Mesh.parse("dp2"), Options(memory=1000))
        said.append(str(error.value))
    assert said[0] == said[1]
