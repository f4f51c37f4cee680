"""Measure how much longer a training step takes with Muon than with AdamW: two CPU processes beside one.

The model is a Llama. All processes have one thread, and all rows have the same global batch. Muon's Newton-Schulz
iterations are in bfloat16: on a CPU without such products, a step with `--width 1024` takes minutes. A row has the
shortest step of the first rank over the repetitions, and the ratio of Muon to AdamW. The last column divides this ratio
by that of one process.

    python benchmarks/optimizers.py [--quick] [--json] [--layers 2] [--width 256] [--tokens 64] [--repeat 3]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _ranks import of_first_rank
from torch import Tensor

ROWS = 8
ALONE = "one process"
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
CASES = {ALONE: ("dp1", {}), "tp2": ("tp2", {}), "dp2": ("dp2", {}), "dp2, ZeRO 1": ("dp2", {"zero": 1}),
         "dp2, ZeRO 3": ("dp2", {"zero": 3})}  # fmt: skip
OPTIMIZERS = ("adamw", "muon")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model, one repetition")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each of 8 samples")
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    if given.quick:
        given.layers, given.width, given.tokens, given.repeat = 1, 64, 16, 1
    sizes = given.layers, given.width, given.tokens, given.repeat
    print(f"{'':<14}{'AdamW ms':>10}{'Muon ms':>10}{'ratio':>8}{'of one process':>16}")
    rows: list[dict[str, Any]] = []
    for title in CASES:
        ranks = 1 if title == ALONE else 2
        times = {kind: of_first_rank(measured, ranks, title, kind, sizes) for kind in OPTIMIZERS}
        ratio = times["muon"] / times["adamw"]
        rows.append({"case": title, **times, "ratio": ratio, "of_one": ratio / (rows[0]["ratio"] if rows else ratio)})
        shown = f"{times['adamw']:>10.1f}{times['muon']:>10.1f}{ratio:>8.2f}{rows[-1]['of_one']:>16.2f}"
        print(f"{title:<14}{shown}", flush=True)
    if given.json:
        print(json.dumps({"benchmark": "optimizers", "rows": rows}))


def measured(rank: int, store: str, title: str, kind: str, sizes: tuple[int, ...]) -> float:
    """Return the milliseconds of the shortest training step."""
    layers, width, tokens, repeat = sizes
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=1 if title == ALONE else 2)
    model, ids = llama(layers, width), torch.randint(512, (ROWS, tokens), generator=torch.Generator().manual_seed(0))
    forward_backward, optimizers = plain(model, ids, kind) if title == ALONE else partitioned(model, ids, kind, title)
    times = []
    for _ in range(repeat + 2):
        started = time.perf_counter()
        forward_backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    return 1e3 * min(times[2:])


def plain(model: Any, ids: Tensor, kind: str) -> tuple[Callable[[], Any], list[torch.optim.Optimizer]]:
    hidden = [p for p in model.model.layers.parameters() if p.ndim == 2 and kind == "muon"]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in hidden)]
    optimizers = [ADAMW(others), *([torch.optim.Muon(hidden, lr=1e-3)] if hidden else [])]
    return lambda: model(input_ids=ids, labels=ids).loss.backward(), optimizers


def partitioned(
    model: Any, ids: Tensor, kind: str, title: str
) -> tuple[Callable[[], Any], list[torch.optim.Optimizer]]:
    import autopart

    mesh, options = CASES[title]
    batch = {"input_ids": ids, "labels": ids}
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, **options)
    muon = pm.optimizer(torch.optim.Muon, lr=1e-3, others=ADAMW) if kind == "muon" else None
    return partial(pm.step, **batch), [muon or ADAMW(pm.parameters())]


def llama(layers: int, width: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, use_cache=False,
    ))  # fmt: skip


if __name__ == "__main__":
    main()
