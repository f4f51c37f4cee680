"""Compare forward and backward of a long-sequence Llama on `cp` with hand-written versions.

    gather    every rank has a shard of the sequence; keys and values are gathered, and used up to the last query
    ring      keys and values rotate, partial results are merged by log-sum-exp, gradients return to their owners

Both hand-written versions have contiguous shards and reduce gradients in one bucket. All variants run in the same
processes in turn, step by step; figures are medians of the ratios of neighbouring steps. The loss and a gradient of
all are compared first. `unbalanced`: autopart with contiguous shards, in which the last rank attends to most keys.

    python benchmarks/context.py [--quick] [--json] [--only NAME ...] [--seq 2048] [--ranks 2]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from two_ranks import PROBE, Batch, Sizes, Step, Time, autopart_on, build, check_equal, timed

LARGE = Sizes(hidden=256, mlp=704, layers=2, vocab=1024, rows=1, seq=2048, warm_ups=2, rounds=12)
QUICK = Sizes(hidden=64, mlp=128, layers=2, vocab=256, rows=1, seq=64, warm_ups=1, rounds=2)
aten = torch.ops.aten


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="leave the others out")
    parser.add_argument("--seq", type=int, help="how many positions")
    parser.add_argument("--ranks", type=int, default=2, help="how many processes")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (f"file://{folder}/store", arguments), nprocs=arguments.ranks)


def rank_main(rank: int, store: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=arguments.ranks)
    sizes = QUICK if arguments.quick else LARGE
    sizes = replace(sizes, seq=arguments.seq or sizes.seq)
    model, batch = build(sizes)
    steps = {name: VARIANTS[name](copy.deepcopy(model), batch) for name in arguments.only}
    check_equal(steps)
    times: dict[str, list[Time]] = {name: [] for name in steps}
    for number in range(sizes.warm_ups + sizes.rounds):
        for name, step in steps.items():
            taken = timed(step)
            if number >= sizes.warm_ups:
                times[name].append(taken)
    if rank == 0:
        report(sizes, times, arguments.json)
    dist.destroy_process_group()


# --- By hand.


def by_hand(attention: Callable[..., Tensor]) -> Callable[[nn.Module, Batch], Step]:
    """Every rank runs the model on its piece of the positions, with this attention."""

    def make(model: nn.Module, batch: Batch) -> Step:
        from transformers import AttentionInterface

        def interface(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
            groups = q.size(1) // k.size(1)
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
            return attention(q, k, v).transpose(1, 2).contiguous(), None

        name = f"by_hand_{attention.__name__}"
        AttentionInterface.register(name, interface)
        model.config._attn_implementation = name
        (_, seq), rank, ranks = batch["input_ids"].shape, dist.get_rank(), dist.get_world_size()
        own = slice(rank * seq // ranks, (rank + 1) * seq // ranks)
        ids, positions = batch["input_ids"][:, own], torch.arange(seq)[None, own]
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)[:, own]
        count = batch["labels"][:, 1:].numel()
        parameters = list(model.parameters())

        def run() -> Tensor:
            hidden = model.model(input_ids=ids, position_ids=positions, attention_mask=None).last_hidden_state
            logits = model.lm_head(hidden).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / count
            loss.backward()
            whole = torch.cat([p.grad.flatten() for p in parameters] + [loss.detach()[None]])
            dist.all_reduce(whole)
            for p, summed in zip(parameters, whole.split([p.numel() for p in parameters] + [1]), strict=False):
                p.grad.copy_(summed.view_as(p))
            return whole[-1]

        return Step(run, model, lambda: model.get_parameter(PROBE).grad)

    return make


class Gathered(torch.autograd.Function):
    """All ranks' pieces; the gradient's are summed on the rank that they belong to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        pieces = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, x.contiguous())
        return torch.cat(pieces, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        pieces = [piece.contiguous() for piece in grad.chunk(dist.get_world_size(), 2)]
        mine = torch.empty_like(pieces[0])
        dist.reduce_scatter(mine, pieces)
        return mine


def gather(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = Gathered.apply(torch.stack((k, v)).flatten(0, 1)).chunk(2)
    own, before = q.size(2), dist.get_rank() * q.size(2)
    if not before:
        return F.scaled_dot_product_attention(q, k[:, :, :own], v[:, :, :own], is_causal=True)
    mask = torch.ones(own, before + own, dtype=torch.bool).tril(before)
    return F.scaled_dot_product_attention(q, k[:, :, : before + own], v[:, :, : before + own], mask)


def moved_on(x: Tensor) -> Tensor:
    """What the rank before has."""
    rank, ranks, found = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x.contiguous(), (rank + 1) % ranks), dist.P2POp(dist.irecv, found, (rank - 1) % ranks)]
    )
    for work in works:
        work.wait()
    return found


