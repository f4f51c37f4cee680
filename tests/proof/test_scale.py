"""Models that do not fit in float64, or have no weights: `verify` takes a copy with fewer repeated blocks."""

import dataclasses

import pytest
import torch
import zoo
from torch import nn

import autopart
from autopart.errors import InputError
from autopart.ir.facts import facts
from autopart.passes.rules.notation import Rule
from autopart.passes.rules.tables import RULES
from autopart.proof.scale import scaled_model
from autopart.proof.scale.scaled_model import VerifyLoad, blocks_to_keep, renamed, scaled_copy
from autopart.proof.verify import VerificationRun

LAYERS = 32


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x):
        return x + self.down(self.up(x).softmax(-1))


class Deep(nn.Module):
    """Blocks of two widths in turn, after a first of its own."""

    def __init__(self, num_layers):
        super().__init__()
        widths = [64, *(32 if i % 2 else 48 for i in range(num_layers - 1))]
        self.layers = nn.ModuleList(Block(width) for width in widths)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def deep():
    with torch.device("meta"):
        model = Deep(LAYERS)
    return model, {"x": torch.randn(4, 3, 16)}


def llama_on_meta():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 12}
    config = LlamaConfig(num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, **sizes)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return model, zoo.causal_batch(4, 12, 64)


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "dp2,pp2,tp2"])
def test_a_llama_of_32_layers_on_meta(mesh):
    model, batch = llama_on_meta()
    found = autopart.verify(model, mesh, example_kwargs=batch)
    assert found.ok, found
    assert f"verified on a copy with 2 of {LAYERS} blocks (model.layers)" in found.notes
    assert {name for name in found.errors if ".layers." in name} >= {"model.layers.1.mlp.up_proj.weight"}
    assert not any(".layers.2." in name for name in found.errors)
    assert model.config.num_hidden_layers == LAYERS and len(model.model.layers) == LAYERS


def test_every_kind_of_block_is_kept():
    model, batch = deep()
    copy = scaled_copy(model, batch)
    assert [layer.up.out_features for layer in copy.model.layers] == [64, 48, 32, 48, 32]
    assert copy.kept == {"layers": ((0, 1, 2, 3, 4), LAYERS)}
    assert not any(p.is_meta for p in copy.model.parameters())


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [
        ("AAAA", (0, 1)), ("AA", (0, 1)), ("A", (0,)), ("ABABAB", (0, 1, 2, 3)), ("ABBBB", (0, 1, 2)),
        ("AAAAB", (0, 1, 4)), ("ABC", (0, 1, 2)), ("AAABBB", (0, 1, 3, 4)),
    ],
)  # fmt: skip
def test_fewest(kinds, kept):
    assert blocks_to_keep(kinds) == kept


@pytest.mark.large
def test_the_plan_of_the_whole_model_is_followed():
    model, batch = llama_on_meta()
    plan = autopart.plan(model, "pp2,tp2", example_kwargs=batch)
    last = f"model.layers.{LAYERS - 1}.mlp.down_proj.weight"
    edited = dataclasses.replace(
        plan, parameters={**plan.parameters, "model.layers.*.mlp.down_proj.weight": {"tp": "R"}, last: {"tp": "S(1)"}}
    )
    found = autopart.verify(model, "pp2,tp2", example_kwargs=batch, plan=edited)
    assert found.ok, found
    copy = scaled_copy(model, batch)
    run = VerificationRun(model, {**batch, "use_cache": False}, scaled=True)
    decisions = run.arrange("pp2,tp2", edited).decisions
    assert str(decisions.place("model.layers.1.mlp.down_proj.weight", "tp")) == "R"
    assert str(decisions.place("model.layers.1.mlp.up_proj.weight", "tp")) == "S(0)"
    assert last not in decisions.stored and renamed(last, copy.kept) is None


@pytest.mark.large
def test_a_wrong_rule_is_found_on_the_copy(monkeypatch):
    model, batch = deep()
    monkeypatch.setitem(RULES, "aten::softmax", Rule("... -> ..."))
    plan = autopart.plan(model, "tp2", example_kwargs=batch)
    found = autopart.verify(model, "tp2", example_kwargs=batch, plan=plan, shrink=True)
    assert not found.ok and found.first_mismatch.keys == ("layers.0/softmax",)
    assert [facts(node)["key"] for node in found.smallest.operators] == ["layers.0/softmax"]


def test_blocks_that_the_model_counts_on_stay():
    class Counting(Deep):
        def forward(self, x):
            return self.layers[LAYERS - 1](x).sum() + super().forward(x)

    torch.manual_seed(0)
    found = autopart.verify(Counting(LAYERS), "dp2", example_kwargs={"x": torch.randn(4, 3, 16)}, scaled=True)
    assert found.ok and not any("copy" in note for note in found.notes)


@pytest.mark.large
def test_memory_decides(monkeypatch):
    model, batch = zoo.llama(num_layers=8)
    assert not any("copy" in note for note in autopart.verify(model, "tp2", example_kwargs=batch).notes)
    needed = VerifyLoad().estimate(model, autopart.tracing.trace_model.bind_call(model, (), batch)).total
    monkeypatch.setattr(scaled_model, "MOST_FOR_COPY", needed)
    monkeypatch.setattr(scaled_model, "SHARE_COPY", scaled_model.SHARE_FULL_SIZE)
    monkeypatch.setattr(scaled_model, "available_bytes", lambda device: needed)
    found = autopart.verify(model, "tp2", example_kwargs=batch)
    assert found.ok and "verified on a copy with 2 of 8 blocks (model.layers)" in found.notes
    monkeypatch.setattr(scaled_model, "available_bytes", lambda device: 10_000)
    with pytest.raises(InputError) as error:
        autopart.verify(model, "tp2", example_kwargs=batch)
    assert "in float64 needs" in str(error.value) and "2 of 8 blocks (model.layers)" in str(error.value)
    with pytest.raises(InputError, match="in float64 needs"):
        autopart.verify(model, "tp2", example_kwargs=batch, scaled=False)
