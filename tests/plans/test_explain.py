"""`Plan.explain()`: what the text says is what the plan holds, from its data alone."""

import json
import re

import pytest
import zoo

import autopart
from autopart.common.text import quantity
from autopart.cost.count.program_summary import block_of
from autopart.plans.plan import Plan


@pytest.fixture(scope="module")
def gpt2_plan() -> Plan:
    model, batch = zoo.gpt2()
    return autopart.plan(model, "pp2,dp2,tp2", example_kwargs=batch)


def rows_of(text: str, stage: str) -> str:
    """The part of the table that belongs to one stage."""
    table = text.split("\n\n")[1]
    groups = re.split(r"\n-[- ]+\n", table)[1:]
    return next(group for group in groups if group.split()[0] == stage)


def test_header_says_what_the_plan_is_for(gpt2_plan):
    header = gpt2_plan.explain().split("\n\n")[0]
    for text in ("GPT2LMHeadModel", "104,960 parameters", "pp2,dp2,tp2 (8 ranks)", "1f1b, 4 microbatches",
                 "a100-80gb-sxm", "input_ids int64[8, 12]", "use_cache=False"):  # fmt: skip
        assert text in header


def test_table_has_layouts_and_collectives_by_stage_and_block(gpt2_plan):
    text = gpt2_plan.explain()
    first, second, step = (rows_of(text, label) for label in ("0", "1", "step"))
    assert "c_attn.weight S(1; sections=3)" in first
    assert re.search(r"attn .* 16\.6 %  1 tp all_reduce", first)
    assert "as in stage 0" in second and "as in stage 0" not in first
    assert "pp send" in second and "receives" not in first
    assert re.search(r"lm_head +transformer\.wte\.weight", second) and "(shared)" in second
    assert "1 dp all_reduce" in step


@pytest.mark.few
@pytest.mark.parametrize("name", ["llama", "t5", "bert", "phi3", "skip_mlp", "transformer_encoder"])
def test_every_stage_is_accounted_for(name):
    model, batch = zoo.ZOO[name]()
    plan = autopart.plan(model, "pp2,tp2", example_kwargs=batch)
    moved = 0
    for stage in plan.stages:
        assert sum(block.get("flops", 0) for block in stage["blocks"]) == stage["flops"]
        moved += sum(block.get("bytes", 0) for block in stage["blocks"])
    assert moved == sum(c.bytes for c in plan.collectives if c.axis == "tp" and c.per == "microbatch")
    counted = sum(n for s in plan.stages for b in s["blocks"] for n in b.get("forward", {}).values())
    assert counted == sum(c.count for c in plan.collectives if c.axis == "tp" and c.forward)
    text = plan.explain()
    for parameter in plan.parameters:
        assert parameter.rpartition(".")[2] in text


def test_a_loaded_plan_explains_itself(gpt2_plan, tmp_path):
    gpt2_plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").explain() == gpt2_plan.explain()


def test_a_plan_with_decisions_only_is_explained(gpt2_plan):
    data = json.loads(gpt2_plan.to_json())
    for key in ("stages", "collectives", "cost", "hardware", "notes"):
        del data[key]
    text = Plan.from_json(json.dumps(data)).explain()
    assert "transformer.h.*.attn.c_attn" in text and "weight S(1; sections=3)" in text


def test_a_plan_without_blocks_is_explained(gpt2_plan):
    data = json.loads(gpt2_plan.to_json())
    for stage in data["stages"]:
        del stage["blocks"]
    text = Plan.from_json(json.dumps(data)).explain()
    assert re.search(r"transformer\.h\.\*\.attn\.c_proj +weight S\(0\) +2 tp all_reduce", text)


def test_a_layout_edited_for_one_layer_is_shown(gpt2_plan):
    data = json.loads(gpt2_plan.to_json())
    data["parameters"]["transformer.h.1.mlp.c_fc.weight"] = {"tp": "R"}
    assert "c_fc.weight of transformer.h.1.mlp.c_fc R" in " ".join(Plan.from_json(json.dumps(data)).explain().split())


def test_balance_and_cost(gpt2_plan):
    text, cost = gpt2_plan.explain(), gpt2_plan.cost
    assert f"{100 * cost['imbalance']:.2f} % above" in text
    assert f"{quantity(cost['step_time_s'], 's')} a step of 8 samples x 12 tokens" in text
    assert quantity(cost["forward_flops"], "FLOP") in text


def test_width(gpt2_plan):
    parts = gpt2_plan.explain().split("\n\n")
    assert max(map(len, parts[1].splitlines())) <= 120  # the table of layouts
    assert max(len(line) for part in (parts[0], *parts[2:]) for line in part.splitlines()) <= 80


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (0, "B", "0 B"),
        (999, "B", "999 B"),
        (999_900, "B", "1 MB"),
        (12_288, "B", "12.3 kB"),
        (6_738_415_616, "", "6.74 G"),
        (1.76e12, "FLOP", "1.76 TFLOP"),
        (9.97e-5, "s", "99.7 µs"),
        (2.5e-9, "s", "2.5 ns"),
        (0.5, "s", "500 ms"),
        (0.25, "B", "0.25 B"),
        (3e-13, "s", "0.0003 ns"),
        (float("inf"), "s", "inf s"),
    ],
)
def test_quantity(number, unit, text):
    assert quantity(number, unit) == text


@pytest.mark.parametrize(
    ("path", "block"),
    [("", ""), ("lm_head", "lm_head"), ("transformer.h.3", "transformer.h.*"),
     ("transformer.h.3.attn.c_attn", "transformer.h.*.attn"), ("bert.embeddings.LayerNorm", "bert.embeddings"),
     ("encoder.block.0.layer.1.DenseReluDense.wi", "encoder.block.*.layer.*.DenseReluDense")],
)  # fmt: skip
def test_block_of(path, block):
    assert block_of(path) == block


def test_a_table_follows_the_width(monkeypatch):
    model, batch = zoo.llama()
    plan = autopart.plan(model, "pp2,tp2", example_kwargs=batch)
    wide, narrow = (_table_width(plan.explain(width)) for width in (120, 90))
    assert narrow < wide <= 120 and _table_width(plan.explain()) == wide
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "90")
    assert _table_width(plan.explain()) == narrow


def _table_width(text):
    lines = text.splitlines()
    return max(map(len, lines[next(i for i, line in enumerate(lines) if line.startswith("stage")) :][:12]))
