"""Test open questions about GPUs one by one; a failure does not stop the others.

    python benchmarks/gpu/probe.py [--device cpu] [--only dropout ...] [--json]

A table, and with `--json` one JSON object as the last line: {"benchmark": "gpu-probe", "device": ..., "points":
{name: {"ok": bool or null, "found": {...}} or {"error": text}}}. `ok` is null if there is no right or wrong. On the
CPU, tests of kernels and synchronisation are skipped.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import autopart
from autopart.ir.graph import operator_name
from autopart.ops import operators
from autopart.ops.grouped_matmul import expert_linear, expert_outer
from autopart.recipe.make_plan import prepare

Found = dict[str, Any]
P = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=POINTS, default=list(POINTS), help="leave the others out")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    points = {name: tried(POINTS[name], device) for name in arguments.only}
    for name, point in points.items():
        verdict = {True: "ok", False: "WRONG", None: "-"}[point["ok"]] if "ok" in point else "FAILED"
        print(f"{name:<14} {verdict:<7} {point.get('error', '')}")
        for what, value in point.get("found", {}).items():
            print(f"{'':<22} {what}: {value}")
    if arguments.json:
        print(
            json.dumps({"benchmark": "gpu-probe", "device": str(device), "torch": torch.__version__, "points": points})
        )


def tried(point: Callable[[torch.device], tuple[bool | None, Found]], device: torch.device) -> Found:
    start_s = time.perf_counter()
    torch.manual_seed(0)
    try:
        ok, found = point(device)
    except Exception as error:  # whatever it is, the other points are wanted
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return {"ok": ok, "found": found, "seconds": round(time.perf_counter() - start_s, 2)}


# --- Means


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def kernels(call: Callable[[], Any], device: torch.device) -> list[str]:
    """The names of the kernels that a call launches, in order; of aten operators on a CPU."""
    call()
    wait(device)
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as seen:
        call()
        wait(device)
    if on_gpu:
        events = (e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA)
        return [event.name[:90] for event in events if not event.name.startswith("Mem")]
    return [event.name for event in seen.events() if event.name.startswith("aten::") and event.cpu_parent is None]


def milliseconds(call: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    for _ in range(3):
        call()
    wait(device)
    start_s = time.perf_counter()
    for _ in range(repeats):
        call()
    wait(device)
    return round((time.perf_counter() - start_s) / repeats * 1e3, 4)


def waits(call: Callable[[], Any], device: torch.device) -> int | None:
    """How often a call waits for the GPU."""
    call()
    if device.type != "cuda":
        return None
    wait(device)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen)


def fill_with_nan(device: torch.device, size_bytes: int = 2**26) -> None:
    """Let what is allocated next begin as NaN, as far as it is taken from what is freed here."""
    held = [torch.full((size // 4,), float("nan"), device=device) for size in (2**12, 2**16, 2**20, size_bytes)]
    del held


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.drop = nn.Dropout(P)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return x.square().mean()


# --- Points


def machine(device: torch.device) -> tuple[None, Found]:
    if device.type != "cuda":
        return None, {"torch": torch.__version__}
    is_of = torch.cuda.get_device_properties(device)
    before = torch.cuda.memory_allocated()
    x = torch.ones(64, 64, device=device)
    x @ x
    kept = torch.cuda.memory_allocated() - before - x.nbytes
    return None, {
        "name": is_of.name, "capability": f"{is_of.major}.{is_of.minor}", "memory_bytes": is_of.total_memory,
        "CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version(),
        "kept_by_the_first_product_bytes": kept,
    }  # fmt: skip


def batch_norms(device: torch.device) -> tuple[bool, Found]:
    """The operators of a trace before and after normalisation: no batch norm in training is left."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(device)
    x = torch.randn(4, 3, 8, 8, device=device)
    traced = torch.export.export(model, (x,), strict=False).run_decompositions({})
    raw = sorted({str(n.target) for n in traced.graph.nodes if "norm" in str(n.target)})
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(288, 2)).to(device)
    left = [operator_name(n) for n in prepare(model, {"input": x}).graph.nodes if n.op == "call_function"]
    found = autopart.verify(model, "dp2", example_args=(x,))
    return found.ok and not any("norm" in name for name in left), {"exported": raw, "largest error": found.max_error}


