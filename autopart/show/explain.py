"""A plan as text: summary, table of stages and blocks, totals, balance of stages, predicted cost.

The text is made from the plan's data alone, so a plan that is read from a file needs no model.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from autopart.common.names import pattern_of
from autopart.common.text import TEXT_WIDTH, indented, quantity
from autopart.cost.update_rules import ADAMW, UPDATES
from autopart.ir.layout import mesh_axes_of
from autopart.ir.mesh import Mesh
from autopart.ir.run.recompute_spec import text_of
from autopart.ir.run.report_terms import MEMORY_KINDS, Collective
from autopart.plans.headlines import fit_text, precision_text, step_size, utilisation

if TYPE_CHECKING:
    from autopart.plans.plan import Plan

WIDTH = 120
HEADINGS = ("stage", "block", "layout of its weights", "FLOPs", "forward", "backward", "sent")
_STAGE, _BLOCK, _LAYOUT, _FLOPS, _FORWARD, _BACKWARD, _SENT = range(len(HEADINGS))
_RIGHT = (_FLOPS, _SENT)
_MIN_LAYOUT_WIDTH, _MIN_KIND_WIDTH = 26, 14
_NEGLIGIBLE = 0.005  # share of FLOPs below which a block without weights or collectives gets no separate row
_PART_NAMES = {"gradient sums": "gradient reduction"}
"""{key of `parts_s` in a plan: its name in the text}, for keys whose name differs."""


def explain(plan: Plan, width: int = WIDTH) -> str:
    """Return the plan as text, 80 columns wide.

    The table of layouts has `width` columns, or more for long module names.

    Example:
        >>> print(autopart.show.explain.explain(Plan.load("plan.json")))    # doctest: +SKIP
    """
    groups = [group for group in (*_stage_groups(plan), _step_group(plan)) if group[1]]
    parts = [
        _header(plan), _table(groups, width), _totals(plan), _unsharded(plan), _layouts(plan), _balance(plan),
        _memory(plan), _cost(plan),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


# Numbers


def _percent(part: float, total: float) -> str:
    share = part / total if total else 0.0
    return f"{100 * share:.1f} %" if share >= 0.0005 else "<0.1 %" if part else ""


# Parts of the text


def _header(plan: Plan) -> str:
    schedule = plan.schedule
    number = int(plan.model["num_parameters"])
    ranks = math.prod(plan.mesh.values())
    inputs = ", ".join(f"{name} {i['dtype']}{list(i['shape'])}" for name, i in plan.inputs.items())
    run = f"{schedule.name or 'one stage'}, {schedule.microbatches} microbatch{'es' * (schedule.microbatches > 1)}"
    if schedule.virtual_stages > 1:
        run += f", {schedule.virtual_stages} stages per rank"
    mode = f", traced in {plan.model['mode']} mode" if "mode" in plan.model else ""
    mode += f" under autocast to {plan.autocast}" if plan.autocast else ""
    lines = [
        ("model", f"{plan.model['class']}, {_count(number)} parameters{mode}"),
        ("inputs", inputs),
        ("a step is", step_size(plan)),
        ("mesh", f"{plan.mesh_object()} ({ranks} rank{'s' * (ranks > 1)})"),
        ("schedule", run),
        ("recompute", text_of(plan.recompute) if plan.recompute != "none" else ""),
        ("zero", _zero(plan)),
        ("optimizer", _optimizer(plan)),
        ("sends", _sends(plan)),
        ("once", _tail(plan)),
        ("compile", "every stage, by torch.compile" if plan.compile else ""),
        ("precision", precision_text(plan)),
        ("hardware", plan.hardware),
        ("pins", _pins(plan.pins)),
        *(("note", note) for note in plan.notes),
    ]
    return _labelled((label, text) for label, text in lines if text)


def _tail(plan: Plan) -> str:
    """Describe the operators that run once per step, for all microbatches; "" without such operators."""
    tail = plan.stages[-1].get("tail") if plan.stages else None
    if tail is None:
        return ""
    share = _percent(tail["flops"], plan.cost["forward_flops"])
    return (
        f"runs once on the whole batch: {tail['first']} and the operators that depend on it, {share} of the FLOPs, "
        "between the forwards and the backwards of the last stage"
    )


def _zero(plan: Plan) -> str:
    """Describe which tensors ZeRO shards, and over which axes."""
    mesh, ahead = plan.mesh_object(), plan.prefetch
    mesh_axes = [[name for name in mesh_axes_of(axis) if mesh.size(name) > 1] for axis in plan.axes_in_parts]
    over = " and ".join(map(" x ".join, mesh_axes))
    sharded = {
        1: "optimizer state", 2: "optimizer state and gradients", 3: "parameters, gradients and optimizer state"
    }  # fmt: skip
    if plan.zero not in sharded:
        return ""
    prefetched = f", prefetched {ahead} block{'s' * (ahead > 1)} ahead" if plan.zero == 3 and ahead else ""
    return f"{plan.zero}: {sharded[plan.zero]} sharded over {over}{prefetched}"


def _optimizer(plan: Plan) -> str:
    """Describe the optimizer whose update the plan predicts, and its cost per step; "" for AdamW."""
    name = plan.timing.get("table", {}).get("optimizer", ADAMW)
    if name == ADAMW:
        return ""
    rows, full = plan.timing["ranks"], UPDATES[name].full
    took = quantity(max(row["optimizer_s"] for row in rows), "s")
    count = sum(row.get("full_tensors", 0) for row in rows)
    if not count:
        return f"{name}: elementwise, the update takes {took}"
    kind = "hidden matrices" if full == "matrices" else "parameters"
    rest = f", {ADAMW} for all other parameters" if full == "matrices" else ""
    sent = max(row.get("update_sent_bytes", 0) for row in rows)
    where = "on owner ranks" if sent else "on every rank that stores them"
    exchange = quantity(max(row.get("owners_s", 0.0) for row in rows), "s")
    moved = f", and its exchange with owners {exchange}: a rank sends {quantity(sent, 'B')}" if sent else ""
    return f"{count} {kind} by {name} {where}{rest}; the update takes {took}{moved}"


def _sends(plan: Plan) -> str:
    """Describe scatter-gather sends between stages; "" if values are sent in full."""
    axes = ",".join(plan.mesh_object().chosen)
    return f"sharded: each rank of {axes} sends a shard, the next stage all-gathers" if plan.scatter_sends else ""


def _pins(pins: Mapping[str, Any]) -> str:
    """Describe the pins (layouts and stages that the user fixed) on one line.

    For example `model.layers.*.mlp tp:R; stage boundary before model.layers.16; model.norm, lm_head together`.
    """
    layouts = [f"{name} {' '.join(f'{a}:{p}' for a, p in at.items())}" for name, at in pins.items() if name != "stages"]
    stages = pins.get("stages", {})
    boundaries = [f"stage boundary before {name}" for name in stages.get("cut_before", ())]
    return "; ".join([*layouts, *boundaries, *(f"{', '.join(names)} together" for names in stages.get("together", ()))])


def _count(number: int) -> str:
    """Format a large number: `6,738,415,616 (6.74 billion)`."""
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number:,} ({number / size:.3g} {word})"
    return f"{number:,}"


def _labelled(lines: Iterable[tuple[str, str]]) -> str:
    """Format (label, text) pairs as wrapped lines `label    text`."""
    return "\n".join(
        textwrap.fill(
            text,
            TEXT_WIDTH,
            initial_indent=f"{label:<13}",
            subsequent_indent=" " * 13,
            break_on_hyphens=False,
            break_long_words=False,
        )
        for label, text in lines
    )


def _totals(plan: Plan) -> str:
    cost = plan.cost
    lines = []
    if "forward_flops" in cost:
        lines.append(("compute", f"{quantity(cost['forward_flops'], 'FLOP')} forward for the global batch"))
    for per, what in (("microbatch", "every microbatch"), ("step", "every step, once")):
        rows = [c for c in plan.collectives if c.per == per]
        kinds: dict[str, int] = {}
        for row in rows:
            kinds[row.axis] = kinds.get(row.axis, 0) + row.bytes
        if rows:
            parts = ", ".join(f"{axis} {quantity(size, 'B')}" for axis, size in kinds.items())
            lines.append(("communication", f"{quantity(sum(kinds.values()), 'B')} {what} ({parts})"))
    text = [f"{label:<15}{line}" for label, line in lines]
    return (
        "\n".join(["totals (bytes: sent by one rank of each stage, forward and backward)", *(f"  {t}" for t in text)])
        if text
        else ""
    )


def _unsharded(plan: Plan) -> str:
    """Describe the operators that run in full on every rank, each with a sharding rule to try."""
    if not plan.unsharded:
        return ""
    lines = ["operators that run in full on every rank"]
    for row in plan.unsharded:
        units = (("flops", "FLOP", ""), ("bytes", "B", " in and out"), ("moved_bytes", "B", " sent by a rank for it"))
        figures = [f"{quantity(row[key], unit)}{what}" for key, unit, what in units if row.get(key)]
        where = f" in {row['where']}" if row["where"] else ""
        lines.append(f"  {row['count']} {row['operator']}{where}: {row['why']}")
        lines.append(f"    {row['shapes']}; {', '.join(figures)}")
        if "try" in row:
            lines.append(f"    try {row['try']}")
    if any(row.get("try", "").startswith("autopart.rule") for row in plan.unsharded):
        lines.append("  (rules to try are guesses from the shapes: test them with autopart.check_rule)")
    return "\n".join(lines)


def _layouts(plan: Plan) -> str:
    """Describe the cost of the chosen layouts, and their proven optimality gap.

    The gap is relative to the cost. The solver has proven that no other layouts are cheaper by more than the gap.
    If several mesh axes have layouts to choose, the proof is for one axis, with the layouts on the other axes fixed.
    """
    cost = plan.cost
    if "work_share" not in cost:
        return ""
    work, weights = _percent(cost["work_share"], 1), _percent(cost["weight_share"], 1)
    parts = {
        "communication": "communication_s",
        "memory traffic": "memory_traffic_s",
        "gradient reduction": "gradient_sync_s",
    }
    seconds = [f"{what} {quantity(cost[key], 's')}" for what, key in parts.items() if cost[key]]
    better = f"more than {100 * cost['gap']:.2g} % cheaper" if cost["gap"] else "cheaper"
    estimate = f"the solver's cost of a step, without overlap: {', '.join(seconds)}" if seconds else ""
    shares = f"a rank has {work} of the matrix FLOPs and {weights} of their weights"
    lines = [shares, estimate, f"proven: no layouts are {better}"]
    return "\n".join([f"layouts on {plan.mesh_object().solving_order[0]}", *indented(lines)])


def _balance(plan: Plan) -> str:
    loads = [stage["flops"] for stage in plan.stages if "flops" in stage]
    if len(loads) < 2:
        return ""
    top, cost = max(loads), plan.cost
    lines = []
    for stage, load in zip(plan.stages, loads, strict=True):
        bar = "#" * round(30 * load / top) if top else ""
        size = f"{_count(stage['parameters'])} parameters" if "parameters" in stage else ""
        lines.append(f"  stage {stage['stage']:<3} {quantity(load, 'FLOP'):>11}  {bar:<30}  {size}".rstrip())
    if "stage_lower_bound_flops" in cost:
        bound = quantity(cost["stage_lower_bound_flops"], "FLOP")
        above = 100 * cost.get("imbalance", top / cost["stage_lower_bound_flops"] - 1)
        lines += indented([f"the largest stage is {above:.2f} % above {bound}, a lower bound for every partition"])
    return "\n".join(["balance of stages (forward FLOPs of the global batch)", *lines])


def _memory(plan: Plan) -> str:
    """Return a table of memory by kind. It has one row per `pp` coordinate, for the rank with most memory.

    Kinds that are zero everywhere are omitted.
    """
    kinds = [kind for kind in MEMORY_KINDS if any(row.get(kind) for row in plan.memory)]
    if not kinds:
        return ""
    rows = [["stage", *kinds, "total", "in flight"]]
    for row in plan.memory:
        sizes = [quantity(row.get(kind, 0), "B") for kind in (*kinds, "total")]
        in_flight = ",".join(map(str, row.get("in_flight", ())))
        rows.append([",".join(map(str, row["stages"])), *sizes, in_flight])
    lines = _right_aligned(rows)
    turned = _right_aligned(list(zip(*rows, strict=True)))
    if max(map(len, lines)) > TEXT_WIDTH >= max(map(len, turned)):
        lines = turned  # a column for every pipeline coordinate
    of = f" of {step_size(plan)}" if step_size(plan) else ""
    title = f"memory of the fullest rank (AdamW; microbatches in flight)\nin a training step{of}"
    return "\n".join([title, *lines, *indented([_uneven(plan)])])


def _uneven(plan: Plan) -> str:
    """Describe the expert load assumed for the predicted memory, and the memory at the largest load."""
    if "worst_memory_bytes" not in plan.cost:
        return ""
    load = f"{plan.balance:g} times the mean number" if plan.balance > 1 else "the mean number"
    worst = quantity(plan.cost["worst_memory_bytes"], "B")
    return f"balance={plan.balance:g}: the busiest rank gets {load} of expert tokens; with all tokens it needs {worst}"


def _right_aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)) for row in rows]


def _cost(plan: Plan) -> str:
    """Describe the predicted step, from the figures in `Plan.cost`."""
    cost = plan.cost
    if "step_time_s" not in cost:
        return ""
    step = quantity(cost["step_time_s"], "s")
    if "parts_s" not in cost:
        return (
            f"predicted step\n  {step} by the formula of an older autopart, from peak FLOP/s only: make the plan again"
        )
    size = step_size(plan)
    parts = ", ".join(f"{_PART_NAMES.get(kind, kind)} {quantity(s, 's')}" for kind, s in cost["parts_s"].items())
    lines = [
        f"{step} a step{f' of {size}' if size else ''}",
        utilisation(cost),
        f"the busiest rank: {parts}",
        f"pipeline bubble: {100 * cost['bubble_fraction']:.1f} % of the busy time"
        if plan.mesh.get("pp", 1) > 1
        else "",
        f"memory: {fit_text(plan)}" if fit_text(plan) else "",
    ]
    return "\n".join([f"predicted step{f' on {plan.hardware}' if plan.hardware else ''}", *indented(lines)])


# The table


@dataclass(frozen=True)
class _Line:
    """One row of the table. The text of a cell can have several lines."""

    block: str = ""
    layout: tuple[str, ...] = ()
    flops: str = ""
    forward: str = ""
    backward: str = ""
    sent: str = ""


Group = tuple[str, list[_Line]]


def _stage_groups(plan: Plan) -> list[Group]:
    """Return (title, rows) of each stage. A plan without blocks has one group with all modules."""
    if not any(stage.get("blocks") for stage in plan.stages):
        return [("all", _module_lines(plan))]
    weights = _weights_by_block(plan, {block["block"] for stage in plan.stages for block in stage.get("blocks", ())})
    shown: dict[str, int] = {}
    return [(str(stage["stage"]), _stage_lines(plan, stage, weights, shown)) for stage in plan.stages]


def _stage_lines(
    plan: Plan, stage: Mapping[str, Any], weights: Mapping[str, list[str]], shown: dict[str, int]
) -> list[_Line]:
    """Return the rows of a stage. Repeated layers share one heading.

    Args:
        shown: {block: number of the stage that shows its layout}. Rows of later stages refer to that stage.
    """
    lines = [
        _collective_line(f"(receives {c.count} value{'s' * (c.count > 1)})", c)
        for c in plan.collectives
        if c.where == f"into stage {stage['stage']}"
    ]
    total = plan.cost.get("forward_flops") or sum(s.get("flops", 0) for s in plan.stages)
    repeated: dict[str, list[Mapping[str, Any]]] = {}
    small = 0
    for block in stage.get("blocks", ()):
        idle = not (weights.get(block["block"]) or block.get("shared") or block.get("forward") or block.get("backward"))
        if idle and block.get("flops", 0) < _NEGLIGIBLE * total:
            small += block.get("flops", 0)
        else:
            repeated.setdefault(_layers_of(block["block"]) or block["block"], []).append(block)
    for name, blocks in repeated.items():
        layers = ""
        if _layers_of(name):
            layers = Counter(block.get("layers", "") for block in blocks).most_common(1)[0][0]
            lines.append(_Line(f"{name}  {layers}"))
        for block in blocks:
            lines.append(_block_line(plan, block, layers, weights, shown.get(block["block"]), total))
            shown.setdefault(block["block"], stage["stage"])
    if small:
        lines.append(_Line("(other operators)", flops=_percent(small, total)))
    return lines


def _block_line(
    plan: Plan, block: Mapping[str, Any], layers: str, weights: Mapping[str, list[str]], before: int | None, total: int
) -> _Line:
    """Return the row of a block.

    Args:
        layers: layer numbers in the heading above the row, such as `0-15`.
        before: number of an earlier stage that shows the block's layout; None if no earlier stage does.
    """
    name = block["block"] or "(model)"
    if layers:
        name = "  " + (name.removeprefix(_layers_of(name)).removeprefix(".") or "(itself)")
        if block.get("layers", "") != layers:
            name += f"\n    of {block.get('layers', '')}"
        if "modules" in block:
            name += f"\n    {block['modules']} modules"
    layout = weights.get(block["block"], [])
    if layout and before is not None:
        layout = [f"as in stage {before}"]
    shared = [f"{other} {_layout_text(plan, other)} (shared)" for other in block.get("shared", ())]
    return _Line(
        name, (*layout, *shared), _percent(block.get("flops", 0), total), _counts(block.get("forward", {})),
        _counts(block.get("backward", {})), quantity(block["bytes"], "B") if block.get("bytes") else "",
    )  # fmt: skip


def _layers_of(name: str) -> str:
    """Return the repeated layer that contains a block: `model.layers.*` for `model.layers.*.mlp`, else ""."""
    parts = name.split(".")
    return ".".join(parts[: parts.index("*") + 1]) if "*" in parts else ""


def _counts(collectives: Mapping[str, int]) -> str:
    return "\n".join(f"{count} {name}" for name, count in collectives.items())


def _counted(row: Collective, kind: str) -> str:
    return f"{row.count} {row.axis} {kind}" if kind else ""


def _collective_line(name: str, row: Collective) -> _Line:
    forward, backward = _counted(row, row.forward), _counted(row, row.backward)
    return _Line(name, forward=forward, backward=backward, sent=quantity(row.bytes, "B"))


def _module_lines(plan: Plan) -> list[_Line]:
    """Return one row for each module with weights or collectives, for plans without blocks."""
    moved: dict[str, list[Collective]] = {}
    for row in plan.collectives:
        if row.per == "microbatch":
            moved.setdefault("" if row.where == "model" else row.where, []).append(row)
    parents = {pattern_of(name).rpartition(".")[0] for name in plan.parameters}
    weights = _weights_by_block(plan, parents | set(moved))
    lines = []
    for name in dict.fromkeys([*weights, *moved]):
        collectives = moved.get(name, [])
        forward, backward = (
            "\n".join(filter(None, (_counted(c, getattr(c, way)) for c in collectives)))
            for way in ("forward", "backward")
        )
        sent = quantity(sum(c.bytes for c in collectives), "B") if collectives else ""
        lines.append(_Line(name or "(model)", tuple(weights.get(name, ())), "", forward, backward, sent))
    return lines


def _step_group(plan: Plan) -> Group:
    """Return the rows of collectives that run once per step, such as gradient reduction."""
    return "step", [_collective_line(f"({c.where})", c) for c in plan.collectives if c.per == "step"]


def _weights_by_block(plan: Plan, blocks: set[str]) -> dict[str, list[str]]:
    """Return {block: lines with its weights and layouts}.

    For example `{block: ["c_attn.weight S(1; sections=3)", ...]}`. If blocks are nested, a parameter belongs to the
    innermost one. Weights with equal layouts share a line; replicated ones come last.
    """
    by_block: dict[str, dict[str, list[str]]] = {}
    for name in plan.parameters:
        pattern = pattern_of(name)
        above = [block for block in blocks if not block or pattern.startswith(f"{block}.")]
        block = max(above, key=len, default="")
        short = pattern.removeprefix(f"{block}.") if block else pattern
        if name != pattern:
            short = f"{short} of {name.rpartition('.')[0]}"
        by_block.setdefault(block, {}).setdefault(_layout_text(plan, name), []).append(short)
    return {
        block: [f"{', '.join(names)} {text}" for text, names in sorted(layouts.items(), key=lambda e: e[0] == "R")]
        for block, layouts in by_block.items()
    }


def _layout_text(plan: Plan, name: str) -> str:
    """Format a parameter's layout: `S(0)` if the plan shards over `tp` only, else `dp:S(1) tp:S(0)`."""
    tensor_axis = Mesh({}, plan.axes).tensor_axis
    used_axes = {axis for entry in plan.parameters.values() for axis in entry}
    joined = sorted(used_axes - set(plan.mesh))
    axes = [*joined, *(axis for axis in plan.mesh if axis in used_axes)]
    if axes in ([], [tensor_axis]):
        return plan.placement_text(name, tensor_axis)
    places = [(axis, plan.placement_text(name, axis)) for axis in axes]
    return " ".join(f"{axis}:{text}" for axis, text in places if text != "R") or "R"


