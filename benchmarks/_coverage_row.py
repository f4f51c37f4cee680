"""One row of the coverage table: build and trace a model, verify it on every mesh, count its FLOPs.

Runs in a separate process, so that a crash or a hang affects only this row.
"""

from __future__ import annotations

import operator
import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _coverage_page import BY_OTHERS
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopart.cost.flops import flop_counter
from autopart.errors import AutopartError, StageError
from autopart.ir.facts import facts
from autopart.ir.graph import operator_name
from autopart.options import Options
from autopart.proof.comparison import Arrangement
from autopart.proof.verify import VerificationRun
from autopart.tracing.trace_model import bind_call, check_values, flatten_call

FLOPS_MESH = "tp2"
MICROBATCHES = {"pp2": 4, "pp2,tp2": 4, "dp2,pp2": 2, "dp2,pp2,tp2": 2}  # of 8 rows; the default would be one row each
NEGLIGIBLE = 0.002
NEWLINE = "\n"

Row = dict[str, Any]


def measure(name: str, meshes: list[str], report: Callable[[Row], None]) -> None:
    """Reports the row of an architecture, again after each thing that is known.

    `step` is what it does or did last: build, forward, trace, then a mesh, then done.
    """

    def build_run(row: Row, reached: Callable[[str], None]) -> VerificationRun:
        from _architectures import ARCHITECTURES, build

        row["family"], row["class"] = ARCHITECTURES[name]
        model, inputs = build(name)
        arguments = bind_call(model, (), inputs)
        row["parameters"] = sum(p.numel() for p in model.parameters())
        reached("forward")
        run_once(model, arguments)
        reached("trace")
        return VerificationRun(model, arguments)

    fill_row(name, meshes, report, build_run)


def measure_by_others(name: str, meshes: list[str], report: Callable[[Row], None]) -> None:
    """The same for a model that others wrote, as it is: in training mode, never run before, with its loss."""

    def build_run(row: Row, reached: Callable[[str], None]) -> VerificationRun:
        from by_others import build_case

        row["family"] = BY_OTHERS
        case = build_case(name)
        row["class"] = type(case.model).__name__
        arguments = bind_call(case.model, case.args, case.kwargs)
        reached("trace")
        check_values(flatten_call(arguments))
        run = VerificationRun(case.model, arguments, case.loss_fn, case.target)
        row["parameters"] = sum(p.numel() for p in run.parameters.values())
        return run

    fill_row(name, meshes, report, build_run)


def fill_row(
    name: str, meshes: list[str], report: Callable[[Row], None],
    build_run: Callable[[Row, Callable[[str], None]], VerificationRun],
) -> None:  # fmt: skip
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    row: Row = {"name": name, "step": "build", "meshes": {}}
    start_s = time.perf_counter()

    def reached(step: str) -> None:
        row["step"], row["time_s"] = step, round(time.perf_counter() - start_s, 1)
        report(row)

    try:
        reached("build")
        run = build_run(row, reached)
        row["trace_s"] = round(time.perf_counter() - start_s - row["time_s"], 2)
        row["operators"] = sum(n.op == "call_function" for n in run.traced.graph.nodes)
        row["no_rule"] = without_rule(run.traced.graph)
        for mesh in meshes:
            reached(mesh)
            row["meshes"][mesh] = on_mesh(run, mesh, row)
        reached("done")
    except Exception as error:  # whatever a model raises is what its row says
        row["error"] = told(error)
        report(row)


@torch.no_grad()
def run_once(model: nn.Module, arguments: dict[str, Any]) -> None:
    """Raises what the model raises. What it makes in torch's default dtype is float64 where it cannot run otherwise."""
    try:
        model(**arguments)
    except RuntimeError:
        torch.set_default_dtype(torch.float64)
        model(**arguments)


def measure_peers(name: str, meshes: list[str], report: Callable[[Row], None]) -> None:
    """Reports what other tools give for an architecture; `meshes` are not theirs to choose."""
    from _architectures import build
    from _peers import peers

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, inputs = build(name)
    report({"name": name, "step": "peers", "peers": peers(model, bind_call(model, (), inputs))})


def measure_torch(name: str, meshes: list[str], report: Callable[[Row], None]) -> None:
    """Reports what torch itself makes of a model that others wrote: `exact` where it runs, traces, compiles whole."""
    from by_others import build_case

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ways: dict[str, Callable[[Any], Any]] = {
        "runs": lambda case: case.model(*case.args, **case.kwargs),
        "export": lambda case: torch.export.export(case.model, case.args, case.kwargs, strict=False),
        "compile": lambda case: torch.compile(case.model, fullgraph=True, backend="eager")(*case.args, **case.kwargs),
    }
    answers: dict[str, str] = {}
    for way, tried in ways.items():
        case = build_case(name)
        try:
            tried(case)
            answers[way] = "yes"
        except Exception as error:  # whatever torch raises is the answer
            answers[way] = f"{type(error).__name__}: {without_folders(str(error)).strip().partition(NEWLINE)[0][:200]}"
        report({"name": name, "step": way, "torch": answers})