def experts(device: torch.device) -> tuple[bool, Found]:
    """Rows of other experts, an expert without rows, and a last group that ends with the rows, over memory of NaN."""
    found: Found = {}
    for dtype in (torch.bfloat16, torch.float32):
        for name, numbers in (("others", [0, 2, 4, 2, 0, 5]), ("all here", [0, 2, 1, 2, 0, 1]), ("none", [4] * 6)):
            expert = torch.tensor(numbers, device=device)
            x = torch.randn(6, 64, device=device, dtype=dtype, requires_grad=True)
            weight = torch.randn(3, 64, 32, device=device, dtype=dtype, requires_grad=True)
            fill_with_nan(device)
            y = expert_linear(x, weight, expert)
            wanted = torch.stack([
                x.detach()[i].double() @ weight.detach()[n].double() if n < 3 else y.detach().new_zeros(32).double()
                for i, n in enumerate(numbers)
            ])  # fmt: skip
            error = float((y.detach() - wanted).abs().max())
            fill_with_nan(device)
            y.float().square().sum().backward()
            outer = expert_outer(x.detach(), y.detach(), expert, 3)
            finite = all(bool(t.isfinite().all()) for t in (y, x.grad, weight.grad, outer))
            found[f"{dtype} {name}"] = {"error": error, "finite": finite}
        count = torch.randint(0, 3, (4096,), device=device)
        wide = torch.randn(4096, 64, device=device, dtype=dtype)
        matrix = torch.randn(3, 64, 64, device=device, dtype=dtype)
        found[f"{dtype} waits"] = waits(lambda w=wide, m=matrix, c=count: expert_linear(w, m, c), device)
    ok = all(f["finite"] and f["error"] < 1 for f in found.values() if isinstance(f, dict))
    return ok, found


def dropout(device: torch.device) -> tuple[bool, Found]:
    """With rng="exact" noise times a value is torch's own dropout, in every dtype, memory order and size; with
    rng="fast" it is one kernel, which leaves the generator as it was and draws the same again."""
    found: Found = {}
    seed = torch.tensor(5)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        different = 0
        for shape in ((7,), (33, 65), (64, 1024)):
            for transposed in (False, True):
                x = torch.randn(shape, device=device).to(dtype)
                x = x.t() if transposed and x.dim() == 2 else x
                torch.manual_seed(3)
                own = F.dropout(x, P)
                torch.manual_seed(3)
                noise = F.dropout(torch.ones_like(x), P)
                different += int((operators.drop(x, noise, P) != own).sum())
        x = torch.randn(1024, 1024, device=device, dtype=dtype, requires_grad=True)
        before = torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
        first, again = (torch.ops.autopart.dropout(x, P, seed, 7, [0]) for _ in range(2))
        after = torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
        of = {"exact: entries that differ": different, "fast: the same again": bool(torch.equal(first, again))}
        of["fast: generator left"] = bool(torch.equal(before, after))
        of["fast: kept"] = round(float((first != 0).float().mean()), 4)
        of["fast: kernels"] = kernels(lambda x=x: torch.ops.autopart.dropout(x, P, seed, 7, [0]), device)
        of["fast: ms"] = milliseconds(lambda x=x: torch.ops.autopart.dropout(x, P, seed, 7, [0]), device)
        of["torch: ms"] = milliseconds(lambda x=x: F.dropout(x, P), device)
        if device.type == "cuda":
            compiled = torch.compile(lambda x: torch.ops.autopart.dropout(x, P, seed, 7, [0]))
            of["fast: compiled is the same"] = bool(torch.equal(compiled(x) != 0, first != 0))
        found[str(dtype)] = of
    good = (of["fast: the same again"] and of["fast: generator left"] for of in found.values())
    return all(good) and all(of["exact: entries that differ"] <= 2 for of in found.values()), found


def attention(device: torch.device) -> tuple[None, Found]:
    """Which kernels run, and how long, by how the causal mask is said and how heads are grouped."""
    rows, heads, tokens, width = (4, 16, 2048, 64) if device.type == "cuda" else (1, 2, 64, 16)
    q, k, v = (torch.randn(rows, heads, tokens, width, device=device, dtype=torch.bfloat16) for _ in range(3))
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    bias = torch.zeros(tokens, tokens, device=device, dtype=q.dtype).masked_fill(~causal, float("-inf"))
    few = (k[:, :2].contiguous(), v[:, :2].contiguous())
    calls: dict[str, Callable[[], Tensor]] = {
        "is_causal": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "boolean mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=causal[None, None]),
        "float mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None, None]),
        "grouped heads": lambda: F.scaled_dot_product_attention(q, *few, is_causal=True, enable_gqa=True),
        "grouped and mask": lambda: F.scaled_dot_product_attention(q, *few, attn_mask=causal, enable_gqa=True),
    }
    return None, {n: {"ms": milliseconds(c, device), "kernels": kernels(c, device)} for n, c in calls.items()}


def streams(device: torch.device) -> tuple[bool, Found]:
    """Numbers drawn on the host by name in a model on the device, and dropout, are those of the model itself."""

    class Hosted(Dropping):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * torch.rand(64, device="cpu").to(x.device) + torch.rand_like(x))

    found = {}
    for name, model in (("dropout", Dropping()), ("drawn on the host", Hosted())):
        x = torch.randn(8, 64, device=device)
        model = model.to(device)
        pm = autopart.parallelize(copy.deepcopy(model), "dp1", example_args=(x,), rng="exact")
        losses = []
        for step in (pm.step, model):
            torch.manual_seed(7)
            losses.append([float(step(x).detach()) for _ in range(3)])
        apart = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
        found[name] = {"dp1, relative": apart, "verify dp2": autopart.verify(model, "dp2", example_args=(x,)).ok}
    return all(of["dp1, relative"] < 1e-5 and of["verify dp2"] for of in found.values()), found


