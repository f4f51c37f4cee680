"""Measure the overhead on one rank: a training step of `parallelize(model, "dp1")` against the model's own.

Both run in the same process on one core, interleaved round after round, so that noise affects both equally. The loss
and a gradient of both are compared first. Bytes are the peak of the tensors that a step creates, counted in a
separate step because counting is slow.

`--compile` also compares a compiled graph with `torch.compile(model)`. `--attention` measures causal attention only:
a mask computed from positions, as in a trace of transformers, against `is_causal=True`.

With `--device cuda` the models are larger and in bfloat16, and bytes are what the allocator hands out.

    python benchmarks/overhead.py [--quick] [--json] [--only llama ...] [--positions 1024 ...] [--compile] [--attention]
                                  [--device cuda]
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

Batch = dict[str, Tensor]
GraphUnderTest = tuple[nn.Module, Batch]


@dataclass(frozen=True)
class Sizes:
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 4096
    patch: int = 4
    tokens: int = 1024
    """Of a batch, unless one row has more."""
    positions: tuple[int, ...] = (128, 1024, 4096)
    attention_heads: int = 8
    attention_width: int = 64
    attention_positions: tuple[int, ...] = (1024, 2048, 4096, 8192)
    warm_ups: int = 1
    rounds: int = 5

    def rows(self, positions: int) -> int:
        return max(1, self.tokens // positions)


ON_GPU = Sizes(
    hidden=2048, layers=16, heads=16, kv_heads=8, vocab=32000, tokens=8192, positions=(1024, 4096),
    attention_heads=16, attention_width=128, attention_positions=(1024, 4096, 16384), warm_ups=3, rounds=12,
)  # fmt: skip
ON_GPU_OF = {"gpt2": replace(ON_GPU, hidden=1024, layers=24, vocab=50257)}
"""GPT-2 medium; the others have `ON_GPU`'s sizes, with which a Llama has 1.1 billion parameters."""
QUICK = Sizes(
    hidden=32, layers=1, heads=4, kv_heads=2, vocab=64, tokens=32, positions=(16,), attention_heads=2,
    attention_width=8, attention_positions=(16,), rounds=2,
)  # fmt: skip
TARGET = 1.02
NOTE = f"""time, cpu: medians of the rounds' ratios; the target of time and MB is at most {TARGET:g}, * is over it
cpu: processor seconds, which move less where other work shares the machine; first: seconds until one step has run"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny models, two rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), help="leave the others out")
    parser.add_argument("--positions", nargs="+", type=int, help="of a row")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--compile", action="store_true", help="compile the graph and the module too")
    parser.add_argument("--attention", action="store_true", help="causal attention alone in place of the models")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # read when the compiler is imported
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch.set_num_threads(1)
    sizes = QUICK if arguments.quick else ON_GPU if arguments.device == "cuda" else Sizes()
    if arguments.rounds:
        sizes = replace(sizes, rounds=arguments.rounds)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        cases = attention_cases if arguments.attention else model_cases
        rows = [row for case in cases(sizes, arguments) for row in measured(case, sizes)]
        dist.destroy_process_group()
    print(f"\n{NOTE}")
    if arguments.json:
        print(json.dumps({"benchmark": "overhead", "sizes": vars(sizes), "rows": [asdict(row) for row in rows]}))


# --- The models, from transformers' configurations. All have random weights and no dropout.


def gpt2(sizes: Sizes, positions: int) -> GraphUnderTest:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=sizes.hidden, n_layer=sizes.layers, n_head=sizes.heads, vocab_size=sizes.vocab, n_positions=positions,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # which transformers would fall back to, with a warning
    return model, tokens(sizes, positions)


def llama(sizes: Sizes, positions: int) -> GraphUnderTest:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**common(sizes, positions), num_key_value_heads=sizes.kv_heads, use_cache=False)
    return LlamaForCausalLM(config), tokens(sizes, positions)


def bert(sizes: Sizes, positions: int) -> GraphUnderTest:
    from transformers import BertConfig, BertForMaskedLM

    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**common(sizes, positions), **no_dropout)), tokens(sizes, positions)


def t5(sizes: Sizes, positions: int) -> GraphUnderTest:
    """Half of the positions are the encoder's."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=sizes.hidden, d_kv=sizes.hidden // sizes.heads, d_ff=4 * sizes.hidden, num_layers=sizes.layers,
        num_decoder_layers=sizes.layers, num_heads=sizes.heads, vocab_size=sizes.vocab, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    half = {name: ids[:, : positions // 2].contiguous() for name, ids in tokens(sizes, positions).items()}
    return T5ForConditionalGeneration(config), half


def vit(sizes: Sizes, positions: int) -> GraphUnderTest:
    """Of as many patches as a square has that has about so many."""
    from transformers import ViTConfig, ViTForImageClassification

    side, rows = sizes.patch * math.isqrt(positions), sizes.rows(positions)
    same = common(sizes, positions)
    for name in ("vocab_size", "max_position_embeddings"):
        del same[name]
    config = ViTConfig(
        **same, image_size=side, patch_size=sizes.patch, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=10, problem_type="single_label_classification",
    )  # fmt: skip
    images, labels = torch.randn(rows, 3, side, side), torch.randint(10, (rows,))
    return ViTForImageClassification(config), {"pixel_values": images, "labels": labels}


def common(sizes: Sizes, positions: int) -> dict[str, int]:
    """The sizes as most configurations name them."""
    return {
        "hidden_size": sizes.hidden,
        "intermediate_size": 4 * sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": positions,
    }


def tokens(sizes: Sizes, positions: int) -> Batch:
    ids = torch.randint(sizes.vocab, (sizes.rows(positions), positions))
    return {"input_ids": ids, "labels": ids.clone()}


MODELS: dict[str, Callable[[Sizes, int], GraphUnderTest]] = {
    "gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5, "vit": vit
}  # fmt: skip


class Loss(NamedTuple):
    loss: Tensor


class CausalAttention(nn.Module):
    """Attention without its projections. A scale a feature stands for them, so that a step has a whole backward."""

    def __init__(self, width: int, has_mask: bool):
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.ones(width)) for _ in range(3))
        self.has_mask = has_mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Loss:
        q, k, v = q * self.q, k * self.k, v * self.v
        if not self.has_mask:
            return Loss(F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean())
        positions = torch.arange(q.size(2), device=q.device)
        mask = (positions[None, :] <= positions[:, None])[None, None]
        return Loss(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().mean())


