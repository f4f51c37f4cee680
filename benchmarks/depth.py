"""Measure planning time over depth: processor seconds by phase, for Llamas of 16 to 128 layers on `meta`.

Every depth is planned three times in a separate process, after a small model that triggers imports. The median is
shown.

    python benchmarks/depth.py [--quick] [--json] [--profile LAYERS [--phase PHASE]]

With `--json` the last line is one JSON object. `--profile 128` prints the functions that cost the most.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import json
import pstats
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

MESH, ROWS, TOKENS, REPEATS = "dp8,tp8", 64, 64, 3
DEPTHS, QUICK = (16, 32, 64, 128), (2, 4)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8,
         "vocab_size": 512}  # fmt: skip

PHASES = {
    "trace": (("recipe.make_plan", "trace"),),
    "normalise": (("recipe.make_plan", "run_passes"),),
    "gradients": (("recipe.make_plan", "with_gradients_checked"),),
    "facts": (("recipe.make_plan", "annotate"),),
    "choose": (("recipe.make_plan", "decide"), ("recipe.make_plan", "choose_sharded_storage")),
    "write": (("recipe.make_plan", "lower"),),
    "walk": (("recipe.make_plan", "liveness_of"),),
    "memory": (("recipe.plan_figures", "rank_memory"),),
    "timing": (
        ("recipe.plan_figures", "tabulate"),
        ("recipe.plan_figures", "deduplicated_rows"),
        ("recipe.plan_figures", "simulated"),
    ),
    "explain": (("recipe.make_plan", "plan_of"),),
}
"""{phase: the functions, each with the module that calls it}; time inside of two counts for the inner one."""
TRACING = ("trace", "gradients")
"""What runs the model, or follows it operator by operator, before anything is planned."""


class Clock:
    """Seconds of the processor by phase; `profiled` is the phase that `recorder` looks into, or "all"."""

    def __init__(self, profiled: str = "", recorder: cProfile.Profile | None = None):
        self.seconds: dict[str, float] = defaultdict(float)
        self.profiled, self.recorder = profiled, recorder
        self._inner = [0.0]

    def around(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = time.process_time()
            self._inner.append(0.0)
            try:
                with self.recorder if self.recorder and phase == self.profiled else nullcontext():
                    return function(*args, **kwargs)
            finally:
                took_s, inner_s = time.process_time() - start_s, self._inner.pop()
                self._inner[-1] += took_s
                self.seconds[phase] += took_s - inner_s

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(map(str, QUICK))} layers")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)  # one depth, in this process
    parser.add_argument("--profile", type=int, metavar="LAYERS", help="profile one depth")
    parser.add_argument("--phase", choices=("all", *PHASES), default="all", help="the phase to profile")
    arguments = parser.parse_args()
    if arguments.profile:
        profile(arguments.profile, arguments.phase)
        return
    if arguments.layers:
        print(json.dumps(measure(arguments.layers)))
        return

    depths = QUICK if arguments.quick else DEPTHS
    found: dict[int, dict[str, float]] = {}
    for layers in depths:
        command = [sys.executable, __file__, "--layers", str(layers)]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[layers] = json.loads(answer.stdout.splitlines()[-1])
    first, last = depths[0], depths[-1]
    print(f"autopart.plan of a Llama on {MESH}, seconds of the processor, median of {REPEATS}\n")
    print(f"{'layers':<12}" + "".join(f"{layers:>8}" for layers in depths) + f"{f'{last}/{first}':>9}")
    for phase in found[first]:
        times = "".join(f"{found[layers][phase]:8.2f}" for layers in depths)
        growth = found[last][phase] / max(found[first][phase], 1e-3)
        print(f"{phase:<12}{times}{growth:9.1f}")
    if arguments.json:
        seconds = {str(layers): times for layers, times in found.items()}
        print(json.dumps({"benchmark": "depth", "mesh": MESH, "time_s": seconds}))


def measure(layers: int) -> dict[str, float]:
    """Seconds by phase: the rest of the plan as `other`, `planned` for all behind the trace, and the whole."""
    clock = Clock()
    _watch(clock)
    plan_once(2)
    runs = []
    for _ in range(REPEATS):
        clock.seconds.clear()
        runs.append(dict(clock.seconds) | {"whole": plan_once(layers)} | dict(clock.seconds))
    rows = {phase: statistics.median(run.get(phase, 0.0) for run in runs) for phase in PHASES}
    other = statistics.median(run["whole"] - sum(run.get(phase, 0.0) for phase in PHASES) for run in runs)
    planned = [run["whole"] - sum(run.get(phase, 0.0) for phase in TRACING) for run in runs]
    whole = statistics.median(run["whole"] for run in runs)
    rows |= {"other": other, "planned": statistics.median(planned), "whole": whole}
    return {phase: round(seconds, 3) for phase, seconds in rows.items()}


def plan_once(layers: int) -> float:
    """Seconds of one plan in which nothing is known of calls that an earlier plan made."""
    import autopart
    from autopart.cost.count.saved_tensors import EFFECT_CACHE

    model, batch = build(layers)
    EFFECT_CACHE.effects.clear()
    start_s = time.process_time()
    autopart.plan(model, MESH, example_kwargs=batch)
    return time.process_time() - start_s


def build(layers: int) -> tuple[Any, dict[str, Any]]:
    """A Llama of so many layers and a batch, both on `meta`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        config = LlamaConfig(**SIZES, num_hidden_layers=layers, max_position_embeddings=TOKENS)
        model = LlamaForCausalLM(config)
        model.loss_type = "ForCausalLM"  # which transformers would fall back to, with a warning
        ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
        return model, {"input_ids": ids, "labels": ids.clone()}


def profile(layers: int, phase: str) -> None:
    """The functions of one phase (or all) that cost the most, with all they call and by themselves."""
    recorder = cProfile.Profile(time.process_time)
    clock = Clock(phase, recorder)
    _watch(clock)
    plan_once(2)
    recorder.clear()
    clock.around("all", plan_once)(layers)
    stats = pstats.Stats(recorder)
    stats.sort_stats("cumulative").print_stats(60)
    stats.sort_stats("tottime").print_stats(30)


def _watch(clock: Clock) -> None:
    """Let the clock time every call of the functions of the phases."""
    import autopart

    assert autopart.plan
    for phase, functions in PHASES.items():
        for home, name in functions:
            module = importlib.import_module(f"autopart.{home}")
            setattr(module, name, clock.around(phase, getattr(module, name)))


if __name__ == "__main__":
    main()
