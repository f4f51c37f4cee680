"""Train a small Llama on text, with one file for one process and for any mesh.

python examples/train_text.py
torchrun --nproc-per-node 4 examples/train_text.py --mesh dp2,tp2 --checkpoint run    # again: goes on where it ended
"""

import os
import resource
import sys
import time
from functools import partial
from itertools import count, islice

import torch
from text_setup import read_arguments, rows_of_text, scalars_to, small_llama
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

import autopart

args, options = read_arguments(__doc__)
first, on_gpu = os.environ.get("RANK", "0") == "0", torch.cuda.is_available()
rows = rows_of_text(args.sequence)
rows_here = args.batch // autopart.Mesh.parse(args.mesh).data_parallel_size  # every rank loads its own rows of a batch
example = {"input_ids": rows[:rows_here], "labels": rows[:rows_here]}
pm = autopart.parallelize(small_llama(args.dtype), args.mesh, example_kwargs=example, local_batch=True, **options)


def load(part, shuffle):
    sampler = DistributedSampler(part, pm.num_data_ranks, pm.data_rank, shuffle, drop_last=True)
    return DataLoader(part, rows_here, sampler=sampler, drop_last=True)


def batches(loader):
    for epoch in count():
        loader.sampler.set_epoch(epoch)
        yield from loader


if args.optimizer == "muon":  # AdamW for embeddings, the output layer, norms and biases
    optimizer = pm.optimizer(torch.optim.Muon, lr=0.02, others=partial(torch.optim.AdamW, lr=1e-3))
else:
    norms_and_biases = [p for name, p in pm.named_parameters() if "norm" in name or name.endswith("bias")]
    others = [p for name, p in pm.named_parameters() if "norm" not in name and not name.endswith("bias")]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms_and_biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
trained = {"optimizer": optimizer, "scheduler": scheduler}
if args.checkpoint:  # on any mesh
    pm.load(args.checkpoint, "latest", **trained, missing_ok=True)
step, predicted, writer = scheduler.last_epoch, autopart.simulate(pm.plan), scalars_to(args.tensorboard)
flops_at_peak_s = predicted.model_flops / predicted.num_devices / predicted.peak_flops_per_s
train = batches(load(rows[: -4 * args.batch], shuffle=True))
for ids in (bar := tqdm(islice(train, step, step + args.steps), total=args.steps, disable=not first)):
    start_s = time.perf_counter()
    loss = pm.step(input_ids=ids, labels=ids)
    norm = pm.clip_grad_norm_(1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    figures, step, step_s = {"loss": loss.item(), "norm": norm.item()}, step + 1, time.perf_counter() - start_s
    memory = torch.cuda.max_memory_allocated() if on_gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures |= {"tokens_per_s": ids.numel() * pm.num_data_ranks / step_s, "mfu": flops_at_peak_s / step_s}
    figures |= {"memory_gb": memory / 1e9}
    bar.set_postfix(figures)
    for name in figures if writer else ():
        writer.add_scalar(name, figures[name], step)
    if pm.stop_requested:  # some rank has received SIGTERM
        break
if args.checkpoint:
    pm.save(args.checkpoint, **trained, step=step, keep=2)
if pm.stop_requested:
    sys.exit(143)
with torch.no_grad():
    pm.eval()
    losses = [pm(input_ids=ids, labels=ids).loss.item() for ids in load(rows[-4 * args.batch :], shuffle=False)]
if first:
    print(f"step {step}: loss {loss:.12f}, norm {norm:.12f}, evaluation {sum(losses) / len(losses):.12f}")
