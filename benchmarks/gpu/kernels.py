"""Compare the kernels of a training step of the module and of its graph, on one GPU.

    python benchmarks/gpu/kernels.py [--only gpt2-medium ...] [--compile] [--quick] [--device cpu] [--json]

Milliseconds of a step, until the host has issued it, of its kernels alone, and how long the GPU waited for the host
between them, medians of rounds that take turns; bytes at the peak beyond what was there before; and the kernels whose
seconds differ most. Models are those of `steps.py`. `--compile`: both compiled.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from steps import QUICK, STEPS, Step, of_kernels, wait
from torch import Tensor, nn

import autopart

DEFAULT = "gpt2-medium", "llama-1b", "gpt2-medium-dropout", "bert-large-dropout"
ROUNDS, WARM_UPS, SHOWN = 12, 3, 12
NO_KERNELS: dict[str, Any] = {"kernels_s": 0.0, "span_s": 0.0, "long_gaps_s": 0.0, "num_kernels": 0, "kernels": {}}


@dataclass(frozen=True)
class Variant:
    """Of a step: seconds, until all was issued, of kernels, and bytes at the peak."""

    step_s: float
    issued_s: float
    peak_bytes: int
    kernels_s: float
    span_s: float
    long_gaps_s: float
    num_kernels: int
    kernels: dict[str, tuple[int, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=STEPS, default=DEFAULT)
    parser.add_argument("--compile", action="store_true", help="compile the graph and the module")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    steps = QUICK if arguments.quick else {name: STEPS[name] for name in arguments.only}
    print(f"{'model':<24}{'':<8}{'step ms':>9}{'issued':>9}{'kernels':>9}{'waits':>9}{'number':>8}{'GB':>8}")
    rows = {name: compared(name, step, arguments.device, arguments.compile) for name, step in steps.items()}
    if arguments.json:
        print(json.dumps({"benchmark": "gpu-kernels", "device": arguments.device, "rows": rows}))


def compared(name: str, step: Step, device: str, compiles: bool) -> dict[str, Any]:
    """Prints its rows too."""
    gc.collect()  # the model before has left cycles that hold its weights
    model, batch = step.built(device)
    options = {**step.options, "compile": True} if compiles else step.options
    pm = autopart.parallelize(copy.deepcopy(model), "dp1", example_kwargs=batch, **options)
    called = torch.compile(model, dynamic=False) if compiles else model

    def module() -> Tensor:
        loss = called(**batch).loss
        loss.backward()
        return loss.detach()

    found = measured({"module": (model, module), "graph": (pm, lambda: pm.step(**batch))}, device == "cuda")
    for variant, of in found.items():
        seconds = of.step_s, of.issued_s, of.kernels_s, of.long_gaps_s
        ms = "".join(f"{each * 1e3:>9.2f}" for each in seconds)
        print(f"{name:<24}{variant:<8}{ms}{of.num_kernels:>8}{of.peak_bytes / 1e9:>8.2f}")
    before, after = found["module"].kernels, found["graph"].kernels
    more = {kernel: after.get(kernel, (0, 0.0))[1] - before.get(kernel, (0, 0.0))[1] for kernel in {*before, *after}}
    for kernel, more_s in sorted(more.items(), key=lambda item: -abs(item[1]))[:SHOWN]:
        numbers = " -> ".join(f"{of.get(kernel, (0, 0.0))[0]:>4}" for of in (before, after))
        print(f"  {more_s * 1e3:+8.3f} ms {numbers}  {kernel:.90}", flush=True)
    ratio = found["graph"].step_s / found["module"].step_s
    print(f"  graph / module {ratio:.3f}\n")
    return {variant: asdict(of) for variant, of in found.items()} | {"ratio": ratio}


def measured(variants: dict[str, tuple[nn.Module, Callable[[], Tensor]]], on_gpu: bool) -> dict[str, Variant]:
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    peak_bytes = dict.fromkeys(variants, 0)
    for number in range(WARM_UPS + ROUNDS):
        for name in list(variants)[:: 1 if number % 2 else -1]:  # none is always the first
            module, run = variants[name]
            module.zero_grad()
            wait(on_gpu)
            before = torch.cuda.memory_allocated() if on_gpu else 0
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            start_s = time.perf_counter()
            run()
            issued_s = time.perf_counter() - start_s
            wait(on_gpu)
            if number >= WARM_UPS:
                times[name].append((time.perf_counter() - start_s, issued_s))
                peak_bytes[name] = torch.cuda.max_memory_allocated() - before if on_gpu else 0
            module.zero_grad()
    found = {}
    for name, (module, run) in variants.items():
        step_s, issued_s = (statistics.median(column) for column in zip(*times[name], strict=True))
        kernels = of_kernels(run) if on_gpu else NO_KERNELS
        module.zero_grad()
        found[name] = Variant(step_s, issued_s, peak_bytes[name], **kernels)
    return found


if __name__ == "__main__":
    main()
