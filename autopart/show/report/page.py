"""Write the HTML page of a report: assets and data in one file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from autopart.common.files import write_whole
from autopart.cost.predict.simulate import simulate
from autopart.errors import OptionError
from autopart.show.report.report_data import comparison, plan_data

if TYPE_CHECKING:
    from torch import fx

    from autopart.plans.plan import Plan

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$title</title><style>$style</style></head>
<body><main id="report"></main>
<script type="application/json" id="data">$data</script>
<script>$library</script>
<script>$script</script>
</body></html>
""")


def page(plans: Mapping[str, Plan], graphs: Mapping[str, fx.GraphModule] | None = None) -> str:
    """Return the HTML page.

    Args:
        plans: {label: plan}. Several plans are compared, and each has a tab.
        graphs: {title: generated graph of the first plan}, printed at the end of its tab.

    Raises PlanError for a plan without `timing`.
    """
    steps = [(label, plan, simulate(plan)) for label, plan in plans.items()]
    shown = [plan_data(*step) for step in steps]
    shown[0]["graphs"] = [
        {"title": title, "text": graph.print_readable(print_output=False)} for title, graph in (graphs or {}).items()
    ]
    data = {"plans": shown, "comparison": comparison(steps)}
    title = "; ".join(str(row["title"]) for row in shown)
    return _PAGE.substitute(
        title=escape(title), style=_asset("report.css"), data=_embedded(data), library=_asset("echarts.min.js"),
        script=_asset("report.js"),
    )  # fmt: skip


def write(plans: Sequence[Plan] | Mapping[str, Plan], path: str | Path, graphs: Mapping[str, fx.GraphModule]) -> None:
    """Write the HTML page to a file. Raises OptionError if that fails."""
    named = plans if isinstance(plans, Mapping) else {str(plan.mesh_object()): plan for plan in plans}
    text = page(named, graphs)
    try:
        write_whole(Path(path), text)
    except OSError as error:
        raise OptionError(f"cannot write the report to {path}", why=error.strerror or str(error)) from error


def _embedded(data: Any) -> str:
    """Return data as JSON that cannot end its `script` element: names of a model may contain `</script>`."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return files("autopart.show.report").joinpath("assets", name).read_text(encoding="utf-8")
