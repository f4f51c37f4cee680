"""Frozen weights beside small trained ones (LoRA): what needs no gradient is sharded like what does."""

import pytest
import torch
import zoo
from transformers import LlamaConfig, LlamaForCausalLM

import autopart
from autopart.ir.facts import facts
from autopart.proof.verify import VerificationRun
from autopart.tracing.trace_model import bind_call

SIZES = {
    "toy": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    "real": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 8},
}
RANK = {"toy": 4, "real": 16}
PROJECTIONS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"


def llama(size: str, tied: bool = False) -> LlamaForCausalLM:
    common = {"num_hidden_layers": 2, "vocab_size": 160, "use_cache": False, "tie_word_embeddings": tied}
    with torch.device("meta" if size == "real" else "cpu"):
        return LlamaForCausalLM(LlamaConfig(**common, **SIZES[size]))


def with_adapters(model: LlamaForCausalLM, rank: int) -> torch.nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=rank, target_modules=PROJECTIONS.split(), lora_dropout=0.0, init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.few
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_frozen_weights_lie_as_trained_ones_do(size, tied):
    """Cutting a whole frozen weight costs nothing at run time, but no memory is saved by it."""
    batch = zoo.causal_batch(8, 12, 160) if size == "toy" else zoo.causal_batch(2, 2048, 160)
    options = {"example_kwargs": batch, "sequence_parallel": False}
    plain = autopart.plan(llama(size, tied), "tp2", **options)
    plan = autopart.plan(with_adapters(llama(size, tied), RANK[size]), "tp2", **options)
    for name in PROJECTIONS.split():
        owner = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        where = f"model.layers.1.{owner}.{name}"
        place = plain.placement_text(f"{where}.weight", "tp")
        adapted = f"base_model.model.{where}"
        found = {part: plan.placement_text(f"{adapted}.{part}.weight", "tp")
                 for part in ("base_layer", "lora_A.default", "lora_B.default")}  # fmt: skip
        assert place in ("S(0)", "S(1)")
        assert found == dict.fromkeys(found, place), where
    embedding = plan.placement_text("base_model.model.model.embed_tokens.weight", "tp")
    assert embedding == "S(0)" if tied else embedding.startswith("S(")


@pytest.mark.large
@pytest.mark.parametrize("tied", [False, True])
def test_adapters_are_sharded_and_exact(tied):
    model, batch = with_adapters(llama("toy", tied), RANK["toy"]), zoo.causal_batch(8, 12, 160)
    run = VerificationRun(model, bind_call(model, (), batch))
    for mesh in ("tp2", "tp4", "dp2,pp2,tp2"):
        arrangement = run.arrange(mesh)
        on_tp = arrangement.decisions.strategies["tp"]
        products = [n for n in on_tp if facts(n)["pattern"] and facts(n)["pattern"].flops]
        cut = [n for n in products if on_tp[n].factor]
        share = sum(facts(n)["pattern"].flops for n in cut) / sum(facts(n)["pattern"].flops for n in products)
        assert share >= 0.9, f"{mesh}: {share:.1%}"
        found = run.check(arrangement)
        assert found.ok, found