def host_batch(device: torch.device) -> tuple[bool, Found]:
    """`verify` of a model on the device with a batch on the host."""
    model, x = Dropping().to(device), torch.randn(8, 64)
    found = autopart.verify(model, "dp2,tp2", example_args=(x,), steps=2)
    return found.ok, {"largest error": found.max_error}


def refused(device: torch.device) -> tuple[bool, Found]:
    """Traced on the CPU and run on a GPU, dropout inside fused attention cannot be exact; on the CPU it can."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.inner(x), x, x, dropout_p=P).mean()

    x = torch.randn(2, 8, 64, device=device)
    try:
        pm = autopart.parallelize(Attends().to(device), "dp1", example_args=(x,), rng="exact")
        pm.step(x)
    except autopart.AutopartError as error:
        return device.type == "cuda", {"said": str(error)}
    return device.type == "cpu", {"said": "nothing"}


def step_waits(device: torch.device) -> tuple[bool, Found]:
    """How often a training step waits for the GPU, by what it draws and recomputes; one is the loss's own."""
    found: Found = {}
    x = torch.randn(8, 64, device=device)
    kinds: dict[str, Any] = {
        "fast": {},
        "fast, microbatches": {"microbatches": 4},
        "recomputed": {"recompute": "full"},
        "exact": {"rng": "exact"},
    }
    for name, options in kinds.items():
        pm = autopart.parallelize(Dropping().to(device), "dp1", example_args=(x,), **options)
        found[name] = waits(lambda pm=pm: pm.step(x), device)
    return all(not number for number in found.values()), found


def one_rank_groups(device: torch.device) -> tuple[bool, Found]:
    """The operators of partitioned graphs on a group of one rank (nccl on a GPU): bfloat16, not contiguous, backward,
    compiled. What several ranks send each other it cannot show."""
    import autopart.runtime.comm.collectives  # noqa: F401  which does them on process groups

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            name = dist.group.WORLD.group_name
            x = torch.randn(6, 4, device=device).bfloat16().t().requires_grad_()
            sizes = {"all_gather": (0, 4), "reduce_scatter": (0, 4), "slice": (1, 6), "slice_pad": (1, 6)}
            for operator in ("all_reduce", "all_reduce_both", "sum_grad", *sizes):

                def call(x: Tensor, operator: str = operator) -> Tensor:
                    return getattr(torch.ops.autopart, operator)(x, name, *sizes.get(operator, ()))

                for kind, run in (("eager", call), ("compiled", torch.compile(call))):
                    if kind == "compiled" and device.type == "cpu":
                        continue
                    y = run(x)
                    (grad,) = torch.autograd.grad(y.float().square().sum(), x)
                    same = torch.equal(y, x) and torch.allclose(grad.float(), 2 * x.detach().float(), rtol=1e-2)
                    found[f"{operator} {kind}"] = bool(same)
        finally:
            dist.destroy_process_group()
    return all(found.values()), found


def whole_float32(device: torch.device) -> tuple[bool, Found]:
    """A convolution in float32 with TF32 switched off, against float64."""
    conv, x = nn.Conv2d(64, 64, 3).to(device), torch.randn(8, 64, 32, 32, device=device)
    with torch.no_grad():
        of_single = conv(x).double()
        error = float((of_single - conv.double()(x.double())).abs().max() / of_single.abs().max())
    return error < 1e-5, {"relative error": error}


def memory(device: torch.device) -> tuple[None, Found]:
    """The plan's peak against what torch hands out, of a small GPT-2 in bfloat16."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=256, n_head=4, vocab_size=4096, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).to(device).bfloat16().train()
    ids = torch.randint(0, 4096, (4, 256), device=device)
    pm = autopart.parallelize(copy.deepcopy(model), "dp1", example_kwargs={"input_ids": ids, "labels": ids})
    planned = pm.plan.memory[0]["total"]
    if device.type != "cuda":
        pm.step(input_ids=ids, labels=ids)
        return None, {"planned_bytes": planned}
    optimizer = torch.optim.AdamW(pm.parameters())
    del model
    for _ in range(2):  # the second is the one that counts
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        pm.step(input_ids=ids, labels=ids)
        optimizer.step()
    return None, {"planned_bytes": planned, "peak_bytes": torch.cuda.max_memory_allocated()}


POINTS: dict[str, Callable[[torch.device], tuple[bool | None, Found]]] = {
    "machine": machine, "batch-norms": batch_norms, "experts": experts, "dropout": dropout, "attention": attention,
    "streams": streams, "host-batch": host_batch, "refused": refused, "step-waits": step_waits,
    "one-rank-groups": one_rank_groups, "float32": whole_float32, "memory": memory,
}  # fmt: skip

if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
