"""Compare the peak resident memory of a rank that loads its shards with their size.

Safetensors of about 2 GB are written, tensor by tensor. Fresh processes then partition the model from `meta`:
`folder` reads the files, `init` runs the constructor, and `loaded` loads the full model first, for comparison.
The bounds are the shards plus the largest tensor. The memory of Python and torch is measured on a small model first,
and subtracted.

`saved` measures `pm.save_pretrained`: the memory in addition to the shards, and the time. `1-saved` is the
`save_pretrained` of transformers on one process.

    python benchmarks/host_memory.py [--quick] [--json] [--only 2-folder ...]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _ranks import status

MB = 2**20
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 10, "vocab_size": 8192}
QUICK = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 8192}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
FILE_BYTES = 250 * MB
MESHES = {2: ("tp2", "pp2"), 4: ("dp2,tp2",)}
RUNS = {
    f"{ranks}-{mesh}-{weights}": (ranks, mesh, weights)
    for ranks, meshes in MESHES.items() for mesh in meshes for weights in ("folder", "init", "loaded")
    if weights != "loaded" or mesh == "tp2"
}  # fmt: skip
"""With four ranks that each hold all of it, a small machine runs out of memory."""
SAVED = {"1-saved": (1, "", "saved"), **{f"4-{mesh}-saved": (4, mesh, "saved") for mesh in ("dp2,tp2", "pp2,tp2")}}
RUNS |= SAVED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a model of 0.3 GB on two ranks")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="leave the others out")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sizes = QUICK if arguments.quick else SIZES
    rows = []
    print(
        f"{'run':<20}{'rank':>5}{'shards':>9}{'largest':>9}{'peak':>9}{'peak / (shards + largest)':>27}{'seconds':>9}"
    )
    with tempfile.TemporaryDirectory() as folder:
        size_bytes, largest_bytes = write_folder(Path(folder), sizes)
        for run in arguments.only:
            ranks, mesh, weights = RUNS[run]
            if arguments.quick and ranks > 2:
                continue
            for row in measured(ranks, mesh, weights, folder, sizes):
                row |= {"run": run, "largest_bytes": largest_bytes}
                row["ratio"] = row["peak_bytes"] / (row["shard_bytes"] + largest_bytes)
                rows.append(row)
                shown = [f"{row[name] / MB:>6.0f} MB" for name in ("shard_bytes", "largest_bytes", "peak_bytes")]
                print(f"{run:<20}{row['rank']:>5}{''.join(shown)}{row['ratio']:>27.2f}{row['seconds']:>9.1f}")
    if arguments.json:
        print(json.dumps({"folder_bytes": size_bytes, "rows": rows}))


def config_of(sizes: dict[str, int]) -> Any:
    from transformers import LlamaConfig

    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": False}
    return LlamaConfig(**sizes, **heads, max_position_embeddings=64, use_cache=False)


def on_meta(sizes: dict[str, int]) -> Any:
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(config_of(sizes))


def write_folder(folder: Path, sizes: dict[str, int]) -> tuple[int, int]:
    """Random weights in files of at most `FILE_BYTES` and an index; the bytes of all, and of the largest tensor."""
    from safetensors.torch import save_file

    places: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    total = largest = 0

    def write() -> None:
        name = f"model-{len(set(places.values())) + 1:05}.safetensors"
        save_file(pending, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(pending, name))
        pending.clear()

    model = on_meta(sizes)
    for part in (model.config, model.generation_config):
        part.save_pretrained(folder)
    for name, form in model.state_dict().items():
        size_bytes = form.numel() * form.itemsize
        if pending and sum(t.numel() * t.itemsize for t in pending.values()) + size_bytes > FILE_BYTES:
            write()
        pending[name] = torch.empty(form.shape).normal_(std=0.02)
        total, largest = total + size_bytes, max(largest, size_bytes)
    write()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return total, largest


def measured(ranks: int, mesh: str, weights: str, folder: str, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """What every rank of one run says of itself."""
    with tempfile.TemporaryDirectory() as place:
        mp.spawn(rank_main, (ranks, mesh, weights, folder, sizes, place), nprocs=ranks)
        return [json.loads((Path(place) / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def rank_main(rank: int, ranks: int, mesh: str, weights: str, folder: str, sizes: dict[str, int], place: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=ranks)
    partition(mesh, "init", folder, SMALL)  # imports, and what torch keeps of every trace
    gc.collect()
    before_bytes = status("VmRSS")
    module = None
    if weights == "saved":
        module = partition(mesh, "folder", folder, sizes)
        for parameter in module.parameters():
            parameter.detach().mul_(1.0)  # transformers maps the files, and reads a page when it is used
        gc.collect()
        before_bytes = status("VmRSS")
        dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    start_s = time.perf_counter()
    if module is None:
        module = partition(mesh, weights, folder, sizes)
    else:
        module.save_pretrained(f"{place}/saved")
    row = {
        "rank": rank,
        "seconds": time.perf_counter() - start_s,
        "peak_bytes": status("VmHWM") - before_bytes,
        "shard_bytes": sum(local.numel() * local.itemsize for local in map(local_of, module.parameters())),
    }
    (Path(place) / f"rank{rank}.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def partition(mesh: str, weights: str, folder: str, sizes: dict[str, int]) -> Any:
    import autopart

    torch.manual_seed(0)
    if not mesh:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM(config_of(sizes)) if weights == "init" else LlamaForCausalLM.from_pretrained(folder)
    ids = torch.zeros(4, 16, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    zero = {"zero": 3} if "dp" in mesh else {}
    if weights != "loaded":
        source = {"folder": folder, "init": "init"}[weights]
        return autopart.parallelize(on_meta(sizes), mesh, example_kwargs=batch, weights=source, **zero)
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    return autopart.parallelize(model, mesh, example_kwargs=batch, **zero)


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard. `numel()` of a sharded parameter is that of the full tensor."""
    local: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local


if __name__ == "__main__":
    main()
