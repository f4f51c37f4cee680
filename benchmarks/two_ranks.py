"""Compare a step of autopart with three other ways to run the same Llama on two CPU cores.

    plain       the unpartitioned model: one process with two threads, where the others have two with one thread each
    dtensor-tp  an expert's `parallelize_module`: the Megatron plan, with vocabulary-parallel embedding and loss
    hand-pp     an expert's `PipelineStage`s: the best split at a layer boundary, the same schedule

A step is forward and backward until gradients are ready. All variants run in the same two processes, interleaved round
after round, so that noise affects all equally. The loss and a gradient of every variant are compared first.
`plain-1-thread` gives processor seconds without partitioning; the difference is the cost of partitioning.

    python benchmarks/two_ranks.py [--quick] [--json] [--only autopart-tp ...]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

NUM_RANKS = 2
MICROBATCHES = 4
PROBE = "model.layers.0.input_layernorm.weight"
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    hidden: int = 512
    mlp: int = 1408
    layers: int = 4
    vocab: int = 4096
    rows: int = 8
    seq: int = 128
    warm_ups: int = 3
    rounds: int = 12


QUICK = Sizes(hidden=64, mlp=128, layers=2, vocab=256, seq=32, warm_ups=1, rounds=2)
PAIRS = (
    ("autopart-tp", "plain"),
    ("autopart-tp", "plain-1-thread"),
    ("autopart-tp", "dtensor-tp"),
    ("autopart-pp", "plain"),
    ("autopart-pp", "plain-1-thread"),
    ("autopart-pp", "hand-pp"),
)
TARGETS = {"dtensor-tp": 1.0, "hand-pp": 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="leave the others out")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (f"file://{folder}/store", arguments), nprocs=NUM_RANKS)


def rank_main(rank: int, store: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)
    sizes = QUICK if arguments.quick else Sizes()
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


def build(sizes: Sizes) -> tuple[nn.Module, Batch]:
    """The same Llama and batch on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=sizes.hidden, intermediate_size=sizes.mlp, num_hidden_layers=sizes.layers,
        num_attention_heads=8, num_key_value_heads=4, vocab_size=sizes.vocab,
        max_position_embeddings=sizes.seq, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, sizes.vocab, (sizes.rows, sizes.seq))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


class Step:
    """One way to run a training step: `run()` makes the gradients of `parameters` and returns the loss, where known."""

    def __init__(self, run: Callable[[], Tensor | None], module: nn.Module, probe: Callable[[], Tensor | None]):
        self.run, self.parameters, self.probe = run, list(module.parameters()), probe

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


# --- The variants.


def plain(num_threads: int) -> Callable[[nn.Module, Batch], Step]:
    """On rank 0 alone, while the other rank waits."""

    def make(model: nn.Module, batch: Batch) -> Step:
        def run() -> Tensor | None:
            if dist.get_rank() != 0:
                return None
            torch.set_num_threads(num_threads)
            loss = model(**batch).loss
            loss.backward()
            torch.set_num_threads(1)
            return loss.detach()

        return Step(run, model, lambda: model.get_parameter(PROBE).grad)

    return make


def autopart_on(mesh: str, **options: Any) -> Callable[[nn.Module, Batch], Step]:
    def make(model: nn.Module, batch: Batch) -> Step:
        import autopart

        pm = autopart.parallelize(model, mesh, example_kwargs=batch, **options)
        return Step(lambda: pm.step(**batch), pm, lambda: pm.full_grads()[PROBE])

    return make


def dtensor_tp(model: nn.Module, batch: Batch) -> Step:
    """Megatron's plan (Shoeybi et al. 2019) in torch's own words, with the vocabulary cut too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    column, row = ColwiseParallel(), RowwiseParallel()
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{part}"] = column
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{part}"] = row
    parallelize_module(model, init_device_mesh("cpu", (NUM_RANKS,)), plan)

    def run() -> Tensor:
        with loss_parallel():
            loss = model(**batch).loss
            loss.backward()
        return loss.detach().to_local()

    return Step(run, model, lambda: model.get_parameter(PROBE).grad)


def hand_pp(model: nn.Module, batch: Batch) -> Step:
    """Two stages cut at the layer boundary that balances them best, 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, tokens = dist.get_rank(), batch["labels"][:, 1:].numel()
    stage = LlamaStage(model, best_split(model), is_first=rank == 0)

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        """This microbatch's part of the mean over all tokens."""
        shifted = logits[:, :-1].reshape(-1, logits.size(-1)).float()
        return F.cross_entropy(shifted, labels[:, 1:].reshape(-1), reduction="sum") / tokens

    schedule = Schedule1F1B(
        PipelineStage(stage, rank, NUM_RANKS, torch.device("cpu")), MICROBATCHES, loss_fn=loss_fn, scale_grads=False
    )

    def run() -> Tensor | None:
        if rank == 0:
            schedule.step(batch["input_ids"])
            return None
        losses: list[Tensor] = []
        schedule.step(target=batch["labels"], losses=losses, return_outputs=False)
        return torch.stack(losses).sum().detach()

    return Step(run, stage, lambda: None if rank else model.get_parameter(PROBE).grad)


