"""Compare predictions with published runs of GPTs on A100s and H100s.

- The ten weak-scaling runs of PTD-P (Narayanan et al. 2021, arXiv:2104.04473, table 1), as its authors ran them: 16
  bits, every layer recomputed, fused kernels between products and collectives, gradients of models without a pipeline
  summed beside the backward (DDP), pipeline sends scattered over `tp` that nothing runs beside; microbatches and
  interleaving are those of their scripts (Megatron-LM, examples/academic_paper_scripts/sc21). 18 bytes a parameter.
- MosaicML's MPT training benchmarks (llm-foundry, scripts/train/benchmarking/README.md, 2,048 tokens): ZeRO-3 with
  flash attention in mixed precision, 0.1B to 65B parameters. Gradients are summed in bfloat16 (llm-foundry's
  `mixed_precision: PURE`).

Every model is traced from its config and counted by autopart; nothing of the papers' own formulas goes into the
predicted time. Three constants of the A100's profile are fitted (`matmul_half_depth`, `matmul_sustained`,
`memory_efficiency`) to the PTD-P rows and the two runs of Korthikanti et al. 2022 (arXiv:2205.05198, abstract), none
to MPT's A100 rows; of the H100's, `matmul_half_depth` to MPT's H100 rows.

    python benchmarks/published.py [--quick] [--search] [--json]

`--search`: also what `autopart.search` would run on as many GPUs, and how long it looks. With `--json` the last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, NamedTuple

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from autopart.cost.predict.table import RunSetting, predict
from autopart.ir.mesh import Mesh
from autopart.ir.run.mixed_precision import Precision
from autopart.ir.run.schedules import Schedule
from autopart.tuning.search import LayoutKind, Space, space_of

SEQUENCE, VOCABULARY, MEMORY = 2048, 51200, 80e9
STATES = 8.0  # PTD-P: bytes for each of a parameter in 16 bits: gradient 4, master 4, two moments 8, of 2


class Run(NamedTuple):
    """A row of the table: billions of parameters, heads, hidden size, layers, sizes of tp and pp, GPUs, global batch,
    microbatch, stages a rank, and the TFLOP/s per GPU that were reached."""

    billions: float
    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    gpus: int
    batch: int
    microbatch: int
    virtual: int
    tflops: float

    @property
    def mesh(self) -> Mesh:
        return Mesh.parse({"pp": self.pp, "dp": self.gpus // (self.tp * self.pp), "tp": self.tp})

    @property
    def schedule(self) -> Schedule:
        name = None if self.pp == 1 else "1f1b" if self.virtual == 1 else "interleaved_1f1b"
        return Schedule(name, self.batch // (self.mesh.size("dp") * self.microbatch), self.virtual)

    @property
    def flops(self) -> float:
        """Of an iteration, by equation 3 of the paper: what its TFLOP/s are counted with."""
        layers = 96 * self.batch * SEQUENCE * self.layers * self.hidden**2
        return layers * (1 + SEQUENCE / (6 * self.hidden) + VOCABULARY / (16 * self.layers * self.hidden))


RUNS = (
    Run(1.7, 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
    Run(3.6, 32, 3072, 30, 2, 1, 64, 512, 16, 1, 138),
    Run(7.5, 32, 4096, 36, 4, 1, 128, 512, 16, 1, 142),
    Run(18.4, 48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135),
    Run(39.1, 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138),
    Run(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 140),
    Run(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148),
    Run(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 155),
    Run(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 163),
    Run(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163),
)


class Mpt(NamedTuple):
    """A row of MPT's table: its name, hidden size, layers, heads, GPUs, rows of a microbatch, microbatches of a step,
    and the MFU that was reached. Every layer is recomputed where `full` says so."""

    name: str
    hidden: int
    layers: int
    heads: int
    gpus: int
    microbatch: int
    microbatches: int
    full: bool
    mfu: float


MPT = {
    "a100-80gb-sxm": (
        Mpt("125m", 768, 12, 12, 8, 32, 2, False, 0.4445),
        Mpt("350m", 1024, 24, 16, 8, 32, 2, False, 0.5162),
        Mpt("760m", 1536, 24, 12, 8, 24, 2, False, 0.5685),
        Mpt("1b", 2048, 24, 16, 8, 14, 4, False, 0.5986),
        Mpt("3b", 2560, 32, 32, 8, 10, 2, False, 0.6211),
        Mpt("7b", 4096, 32, 32, 8, 6, 2, False, 0.6423),
        Mpt("13b", 5120, 40, 40, 8, 2, 3, False, 0.5957),
        Mpt("30b", 7168, 48, 56, 8, 3, 21, True, 0.5530),
        Mpt("70b", 8192, 80, 64, 64, 8, 4, True, 0.5333),
    ),
    "h100-80gb-sxm": (
        Mpt("760m", 1536, 24, 12, 16, 24, 1, False, 0.3789),
        Mpt("1b", 2048, 24, 16, 8, 14, 1, False, 0.4182),
        Mpt("3b", 2560, 32, 32, 16, 10, 3, False, 0.4373),
        Mpt("7b", 4096, 32, 32, 8, 6, 1, False, 0.4644),
        Mpt("13b", 5120, 40, 40, 8, 2, 1, False, 0.3979),
        Mpt("30b", 7168, 48, 56, 8, 3, 21, True, 0.3811),
        Mpt("30b", 7168, 48, 56, 16, 10, 3, True, 0.4307),
        Mpt("70b", 8192, 80, 64, 64, 8, 4, True, 0.4257),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two rows")
    parser.add_argument("--search", action="store_true", help="also search on as many GPUs")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    rows = []
    print(f"{'B params':>8} {'mesh':<15}{'TFLOP/s':>8}{'published':>10}{'error':>8}{'step s':>8}{'GB':>6}   searched")
    for run in (RUNS[0], RUNS[4]) if arguments.quick else RUNS:
        rows.append(row := measure(run, arguments.search))
        found = row.get("search")
        searched = f"{found['step_time_s']:.2f} s in {found['seconds']:.1f} s: {found['found']}" if found else ""
        print(f"{run.billions:>8} {run.mesh!s:<15}{row['tflops']:>8.1f}{run.tflops:>10}{row['error']:>8.1%}"
              f"{row['step_time_s']:>8.2f}{row['memory_bytes'] / 1e9:>6.1f}   {searched}", flush=True)  # fmt: skip
    errors = [abs(row["error"]) for row in rows]
    print(f"mean absolute error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}")
    print(f"\n{'MPT':>8} {'GPUs':<19}{'MFU':>8}{'published':>10}{'error':>8}")
    others = [measure_mpt(run, hardware) for hardware, runs in MPT.items()
              for run in (runs[1:2] if arguments.quick else runs)]  # fmt: skip
    for row in others:
        on = f"{row['gpus']} {row['hardware']}"
        print(f"{row['name']:>8} {on:<19}{row['mfu']:>8.1%}{row['published']:>10.1%}{row['error']:>8.1%}")
    if arguments.json:
        print(json.dumps({"benchmark": "published", "rows": rows, "mean_error": sum(errors) / len(errors),
                          "worst_error": max(errors), "mpt": others}))  # fmt: skip


def gpt(hidden: int, layers: int, heads: int, vocabulary: int, dtype: torch.dtype, **options: Any) -> GPT2LMHeadModel:
    """A GPT without memory for its weights."""
    with torch.device("meta"):
        config = GPT2Config(n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=vocabulary, n_positions=SEQUENCE,
                            bos_token_id=0, eos_token_id=0, **options)  # fmt: skip
        model = GPT2LMHeadModel(config).to(dtype)
    model.loss_type = "ForCausalLM"  # which transformers would fall back to, with a warning
    return model


def space(hidden: int, layers: int, heads: int, batch: int) -> Space:
    """A GPT of the paper, to be run on its hardware: Megatron-LM's modules and gradients are in 16 bits themselves, its
    optimizer has the masters, where `precision=` keeps parameters and gradients in float32."""
    model = gpt(hidden, layers, heads, VOCABULARY, torch.float16, attn_implementation="eager")
    found = space_of(model, "a100-80gb-sxm", batch, None)
    found.fused = True
    found.assumed = {"state_bytes": STATES, "scatter_sends": True, "overlap_sends": False, "receives_held": 1}
    return found


def setting(run: Run, scatter: bool = True) -> RunSetting:
    """As the authors ran it."""
    hidden = 1.0 if run.pp == 1 else 0.0
    return RunSetting(run.mesh, run.schedule, run.batch, 0, STATES, hidden, scatter, False, receives_held=1)


def measure(run: Run, search: bool = False) -> dict[str, Any]:
    start_s = time.perf_counter()
    model = space(run.hidden, run.layers, run.heads, run.batch)
    traced_s = time.perf_counter() - start_s
    found = predict(model.table(LayoutKind(run.tp > 1, False), "full"), setting(run), model.hardware)
    tflops = run.flops / run.gpus / found.step_time_s / 1e12
    row = {
        "billions": run.billions, "mesh": str(run.mesh), "tflops": tflops, "published": run.tflops,
        "error": tflops / run.tflops - 1, "step_time_s": found.step_time_s,
        "published_step_time_s": run.flops / run.gpus / run.tflops / 1e12,
        "memory_bytes": max(found.peak_memory_bytes), "bubble_fraction": found.bubble_fraction,
    }  # fmt: skip
    if search:
        start_s = time.perf_counter()
        best = model.best(run.gpus, MEMORY)[0]
        seconds = traced_s + time.perf_counter() - start_s
        row["search"] = {"step_time_s": best.step_time_s, "found": str(best), "seconds": seconds}
    return row


def measure_mpt(run: Mpt, hardware: str) -> dict[str, Any]:
    """MPT has no biases and no table of positions, GPT-2 does: less than a percent of its work."""
    model = gpt(run.hidden, run.layers, run.heads, 50368, torch.float32, attn_implementation="sdpa", attn_pdrop=0.0,
                resid_pdrop=0.0, embd_pdrop=0.0)  # fmt: skip
    rows = run.gpus * run.microbatch * run.microbatches
    found = space_of(model, hardware, rows, None, Precision.parse("bf16", "bf16"))
    found.fused = True
    mesh = Mesh.parse({"dp": run.gpus})
    chosen = RunSetting(mesh, Schedule(None, run.microbatches, 1), rows, 3)
    mfu = predict(found.table(LayoutKind(False, False), "full" if run.full else "none"), chosen, found.hardware).mfu
    return {"name": run.name, "hardware": hardware, "gpus": run.gpus, "mfu": mfu, "published": run.mfu,
            "error": mfu / run.mfu - 1}  # fmt: skip


if __name__ == "__main__":
    main()
