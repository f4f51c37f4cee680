"""Data of a plan for the report, as JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autopart.common.text import quantity
from autopart.cost.predict.simulate import Simulation
from autopart.cost.predict.step_trace import ACTION_NAMES, CONSTANT_KINDS, memory_curve
from autopart.errors import AutopartError
from autopart.ir.run.report_terms import MEMORY_KINDS
from autopart.plans.headlines import fit_text, fits, replicated_operator_text, replicated_operators, step_size
from autopart.show.diff import diff
from autopart.show.explain import WIDTH
from autopart.show.nodes import node_lines
from autopart.show.report.suggestions import suggestions

if TYPE_CHECKING:
    from autopart.plans.plan import Plan

MOST_ACTIONS = 12_000
"""Maximum number of actions in a timeline. Later actions are left out."""

MOST_LINES = 64
"""Maximum number of `pp` coordinates in a timeline. With more, the first and last ones are shown."""

_PART_NAMES = {"other": "other operators", "matmul": "matrix products"}
"""{kind of time: its name on the page}, for kinds whose name differs."""

WAITING = "idle"
"""Kind of time, in the parts of a step, in which a rank waits for other ranks."""


def plan_data(label: str, plan: Plan, step: Simulation) -> dict[str, Any]:
    """Return all data of one plan and its simulated step for the report."""
    return {
        "label": label,
        "title": f"{plan.model.get('class', 'a model')} on {plan.mesh_object()}",
        "summary": _summary(plan, step),
        "suggestions": [
            asdict(row) | {"time": quantity(row.step_time_s, "s"), "memory": quantity(row.memory_bytes, "B")}
            for row in suggestions(plan)
        ],
        "figures": _figures(plan, step),
        "waterfall": _waterfall(step),
        "timeline": _timeline(step),
        "memory": _memory(plan, step),
        "stages": _stages(plan),
        "collectives": [
            {**asdict(row), "each": quantity(row.bytes / max(1, row.count), "B"), "time": quantity(row.seconds, "s"),
             "share": row.seconds / step.step_time_s if step.step_time_s else 0.0}
            for row in sorted(step.collectives, key=lambda row: -row.seconds)
        ],
        "mesh": _mesh(plan),
        "notes": list(plan.notes),
        "explain": str(plan.explain(WIDTH)),
        "graphs": [],
    }  # fmt: skip


def comparison(steps: Sequence[tuple[str, Plan, Simulation]]) -> dict[str, Any] | None:
    """Return one row of figures per plan, and the differences of the first two plans; None for one plan."""
    if len(steps) < 2:
        return None
    kinds = list(dict.fromkeys(kind for _, _, step in steps for kind in step.parts))
    best = min(step.step_time_s for _, _, step in steps)
    rows = [
        {"label": label, "mesh": str(plan.mesh_object()), "step_s": step.step_time_s,
         "step": quantity(step.step_time_s, "s"), "slower": step.step_time_s / best, "mfu": step.mfu,
         "bubble": step.bubble_fraction, "memory": fit_text(plan), "parts": [step.parts.get(k, 0.0) for k in kinds]}
        for label, plan, step in steps
    ]  # fmt: skip
    (first, a, _), (second, b, _) = steps[:2]
    names = [_PART_NAMES.get(kind, kind) for kind in kinds]
    return {"rows": rows, "kinds": names, "diff": str(diff(a, b).table(first, second))}


def _summary(plan: Plan, step: Simulation) -> str:
    size, ranks = step_size(plan), plan.mesh_object().num_ranks
    number = quantity(int(plan.model["num_parameters"]), "")
    parts = [
        f"{plan.model.get('class', 'The model')} with {number} parameters runs "
        f"on {ranks} rank{'s' * (ranks > 1)} of {plan.hardware or 'unknown hardware'}.",
        f"A step{f' of {size}' if size else ''} is predicted to take {quantity(step.step_time_s, 's')} "
        f"({_interval(step)}{100 * step.mfu:.3g} % of peak FLOP/s).",
    ]
    parts += [f"Memory: {fit_text(plan)}."] if fit_text(plan) else []
    gap = plan.cost.get("gap")
    if gap is not None and plan.mesh_object().chosen:
        proven = "No other layout of these operators is cheaper" if gap < 1e-9 else (
            f"Layouts are at most {100 * gap:.2g} % from the cheapest"
        )  # fmt: skip
        parts.append(f"{proven} (proven by the solver's lower bound).")
    return " ".join(parts)


def _interval(step: Simulation) -> str:
    likely = step.likely_range
    return f"likely {quantity(likely.low_s, 's')} to {quantity(likely.high_s, 's')}; " if likely is not None else ""


def _figures(plan: Plan, step: Simulation) -> list[dict[str, str]]:
    largest = max((row["total"] for row in plan.memory), default=0)
    fit = fits(plan)
    capacity = plan.cost.get("device_memory_bytes")
    of_device = f"of {quantity(capacity, 'B')}: {'it fits' if fit else 'it does not fit'}" if capacity else ""
    longest = max(step.parts, key=lambda kind: step.parts[kind], default="")
    share = step.parts.get(longest, 0.0) / step.step_time_s if step.step_time_s else 0.0
    rows = [
        ("step", quantity(step.step_time_s, "s"), step_size(plan)),
        ("MFU", f"{100 * step.mfu:.3g} %", f"of {quantity(step.peak_flops_per_s, 'FLOP/s')} {step.peak_dtype}".strip()),
        ("memory", quantity(largest, "B"), of_device or "on the fullest rank"),
        ("bubble", f"{100 * step.bubble_fraction:.3g} %", "idle time of the pipeline / busy time"),
        ("longest part", _PART_NAMES.get(longest, longest), f"{100 * share:.3g} % of the step"),
    ]
    state = {True: "good", False: "bad", None: ""}[fit]
    return [{"name": n, "value": v, "note": t, "state": state if n == "memory" else ""} for n, v, t in rows]


def _waterfall(step: Simulation) -> list[dict[str, Any]]:
    """Return the parts of a step's time in order, from matrix products at peak FLOP/s to idle time."""
    products = {kind: seconds for kind, seconds in step.parts.items() if kind in ("matmul", "attention")}
    ideal = min(step.mfu * step.step_time_s, sum(products.values()))
    rows = [("products at peak FLOP/s", ideal, "ideal")] if products else []
    rows += [("products below peak", sum(products.values()) - ideal, "compute")] if products else []
    for kind, seconds in step.parts.items():
        if kind not in products:
            group = "wait" if kind == WAITING else "communication" if _communicates(kind) else "compute"
            rows.append((_PART_NAMES.get(kind, kind), seconds, group))
    order = {"ideal": 0, "compute": 1, "communication": 2, "wait": 3}
    rows.sort(key=lambda row: order[row[2]])
    return [{"name": name, "s": s, "text": quantity(s, "s"), "group": group} for name, s, group in rows if s > 0]


