"""Predict training on long sequences on H100s, with the mesh that `search` chooses for each length.

Llama 3 8B on 64 GPUs and 70B on 256, in bfloat16, batches of about four million tokens, at most 80 GB a GPU. FLOPs
count attention as if it were not causal, as publications do, so MFU grows with the length.

    python benchmarks/lengths.py [--quick] [--json] [--only 8B 70B] [--lengths 8192 131072] [--picture FILE.svg]
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from _lengths_picture import draw
from torch import nn

import autopart

TOKENS = 2**22
LENGTHS = [2**13, 2**15, 2**17, 2**20]
MODELS: dict[str, tuple[int, dict[str, int]]] = {
    "8B": (64, {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}),
    "70B": (256, {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short length of the small model")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), help="these models")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="positions")
    parser.add_argument("--picture", metavar="FILE.svg", help="draw them")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.only, arguments.lengths = ["8B"], LENGTHS[:1]
    print(f"{'model':<6} {'positions':>9} {'GPUs':>5} {'tokens/s a GPU':>15} {'MFU':>7} {'memory':>9}  mesh")
    rows = [found(name, length) for name in arguments.only for length in arguments.lengths]
    if arguments.picture:
        draw(rows, arguments.picture)
    if arguments.json:
        print(json.dumps({"benchmark": "lengths", "rows": rows}))


def found(name: str, length: int) -> dict[str, Any]:
    gpus, sizes = MODELS[name]
    model, started = llama(sizes, length), time.perf_counter()
    count = max(1, TOKENS // length)
    ids = torch.zeros(count, length, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    options = {"global_batch": count, "example_kwargs": batch, "hardware": "h100-80gb-sxm", "memory": "80GB"}
    (best, *_) = autopart.search(model, gpus, **options)
    taken_s = best.cost["step_time_s"]
    mesh = (
        f"{best.mesh_object()}, zero={best.zero}, recompute={best.recompute}, {best.schedule.microbatches} microbatches"
    )
    row = {
        "model": name, "positions": length, "gpus": gpus, "rows": count, "mesh": mesh,
        "tokens_per_s": count * length / taken_s / gpus, "mfu": best.cost["mfu"],
        "memory_bytes": max(entry["total"] for entry in best.memory), "search_s": time.perf_counter() - started,
    }  # fmt: skip
    print(f"{name:<6} {length:>9,} {gpus:>5} {row['tokens_per_s']:>15,.0f} {row['mfu']:>6.1%} "
          f"{row['memory_bytes'] / 1e9:>6.1f} GB  {mesh}", flush=True)  # fmt: skip
    return row


def llama(sizes: dict[str, int], length: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **sizes, vocab_size=128256, num_key_value_heads=8, max_position_embeddings=length, use_cache=False
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


if __name__ == "__main__":
    main()
