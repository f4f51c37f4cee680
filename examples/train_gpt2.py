"""Train a small GPT-2 on real text on four processes, and compare with one process.

The model is the one from transformers, unmodified. autopart traces it, shards every layer over two tensor-parallel
processes, splits the model into two pipeline stages (mesh `tp2,pp2`), and runs the stages with the 1F1B schedule.
Process 0 also trains the unpartitioned model on the same batches, and both losses are shown.

In float32 the two diverge: reductions have another order, and AdamW amplifies rounding by an amount that depends
on the processor. So the check repeats the training in float64: the losses of 20 steps must agree to 1e-5.

    python examples/train_gpt2.py [--steps 100]

It starts its four processes itself; `torchrun --nproc-per-node 4 examples/train_gpt2.py` does the same. It needs no GPU
and no network, takes about two minutes on two cores, and leaves the plan in `plan.json`.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_PROCESSES = 4
MESH = "tp2,pp2"
TOLERANCE = 1e-5  # of losses in float64, which transformers rounds to float32 (1 unit: 5e-7)
CHECKED_STEPS = 20
VERDICT = "TRAIN_GPT2_VERDICT"  # names the file that process 0 writes its verdict to
VOCAB, ROWS, SEQ = 512, 16, 64
LEARNING_RATE = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="how many optimizer steps (100)")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        train(arguments.steps)
    else:
        sys.exit(start_processes())


def start_processes() -> int:
    """Runs this file in four processes, as `torchrun` does; returns the exit code."""
    print(f"Starting {NUM_PROCESSES} processes, one thread each ...", flush=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_PROCESSES)]
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        verdict = Path(folder, "verdict")
        code = subprocess.run([*torchrun, *sys.argv], env={**os.environ, **quiet, VERDICT: str(verdict)}).returncode
        return code or (0 if verdict.read_text() == "agree" else 1)


def train(num_steps: int) -> None:
    """Train in float32 and in float64 beside one process; run by every process."""
    import torch
    import torch.distributed as dist

    start_s = time.perf_counter()
    torch.manual_seed(0)
    tokens = torch.tensor(encode(python_reference()))
    batches = [random_rows(tokens) for _ in range(num_steps)]
    model = small_gpt2()
    exact = copy.deepcopy(model).double()
    first = os.environ["RANK"] == "0"

    losses = train_both(model, batches, "float32", lambda pm: introduce(pm, model, tokens) if first else None)
    exact_losses = train_both(exact, batches[:CHECKED_STEPS], "float64")
    agree = not first or conclude(losses, exact_losses, time.perf_counter() - start_s)
    dist.destroy_process_group()
    if first and VERDICT in os.environ:
        Path(os.environ[VERDICT]).write_text("agree" if agree else "disagree")
        agree = True  # the process that started this one gives the exit code
    sys.exit(0 if agree else 1)


def train_both(model, batches, dtype: str, introduce=lambda pm: None) -> list[tuple[float, float]]:
    """Return (partitioned loss, loss of one process) of every step; on process 0 alone."""
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    import autopart

    whole = copy.deepcopy(model)  # trained in one process, to compare with

    # This is all there is to it: the model partitioned, then `step` instead of forward and backward.
    pm = autopart.parallelize(model, MESH, example_kwargs=batches[0], schedule="1f1b", microbatches=4)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=LEARNING_RATE)

    introduce(pm)
    first = dist.get_rank() == 0
    whole_optimizer = torch.optim.AdamW(whole.parameters(), lr=LEARNING_RATE)
    losses: list[tuple[float, float]] = []
    bar = tqdm(batches, desc=f"training in {dtype}", unit="step", disable=not first, mininterval=1)
    for batch in bar:
        optimizer.zero_grad()
        loss = pm.step(**batch)
        optimizer.step()
        if first:
            whole_optimizer.zero_grad()
            global_loss = whole(**batch).loss
            global_loss.backward()
            whole_optimizer.step()
            losses.append((loss.item(), global_loss.item()))
            bar.set_postfix(partitioned=f"{loss:.4f}", one_process=f"{global_loss:.4f}", refresh=False)
    return losses


def python_reference() -> str:
    """The Python language reference, as it comes with every Python installation (`help('for')` reads it)."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def encode(text: str) -> list[int]:
    """The text as tokens of a byte-level BPE vocabulary that is learned from the text itself."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=VOCAB, show_progress=False)
    return tokenizer.encode(text).ids


def random_rows(tokens):
    """A batch of rows from random places of the text."""
    import torch

    starts = torch.randint(len(tokens) - SEQ, (ROWS,)).tolist()
    rows = torch.stack([tokens[start : start + SEQ] for start in starts])
    return {"input_ids": rows, "labels": rows.clone()}


def small_gpt2():
    """A GPT-2 with random weights, without dropout, so that both trainings compute the same."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # which transformers would fall back to, with a warning
    return model


def introduce(pm, model, tokens) -> None:
    count = sum(p.numel() for p in model.parameters())
    mine = sum(p.to_local().numel() for p in pm.parameters())
    pm.plan.save("plan.json")
    print(f"""
GPT-2 with {count:,} parameters on the Python language reference: {len(tokens):,} tokens, batches of {ROWS} x {SEQ}.
Mesh {MESH}: {NUM_PROCESSES} processes; process 0 holds {mine:,} of the parameters ({mine / count:.0%}).

The plan (also in plan.json; edit it and pass `plan="plan.json"` to run what you wrote):

{pm.plan.explain()}
""", flush=True)  # fmt: skip


def conclude(losses: list[tuple[float, float]], exact: list[tuple[float, float]], time_s: float) -> bool:
    """Print the losses; return True if those in float64 agree at every step, and those in float32 fell."""
    print(f"\n{'step':>6} {'partitioned':>13} {'one process':>13} {'difference':>12} {'in float64':>12}")
    every = max(1, len(losses) // 10)
    for step in sorted({*range(0, len(losses), every), len(losses) - 1, len(exact) - 1}):
        partitioned, whole = losses[step]
        checked = f"{difference(exact[step]):.1e}" if step < len(exact) else ""
        print(f"{step + 1:>6} {partitioned:>13.6f} {whole:>13.6f} {difference(losses[step]):>12.1e} {checked:>12}")
    worst = max(map(difference, exact))
    agree, fell = worst <= TOLERANCE, losses[-1][0] < losses[0][0]
    print(f"\n{len(losses)} steps in float32 and {len(exact)} in float64, {time_s:.0f} s.")
    print(f"Largest difference in float64: {worst:.1e} (allowed: {TOLERANCE:.0e}).")
    print(f"The loss {'fell' if fell else 'DID NOT FALL'}: {losses[0][0]:.3f} -> {losses[-1][0]:.3f}.")
    print(f"The two trainings {'agree' if agree else 'DO NOT AGREE'}.", flush=True)
    return agree and fell


def difference(losses: tuple[float, float]) -> float:
    """Return how far two losses are apart."""
    return abs(losses[0] - losses[1])


if __name__ == "__main__":
    main()
