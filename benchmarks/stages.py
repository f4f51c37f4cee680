"""Measure the balance of pipeline stages: slowest stage over the lower bound, against equal layer counts.

The lower bound is the maximum of the mean stage and the largest operator; no partition can be below it. The head of
a GPT-2 (vocabulary 50257) costs as much as several layers, so equal layer counts make the last stage far too slow.
Exact boundaries between any two operators avoid this.

    python benchmarks/stages.py [--quick] [--json]

With `--json` the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from autopart.passes.choose.stages.stage_partition import equal_layer_loads, partition
from autopart.recipe.make_plan import prepare
from autopart.tracing.trace_model import bind_call

NUM_STAGES = 4
QUICK = {
    "gpt2-tiny": {"n_embd": 64, "n_layer": 4, "n_head": 2, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
}
MODELS = {
    "gpt2-small": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
}
TARGET = 1.05  # heaviest stage over the lower bound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one small model")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    rows = {name: measure(**sizes) for name, sizes in (QUICK if arguments.quick else MODELS).items()}

    print(f"heaviest of {NUM_STAGES} pipeline stages over the lower bound (1 is perfect; target {TARGET})\n")
    print(f"{'model':<12} {'operators':>9} {'autopart':>9} {'equal layers':>13}   ", end="")
    print("FLOPs by stage, autopart | equal layers")
    for name, row in rows.items():
        shares = " | ".join(" ".join(f"{share:5.1%}" for share in row[key]) for key in ("shares", "equal_shares"))
        print(f"{name:<12} {row['operators']:>9} {row['ratio']:>9.4f} {row['equal_layers_ratio']:>13.4f}   {shares}")
    if arguments.json:
        print(json.dumps({"benchmark": "stages", "num_stages": NUM_STAGES, "models": rows}))


def measure(**sizes: int) -> dict:
    """The partition of one GPT-2, and that of equal layer counts."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(**sizes)).train()
    model.loss_type = "ForCausalLM"  # which transformers would fall back to, with a warning
    ids = torch.zeros(8, 1024, dtype=torch.long, device="meta")
    traced = prepare(model, bind_call(model, (), {"input_ids": ids, "labels": ids.clone()}))
    found = partition(traced.graph, NUM_STAGES)
    equal = equal_layer_loads(traced.graph, NUM_STAGES)
    total = sum(found.loads)
    return {
        "operators": sum(node.op == "call_function" for node in traced.graph.nodes),
        "ratio": max(found.loads) / found.lower_bound,
        "equal_layers_ratio": max(equal) / found.lower_bound,
        "shares": [load / total for load in found.loads],
        "equal_shares": [load / total for load in equal],
    }


if __name__ == "__main__":
    main()
