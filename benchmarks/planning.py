"""Measure the time of `autopart.plan` by pass, and its peak memory: on `meta`, one core, without a GPU.

Every model is planned in a separate process, so that the peak memory is separate too.

    python benchmarks/planning.py [--quick] [--json] [--profile CASE]

With `--json` the last line is one JSON object. `--profile llama-8b` prints the functions that cost the most.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import subprocess
import sys
import time
from collections import defaultdict
from typing import Any

from autopart.recipe import make_plan

# name: (model, its sizes, mesh, rows, tokens a row)
CASES: dict[str, tuple[str, dict[str, int], str, int, int]] = {
    "llama-8b": (
        "llama",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256},
        "dp8,tp8", 64, 2048,
    ),
    "llama-7b": (
        "llama",
        {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 32, "vocab_size": 32000},
        "pp2,dp4,tp8", 64, 2048,
    ),
    "gpt2-small tp2": ("gpt2", {"n_embd": 768, "n_layer": 12, "n_head": 12}, "tp2", 16, 1024),
    "gpt2-small pp4": ("gpt2", {"n_embd": 768, "n_layer": 12, "n_head": 12}, "pp4", 16, 1024),
    "gpt2-medium tp2": ("gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}, "tp2", 16, 1024),
    "gpt2-medium pp4": ("gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}, "pp4", 16, 1024),
    "gpt3-175b": (
        "gpt2", {"n_embd": 12288, "n_layer": 96, "n_head": 96, "vocab_size": 51200}, "dp24,pp8,tp8", 1536, 2048,
    ),
    "ptdp-1008b": (
        "gpt2", {"n_embd": 25600, "n_layer": 128, "n_head": 160, "vocab_size": 51200}, "dp6,pp64,tp8", 3072, 2048,
    ),
    "gpt2-tiny": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 2}, "tp2,pp2", 8, 64),
}  # fmt: skip
QUICK = ("gpt2-tiny",)
TARGETS_S = {"llama-8b": 5.0, "gpt3-175b": 20.0, "ptdp-1008b": 30.0}
"""What a plan may take, in seconds; PTD-P's largest model has 1,008 billion parameters."""

# What `plan` calls, by the column it is counted in.
PASSES = {
    "trace": ("trace",),
    "analyse": ("run_passes", "annotate"),
    "solve": ("decide",),
    "lower": ("lower",),
    "memory": ("figures_of",),
    "summary": ("plan_of",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one small model")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)  # one case, in this process
    parser.add_argument("--profile", choices=CASES, metavar="CASE", help=f"one of {', '.join(CASES)}")
    arguments = parser.parse_args()
    if arguments.profile:
        profile(arguments.profile)
        return
    if arguments.case:
        print(json.dumps(measure(arguments.case)))
        return

    columns = (*PASSES, "whole")
    print("autopart.plan from meta, seconds\n")
    heading = "".join(f"{name:>9}" for name in columns)
    print(f"{'model':<16} {'mesh':<12}{heading}{'target':>9}{'peak MB':>10}{'before MB':>10}")
    rows = {}
    for name in QUICK if arguments.quick else [case for case in CASES if case not in QUICK]:
        command = [sys.executable, __file__, "--case", name]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows[name] = row = json.loads(answer.stdout.splitlines()[-1])
        times = "".join(f"{row['time_s'][column]:9.2f}" for column in columns)
        memory = "".join(f"{row[key] / 1e6:10.0f}" for key in ("peak_memory_bytes", "before_memory_bytes"))
        print(f"{name.split()[0]:<16} {CASES[name][2]:<12}{times}{TARGETS_S.get(name, ''):>9}{memory}", flush=True)
    print("\npeak MB: of the whole process; before MB: with torch, transformers and the meta model, before planning")
    if arguments.json:
        print(json.dumps({"benchmark": "planning", "cases": rows}))


def measure(case: str) -> dict[str, Any]:
    """Seconds by pass and for the whole plan, and the process's peak memory before and after."""
    import autopart

    times_s: dict[str, float] = defaultdict(float)
    for column, functions in PASSES.items():
        for function in functions:
            _time_calls(make_plan, function, column, times_s)
    model, batch = build(case)
    before_bytes = _peak_bytes()
    start_s = time.perf_counter()
    plan = autopart.plan(model, CASES[case][2], example_kwargs=batch)
    times_s["whole"] = time.perf_counter() - start_s
    return {
        "mesh": CASES[case][2],
        "parameters": plan.model["num_parameters"],
        "time_s": {column: round(times_s[column], 4) for column in (*PASSES, "whole")},
        "before_memory_bytes": before_bytes,
        "peak_memory_bytes": _peak_bytes(),
    }


def build(case: str) -> tuple[Any, dict[str, Any]]:
    """A case's model and batch, both on `meta`."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    kind, sizes, _, rows, seq = CASES[case]
    with torch.device("meta"):
        if kind == "llama":
            model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=seq))
        else:
            config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
            model = GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"  # which transformers would fall back to, with a warning
        ids = torch.zeros(rows, seq, dtype=torch.long)
        return model, {"input_ids": ids, "labels": ids.clone()}


def profile(case: str) -> None:
    """The functions of one case that cost the most, with all they call and by themselves."""
    import autopart

    model, batch = build(case)
    recorder = cProfile.Profile()
    recorder.runcall(autopart.plan, model, CASES[case][2], example_kwargs=batch)
    stats = pstats.Stats(recorder)
    stats.sort_stats("cumulative").print_stats("autopart|passes|cost|torch/export", 45)
    stats.sort_stats("tottime").print_stats(30)


def _time_calls(module: Any, name: str, column: str, times_s: dict[str, float]) -> None:
    """Add the time of every call of `module.name` to a column."""
    function = getattr(module, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            times_s[column] += time.perf_counter() - start_s

    setattr(module, name, timed)


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
