"""Compare search methods on per-block choices: recomputation, weight sharding and stage boundaries.

The memory limit is one that no uniform choice (one recomputation, one sharding, the stages of `plan`) uses fully.
Every method searches the same problem; "cost" is its objective, "gap" to the best known, with the
proven lower bound below; "step" and memory are simulated.

    python benchmarks/methods.py [--quick] [--seeds N] [--json]

With `--json` the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, NamedTuple, get_args

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopart.cost.predict.table import RunSetting, predict
from autopart.errors import MemoryLimitError
from autopart.extras.block_search.block_problem import Blocks
from autopart.extras.block_search.choose_blocks import blocks_of, completed
from autopart.extras.block_search.search_methods import Method, solve
from autopart.ir.mesh import Mesh
from autopart.ir.run.recompute_spec import RecomputeMode
from autopart.tuning.search import LayoutKind, Space, space_of


class Case(NamedTuple):
    """A model on a mesh: `rows` of the global batch, and what a rank may hold."""

    model: str
    mesh: str
    hardware: str
    rows: int
    microbatches: int
    memory_gb: float


CASES = (
    Case("gpt3-175b", "pp8,dp8,tp8", "a100-40gb-sxm", 512, 64, 40),
    Case("llama-8b", "dp8", "h100-80gb-sxm", 64, 8, 80),
)
QUICK = (Case("gpt2-tiny", "pp2,dp2", "a100-40gb-sxm", 16, 8, 0.0053),)
QUICK_BUDGET = {"evolution_strategies": 1280, "reinforcement_learning": 1280}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one small model, small budgets")
    parser.add_argument("--seeds", type=int, default=3, help="of the methods that draw; the worst is printed")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    found = []
    for case in QUICK if arguments.quick else CASES:
        found.append(result := measure(case, arguments.seeds, QUICK_BUDGET if arguments.quick else {}))
        show(case, result)
    if arguments.json:
        print(json.dumps({"benchmark": "methods", "cases": found}))


def model_of(name: str) -> tuple[nn.Module, int]:
    """A model on `meta` in 16 bits, and its tokens."""
    with torch.device("meta"):
        if name == "llama-8b":
            config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, vocab_size=128256,
                                 num_attention_heads=32, num_key_value_heads=8)  # fmt: skip
            return LlamaForCausalLM(config).to(torch.bfloat16), 4096
        sizes = {"gpt3-175b": (12288, 96, 96, 51200, 2048), "gpt2-tiny": (64, 6, 2, 256, 128)}
        hidden, layers, heads, vocabulary, tokens = sizes[name]
        model = GPT2LMHeadModel(GPT2Config(
            n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=vocabulary, n_positions=tokens,
            attn_implementation="eager", bos_token_id=0, eos_token_id=0,
        )).to(torch.bfloat16)  # fmt: skip
    model.loss_type = "ForCausalLM"  # which transformers would fall back to, with a warning
    return model, tokens


def measure(case: Case, seeds: int, budgets: dict[str, int]) -> dict[str, Any]:
    """All methods on one problem, and the best uniform choice."""
    model, tokens = model_of(case.model)
    ids = torch.zeros(2, tokens, dtype=torch.long, device="meta")
    space = space_of(model, case.hardware, case.rows, {"input_ids": ids, "labels": ids.clone()})
    mesh = Mesh.parse(case.mesh)
    blocks = blocks_of(space, mesh, completed(case.rows, mesh, None, case.microbatches))
    limit = case.memory_gb * 1e9
    rows = []
    for method in get_args(Method):
        runs = [run(blocks, limit, method, seed, budgets.get(method))
                for seed in range(seeds if method in QUICK_BUDGET else 1)]  # fmt: skip
        rows.append(max(runs, key=lambda row: row["cost_s"]))
    best = min(row["cost_s"] for row in rows)
    for row in rows:
        row["gap"] = row["cost_s"] / best - 1
    bound = max(row.pop("lower_bound_s") for row in rows)
    return {"case": case._asdict(), "blocks": len(blocks.blocks), "options": len(blocks.options), "rows": rows,
            "best_known_s": best, "lower_bound_s": bound, "uniform": uniform(space, blocks, limit)}  # fmt: skip


def run(blocks: Blocks, limit: float, method: Method, seed: int, budget: int | None) -> dict[str, Any]:
    try:
        found = solve(blocks.problem(limit), method, seed, budget)
    except MemoryLimitError:
        return {"method": method, "cost_s": float("inf"), "lower_bound_s": 0.0, "seconds": 0.0, "evaluations": 0}
    step = blocks.simulation(found.choice)
    return {
        "method": method, "seed": seed, "cost_s": found.step_time_s, "lower_bound_s": found.lower_bound_s,
        "step_time_s": step.step_time_s, "memory_bytes": max(step.peak_memory_bytes), "seconds": found.seconds,
        "evaluations": found.evaluations,
    }  # fmt: skip


def uniform(space: Space, blocks: Blocks, limit: float) -> dict[str, Any] | None:
    """The fastest uniform choice that fits, as a plan would cut and run it."""
    mesh, fitting = blocks.setting.mesh, []
    for recompute in get_args(RecomputeMode):
        table = space.table(LayoutKind.of(mesh, mesh.size("tp") > 1), recompute)
        for zero in (0, 3) if mesh.size("dp") > 1 else (0,):
            found = predict(table, RunSetting(mesh, blocks.setting.schedule, space.rows, zero), space.hardware)
            row = {"recompute": recompute, "zero": zero, "step_time_s": found.step_time_s,
                   "memory_bytes": max(found.peak_memory_bytes)}  # fmt: skip
            fitting += [row] if row["memory_bytes"] <= limit else []
    return min(fitting, key=lambda row: row["step_time_s"], default=None)


def show(case: Case, result: dict[str, Any]) -> None:
    print(f"{case.model}, {result['blocks']} blocks of {result['options']} options, on {case.mesh} ({case.hardware}, "
          f"{case.memory_gb:g} GB)\n")  # fmt: skip
    print(f"{'method':<24}{'cost s':>9}{'gap':>8}{'step s':>9}{'GB':>8}{'took s':>8}{'evaluations':>13}")
    for row in result["rows"]:
        if "step_time_s" not in row:
            print(f"{row['method']:<24}{'nothing that fits':>17}")
            continue
        print(f"{row['method']:<24}{row['cost_s']:>9.4g}{row['gap']:>8.2%}{row['step_time_s']:>9.4g}"
              f"{row['memory_bytes'] / 1e9:>8.3g}{row['seconds']:>8.2f}{row['evaluations']:>13,}")  # fmt: skip
    print(f"{'proven lower bound':<24}{result['lower_bound_s']:>9.4g}")
    best = result["uniform"]
    said = f"recompute={best['recompute']}, zero={best['zero']}" if best else "no uniform choice fits"
    figures = f"{best['step_time_s']:>9.4g}{best['memory_bytes'] / 1e9:>8.3g}" if best else ""
    print(f"{'best uniform choice':<24}{'':>17}{figures}  {said}\n", flush=True)


if __name__ == "__main__":
    main()
