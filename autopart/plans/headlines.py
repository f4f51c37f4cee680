"""Summary lines of a plan that several reports print: size of a step, utilization, memory fit.

The lines are computed from the plan's data alone, so a plan that is read from a file gives equal lines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autopart.common.text import indented, quantity

if TYPE_CHECKING:
    from autopart.plans.plan import Plan

ADVICE = "to fit into memory: "
"""Prefix of the note that lists settings that would fit into memory."""


def step_size(plan: Plan) -> str:
    """Return the size of a step as text: `8 samples x 128 tokens`, for images `8 samples x 3 x 32 x 32`.

    The number of tokens is the second dim of integer inputs. If inputs have different numbers of tokens, all are
    listed. Returns "" if no input has dims.
    """
    shapes = [
        (name, str(i["dtype"]), [int(size) for size in i["shape"]]) for name, i in plan.inputs.items() if i["shape"]
    ]
    first = [shape[0] for _, _, shape in shapes]
    if not first:
        return ""
    rows = max(first, key=first.count)
    rest = [(name, dtype, shape[1:]) for name, dtype, shape in shapes if shape[0] == rows]
    lengths = [
        s[0] for name, dtype, s in rest if len(s) == 1 and dtype.lstrip("u").startswith("int") and not _is_target(name)
    ]
    text = f"{rows} sample{'s' * (rows != 1)}"
    if lengths:
        return f"{text} x {' and '.join(map(str, dict.fromkeys(lengths)))} tokens"
    largest = max((shape for _, _, shape in rest), key=math.prod)
    return " x ".join([text, *map(str, largest)])


def _is_target(name: str) -> bool:
    return name.rpartition(".")[2] in ("labels", "label", "target", "targets")


def utilisation(cost: Mapping[str, Any]) -> str:
    """Describe the utilization: `151 TFLOP/s a device: MFU 48.4 % of 312 TFLOP/s, the peak of bfloat16`."""
    peak, whose = quantity(cost["peak_flops_per_s"], "FLOP/s"), cost["peak_dtype"]
    text = f"{quantity(1e12 * cost['tflops_per_device'], 'FLOP/s')} a device: MFU {100 * cost['mfu']:.3g} % of {peak}"
    return f"{text}, the peak of {whose}" if whose else f"{text}, its peak"


def fits(plan: Plan) -> bool | None:
    """Return True if the plan's peak memory fits into device memory; None if either is unknown."""
    capacity = plan.cost.get("device_memory_bytes")
    return max(row["total"] for row in plan.memory) <= capacity if plan.memory and capacity else None


def fit_text(plan: Plan) -> str:
    """Describe whether the plan fits into device memory; "" if the plan has no memory figures.

    For example `1.2 GB on the fullest rank: it fits, a100-80gb-sxm has 80 GB (1.5 % of it)`.
    """
    if not plan.memory:
        return ""
    needed = max(row["total"] for row in plan.memory)
    needed_text = f"{quantity(needed, 'B')} on the fullest rank"
    fit = fits(plan)
    if fit is None:
        return needed_text
    capacity, of = plan.cost["device_memory_bytes"], plan.cost.get("device_memory_of") or plan.hardware
    has = f"{of} has {quantity(capacity, 'B')}" if of != "memory=" else f"memory= says {quantity(capacity, 'B')}"
    share = f" ({100 * needed / capacity:.3g} % of it)" if needed > 0.01 * capacity else ""
    return f"{needed_text}: {'it fits' if fit else 'IT DOES NOT FIT'}, {has}{share}"


def replicated_operators(plan: Plan, flops: float) -> list[dict[str, Any]]:
    """Return one row for each kind of operator that runs in full on every rank (`plan.unsharded`).

    Operators that differ only in shape share a row. The entry `share` of a row is its fraction of `flops`. Rows with
    most FLOPs come first.

    Args:
        flops: FLOPs of a step.
    """
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in sorted(plan.unsharded, key=lambda row: (-row.get("flops", 0), -row.get("bytes", 0))):
        kind = {name: row[name] for name in ("operator", "where", "why")}
        summed = rows.setdefault(tuple(kind.values()), {**kind, "count": 0, "share": 0.0, "bytes": 0})
        summed["count"] += row["count"]
        summed["share"] += row.get("flops", 0) / flops if flops else 0.0
        summed["bytes"] += row.get("bytes", 0)
        if "try" in row:
            summed.setdefault("try", row["try"])
    return sorted(rows.values(), key=lambda row: (-row["share"], -row["bytes"]))


def replicated_operator_text(row: Mapping[str, Any]) -> str:
    """Describe a row of `replicated_operators`.

    For example `2 aten::lstm in encoder, 12 % of the work: it has no sharding rule`. If the FLOPs of the operator are
    unknown, the bytes of its inputs and outputs replace the share of the work.
    """
    where = f" in {row['where']}" if row["where"] else ""
    size = f"{100 * row['share']:.3g} % of the work" if row["share"] else f"{quantity(row['bytes'], 'B')} in and out"
    return f"{row['count']} {row['operator']}{where}, {size}: {row['why']}"


def headlines(plan: Plan) -> list[str]:
    """Return the summary lines of a plan: size of a step, predicted time, memory, advice on memory."""
    size, cost = step_size(plan), plan.cost
    lines = [f"a step is {size}" if size else ""]
    if "parts_s" in cost:
        lines.append(f"predicted: {quantity(cost['step_time_s'], 's')} a step, {utilisation(cost)}")
    lines.append(f"memory: {fit_text(plan)}" if fit_text(plan) else "")
    lines += [note for note in plan.notes if note.startswith(ADVICE)]
    return indented(lines)


def precision_text(plan: Plan) -> str:
    """Describe the dtypes of mixed precision; "" if a plan uses the model's own dtypes."""
    if plan.precision is None:
        return ""
    scaled = " with loss scaling" if plan.precision == "fp16" else ""
    return f"computed in {plan.precision}{scaled}; gradients reduced in {plan.reduce_dtype}"