class LlamaStage(nn.Module):
    """The embedding and the layers before `split`, or the layers from there, the norm and the head."""

    def __init__(self, model: nn.Module, split: int, is_first: bool):
        super().__init__()
        self.rotary = model.model.rotary_emb
        self.layers = model.model.layers[:split] if is_first else model.model.layers[split:]
        self.embed = model.model.embed_tokens if is_first else None
        self.norm, self.head = (None, None) if is_first else (model.model.norm, model.lm_head)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.embed is None else self.embed(x)
        positions = self.rotary(hidden, torch.arange(hidden.size(1))[None])
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=positions)  # None: causal
        return hidden if self.head is None else self.head(self.norm(hidden))


def best_split(model: nn.Module) -> int:
    """How many layers go before the cut, so that the heavier stage is as light as can be, by matrix sizes."""
    layer = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() == 2)
    count, head = len(model.model.layers), model.lm_head.weight.numel()
    return min(range(1, count), key=lambda before: max(before * layer, (count - before) * layer + head))


VARIANTS: dict[str, Callable[[nn.Module, Batch], Step]] = {
    "plain": plain(NUM_RANKS),
    "plain-1-thread": plain(1),
    "autopart-tp": autopart_on("tp2"),
    "dtensor-tp": dtensor_tp,
    "autopart-pp": autopart_on("pp2", schedule="1f1b", microbatches=MICROBATCHES),
    "hand-pp": hand_pp,
}


# --- Measuring.


class Time(NamedTuple):
    """Of one step: seconds from a common start until the slowest rank is done, and processor seconds of all ranks."""

    wall_s: float
    cpu_s: float


def timed(step: Step) -> Time:
    step.clear()
    dist.barrier()
    start_s, cpu_start_s = time.perf_counter(), time.process_time()
    step.run()
    wall_s = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
    cpu_s = torch.tensor(time.process_time() - cpu_start_s, dtype=torch.float64)
    dist.all_reduce(wall_s, dist.ReduceOp.MAX)
    dist.all_reduce(cpu_s)
    return Time(float(wall_s), float(cpu_s))


def check_equal(steps: dict[str, Step]) -> None:
    """All variants must compute the same loss, and the same gradient at the far end of the backward pass."""
    expected: dict[str, float] = {}
    for name, step in steps.items():
        step.clear()
        values = {"loss": step.run(), "gradient": step.probe()}
        mine = {what: float(value.norm()) for what, value in values.items() if value is not None}
        everyones: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        for what, found in {**everyones[1], **everyones[0]}.items():
            wanted = expected.setdefault(what, found)
            assert abs(found - wanted) <= 1e-3 * wanted, f"{name}: {what} {found}, not {wanted}"


def report(sizes: Sizes, times: dict[str, list[Time]], as_json: bool) -> None:
    print(f"Llama: {sizes.layers} layers, hidden {sizes.hidden}, vocabulary {sizes.vocab}, ", end="")
    print(f"batch {sizes.rows} x {sizes.seq}, 1F1B with {MICROBATCHES} microbatches; {sizes.rounds} rounds\n")
    print(f"{'variant':<16} {'median s':>9} {'min s':>8} {'max s':>8} {'cpu s':>8}")
    medians = {}
    for name, values in times.items():
        wall_s, cpu_s = zip(*values, strict=True)
        median = medians[name] = Time(statistics.median(wall_s), statistics.median(cpu_s))
        print(f"{name:<16} {median.wall_s:>9.4f} {min(wall_s):>8.4f} {max(wall_s):>8.4f} {median.cpu_s:>8.4f}")
    ratios = {}
    print(f"\n{'autopart over ...':<30} {'time':>6} {'cpu':>6}   (median of the rounds' ratios)")
    for name, other in PAIRS:
        if name in times and other in times:
            pairs = list(zip(times[name], times[other], strict=True))
            wall = statistics.median(a.wall_s / b.wall_s for a, b in pairs)
            cpu = statistics.median(a.cpu_s / b.cpu_s for a, b in pairs)
            ratios[f"{name}/{other}"] = {"wall": wall, "cpu": cpu}
            target = f"   target: time {TARGETS[other]:g}" if other in TARGETS else ""
            print(f"{name + ' / ' + other:<30} {wall:>6.3f} {cpu:>6.3f}{target}")
    print("\ncpu: processor seconds of both processes, which move less where other work shares the machine")
    if as_json:
        median = {name: value._asdict() for name, value in medians.items()}
        print(json.dumps({"benchmark": "two_ranks", "sizes": vars(sizes), "median": median, "ratio": ratios}))


if __name__ == "__main__":
    main()
