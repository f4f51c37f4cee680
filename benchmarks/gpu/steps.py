"""Measure training steps on one GPU, or predict them with the simulator and `plan.memory`.

    python benchmarks/gpu/steps.py measure STEPS.json [--only gpt2 ...] [--quick]
    python benchmarks/gpu/steps.py predict STEPS.json --hardware PROFILE [--json]

`measure` needs a GPU: forward, backward, fused AdamW; the median of ten steps, the most bytes that torch's allocator
has handed out in one, and the seconds of its kernels by name. `predict` needs none: it plans the same models on
`meta`. No number of a profile is fitted to these steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopart

ROUNDS, WARM_UPS = 10, 3
MOST_KERNELS = 60
LONG_GAP_S = 5e-6
"""Between two kernels: the GPU waits for the host."""


@dataclass(frozen=True)
class Step:
    make: Callable[[int], nn.Module]
    """Of the positions of a row; in float32."""
    rows: int
    positions: int
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    """Of the model's own parameters."""

    def built(self, device: str) -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        with torch.device(device):
            model = self.make(self.positions).to(self.dtype).train()
            ids = torch.randint(0, model.config.vocab_size, (self.rows, self.positions))
        return model, {"input_ids": ids, "labels": ids.clone()}


def gpt2(width: int, layers: int, heads: int, dropout: float = 0.0) -> Callable[[int], nn.Module]:
    def make(positions: int) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_embd=width, n_layer=layers, n_head=heads, n_positions=positions, embd_pdrop=dropout, attn_pdrop=dropout,
            resid_pdrop=dropout, use_cache=False,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"  # which transformers would fall back to, with a warning
        return model

    return make


def llama(width: int, layers: int, heads: int, inner: int) -> Callable[[int], nn.Module]:
    def make(positions: int) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
            intermediate_size=inner, max_position_embeddings=positions, use_cache=False,
        ))  # fmt: skip

    return make


def bert(dropout: float = 0.0) -> Callable[[int], nn.Module]:
    def make(positions: int) -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        return BertForMaskedLM(BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, max_position_embeddings=positions,
        ))  # fmt: skip

    return make


def tiny(positions: int) -> nn.Module:
    return gpt2(64, 2, 4)(positions)