def on_mesh(run: VerificationRun, mesh: str, row: Row) -> Row:
    """Whether the model is exact on a mesh; under `FLOPS_MESH` also what is sharded."""
    start_s = time.perf_counter()
    result: Row = {"exact": False}
    try:
        arrangement = arrange(run, mesh)
        result["microbatches"] = arrangement.decisions.microbatches
        found = run.check(arrangement)
        result |= {"exact": found.ok, "max_error": float(f"{found.max_error:.2g}")}
        if found.not_finite is not None:
            result["not_finite"] = str(found.not_finite)[:300]
        if not found.ok:
            worst = sorted(found.errors.items(), key=lambda e: -e[1])[:4]
            result |= {"first": str(found.first_mismatch)[:900], "worst": dict(worst)}
        if mesh == FLOPS_MESH:
            row["flops"] = sharded_flops(run, arrangement)
    except Exception as error:
        result["error"] = told(error)
    result["time_s"] = round(time.perf_counter() - start_s, 1)
    return result


def arrange(run: VerificationRun, mesh: str) -> Arrangement:
    """On a mesh with a pipeline in microbatches, unless the model mixes rows: then in one piece."""
    if "pp" not in mesh:
        return run.arrange(mesh)
    try:
        return run.arrange(mesh, options=Options(microbatches=MICROBATCHES[mesh]))
    except StageError:
        return run.arrange(mesh, options=Options(microbatches=1))


def told(error: Exception) -> Row:
    """What a row keeps of an exception; `refused`: in autopart's words."""
    frames = traceback.extract_tb(error.__traceback__)[-5:]
    stack = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
    text = re.sub(r" at 0x[0-9a-f]+", "", without_folders(str(error)))[:700]
    return {"type": type(error).__name__, "text": text, "stack": stack, "refused": isinstance(error, AutopartError)}


def without_folders(text: str) -> str:
    """A text without the folders of this machine: a module's path begins at its package, others are file names."""
    text = re.sub(r"(?<![\w.])/(?:[^\s'\"/]+/)*site-packages/", "", text)
    text = re.sub(r"(?<=\()(?:[\w.@+-]+/)+(?=autopart/)", "", text)  # torch names ours from some folder above
    return re.sub(r"(?<![\w.:/>)\]-])/(?:[\w.+@~-]+/)+(?=[\w.+-])", "", text)


def without_rule(graph: fx.Graph) -> dict[str, Row]:
    """Operators on activations that have no rule: how many calls, and one of them as text."""
    found: dict[str, Row] = {}
    for node in graph.nodes:
        is_operator = node.op == "call_function" and node.target is not operator.getitem
        if is_operator and facts(node)["pattern"] is None and facts(node)["role"] == "active":
            entry = found.setdefault(operator_name(node), {"calls": 0, "example": call_text(node)})
            entry["calls"] += 1
    return found


def call_text(node: fx.Node) -> str:
    """`aten.topk.default(float64[96, 4], 2) -> [96, 2], [96, 2]`."""

    def one(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            value = argument.meta["val"]
            kind = "" if facts(argument)["role"] == "active" else f" {facts(argument)['role']}"
            if not isinstance(value, Tensor):
                return argument.name
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{kind}"
        if isinstance(argument, (list, tuple)):
            return f"[{', '.join(map(one, argument))}]"
        return repr(argument)

    outputs = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
    shapes = ", ".join(str(list(v.shape)) for v in outputs if isinstance(v, Tensor))
    arguments = ", ".join([*map(one, node.args), *(f"{k}={one(v)}" for k, v in node.kwargs.items())])
    return f"{node.target}({arguments}) -> {shapes}"[:300]


def sharded_flops(run: VerificationRun, arrangement: Arrangement) -> Row:
    """The share of FLOPs that run sharded: those of forward and backward on one rank, against those on all.

    Work that is not sharded is done by every rank, so with n ranks the share is (n - all/one) / (n - 1).
    `unsharded`: {operator: what of it is not sharded, as a share of all forward FLOPs}.
    """
    one, one_forward = flops(run, run.arrange("dp1"))
    all_ranks, all_forward = flops(run, arrangement)
    others = arrangement.decisions.mesh.num_ranks - 1
    whole = sum(one_forward.values()) or 1
    apart = {op: (all_forward[op] - count) / others / whole for op, count in one_forward.items()}
    return {
        "one_rank": one, "all_ranks": all_ranks,
        "share": round(1 - (all_ranks / one - 1) / others, 4) if one else None,
        "unsharded": {op: round(share, 3) for op, share in apart.items() if share > NEGLIGIBLE},
    }  # fmt: skip


def flops(run: VerificationRun, arrangement: Arrangement) -> tuple[int, Counter[str]]:
    """FLOPs of forward and backward on all ranks as they run, and those of the forward by operator.

    Counted by torch's FlopCounterMode: matrix products (of attention too) and convolutions, nothing else.
    """
    step, forward = run.subject.step(arrangement.decisions), Counter[str]()
    seen = 0

    def count(stage: int, microbatch: int, node: fx.Node, value: Any) -> None:
        nonlocal seen
        if node.op == "call_function":
            forward[str(node.target)] += counter.get_total_flops() - seen
        seen = counter.get_total_flops()

    # The counter does not know the fused attention of CPUs.
    with sdpa_kernel(SDPBackend.MATH), flop_counter() as counter:
        results = run.subject.lockstep(step, run.subject.shards(step, arrangement), arrangement.stage_style, count)
        torch.autograd.backward(run.subject.seeds(step, results))
    return counter.get_total_flops(), forward
