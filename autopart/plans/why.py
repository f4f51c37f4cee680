"""Explanations that `Plan.why` returns: the reasons for a choice, and the costs of its alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autopart.common.names import near_names, pattern_of
from autopart.common.text import ShownAsText
from autopart.errors import OptionError

SETTINGS = ("mesh", "schedule", "microbatches", "zero", "recompute", "loss")
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

    def as_data(self) -> dict[str, Any]:
        """Return the non-empty attributes as JSON data, without the subject."""
        return {name: value for name, value in asdict(self).items() if value and name != "subject"}

    @staticmethod
    def from_data(subject: str, data: Mapping[str, Any]) -> Why:
        """Return the explanation with these attributes. Raises TypeError if one does not exist."""
        return Why(subject, **{**data, "collectives": tuple(data.get("collectives", ()))})

    def __str__(self) -> str:
        rows = [("because", self.reason), *(("else", f"{other}: {price}") for other, price in self.others.items())]
        rows += [("moves", ", ".join(self.collectives)), ("where", self.where)]
        lines = [f"{self.subject}: {self.chosen}", *(f"  {label:<9}{text}" for label, text in rows if text)]
        return "\n".join(lines)


def stored_why(alternatives: Mapping[str, Mapping[str, Any]], name: str) -> Why:
    """Return the explanation of a parameter, module or operator from the alternatives that a plan stores.

    Raises OptionError for an unknown name.
    """
    for key in (name, pattern_of(name)):
        inside = [other for other in alternatives if other.startswith((f"{key}.", f"{key}/"))]
        for found in (key, *inside):
            if found in alternatives:
                return Why.from_data(found, alternatives[found])
    raise OptionError(f"the plan has nothing with the name '{name}'", hint=near_names(name, alternatives))