SMALL, MEDIUM, LARGE = gpt2(768, 12, 12), gpt2(1024, 24, 16), gpt2(1280, 36, 20)
LLAMA_1B, LLAMA_3B = llama(2048, 16, 32, 8192), llama(3072, 28, 24, 8192)
STEPS: dict[str, Step] = {
    "gpt2-small": Step(SMALL, 8, 1024),
    "gpt2-medium": Step(MEDIUM, 8, 1024),
    "gpt2-medium-float32": Step(MEDIUM, 4, 1024, dtype=torch.float32),
    "gpt2-medium-recomputed": Step(MEDIUM, 16, 1024, {"recompute": "full"}),
    "gpt2-large-selective": Step(LARGE, 8, 1024, {"recompute": "selective"}),
    "gpt2-medium-dropout": Step(gpt2(1024, 24, 16, 0.1), 8, 1024),
    "bert-large": Step(bert(), 32, 512),
    "bert-large-dropout": Step(bert(0.1), 32, 512),
    "llama-1b": Step(LLAMA_1B, 4, 2048),
    "llama-1b-long": Step(LLAMA_1B, 1, 16384),
    "llama-1b-mixed": Step(LLAMA_1B, 4, 2048, {"precision": "bf16"}, torch.float32),
    "llama-1b-microbatches": Step(LLAMA_1B, 8, 2048, {"microbatches": 4}),
    "llama-1b-compiled": Step(LLAMA_1B, 4, 2048, {"compile": True}),
    "llama-3b": Step(LLAMA_3B, 2, 4096),
    "llama-3b-recomputed": Step(LLAMA_3B, 4, 4096, {"recompute": "full"}),
}
QUICK = {"tiny": Step(tiny, 2, 32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("measure", "predict"))
    parser.add_argument("path", type=Path, help="of the measured steps, a .json file")
    parser.add_argument("--only", nargs="+", choices=STEPS, help="leave the others out")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--hardware", default="h100-80gb-sxm", help="a profile that prices the plans")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    steps = QUICK if arguments.quick else {name: STEPS[name] for name in arguments.only or STEPS}
    if arguments.what == "predict":
        found = json.loads(arguments.path.read_text())
        print(f"{found['device']}, torch {found['torch']}; predicted with {arguments.hardware}\n")
        rows = predicted(steps, found["steps"], arguments.hardware)
        if arguments.json:
            print(json.dumps({"benchmark": "gpu-steps", "hardware": arguments.hardware, "rows": rows}))
        return
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    found = {"device": name, "torch": torch.__version__, "steps": {}}
    for step_name, step in steps.items():
        try:
            found["steps"][step_name] = measured(step, arguments.device)
        except Exception as error:  # the other steps are wanted
            found["steps"][step_name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        shown = {key: value for key, value in found["steps"][step_name].items() if key != "kernels"}
        print(f"{step_name:<24} {shown}", flush=True)
        arguments.path.write_text(as_text(found))


def as_text(found: dict[str, Any]) -> str:
    """JSON with a step on every line."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(step)}" for name, step in found["steps"].items())
    head = json.dumps({key: value for key, value in found.items() if key != "steps"})
    return f'{head[:-1]}, "steps": {{\n{lines}\n}}}}\n'


# --- Measuring.


def measured(step: Step, device: str) -> dict[str, Any]:
    on_gpu = device == "cuda"
    gc.collect()  # the step before has left cycles that hold its weights
    model, batch = step.built(device)
    start_s = time.perf_counter()
    pm = autopart.parallelize(model, "dp1", example_kwargs=batch, **step.options)
    del model  # whose weights the parallel module has copies of
    planned_s = time.perf_counter() - start_s
    optimizer = torch.optim.AdamW(pm.parameters(), fused=True)

    def run() -> Tensor:
        loss = pm.step(**batch)
        optimizer.step()
        return loss

    times_s = []
    for number in range(WARM_UPS + ROUNDS):
        optimizer.zero_grad()
        wait(on_gpu)
        if on_gpu and number == WARM_UPS:
            torch.cuda.reset_peak_memory_stats()
        start_s = time.perf_counter()
        loss = run()
        wait(on_gpu)
        if number >= WARM_UPS:
            times_s.append(time.perf_counter() - start_s)
    found = {"median_s": statistics.median(times_s), "min_s": min(times_s), "loss": float(loss), "planned_s": planned_s}
    found["planned_bytes"] = pm.plan.memory[0]["total"]
    if on_gpu:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        optimizer.zero_grad()
        found |= of_kernels(run)
    return found


def wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def of_kernels(run: Callable[[], Tensor]) -> dict[str, Any]:
    """The kernels of one step: {name: [how many, seconds in all]}, those that take longest; of all the sum, from the
    first to the last, and how long the GPU waited for the host between them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    kernels: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    spans = []
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, total_s = kernels[event.name[:140]]
            kernels[event.name[:140]] = [count + 1, total_s + event.time_range.elapsed_us() / 1e6]
            spans.append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    starts, ends = zip(*sorted(spans), strict=True)
    gaps_s = [start - end for start, end in zip(starts[1:], ends[:-1], strict=True)]
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])
    return {
        "kernels_s": sum(seconds for _, seconds in kernels.values()), "span_s": max(ends) - starts[0],
        "long_gaps_s": sum(gap for gap in gaps_s if gap > LONG_GAP_S),
        "num_kernels": sum(count for count, _ in kernels.values()), "kernels": dict(longest[:MOST_KERNELS]),
    }  # fmt: skip


# --- Predicting.


def predicted(steps: dict[str, Step], found: dict[str, Any], hardware: str) -> list[dict[str, Any]]:
    print(f"{'step':<24}{'ms':>9}{'predicted':>11}{'error':>8}{'GB':>9}{'planned':>9}{'error':>8}")
    rows = []
    for name, step in steps.items():
        of_gpu = found.get(name, {"error": "not measured"})
        if "error" in of_gpu:
            print(f"{name:<24} {of_gpu['error']}")
            continue
        model, batch = step.built("meta")
        plan = autopart.plan(model, "dp1", example_kwargs=batch, hardware=hardware, **step.options)
        step_s, total = autopart.simulate(plan).step_time_s, plan.memory[0]["total"]
        row = {"step": name, "measured_s": of_gpu["median_s"], "predicted_s": step_s, "predicted_bytes": total}
        row |= {"error": step_s / of_gpu["median_s"] - 1, "peak_bytes": of_gpu.get("peak_bytes")}
        print(f"{name:<24}{row['measured_s'] * 1e3:>9.1f}{step_s * 1e3:>11.1f}{row['error']:>+8.1%}", end="")
        if row["peak_bytes"]:
            row["memory_error"] = total / row["peak_bytes"] - 1
            print(f"{row['peak_bytes'] / 1e9:>9.2f}{total / 1e9:>9.2f}{row['memory_error']:>+8.1%}", end="")
        print(flush=True)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