def _table(groups: Sequence[Group], width: int) -> str:
    """Format groups of rows as one table of `width` columns: wrap layouts, then collectives."""
    rows = [
        [label * (i == 0), x.block, "\n".join(x.layout), x.flops, x.forward, x.backward, x.sent]
        for label, lines in groups
        for i, x in enumerate(lines)
    ]
    widths = [
        max(len(part) for row in (HEADINGS, *rows) for part in row[column].split("\n"))
        for column in range(len(HEADINGS))
    ]
    layout_width = _MIN_LAYOUT_WIDTH if width >= WIDTH else _MIN_KIND_WIDTH
    for column, least in ((_LAYOUT, layout_width), (_FORWARD, _MIN_KIND_WIDTH), (_BACKWARD, _MIN_KIND_WIDTH)):
        room = width - sum(widths) - 2 * (len(widths) - 1) + widths[column]
        if room >= widths[column]:
            break
        for row in rows:
            row[column] = "\n".join(_wrap_layout(row[column], max(room, least)))
        widths[column] = max(len(part) for row in (HEADINGS, *rows) for part in row[column].split("\n"))
    lines = [_text_line(HEADINGS, widths)]
    for row in rows:
        if row[_STAGE]:
            lines.append("  ".join("-" * width for width in widths))
        lines += [_text_line(parts, widths) for parts in zip_longest(*(text.split("\n") for text in row), fillvalue="")]
    return "\n".join(lines)


def _wrap_layout(text: str, width: int) -> list[str]:
    """Wrap a list of weights and their layout into lines, with no break inside a placement."""
    lines = []
    for line in text.split("\n"):
        kept = line.replace("; sections", ";\0sections").replace(" (shared)", "\0(shared)")
        parts = textwrap.wrap(kept, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        lines += [part.replace("\0", " ") for part in parts] or [""]
    return lines


def _text_line(texts: Sequence[str], widths: Sequence[int]) -> str:
    parts = [
        f"{text:>{width}}" if column in _RIGHT else f"{text:<{width}}"
        for column, (text, width) in enumerate(zip(texts, widths, strict=True))
    ]
    return "  ".join(parts).rstrip()
