"""Explanations that `Plan.why` returns: the reasons for a choice, and the costs of its alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopart.common.text import ShownAsText

SETTINGS = ("mesh", "schedule", "microbatches", "zero")
"""Settings that `Plan.why` explains from the plan alone."""


@dataclass(frozen=True, repr=False)
class Why(ShownAsText):
    """Explanation of one choice in a plan, with the costs of the alternatives, to be printed.

    Attributes:
        price_s: by how many seconds the second-best choice makes a step longer.
        others: {alternative: its cost as text}.
        collectives: names of the collectives next to the operator in the graph.
        where: source lines of the model.
    """

    subject: str
    chosen: str
    reason: str
    runner_up: str = ""
    price_s: float = 0.0
    others: Mapping[str, str] = field(default_factory=dict)
    collectives: tuple[str, ...] = ()
    where: str = ""

    def __str__(self) -> str:
        rows = [("because", self.reason), *(("else", f"{other}: {price}") for other, price in self.others.items())]
        rows += [("moves", ", ".join(self.collectives)), ("where", self.where)]
        lines = [f"{self.subject}: {self.chosen}", *(f"  {label:<9}{text}" for label, text in rows if text)]
        return "\n".join(lines)
