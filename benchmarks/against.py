"""Compare planning and training steps with another commit, interleaved, as ratios of medians.

Plans Llama-8B on `dp8,tp8` and GPT-3 175B on `dp24,pp8,tp8` (on `meta`, processor seconds), and runs steps of a small
GPT-2 on two gloo processes on `tp2`, `pp2`, `dp2` and `dp2` with zero=3 (wall seconds). Every round starts new
processes of both versions, in turn. The aim: new / old at most 1.02 each.

    python benchmarks/against.py [--base COMMIT] [--rounds N] [--only TEXT] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1.02

PLAN = """
import time, torch, autopart
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
model = {"llama": LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                              num_key_value_heads=8, vocab_size=128256),
         "gpt3": GPT2Config(n_embd=12288, n_layer=96, n_head=96, n_positions=2048, vocab_size=51200)}["%s"]
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(model)
    ids = torch.zeros(%d, 512, dtype=torch.int64)
start_s = time.process_time()
autopart.plan(model, "%s", example_kwargs={"input_ids": ids, "labels": ids})
print("took", time.process_time() - start_s)
"""

STEP = """
import os, statistics, tempfile, time, torch, torch.distributed as dist, torch.multiprocessing as mp
def rank_main(rank, store):
    import autopart
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=4, n_head=8, vocab_size=2048))
    ids = torch.randint(2048, (8, 128))
    batch = {"input_ids": ids, "labels": ids}
    pm = autopart.parallelize(model, "%s", example_kwargs=batch, **%s)
    took = []
    for _ in range(12):
        dist.barrier()
        start_s = time.perf_counter()
        pm.step(**batch)
        took.append(time.perf_counter() - start_s)
    if rank == 0:
        print("took", statistics.median(took[2:]), flush=True)
    dist.destroy_process_group()
if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (f"file://{folder}/store",), nprocs=2)
"""

CASES = {
    "plan Llama-8B dp8,tp8": PLAN % ("llama", 64, "dp8,tp8"),
    "plan GPT-3 175B dp24,pp8,tp8": PLAN % ("gpt3", 192, "dp24,pp8,tp8"),
    "step tp2": STEP % ("tp2", {}),
    "step pp2": STEP % ("pp2", {}),
    "step dp2": STEP % ("dp2", {}),
    "step dp2 zero=3": STEP % ("dp2", {"zero": 3}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", default="HEAD~1", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--quick", action="store_true", help="one round of the steps on tp2")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    asked = parser.parse_args()
    rounds, only = (1, "step tp2") if asked.quick else (asked.rounds, asked.only)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "--detach", "-q", str(tree), asked.base], cwd=ROOT, check=True)
        try:
            rows = {name: paired(script, tree, rounds) for name, script in CASES.items() if only in name}
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    print(f"seconds, medians of {rounds}; the aim: new / old at most {LIMIT}\n")
    print(f"{'case':<30} {'old':>9} {'new':>9} {'ratio':>7}")
    for name, row in rows.items():
        print(f"{name:<30} {row['old_s']:>9.3f} {row['new_s']:>9.3f} {row['ratio']:>7.3f}")
    if asked.json:
        print(json.dumps({"benchmark": "against", "base": asked.base, "rounds": rounds, "cases": rows}))


def paired(script: str, base: Path, rounds: int) -> dict[str, float]:
    """Median seconds of both, and the median of the ratios of each round."""
    old, new = [], []
    for number in range(rounds):
        for tree, found in ((base, old), (ROOT, new))[:: 1 if number % 2 else -1]:
            found.append(seconds(script, tree))
    ratios = [b / a for a, b in zip(old, new, strict=True)]
    return {"old_s": statistics.median(old), "new_s": statistics.median(new), "ratio": statistics.median(ratios)}


def seconds(script: str, tree: Path) -> float:
    """What a script says that it took with the code of a tree."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.py"
        path.write_text(script)
        environ = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, str(path)], env=environ, check=True, capture_output=True, text=True)
    return float(done.stdout.rpartition("took ")[2])


if __name__ == "__main__":
    main()
