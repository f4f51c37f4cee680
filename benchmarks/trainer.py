"""Compare a step of transformers' Trainer with autopart to one with FSDP2, on two gloo processes.

Both train the same Llama in float32 with AdamW and clipping, on the same samples: autopart on `dp2` with `zero=3` and
`local_batch=True`, FSDP2 with `fully_shard` of each layer. Every round starts fresh processes. The printed ratios are
medians over rounds. Memory is the peak in addition to the memory of a process that has imported the packages.

    python benchmarks/trainer.py [--quick] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _ranks import of_first_rank, status

MB = 2**20
KINDS = ("autopart", "fsdp2")
WARMUP = 2
"""Steps that are not measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model and one round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of fresh processes  [default: 3]")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    hidden, layers, length = (64, 2, 32) if arguments.quick else (512, 4, 128)
    os.environ["OMP_NUM_THREADS"] = "1"
    rounds = []
    print(f"{'round':>5} {'library':<10}{'step':>10}{'processor':>11}{'peak':>10}{'loss':>9}")
    for number in range(1 if arguments.quick else arguments.rounds):
        results = {}
        for kind in KINDS if number % 2 else KINDS[::-1]:
            row = results[kind] = of_first_rank(train, 2, kind, hidden, layers, length)
            print(f"{number:>5} {kind:<10}{row['step_s']:>8.3f} s{row['processor_s']:>9.3f} s"
                  f"{row['peak_bytes'] / MB:>7.0f} MB{row['losses'][-1]:>9.4f}")  # fmt: skip
        rounds.append(results)
    ratios = {
        name: statistics.median(one["autopart"][name] / one["fsdp2"][name] for one in rounds)
        for name in ("step_s", "processor_s", "peak_bytes")
    }
    print("autopart / fsdp2:", ", ".join(f"{name} {value:.2f}" for name, value in ratios.items()))
    if arguments.json:
        print(json.dumps({"benchmark": "trainer", "ratios": ratios, "rounds": rounds}))


def train(rank: int, store: str, kind: str, hidden: int, layers: int, length: int) -> dict[str, Any]:
    """Train some steps and return the first rank's medians of them, its peak memory and all losses."""
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", **place)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    from accelerate import Accelerator
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    import autopart

    class Measuring(TrainerCallback):
        """Callback that measures the steps after the first ones."""

        times: list[tuple[float, float]]

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == WARMUP:
                gc.collect()
                Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
                self.times = []
            self.start = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step > WARMUP:
                self.times.append((time.perf_counter() - self.start[0], time.process_time() - self.start[1]))

    config = LlamaConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(4096, (64, length), generator=torch.Generator().manual_seed(0))
    base_bytes = status("VmRSS")
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    if kind == "autopart":
        batch = {"input_ids": tokens[:4], "labels": tokens[:4]}
        model = autopart.parallelize(model, "dp2", zero=3, local_batch=True, example_kwargs=batch)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        # On CPUs, accelerate would add DistributedDataParallel to the model that is sharded already.
        Accelerator.prepare_model = lambda self, model, *args, **kwargs: model
    measuring = Measuring()
    arguments = TrainingArguments(
        output_dir="unused", per_device_train_batch_size=4, max_steps=8, logging_steps=1, save_strategy="no",
        use_cpu=True, report_to=[], disable_tqdm=True, log_level="error", max_grad_norm=1.0,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[measuring])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    step_s, processor_s = (statistics.median(column) for column in zip(*measuring.times, strict=True))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    peak_bytes = status("VmHWM") - base_bytes
    return {"step_s": step_s, "processor_s": processor_s, "peak_bytes": peak_bytes, "losses": losses}


if __name__ == "__main__":
    main()
