"""What attention sends on `cp`, gathered and exchanged, beside the formulas for it; and from how many ranks on
exchanging is cheaper."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from importlib import resources

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopart
from autopart.ir.mesh import Mesh

SEQ, WIDTH, LAYERS, ROWS = 4096, 128, 1, 2


@pytest.fixture(scope="module")
def wires(tmp_path_factory):
    """A profile of what the formulas know of: bytes that ranks send, over links that are all alike."""
    data = json.loads((resources.files("autopart") / "cost/hardware/profiles/h100-80gb-sxm.json").read_text())
    changed = {"devices_per_node": 1024, "link_latency_s": 1e-15, "node_link_latency_s": 1e-15, "launch_s": 1e-15,
               "memory_bytes_per_s": 1e18}  # fmt: skip
    data |= {"name": "wires", **{name: {**data[name], "value": value} for name, value in changed.items()}}
    data.pop("collectives", None)
    path = tmp_path_factory.mktemp("profiles") / "wires.json"
    path.write_text(json.dumps(data))
    return str(path)


@cache
def planned(heads, kv_heads, mesh, context, hardware):
    config = LlamaConfig(
        hidden_size=WIDTH * heads, intermediate_size=WIDTH * heads, num_hidden_layers=LAYERS, vocab_size=256,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=SEQ, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(ROWS, SEQ, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    return autopart.plan(model, mesh, example_kwargs=batch, context=context, hardware=hardware)


def sent(plan):
    """{kind: bytes that a rank sends on `cp` for attention}, both ways."""
    found = Counter()
    for row in plan.collectives:
        if row.axis == "cp" and "self_attn" in row.where:
            found[row.forward or row.backward] += row.bytes
    return {kind: size for kind, size in found.items() if size}


def formulas(heads, kv_heads, cp, tp=1):
    """Bytes that a rank sends, both ways: K and V gathered; Q, K, V and the output exchanged, of fewer heads of keys
    than ranks all repeated before."""
    q, kv = (2 * ROWS * SEQ * WIDTH * number / tp * LAYERS * 2 for number in (heads, kv_heads))
    kv_sent = kv if kv_heads / tp % cp == 0 else q
    return {"gather": 2 * kv * (cp - 1) / cp, "ulysses": (2 * q + 2 * kv_sent) * (cp - 1) / cp**2}


@pytest.mark.few
@pytest.mark.parametrize(("heads", "kv_heads", "mesh", "context"), [
    (16, 16, "cp2", "auto"), (16, 16, "cp2", "gather"), (16, 16, "cp2", "ulysses"), (16, 16, "cp8", "ulysses"),
    (16, 8, "cp4", "gather"), (16, 8, "cp4", "ulysses"), (32, 8, "cp8", "auto"), (32, 8, "cp8", "ulysses"),
    (32, 8, "cp16", "auto"), (32, 8, "cp16", "gather"), (32, 8, "cp4,tp2", "auto"), (32, 8, "cp4,tp2", "ulysses"),
    (16, 4, "cp2,tp4", "gather"),
])  # fmt: skip
def test_they_are_those_of_the_formulas(heads, kv_heads, mesh, context, wires):
    sizes = Mesh.parse(mesh).sizes
    expected = formulas(heads, kv_heads, sizes["cp"], sizes.get("tp", 1))
    by_kind = sent(planned(heads, kv_heads, mesh, context, wires))
    if context == "auto":
        assert sum(by_kind.values()) <= min(expected.values()) * 1.001
    else:
        kind = {"gather": "all_gather", "ulysses": "all_to_all"}[context]
        assert by_kind == {kind: pytest.approx(expected[context])}


@pytest.mark.large
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 16), (16, 8), (32, 8), (128, 16)])
def test_exchanging_is_cheaper_beyond_as_many_ranks_as_the_formula_says(heads, kv_heads, wires):
    """More than 1 + q / kv (of Llama 8B more than five), the next of the powers of two that are looked through; so many
    ranks exactly send as much either way."""
    gathers, exchanges = (planned(heads, kv_heads, "cp2", context, wires) for context in ("gather", "ulysses"))
    equal = 1 + heads // kv_heads
    if equal > 2:  # else there is no number of ranks on which gathering is cheaper
        power = next(2**i for i in range(9) if 2**i > equal)
        assert autopart.crossover(gathers, exchanges, over="cp", low=2) == power
    moved = {cp: tuple(float(plan.cost.at(cp=cp)) for plan in (gathers, exchanges)) for cp in (equal, equal + 1)}
    assert moved[equal][0] == pytest.approx(moved[equal][1], rel=1e-4)
    assert moved[equal + 1][0] > moved[equal + 1][1]


@pytest.mark.few
@pytest.mark.parametrize(("cp", "way"), [(8, "all_gather"), (16, "all_to_all")])
def test_heads_of_keys_that_are_too_few_are_repeated(cp, way, wires):
    """All of them, for each head of queries: so more than 2 q / kv ranks are needed, not (q / kv) / (1 - 1 / kv)."""
    plan = planned(16, 2, "cp16", "ulysses", wires) if cp == 16 else planned(16, 2, "cp8", "auto", wires)
    assert way in sent(plan)
    expected = formulas(16, 2, cp)
    assert expected["ulysses"] == pytest.approx(expected["gather"] * 2 * 8 / cp)
