"""A plan as one HTML page without scripts or external resources.

It shows the predicted step, every rank's timeline, the memory of every rank by kind, the text of `explain`, notes, and
optionally the generated graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from torch import fx

from autopart.common.text import quantity
from autopart.cost.predict.simulate import Simulation, simulate
from autopart.errors import OptionError
from autopart.ir.run.report_terms import MEMORY_KINDS
from autopart.plans.headlines import headlines, utilisation

if TYPE_CHECKING:
    from autopart.plans.plan import Plan

WIDTH, ROW, GAP = 1000, 22, 4
"""Pixels: width of a drawing, height of a row in it, and gap between rows."""

MOST = 4000
"""Maximum number of actions that a timeline shows. Later actions are left out."""

COLORS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#eeca3b", "sums": "#54a24b", "optimizer": "#b279a2"}
KINDS = dict(zip(MEMORY_KINDS, ("#4c78a8", "#f58518", "#b279a2", "#9d755d", "#bab0ac", "#54a24b", "#eeca3b", "#e45756",
                                "#72b7b2"),
                 strict=True))  # fmt: skip
ACTION_NAMES = {"F": "forward", "B": "backward", "I": "backward towards the inputs", "W": "backward of the weights"}

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1060px; margin: 2em auto; padding: 0 1em; color: #222 }
pre { font-size: 12px; line-height: 1.35; overflow-x: auto; background: #f6f6f6; padding: 1em }
table { border-collapse: collapse } td, th { padding: .15em 1em .15em 0; text-align: left }
svg { display: block; max-width: 100% }
i { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em }
"""


def page(plan: Plan, graphs: Mapping[str, fx.GraphModule]) -> str:
    """Return the HTML page. `graphs`: {title: generated graph to print}."""
    simulation = simulate(plan)
    name, mesh = plan.model.get("class", "a model"), plan.mesh_object()
    parts = [
        f"<h1>{escape(str(name))} on {escape(str(mesh))}</h1>",
        f"<p>{mesh.num_ranks} ranks, {escape(plan.hardware)}; schedule {plan.schedule.name or 'none'},"
        f" microbatches: {plan.schedule.microbatches}</p>",
        *(f"<p>{escape(line.strip())}</p>" for line in headlines(plan)),
        "<h2>A step as predicted</h2>", _figures(simulation),
        "<h2>Timeline</h2>", _timeline(simulation),
        "<h2>Memory of a rank</h2>", _memory(plan),
        "<h2>The plan</h2>", f"<pre>{escape(str(plan.explain()))}</pre>",
        *([f"<h2>Notes</h2><ul>{''.join(f'<li>{escape(note)}</li>' for note in plan.notes)}</ul>"] * bool(plan.notes)),
        *(f"<h2>{escape(title)}</h2><pre>{escape(graph.print_readable(print_output=False))}</pre>"
          for title, graph in graphs.items()),
    ]  # fmt: skip
    title = f"<title>{escape(str(name))} on {escape(str(mesh))}</title>"
    head = f'<meta charset="utf-8">{title}<style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def write(plan: Plan, path: str | Path, graphs: Mapping[str, fx.GraphModule] | None = None) -> None:
    """Write the HTML page to a file. Raises OptionError if that fails."""
    text = page(plan, graphs or {})
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write the report to {path}", why=error.strerror or str(error)) from error


def _figures(simulation: Simulation) -> str:
    rows = [
        ("step", quantity(simulation.step_time_s, "s")),
        ("per device", utilisation(simulation.figures())),
        ("bubble", f"{simulation.bubble_fraction:.1%} of the busy time"),
        *((kind, f"{quantity(s, 's')}, {s / simulation.step_time_s:.1%}") for kind, s in simulation.parts.items()),
        *((f"{row.axis} {row.kind}", f"{row.count} of {quantity(row.bytes / max(1, row.count), 'B')},"
           f" {quantity(row.seconds, 's')}") for row in simulation.collectives),
    ]  # fmt: skip
    return _rows(rows)


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{escape(label)}</td><td>{escape(text)}</td></tr>" for label, text in rows)
    return f"<table>{cells}</table>"


def _timeline(simulation: Simulation) -> str:
    """Draw one line per `pp` coordinate: its actions, gradient reduction and optimizer step."""
    timeline, scale = simulation.timeline, WIDTH / (simulation.step_time_s or 1.0)
    each = max(1, MOST // len(timeline.spans))
    boxes = []
    for rank, spans in enumerate(timeline.spans):
        drawn = [(s.start_s, s.end_s, s.kind, f"{ACTION_NAMES[s.kind]} of microbatch {s.microbatch}, stage {s.stage}")
                 for s in spans[:each]]  # fmt: skip
        drawn += [
            (*timeline.grad_sums[rank], "sums", "gradient reduction"),
            (*timeline.optimizers[rank], "optimizer", "optimizer"),
        ]
        boxes += [
            _box(start * scale, rank, (end - start) * scale, COLORS[kind], f"{what}, {quantity(end - start, 's')}")
            for start, end, kind, what in drawn if end > start
        ]  # fmt: skip
    more = "" if max(map(len, timeline.spans)) <= each else f"<p>The first {each} actions of every rank.</p>"
    shown = {"forward": "F", "backward": "B", "weights": "W", "gradient reduction": "sums", "optimizer": "optimizer"}
    return _legend({label: COLORS[kind] for label, kind in shown.items()}) + _drawing(boxes, len(timeline.spans)) + more


def _memory(plan: Plan) -> str:
    """Draw one bar per `pp` coordinate: the memory by kind of its rank with most memory.

    Kinds can peak at different times, so that the bar can be longer than the peak.
    """
    sums = [sum(row.get(kind, 0) for kind in MEMORY_KINDS) for row in plan.memory]
    scale = WIDTH / max([*sums, 1])
    boxes = []
    for rank, row in enumerate(plan.memory):
        x = 0.0
        for kind, color in KINDS.items():
            width = row.get(kind, 0) * scale
            boxes.append(_box(x, rank, width, color, f"{kind} {quantity(row.get(kind, 0), 'B')}"))
            x += width
    totals = [
        (f"stages {', '.join(map(str, row['stages']))}", f"{quantity(row['total'], 'B')} at most")
        for row in plan.memory
    ]
    return _legend(KINDS) + _drawing(boxes, len(plan.memory)) + _rows(totals)


def _box(x: float, line: int, width: float, color: str, title: str) -> str:
    y = line * (ROW + GAP)
    place = f'x="{x:.2f}" y="{y}" width="{max(width, 0.2):.2f}" height="{ROW}"'
    title = escape(f"rank {line}: {title}")
    return f'<rect {place} fill="{color}" stroke="#fff" stroke-width=".3"><title>{title}</title></rect>'


def _drawing(boxes: Sequence[str], lines: int) -> str:
    height = lines * (ROW + GAP)
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">{"".join(boxes)}</svg>'


def _legend(colors: Mapping[str, str]) -> str:
    return "<p>" + "".join(f'<i style="background:{c}"></i>{escape(label)}' for label, c in colors.items()) + "</p>"
