"""How trained parameters change before a forward, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

_SHRINK = 1e-7  # torch adds this to a norm before it divides by it (aten::embedding_renorm_)


@dataclass(frozen=True)
class ByElement:
    """A change of every element by itself, `graph`: from any part of the parameter to its new value."""

    graph: fx.GraphModule

    def of_whole(self, weight: Tensor, inputs: Sequence[Any]) -> Tensor:
        new: Tensor = self.graph(weight)
        return new

    def __str__(self) -> str:
        return _text(self.graph)


@dataclass(frozen=True)
class RowNorms:
    """Rows of a table that are looked up, scaled to `max_norm` where their norm (the `norm_type`-th root of the sum of
    powers) is above. `looked_up`: from the inputs of the call to the numbers of the rows, a tensor a look-up."""

    looked_up: fx.GraphModule
    max_norm: float
    norm_type: float

    def of_whole(self, weight: Tensor, inputs: Sequence[Any]) -> Tensor:
        rows = torch.arange(len(weight), device=weight.device)
        return self.scaled(weight, self.powers(weight), torch.isin(rows, self.chosen(inputs)))

    @property
    def reads(self) -> list[int]:
        """The positions of the inputs that say which rows are looked up."""
        placeholders = self.looked_up.graph.find_nodes(op="placeholder")
        return [position for position, node in enumerate(placeholders) if node.users]

    def chosen(self, inputs: Sequence[Any]) -> Tensor:
        """The numbers of the rows that a call on these inputs looks up."""
        count = len(self.looked_up.graph.find_nodes(op="placeholder"))
        return torch.cat([ids.flatten() for ids in self.looked_up(*inputs[:count])])

    def powers(self, part: Tensor) -> Tensor:
        """What the columns of a part add to the sum of powers of each of its rows."""
        return part.abs().pow(self.norm_type).sum(1)

    def scaled(self, part: Tensor, powers: Tensor, is_chosen: Tensor) -> Tensor:
        """The new value of a part. Of its rows, `powers`: over all columns; `is_chosen`: whether they are looked up."""
        norms = powers.pow(1 / self.norm_type)
        above = is_chosen & (norms > self.max_norm)
        return part * torch.where(above, self.max_norm / (norms + _SHRINK), 1.0).unsqueeze(1)

    def __str__(self) -> str:
        return f"{_text(self.looked_up)}\nrows to {self.max_norm} by norm {self.norm_type}"


WeightUpdate = ByElement | RowNorms
WeightUpdates = Mapping[str, WeightUpdate]
"""{parameter: how it changes before a forward}"""


def _text(graph: fx.GraphModule) -> str:
    return "\n".join(str(node.format_node()) for node in graph.graph.nodes if node.op == "call_function")


@torch.no_grad()
def update_whole_weights(parameters: Mapping[str, Tensor], updates: WeightUpdates, inputs: Sequence[Any]) -> None:
    """Change those of the whole parameters that are to be changed before a forward on these inputs."""
    for name, update in updates.items():
        parameters[name].copy_(update.of_whole(parameters[name].detach(), inputs))