class Ring(torch.autograd.Function):
    """Attention to the own block, causal, and to those of all ranks before (Liu et al. 2023)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        block = torch.stack((k, v))
        for hops in range(1, dist.get_world_size()):
            block = moved_on(block)
            if hops <= dist.get_rank():
                more, more_lse = aten._scaled_dot_product_flash_attention_for_cpu(q, *block, 0.0, False)
                total = torch.logaddexp(lse, more_lse)
                out = out * (lse - total).exp()[..., None] + more * (more_lse - total).exp()[..., None]
                lse = total
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        block, grad = torch.stack((k, v)), grad.contiguous()
        back = aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = back(grad, q, k, v, out, lse, 0.0, True)
        visiting = torch.zeros_like(block)
        for hops in range(1, dist.get_world_size()):
            block, visiting = moved_on(block), moved_on(visiting) if hops > 1 else visiting
            if hops <= dist.get_rank():
                more, *visiting_grads = back(grad, q, *block, out, lse, 0.0, False)
                dq, visiting = dq + more, visiting + torch.stack(visiting_grads)
        home = moved_on(visiting)
        return dq, dk + home[0], dv + home[1]


def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Ring.apply(q.contiguous(), k.contiguous(), v.contiguous())


# --- By autopart.


def on_cp(context: str) -> Callable[[nn.Module, Batch], Step]:
    return lambda model, batch: autopart_on(f"cp{dist.get_world_size()}", context=context)(model, batch)


def in_order(model: nn.Module, batch: Batch) -> Step:
    with mock.patch("autopart.passes.facts.mask_facts._is_causal", lambda *_: False):
        return on_cp("gather")(model, batch)


VARIANTS: dict[str, Callable[[nn.Module, Batch], Step]] = {
    "autopart-gather": on_cp("gather"),
    "autopart-ulysses": on_cp("ulysses"),
    "autopart-ring": on_cp("ring"),
    "unbalanced": in_order,
    "gather": by_hand(gather),
    "ring": by_hand(ring),
}
MINE = [name for name in VARIANTS if name.startswith("autopart-")]
PAIRS = [(mine, other) for mine in MINE for other in ("gather", "ring", "unbalanced")]


def report(sizes: Sizes, times: dict[str, list[Time]], as_json: bool) -> None:
    ranks = dist.get_world_size()
    print(f"Llama: {sizes.layers} layers, hidden {sizes.hidden}, {sizes.seq} positions, cp{ranks} on gloo\n")
    medians = {}
    for name, values in times.items():
        wall_s, cpu_s = zip(*values, strict=True)
        medians[name] = Time(statistics.median(wall_s), statistics.median(cpu_s))
        print(f"{name:<18} {medians[name].wall_s:>9.4f} s {medians[name].cpu_s:>9.4f} cpu s")
    ratios = {}
    print(f"\n{'':<32} {'time':>6} {'cpu':>6}   (medians of the rounds' ratios; aim 1.0)")
    for mine, other in PAIRS:
        if mine in times and other in times:
            pairs = list(zip(times[mine], times[other], strict=True))
            wall, cpu = (statistics.median(a[i] / b[i] for a, b in pairs) for i in range(2))
            ratios[f"{mine}/{other}"] = {"wall": wall, "cpu": cpu}
            print(f"{mine + ' / ' + other:<32} {wall:>6.3f} {cpu:>6.3f}")
    if as_json:
        median = {name: value._asdict() for name, value in medians.items()}
        print(json.dumps({"benchmark": "context", "sizes": vars(sizes), "median": median, "ratio": ratios}))


if __name__ == "__main__":
    main()