# --- The variants.


@dataclass
class Step:
    """One way to run a training step: `run()` makes the gradients of `module` and returns the loss."""

    run: Callable[[], Tensor]
    module: nn.Module
    probe: Callable[[], Tensor | None]
    """The gradient of the first parameter that is a vector, at the far end of the backward."""

    def clear(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None


def plain(model: nn.Module, batch: Batch, compiled: bool = False) -> Step:
    called = torch.compile(model, dynamic=False) if compiled else model

    def run() -> Tensor:
        loss = called(**batch).loss
        loss.backward()
        return loss.detach()

    return Step(run, model, lambda: model.get_parameter(first_vector(model)).grad)


def traced(model: nn.Module, batch: Batch, compiled: bool = False) -> Step:
    import autopart

    name = first_vector(model)
    pm = autopart.parallelize(model, "dp1", example_kwargs=batch, compile=compiled)
    return Step(lambda: pm.step(**batch), pm, lambda: pm.full_grads()[name])


def first_vector(model: nn.Module) -> str:
    return next(name for name, parameter in model.named_parameters() if parameter.dim() == 1)


def on_device(make: Callable[[], GraphUnderTest], device: str) -> GraphUnderTest:
    """Made on the device; on a GPU in bfloat16."""
    with torch.device(device):
        model, batch = make()
    if device == "cpu":
        return model, batch
    return model.bfloat16(), {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}


class Case(NamedTuple):
    """Ways to run a step of one model on one batch; `pairs`: which is measured against which."""

    model: str
    positions: int
    rows: int
    variants: dict[str, Callable[[], Step]]
    pairs: list[tuple[str, str]]


def model_cases(sizes: Sizes, arguments: argparse.Namespace) -> Iterator[Case]:
    on_gpu = arguments.device == "cuda"
    kind = "bfloat16" if on_gpu else "float32, one thread"
    print(f"{sizes.layers} layers, hidden {sizes.hidden}, vocabulary {sizes.vocab}, {kind}")
    print_heading()
    for name in arguments.only:
        of_model = ON_GPU_OF.get(name, sizes) if on_gpu and not arguments.quick else sizes
        for positions in arguments.positions or sizes.positions:
            torch.manual_seed(0)
            model, batch = on_device(partial(MODELS[name], of_model, positions), arguments.device)
            makers = {"module": plain, "graph": traced}
            variants = {variant: partial(make, copy.deepcopy(model), batch) for variant, make in makers.items()}
            pairs = [("graph", "module")]
            if arguments.compile:
                for variant, make in makers.items():
                    variants[f"compiled {variant}"] = partial(make, copy.deepcopy(model), batch, compiled=True)
                pairs.append(("compiled graph", "compiled module"))
            yield Case(name, positions, sizes.rows(positions), variants, pairs)


def attention_cases(sizes: Sizes, arguments: argparse.Namespace) -> Iterator[Case]:
    heads, width = sizes.attention_heads, sizes.attention_width
    print(
        f"causal attention, {heads} heads of {width}, float32, one thread; module: is_causal=True, masked: with a mask"
    )
    print_heading()
    for positions in arguments.positions or sizes.attention_positions:
        torch.manual_seed(0)
        with torch.device(arguments.device):
            batch = {name: torch.randn(1, heads, positions, width) for name in "qkv"}
        told, masked, graph = (
            on_device(lambda mask=mask, batch=batch: (CausalAttention(width, mask), batch), arguments.device)
            for mask in (False, True, True)
        )
        variants = {
            "module": partial(plain, *told), "masked": partial(plain, *masked), "graph": partial(traced, *graph)
        }  # fmt: skip
        yield Case("attention", positions, 1, variants, [("masked", "module"), ("graph", "module")])


# --- Measuring.


@dataclass(frozen=True)
class Figures:
    """Of a step, medians: seconds, processor seconds, and the most bytes at a time, 0 where they cannot be counted.
    `first_s`: until the first step has run, with what comes before it."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    first_s: float


@dataclass(frozen=True)
class Row:
    """`variant` over `base`: medians of the rounds' ratios, and of the bytes."""

    model: str
    positions: int
    rows: int
    variant: str
    base: str
    figures: Figures
    base_figures: Figures
    wall_ratio: float
    cpu_ratio: float
    bytes_ratio: float | None


def measured(case: Case, sizes: Sizes) -> list[Row]:
    """Prints its rows too."""
    torch._dynamo.reset()  # which compiles one function so many times, and runs it as it is from then on
    steps, first_s, results = {}, {}, {}
    for name, make in case.variants.items():
        start_s = time.perf_counter()
        steps[name] = make()
        results[name] = result(steps[name])
        first_s[name] = time.perf_counter() - start_s
    first = next(next(iter(steps.values())).module.parameters())
    check_equal(results, 2e-2 if first.dtype == torch.bfloat16 else 1e-3)
    peak_bytes = {name: 0 if "compiled" in name else counted_bytes(step) for name, step in steps.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(sizes.warm_ups + sizes.rounds):
        if number == 1:
            graphs = compiled_graphs()
        for name in list(steps)[:: 1 if number % 2 else -1]:  # none is always the first
            taken = timed(steps[name])
            if number >= sizes.warm_ups:
                times[name].append(taken)
    if any("compiled" in name for name in steps):
        breaks = sum(counters["graph_break"].values())
        print(f"graph breaks {breaks}, graphs compiled after the first round {compiled_graphs() - graphs}")
    figures = {}
    for name, values in times.items():
        wall_s, cpu_s = (statistics.median(column) for column in zip(*values, strict=True))
        figures[name] = Figures(wall_s, cpu_s, peak_bytes[name], first_s[name])
    rows = []
    for variant, base in case.pairs:
        ratios = [(a[0] / b[0], a[1] / b[1]) for a, b in zip(times[variant], times[base], strict=True)]
        wall, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
        size = peak_bytes[variant] / peak_bytes[base] if peak_bytes[base] else None
        found = figures[variant], figures[base]
        rows.append(Row(case.model, case.positions, case.rows, variant, base, *found, wall, cpu, size))
        print_row(rows[-1])
    return rows


def compiled_graphs() -> int:
    """So far in this process, by the compiler's own count."""
    return counters["stats"]["unique_graphs"]


def result(step: Step) -> dict[str, float]:
    """Norms, by which variants are compared."""
    step.clear()
    values = {"loss": step.run(), "gradient": step.probe()}
    return {what: float(value.norm()) for what, value in values.items() if value is not None}


def check_equal(results: dict[str, dict[str, float]], near: float) -> None:
    """All variants must compute the same loss, and the same gradient at the far end of the backward pass."""
    expected = next(iter(results.values()))
    assert len(expected) == 2
    for name, found in results.items():
        for what, wanted in expected.items():
            assert abs(found[what] - wanted) <= near * wanted, f"{name}: {what} {found[what]}, not {wanted}"


def timed(step: Step) -> tuple[float, float]:
    """Seconds, and processor seconds."""
    step.clear()
    wait()
    start_s, cpu_start_s = time.perf_counter(), time.process_time()
    step.run()
    wait()
    return time.perf_counter() - start_s, time.process_time() - cpu_start_s


def wait() -> None:
    """Until a GPU has done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def counted_bytes(step: Step) -> int:
    """The most bytes that a step's own tensors have at a time, gradients too."""
    from autopart.cost.count.saved_tensors import Allocated

    step.clear()
    if torch.cuda.is_initialized():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step.run()
        wait()
        return torch.cuda.max_memory_allocated() - before
    with Allocated() as allocated:
        step.run()
    return allocated.most


def print_heading() -> None:
    print(f"\n{'model':<10} {'batch':>10} {'variant / base':<32} {'s':>14} {'time':>7} {'cpu':>6}", end="")
    print(f" {'MB':>15} {'MB':>7} {'first s':>15}")


def print_row(row: Row) -> None:
    new, old = row.figures, row.base_figures
    print(f"{row.model:<10} {f'{row.rows} x {row.positions}':>10} {f'{row.variant} / {row.base}':<32}", end="")
    print(f" {f'{new.wall_s:.3f} / {old.wall_s:.3f}':>14} {marked(row.wall_ratio)} {row.cpu_ratio:>6.3f}", end="")
    sizes = f"{new.peak_bytes / 1e6:.1f} / {old.peak_bytes / 1e6:.1f}" if row.bytes_ratio else "-"
    print(f" {sizes:>15} {marked(row.bytes_ratio)} {f'{new.first_s:.1f} / {old.first_s:.1f}':>15}", flush=True)


def marked(ratio: float | None) -> str:
    if ratio is None:
        return f"{'-':>7}"
    return f"{ratio:>6.3f}{'*' if ratio > TARGET else ' '}"


if __name__ == "__main__":
    main()
