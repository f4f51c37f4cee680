"""Comments on graph nodes that show a plan's decisions in a dump (`AUTOPART_DUMP`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from autopart.ir.decisions import Decisions
from autopart.ir.layout import Layout
from autopart.passes.dump import Notes


def decision_notes(chosen: Decisions | tuple[Decisions, object]) -> Notes:
    """Return a function that maps a graph node to comments with its decisions, for dumps.

    Comments of an operator look like `stage 1` or `tp R, S(0) -> S(1)`. A parameter has a comment like `tp:S(0)`.
    """
    decisions = chosen if isinstance(chosen, Decisions) else chosen[0]
    on_axes = {"rows": decisions.rows, **decisions.features}
    of_layout = layout_notes(decisions.stored)

    def note(node: fx.Node) -> Iterator[str]:
        if node in decisions.stage_of and decisions.num_stages > 1:
            yield f"stage {decisions.stage_of[node]}"
        for axis, strategies in on_axes.items():
            if node in strategies:
                yield f"{axis} {strategies[node]}"
        yield from of_layout(node)

    return note


def layout_notes(stored: Mapping[str, Layout]) -> Notes:
    """Return a function that maps a parameter's node to comments with its layout, such as `dp:S(1)`."""

    def note(node: fx.Node) -> Iterator[str]:
        if node.op == "get_attr":
            yield from (f"{axis}:{place}" for axis, place in stored.get(node.target, {}).items())

    return note
