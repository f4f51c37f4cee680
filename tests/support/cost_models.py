"""Models and hardware profiles for tests of costs."""

import json
from functools import cache

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


@cache
def gpt(hidden=64, layers=3, heads=4, vocabulary=120, tokens=32, rows=8, attention="eager"):
    with torch.device("meta"):
        config = GPT2Config(
            n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=vocabulary, n_positions=64, bos_token_id=0,
            eos_token_id=0, attn_implementation=attention, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"
        ids = torch.zeros(rows, tokens, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids.clone()}


def llama(dtype, layers=4, hidden=256, rows=16, tokens=64, vocab=512, widening=2):
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=widening * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        ids = torch.zeros(rows, tokens, dtype=torch.long)
        return LlamaForCausalLM(config).to(dtype), {"input_ids": ids, "labels": ids.clone()}


SECOND = {"value": 1e12, "unit": "1/s", "source": "a device to count on"}


NOTHING, ENDLESS = {**SECOND, "value": 1e-30}, {**SECOND, "value": 1e30}


def profile(folder, **numbers):
    """A device that does 1e12 FLOP/s whatever the product, and on which nothing else takes time, but for `numbers`."""
    data = {
        "name": "counting", "flops_per_s": {d: SECOND for d in ("float32", "float64", "bfloat16")},
        "matmul_efficiency": {"value": [[1.0, 1.0], [1e15, 1.0]], "unit": "share of peak by FLOPs", "source": "exact"},
        "launch_s": NOTHING, "memory_bytes": ENDLESS, "memory_bytes_per_s": ENDLESS,
        "devices_per_node": {"value": 8, "unit": "devices", "source": "a node"},
        "link_bytes_per_s": ENDLESS, "link_latency_s": NOTHING,
        "node_link_bytes_per_s": ENDLESS, "node_link_latency_s": NOTHING,
    }  # fmt: skip
    data |= {name: {**SECOND, "value": number} for name, number in numbers.items()}
    path = folder / f"counting{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(data))
    return str(path)


def large_llama(layers):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers, num_attention_heads=32
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ids = torch.zeros(2, 2048, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids.clone()}
