"""Comparison of two plans.

Layouts are compared per parameter, even if two plans group names by different patterns. Decisions come first (mesh,
schedule, layouts, operators, stages), then their consequences (collectives, cost). Pins and notes describe how a plan
was made and are not compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopart.common.names import pattern_of
from autopart.common.text import ShownAsText, ShownText, quantity
from autopart.ir.mesh import Mesh
from autopart.ir.run.recompute_spec import recompute_mode_of, text_of
from autopart.ir.run.sync_option import parse_sync

if TYPE_CHECKING:
    from autopart.plans.plan import Plan

REPLICATED = "replicated"
"""Text for an operator that the plan does not list."""

_MOST_ROWS = 30


@dataclass(frozen=True)
class DiffRow:
    """One difference: section of the plan (`part`), entry in it (`what`), and its texts in both plans."""

    part: str
    what: str
    first: str
    second: str


@dataclass(frozen=True, repr=False)
class Difference(ShownAsText):
    """All differences between two plans.

    It prints as a table, and its truth value is False if the plans are equal.

    Attributes:
        summary: the step time, memory and sent bytes of both plans, if their meshes differ.
    """

    rows: tuple[DiffRow, ...]
    summary: tuple[tuple[str, str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rows)

    def table(self, first: str = "first", second: str = "second") -> ShownText:
        """Return the differences as a table with one column per plan and at most 30 rows per section."""
        if not self.rows:
            return ShownText(f"{first} and {second} are the same plan\n")
        parts: dict[str, list[DiffRow]] = defaultdict(list)
        for row in self.rows:
            parts[row.part].append(row)
        lines = [("", first, second), *self.summary]
        for part, rows in parts.items():
            lines.append((part, "", ""))
            lines += [(f"  {row.what}", row.first, row.second) for row in rows[:_MOST_ROWS]]
            if len(rows) > _MOST_ROWS:
                lines.append((f"  and {len(rows) - _MOST_ROWS} more", "", ""))
        widths = [max(len(line[column]) for line in lines) for column in range(2)]
        return ShownText("".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() + "\n" for a, b, c in lines))

    def __str__(self) -> str:
        return str(self.table())


def diff(first: Plan, second: Plan) -> Difference:
    """Return the differences between two plans.

    Example:
        >>> if plan.diff(Plan.load("yesterday.json")): ...    # doctest: +SKIP
    """
    rows = [row for compare in _COMPARED for row in compare(first, second)]
    return Difference(tuple(rows), _summary(first, second) if any(row.part == "mesh" for row in rows) else ())


def _summary(a: Plan, b: Plan) -> tuple[tuple[str, str, str], ...]:
    """Compare step time, memory and sent bytes of two plans on different meshes."""
    steps = [plan.cost.get("step_time_s") or 0.0 for plan in (a, b)]
    memory = [max((row["total"] for row in plan.memory), default=0) for plan in (a, b)]
    sent = [sum(row.bytes for row in plan.collectives) for plan in (a, b)]
    lines: list[tuple[str, str, str]] = [("summary", "", "")]
    ranks, other_ranks = (str(plan.mesh_object().num_ranks) for plan in (a, b))
    lines.append(("  ranks", ranks, other_ranks))
    for label, unit, (first, second) in (("step", "s", steps), ("memory", "B", memory), ("sent", "B", sent)):
        if first and second:
            change = f"{quantity(second, unit)} ({100 * (second / first - 1):+.1f} %)"
            lines.append((f"  {label}", quantity(first, unit), change))
    return tuple(lines)


def _row(part: str, what: str, first: str, second: str) -> list[DiffRow]:
    return [DiffRow(part, what, first, second)] if first != second else []


def _basics(a: Plan, b: Plan) -> list[DiffRow]:
    first, second = ({
        ("model", "class"): str(plan.model["class"]),
        ("model", "fingerprint"): str(plan.model["fingerprint"])[:12],
        ("model", "parameters"): f"{plan.model['num_parameters']:,}",
        ("model", "mode"): str(plan.model.get("mode", "")),
        ("model", "autocast"): plan.autocast or "none",
        ("mesh", "axes"): str(Mesh({axis: size for axis, size in plan.mesh.items() if size > 1})),
        ("schedule", "name"): plan.schedule.name or "one stage",
        ("schedule", "microbatches"): str(plan.schedule.microbatches),
        ("schedule", "stages per rank"): str(plan.schedule.virtual_stages),
        ("zero", "level"): str(plan.zero),
        ("prefetch", "blocks ahead"): str(plan.prefetch),
        ("scatter_sends", "between stages"): _sent(plan),
        ("dp_sync", "between data ranks"): str(parse_sync(plan.dp_sync)),
        ("balance", "tokens of the busiest expert rank"): f"{plan.balance:g} times the mean",
        ("sequence_dims", "sharded over cp"): str(plan.sequence_dims or "all sequence dims"),
        ("compile", "stages"): "yes" if plan.compile else "no",
        ("precision", "computed in"): plan.precision or "the model's own",
        ("reduce_dtype", "gradients reduced in"): plan.reduce_dtype or "the model's own",
        ("hardware", "profile"): plan.hardware,
        **{("inputs", name): f"{i['dtype']}{list(i['shape'])}" for name, i in plan.inputs.items()},
        **{("rules", name): "; ".join(rule["lines"]) for name, rule in plan.rules.items()},
    } for plan in (a, b))  # fmt: skip
    keys = dict.fromkeys([*first, *second])
    return [row for key in keys for row in _row(*key, first.get(key, ""), second.get(key, ""))]


def _sent(plan: Plan) -> str:
    return "sharded" if plan.scatter_sends else "in full"


def _recompute(a: Plan, b: Plan) -> list[DiffRow]:
    blocks = [
        f"{prefix}{number}" for plan in (a, b) for prefix, numbers in _numbers(plan).items() for number in numbers
    ]
    if blocks and all(
        recompute_mode_of(a.recompute, block) == recompute_mode_of(b.recompute, block) for block in blocks
    ):
        return []
    return _row("recompute", "in the backward", text_of(a.recompute), text_of(b.recompute))


# Layouts


def _parameters(a: Plan, b: Plan) -> list[DiffRow]:
    def wording(plan: Plan, name: str) -> str:
        axes = [axis for axis in plan.mesh if plan.placement_text(name, axis) != "R"]
        return " ".join(f"{axis}:{plan.placement_text(name, axis)}" for axis in axes) or "R"

    return _by_name("parameters", a, b, a.parameters, b.parameters, wording)


def _operators(a: Plan, b: Plan) -> list[DiffRow]:
    def wording(plan: Plan, name: str) -> str:
        _, entry = plan.operator_entry(name, _pattern(name)) or ("", {})
        on_axes = [str(text) for axis, text in entry.items() if axis in plan.mesh]
        text = "; ".join(on_axes)
        alone = {place.strip() for one in on_axes for side in one.split("->") for place in side.split(",")} <= {"R", ""}
        return REPLICATED if alone else text + " (weight stored with another placement)" * bool(entry.get("keep"))

    return _by_name("operators", a, b, a.operators, b.operators, wording)


def _by_name(
    part: str, a: Plan, b: Plan, of_a: Iterable[str], of_b: Iterable[str], wording: Callable[[Plan, str], str]
) -> list[DiffRow]:
    """Return the differences of named entries: a row per name pattern, or several if its blocks differ.

    Args:
        part: section of the plan to which the entries belong.
        of_a, of_b: names or name patterns of the entries in each plan.
        wording: function that returns the text of a plan's entry with this name.
    """
    numbers = _numbers(a) | _numbers(b)
    groups: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in dict.fromkeys([*of_a, *of_b]):
        for full in _members(name, numbers):
            texts = wording(a, full), wording(b, full)
            if full not in groups[_pattern(name)][texts]:
                groups[_pattern(name)][texts].append(full)
    rows = []
    for pattern, by_texts in groups.items():
        for (first, second), names in by_texts.items():
            some = f"  of {', '.join(map(_number, names))}" if len(by_texts) > 1 and "*" in pattern else ""
            rows += _row(part, pattern + some, first, second)
    return rows


def _pattern(name: str) -> str:
    """Replace block numbers by `*` in a parameter's name, or in the module path of an operator's name."""
    path, slash, operator = name.rpartition("/")
    return f"{pattern_of(path)}/{operator}" if slash else pattern_of(name)


def _members(name: str, numbers: Mapping[str, list[int]]) -> list[str]:
    """Return the names that a pattern with one `*` matches, for the block numbers in `numbers`."""
    known = numbers.get(name.partition("*")[0], [])
    return [name.replace("*", str(number)) for number in known] if name.count("*") == 1 and known else [name]


def _number(name: str) -> str:
    return next((part for part in name.replace("/", ".").split(".") if part.isdigit()), name)


def _numbers(plan: Plan) -> dict[str, list[int]]:
    """Return {module list: its block numbers}: `{"model.layers.": [0, 1, ...]}`."""
    by_prefix: dict[str, set[int]] = defaultdict(set)
    for stage in plan.stages:
        for block in stage.get("blocks", ()):
            for run in filter(None, block.get("layers", "").split(",")):
                low, _, high = run.partition("-")
                by_prefix[block["block"].partition("*")[0]] |= set(range(int(low), int(high or low) + 1))
    return {prefix: sorted(numbers) for prefix, numbers in by_prefix.items()}


# Stages, and their consequences


def _cuts(a: Plan, b: Plan) -> list[DiffRow]:
    stages = range(max(len(a.cuts), len(b.cuts)))
    first, second = ([*plan.cuts, *[""] * len(stages)] for plan in (a, b))
    return [row for i in stages for row in _row("cuts", f"stage {i + 1} begins with", first[i], second[i])]


def _collectives(a: Plan, b: Plan) -> list[DiffRow]:
    first, second = _moved(a), _moved(b)
    keys = dict.fromkeys([*first, *second])
    return [row for key in keys for row in _row("collectives", key, first.get(key, "none"), second.get(key, "none"))]


def _moved(plan: Plan) -> dict[str, str]:
    """Return {kind of collective: its count, and the bytes that one rank sends}, as text.

    For example `{"tp all_reduce forward, a microbatch": "4, 12.3 kB"}`.
    """
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in plan.collectives:
        ways = [f"{kind} {way}" for kind, way in ((row.forward, "forward"), (row.backward, "backward")) if kind]
        total = counts[f"{row.axis} {', '.join(ways)}, a {row.per}"]
        total[0] += row.count
        total[1] += row.bytes
    return {key: f"{count}, {quantity(size, 'B')}" for key, (count, size) in counts.items()}


_UNITS = {"_s": "s", "_flops": "FLOP", "_bytes": "B"}


def _cost(a: Plan, b: Plan) -> list[DiffRow]:
    rows = []
    for key in dict.fromkeys([*a.cost, *b.cost]):
        first, second = a.cost.get(key), b.cost.get(key)
        if not isinstance(first, (int, float)) or not isinstance(second, (int, float)):
            continue
        if abs(first - second) > 1e-9 * max(abs(first), abs(second)):
            rows.append(DiffRow("cost", key, _figure(key, first), _figure(key, second)))
    return rows


def _figure(key: str, value: Any) -> str:
    unit = next((unit for end, unit in _UNITS.items() if key.endswith(end)), "B" if key.startswith("bytes_") else "")
    return quantity(value, unit) if unit else f"{value:g}"


_COMPARED = (_basics, _recompute, _parameters, _operators, _cuts, _collectives, _cost)
