"""Compare every `dp_sync=` method with the exact all-reduce of gradients.

    digits    accuracy on 450 held-out handwritten digits of scikit-learn, of a net of 64, 128, 10. Samples are
              distributed evenly, or by label with two and a half labels per rank. SGD without momentum, four samples
              per rank and step, so that the effect of noisy gradients is visible.
    gpt2      loss of a GPT-2 of two layers on held-out bytes of the Python documentation. AdamW.
    links     predicted step of GPT-2 (124M) on 16 nodes of one H100, at 1, 10, 100 and 400 Gb/s between them.

All run on four gloo processes. Figures are the mean over several seeds, and the largest deviation from it. `sent`:
bytes that a rank sends in a step over those of the exact all-reduce, as counted by the plan.

    python benchmarks/dp_sync.py [--quick] [--json] [--only METHOD ...] [--seeds 3] [--gpt2-seeds 3]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _methods_picture import draw
from _ranks import of_first_rank
from torch import Tensor, nn

import autopart
from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.dp_sync_costs import carried, exchanges
from autopart.extras.dp_sync.sync_options import DpSync

NUM_RANKS, TRAINED, ROWS, WIDTH = 4, 1347, 4, 48
METHODS = [
    "all_reduce", "qsgd:4bit", "top_k:0.01", "top_k:0.01,false", "sign", "double_squeeze:top_k:0.01",
    "double_squeeze:sign", "ef21:0.01", "ef21_sgdm:0.01", "neolithic:0.01,2", "powersgd:4", "gossip:ring",
    "gossip:one_peer", "exact_diffusion:ring", "gradient_tracking:ring", "local:16", "diloco:16",
]  # fmt: skip
LINKS = (1, 10, 100, 400)
Rows = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two methods, a few steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--only", nargs="+", default=[], help="these methods alone")
    parser.add_argument("--seeds", type=int, default=3, help="how many trainings of each on digits")
    parser.add_argument("--gpt2-seeds", type=int, default=3, help="and of GPT-2; 0: it is not trained")
    parser.add_argument("--picture", metavar="FILE.svg", help="draw the loss over the time of a step")
    arguments = parser.parse_args()
    methods = arguments.only or (["all_reduce", "top_k:0.01"] if arguments.quick else METHODS)
    seeds = (1, 1) if arguments.quick else (arguments.seeds, arguments.gpt2_seeds)
    steps = 5 if arguments.quick else 300  # of GPT-2; twice as many on digits
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = of_first_rank(learned, NUM_RANKS, methods, seeds, steps)
    add_links(rows)
    report(rows)
    if arguments.picture:
        draw(rows, arguments.picture)
    if arguments.json:
        print(json.dumps({"methods": rows}))


def learned(rank: int, store: str, methods: list[str], seeds: tuple[int, int], steps: int) -> Rows:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)
    rows: Rows = {}
    for method in methods:
        digits = {split: [train_digits(method, split, seed, 2 * steps) for seed in range(seeds[0])] for split in SPLITS}
        losses = [train_gpt2(method, seed, steps) for seed in range(seeds[1])]
        rows[method] = {**{split: spread(found) for split, found in digits.items()}, "loss": spread(losses)}
        if rank == 0:
            print(f"{method} trained: {json.dumps(rows[method])}", flush=True)
    for method, step_ms in timed(methods, steps // 5).items():
        rows[method]["step_ms"] = step_ms
    return rows


def spread(found: list[float]) -> list[float]:
    """The mean, and how far the furthest is from it; NaN of none."""
    if not found:
        return [math.nan, math.nan]
    mean = statistics.fmean(found)
    return [mean, max(abs(one - mean) for one in found)]


# --- Digits.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.outer(self.inner(x).relu()), labels)


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(found.data, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order]


def as_they_come(labels: Tensor) -> Tensor:
    return torch.arange(len(labels))


def by_label(labels: Tensor) -> Tensor:
    return labels.argsort(stable=True)


SPLITS = {"even": as_they_come, "by_label": by_label}


def train_digits(method: str, split: str, seed: int, steps: int) -> float:
    torch.manual_seed(seed)
    x, labels = digits()
    owned = SPLITS[split](labels[:TRAINED]).chunk(NUM_RANKS)

    def batches() -> Iterator[dict[str, Tensor]]:
        draws = torch.Generator().manual_seed(seed)
        while True:
            places = [rows[torch.randint(len(rows), (ROWS,), generator=draws)] for rows in owned]
            chosen = torch.cat(places)
            yield {"x": x[chosen], "labels": labels[chosen]}

    found = Net()
    train(found, batches(), method, lambda given: torch.optim.SGD(given, lr=0.3), steps)
    with torch.no_grad():
        guessed = found.outer(found.inner(x[TRAINED:]).relu()).argmax(-1)
    return float((guessed == labels[TRAINED:]).double().mean())


# --- The Python documentation.


def documentation() -> Tensor:
    from pydoc_data.topics import topics

    return torch.tensor(list("\n".join(topics.values()).encode()))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": WIDTH}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False))


def rows_of(text: Tensor, number: int, draws: torch.Generator) -> dict[str, Tensor]:
    starts = torch.randint(len(text) - WIDTH, (number,), generator=draws)
    rows = torch.stack([text[start : start + WIDTH] for start in starts])
    return {"input_ids": rows, "labels": rows}


def adamw(given: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(given, lr=2e-3)


def train_gpt2(method: str, seed: int, steps: int) -> float:
    """The loss on text that was not trained on."""
    torch.manual_seed(seed)
    found, text = gpt2(), documentation()
    split = len(text) * 9 // 10

    def batches() -> Iterator[dict[str, Tensor]]:
        draws = torch.Generator().manual_seed(seed)
        while True:
            yield rows_of(text[:split], 2 * NUM_RANKS, draws)

    train(found, batches(), method, adamw, steps)
    with torch.no_grad():
        kept = rows_of(text[split:], 256, torch.Generator().manual_seed(0))
        return float(found(**kept).loss)


def train(found: nn.Module, batches: Iterator[dict[str, Tensor]], method: str, optimizer_of: Any, steps: int) -> None:
    """Train on the ranks there are, and load what came of it."""
    step, pm = step_of(found, next(batches), method, optimizer_of)
    for _ in range(steps):
        step(next(batches))
    found.load_state_dict(pm.full_state_dict())


def step_of(found: nn.Module, example: dict[str, Tensor], method: str, optimizer_of: Any) -> tuple[Any, Any]:
    """A whole training step of a partitioned model, and that model."""
    pm = autopart.parallelize(found, f"dp{NUM_RANKS}", example_kwargs=example, dp_sync=method)
    optimizer = optimizer_of(pm.parameters())
    pm.attach(optimizer)

    def step(batch: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        pm.step(**batch)
        optimizer.step()

    return step, pm


def timed(methods: list[str], rounds: int) -> dict[str, float]:
    """The median milliseconds of a step by method: in every round, one step of each."""
    batch = rows_of(documentation(), 2 * NUM_RANKS, torch.Generator().manual_seed(0))
    steps = {method: step_of(gpt2(), batch, method, adamw)[0] for method in methods}
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step(batch)
            seconds[method].append(time.perf_counter() - start)
    return {method: 1e3 * statistics.median(found) for method, found in seconds.items()}


# --- Predicted.


def add_links(rows: Rows) -> None:
    """Of every method the bytes sent beside the exact sum's, and seconds of a step at each speed of the links."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False))
        ids = torch.zeros(64, 1024, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    base = replace(Hardware.load("h100-80gb-sxm"), devices_per_node=1, collectives={})
    for method in ["all_reduce", *(name for name in rows if name != "all_reduce")]:
        plan = autopart.plan(
            model, "dp16", example_kwargs=batch, precision="bf16", hardware="h100-80gb-sxm", dp_sync=method
        )
        row = rows.setdefault(method, {})
        row["links_ms"] = {
            link: 1e3 * plan.cost.on(replace(base, node_link_bytes_per_s=link * 1e9 / 8)).step_time_s for link in LINKS
        }
        row["sent"] = sent_bytes(model, method) / sent_bytes(model, "all_reduce")


def sent_bytes(model: nn.Module, method: str) -> float:
    sizes = [(float(p.numel()), 4, tuple(p.shape)) for p in model.parameters()]
    return sum(one.sent_bytes(NUM_RANKS) for one in exchanges(carried(DpSync.parse(method).method, sizes), NUM_RANKS))


def report(rows: Rows) -> None:
    head = "method                     sent   digits: even     by label     gpt2: loss    gloo ms"
    print(head + "".join(f"{f'{link} Gb/s':>10}" for link in LINKS))
    for method, row in rows.items():
        (even, a), (label, b), (loss, c) = row["even"], row["by_label"], row["loss"]
        learned = f"{even:.3f} ± {a:.3f}  {label:.3f} ± {b:.3f}  {loss:.3f} ± {c:.3f}  {row['step_ms']:6.1f}"
        print(f"{method:25} {row['sent']:6.3f}  {learned}" + "".join(f"{ms:10.1f}" for ms in row["links_ms"].values()))


if __name__ == "__main__":
    main()
