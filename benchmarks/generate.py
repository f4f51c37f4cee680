"""Compare the time per token of `pm.generate` with `generate` of transformers, on one and two CPU processes.

Peers: transformers on one process, and transformers' own tensor parallelism (`tp_plan="auto"`) on two. For comparison,
"two copies" is transformers on two processes at once, each with half of the samples. All processes have one thread. A
row has the shortest wall time and processor time of the first rank over the repetitions, per new token, without the
prompt: the difference between a long and a short generation.

    python benchmarks/generate.py [--quick] [--json] [--meshes tp2 dp2] [--layers 12] [--width 512]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _ranks import of_first_rank

ROWS, PROMPT, SHORT = 4, 32, 4
PEERS = ("transformers", "tp_plan")
COPIES = "two copies"
"""Two processes of transformers at once, each with half of the samples. Shows what a second process gains here."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model on tp2, few tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--meshes", nargs="+", default=["tp2", "dp2", "pp2"], help="meshes of two ranks")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens")
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    if given.quick:
        given.meshes, given.layers, given.width, given.tokens, given.repeat = ["tp2"], 2, 64, 12, 1
    print(f"{'':<14} {'ms/token':>9} {'CPU ms/token':>13} {'of the faster peer':>19}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in (*PEERS, COPIES, *given.meshes):
            num_ranks = 1 if kind == "transformers" else 2
            sizes = (given.layers, given.width, given.tokens, given.repeat)
            row = of_first_rank(measured, num_ranks, num_ranks, kind, folder, sizes)
            peers = [peer["ms"] for peer in rows if peer["kind"] in PEERS]
            row |= {"ratio": None if kind in (*PEERS, COPIES) else row["ms"] / min(peers)}
            rows.append(row)
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
            print(f"{kind:<14} {row['ms']:>9.2f} {row['cpu_ms']:>13.2f} {ratio:>19}", flush=True)
    if given.json:
        print(json.dumps({"benchmark": "generate", "rows": rows}))


def measured(rank: int, store: str, num_ranks: int, kind: str, folder: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    layers, width, tokens, repeat = sizes
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    generate = generator(kind, folder, layers, width)
    rows = ROWS // 2 if kind == COPIES else ROWS
    ids = torch.randint(1, 1000, (rows, PROMPT), generator=torch.Generator().manual_seed(0))

    def run(count: int) -> tuple[float, float]:
        started, cpu = time.perf_counter(), time.process_time()
        generate(input_ids=ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return time.perf_counter() - started, time.process_time() - cpu

    run(tokens), run(SHORT)
    times = [(run(SHORT), run(tokens)) for _ in range(repeat)]
    wall, cpu = (min(long[i] for _, long in times) - min(short[i] for short, _ in times) for i in (0, 1))
    per_token = 1e3 / (tokens - SHORT)
    return {"kind": kind, "ms": wall * per_token, "cpu_ms": cpu * per_token}


def generator(kind: str, folder: str, layers: int, width: int) -> Callable[..., Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    import autopart

    if kind == "tp_plan":
        return LlamaForCausalLM.from_pretrained(folder, tp_plan="auto").eval().generate
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    if kind == "transformers":
        model.save_pretrained(folder)
    if kind in ("transformers", COPIES):
        return model.generate
    ids = torch.zeros(ROWS, PROMPT, dtype=torch.int64)
    return autopart.parallelize(model, kind, example_kwargs={"input_ids": ids, "labels": ids}).generate


if __name__ == "__main__":
    main()
