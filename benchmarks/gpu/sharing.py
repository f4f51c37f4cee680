"""Compare the losses of several ranks on one GPU with those of one rank.

    python benchmarks/gpu/sharing.py [--ranks 2 4] [--backend nccl] [--quick] [--device cpu] [--trace FILE] [--json]

The models are a Llama of 100 million parameters and a mixture of experts, in bfloat16 with float32 parameters. Over
gloo every collective goes through the host. `--backend nccl` needs NCCL 2.30 or later and the environment variable
NCCL_MULTI_RANK_GPU_ENABLE=1. Step times of ranks that share a GPU say nothing of several GPUs, so none are shown.
`--trace` writes a profile of one step with zero=3 on two ranks, for Chrome's or Perfetto's viewer.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import traceback
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

STEPS = 3
NEAR = 5e-3
"""Relative, of a loss after steps whose sums are rounded to 8 bits in other places."""

MESHES: dict[int, list[tuple[str, str, dict[str, Any]]]] = {
    2: [
        ("llama", "tp2", {}), ("llama", "tp2", {"sequence_parallel": True}), ("llama", "pp2", {"microbatches": 2}),
        ("llama", "dp2", {}), ("llama", "dp2", {"zero": 1}), ("llama", "dp2", {"zero": 2}),
        ("llama", "dp2", {"zero": 3}), ("llama", "dp2", {"zero": 3, "compile": True}), ("llama", "cp2", {}),
        ("llama", "tp2", {"compile": True}), ("llama", "tp2", {"recompute": "full"}), ("mixture", "ep2", {}),
    ],
    4: [
        ("llama", "dp2,tp2", {"zero": 1}), ("llama", "pp2,tp2", {"microbatches": 4, "schedule": "zbv"}),
        ("llama", "dp2,pp2", {"zero": 2, "microbatches": 2}), ("llama", "dp4", {"zero": 3}), ("llama", "cp2,tp2", {}),
        ("llama", "pp4", {"microbatches": 4}), ("mixture", "dp2,ep2", {}),
    ],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", nargs="+", type=int, choices=MESHES, default=list(MESHES))
    parser.add_argument("--quick", action="store_true", help="tiny models")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--trace", help="where to write a profile of a step on dp2, zero=3")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    rows = []
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank_main, (ranks, folder, arguments), nprocs=ranks)
            with open(f"{folder}/found.json") as file:
                rows += json.load(file)
    if arguments.json:
        print(
            json.dumps(
                {
                    "benchmark": "gpu-sharing",
                    "device": arguments.device,
                    "backend": arguments.backend,
                    "steps": STEPS,
                    "rows": rows,
                }
            )
        )


def rank_main(rank: int, ranks: int, folder: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(arguments.backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    wanted, rows = {}, []
    for kind, mesh, options in MESHES[ranks]:
        model, batch = MODELS[kind](arguments)
        if kind not in wanted:
            wanted[kind] = plain_losses(copy.deepcopy(model), batch)
        row = {"model": kind, "mesh": mesh, "options": options, "plain": wanted[kind]}
        try:
            row["losses"] = trained(model, mesh, batch, options, arguments.trace if rank == 0 else None)
            row["apart"] = max(abs(a / b - 1) for a, b in zip(row["losses"], row["plain"], strict=True))
            row["ok"] = row["apart"] < NEAR
        except Exception as error:  # the other meshes are wanted; all ranks raise
            row |= {"ok": False, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        rows.append(row)
        if rank == 0:
            said = row.get("error", f"apart by {row.get('apart', 0):.1e}: {row.get('losses')}")
            print(f"{kind:<8} {mesh:<8} {options!s:<45} {'ok' if row['ok'] else 'WRONG':<6} {said}", flush=True)
    if rank == 0:
        with open(f"{folder}/found.json", "w") as file:
            json.dump(rows, file)
    dist.destroy_process_group()


def llama(arguments: argparse.Namespace) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    wide = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32000}
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 128}
    sizes = (small if arguments.quick else wide) | {"num_attention_heads": 4 if arguments.quick else 12}
    config = LlamaConfig(**sizes, num_key_value_heads=4, use_cache=False)
    return built(LlamaForCausalLM, config, arguments)


def mixture(arguments: argparse.Namespace) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    wide = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 32000}
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
    sizes = (small if arguments.quick else wide) | {"num_attention_heads": 4 if arguments.quick else 8}
    config = MixtralConfig(**sizes, num_key_value_heads=4, num_local_experts=4, use_cache=False)
    return built(MixtralForCausalLM, config, arguments)


def built(kind: type[nn.Module], config: Any, arguments: argparse.Namespace) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    rows, positions = (4, 16) if arguments.quick else (4, 512)
    with torch.device(arguments.device):
        model = kind(config).train()
        ids = torch.randint(0, config.vocab_size, (rows, positions))
    return model, {"input_ids": ids, "labels": ids.clone()}


MODELS = {"llama": llama, "mixture": mixture}


def plain_losses(model: nn.Module, batch: dict[str, Tensor]) -> list[float]:
    """Of the model alone, under torch's own mixed precision."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def trained(
    model: nn.Module, mesh: str, batch: dict[str, Tensor], options: dict[str, Any], trace: str | None
) -> list[float]:
    import autopart

    pm = autopart.parallelize(model, mesh, example_kwargs=batch, precision="bf16", **options)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(pm.step(**batch)))
        optimizer.step()
    if options == {"zero": 3} and mesh == "dp2":
        profiled(pm, batch, trace)
    return losses


def profiled(pm: nn.Module, batch: dict[str, Tensor], path: str | None) -> None:
    """One step more, on all ranks; the profile of one."""
    from torch.profiler import ProfilerActivity, profile

    if path is None:
        pm.step(**batch)
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as seen:
        pm.step(**batch)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    seen.export_chrome_trace(path)


if __name__ == "__main__":
    main()