def _communicates(kind: str) -> bool:
    return kind in ("gradient sums", "parameter gathers", "dp_sync") or kind.partition(" ")[2] != ""


def _timeline(step: Simulation) -> dict[str, Any]:
    """Return one line per `pp` coordinate: actions, then the gradient reduction and the optimizer step."""
    timeline = step.timeline
    ranks = [*range(len(timeline.spans))]
    if len(ranks) > MOST_LINES:
        ranks = [*ranks[: MOST_LINES // 2], *ranks[-MOST_LINES // 2 :]]
    each = max(1, MOST_ACTIONS // len(ranks))
    lines = []
    for rank in ranks:
        actions = [[s.start_s, s.end_s, s.kind, s.stage, s.microbatch] for s in timeline.spans[rank][:each]]
        after = [(*timeline.grad_sums[rank], "gradient reduction"), (*timeline.optimizers[rank], "optimizer")]
        lines.append({"rank": rank, "actions": actions, "after": [row for row in after if row[1] > row[0]]})
    cut = max(map(len, timeline.spans)) > each
    return {
        "lines": lines, "names": ACTION_NAMES, "step_s": step.step_time_s,
        "note": f"The first {each} actions of every rank." if cut else "",
        "ranks": f"{len(timeline.spans)} pp coordinates" if len(timeline.spans) > 1 else "",
    }  # fmt: skip


def _memory(plan: Plan, step: Simulation) -> dict[str, Any]:
    """Return each rank's bytes by kind, and its bytes over the step.

    The curve assumes that gradients are allocated from the start, and that all microbatches save equally many bytes.
    """
    rows, curves = [], []
    for index, row in enumerate(plan.memory):
        stages = ", ".join(map(str, row["stages"]))
        rows.append(
            {"label": f"stage {stages}", "total": row["total"], "text": quantity(row["total"], "B"),
             "kinds": {kind: row.get(kind, 0) for kind in MEMORY_KINDS if row.get(kind)}}
        )  # fmt: skip
        constant = sum(row.get(kind, 0) for kind in CONSTANT_KINDS)
        if index < MOST_LINES and index < len(step.timeline.spans):
            curve = memory_curve(step.timeline, index, row)
            curves.append([[time_s, constant + size] for time_s, size in curve[: MOST_ACTIONS // len(plan.memory)]])
    capacity = plan.cost.get("device_memory_bytes")
    return {"kinds": MEMORY_KINDS, "rows": rows, "capacity": capacity, "curves": curves,
            "device": plan.cost.get("device_memory_of") or plan.hardware}  # fmt: skip


def _stages(plan: Plan) -> list[dict[str, Any]]:
    """Return the blocks of every stage with their operators, parameters and collectives."""
    total = sum(block.get("flops", 0) for stage in plan.stages for block in stage["blocks"]) or 1
    names = {str(block["block"]) for stage in plan.stages for block in stage["blocks"]}
    operators = _by_block(plan.operators, names, "/", plan.alternatives)
    parameters = _by_block(plan.parameters, names, ".", plan.alternatives)
    moved: dict[str, list[str]] = {}
    for row in plan.collectives:
        kinds = (("forward", row.forward), ("backward", row.backward))
        direction = " and ".join(f"{way}: {kind}" for way, kind in kinds if kind)
        text = f"{row.axis} {direction}, {row.count} per {row.per}, {quantity(row.bytes, 'B')} sent in all"
        moved.setdefault(_block_of(row.where, names), []).append(text)
    return [
        {
            "stage": stage["stage"], "flops": quantity(stage["flops"], "FLOP"),
            "parameters": quantity(stage["parameters"], ""), "receives": len(stage["receives"]),
            "blocks": [
                {
                    "name": block["block"], "layers": block.get("layers", ""), "share": block.get("flops", 0) / total,
                    "flops": quantity(block.get("flops", 0), "FLOP"), "sent": quantity(block.get("bytes", 0), "B"),
                    "forward": block.get("forward", {}), "backward": block.get("backward", {}),
                    "operators": operators.get(block["block"], []), "parameters": parameters.get(block["block"], []),
                    "collectives": moved.get(block["block"], []),
                }
                for block in stage["blocks"]
            ],
        }
        for stage in plan.stages
    ]  # fmt: skip


def _by_block(
    entries: Mapping[str, Mapping[str, Any]], names: Collection[str], separator: str,
    alternatives: Mapping[str, Mapping[str, Any]],
) -> dict[str, list[Any]]:  # fmt: skip
    """Return {block: [[name, {axis: placements}, runner-up with its cost, source line], ...]}.

    Runner-up and source line are empty if the plan does not store its alternatives.
    """
    result = dict[str, list[Any]]()
    for key, layout in entries.items():
        path, _, name = key.rpartition(separator)
        block = _block_of(path, names)
        inner = path.removeprefix(block).lstrip(".")
        why = alternatives.get(key, {})
        other = why.get("runner_up", "")
        runner_up = f"{other}: {why['others'][other]}" if other in why.get("others", {}) else ""
        row = [separator.join(filter(None, (inner, name))), dict(layout), runner_up, why.get("where", "")]
        result.setdefault(block, []).append(row)
    return result


def _block_of(path: str, names: Collection[str]) -> str:
    """Return the longest name of a block that contains a module path; "" if no block does."""
    while path and path not in names:
        path = path.rpartition(".")[0]
    return path


def _mesh(plan: Plan) -> dict[str, Any]:
    mesh = plan.mesh_object()
    axes = [{"axis": axis, "size": mesh.size(axis), "stride": mesh.stride(axis)} for axis in mesh.sizes]
    try:
        lines = node_lines(plan)
    except AutopartError:
        lines = []
    work = plan.cost.get("forward_flops", 0)
    replicated = [replicated_operator_text(row) for row in replicated_operators(plan, work)]
    return {"axes": axes, "ranks": mesh.num_ranks, "nodes": lines, "replicated": replicated}
