"""Changes (such as `max_norm`) that a forward makes to trained parameters before it uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

_SHRINK = 1e-7  # torch adds this to a norm before it divides by it (aten::embedding_renorm_)


@dataclass(frozen=True)
class ByElement:
    """Elementwise update of a parameter. `graph` computes the new value of the parameter, or of any shard."""

    graph: fx.GraphModule

    def updated_full(self, weight: Tensor, inputs: Sequence[Any]) -> Tensor:
        new: Tensor = self.graph(weight)
        return new

    def __str__(self) -> str:
        return _text(self.graph)


@dataclass(frozen=True)
class RowNorms:
    """Renormalization of the embedding rows that a call looks up (`max_norm` of `nn.Embedding`).

    A row with a p-norm above `max_norm` is scaled to the norm `max_norm`; p is `norm_type`. `looked_up` is a graph that
    maps the inputs of the call to the indices of the rows, one tensor per look-up.
    """

    looked_up: fx.GraphModule
    max_norm: float
    norm_type: float

    def updated_full(self, weight: Tensor, inputs: Sequence[Any]) -> Tensor:
        rows = torch.arange(len(weight), device=weight.device)
        return self.scaled(weight, self.powers(weight), torch.isin(rows, self.chosen(inputs)))

    @property
    def reads(self) -> list[int]:
        """Indices of the model inputs that determine which rows are looked up."""
        placeholders = self.looked_up.graph.find_nodes(op="placeholder")
        return [position for position, node in enumerate(placeholders) if node.users]

    def chosen(self, inputs: Sequence[Any]) -> Tensor:
        """Return the indices of the rows that a call on these inputs looks up."""
        count = len(self.looked_up.graph.find_nodes(op="placeholder"))
        return torch.cat([ids.flatten() for ids in self.looked_up(*inputs[:count])])

    def powers(self, part: Tensor) -> Tensor:
        """Return the sum of |w|^p of each row over the columns of a shard: a partial sum of its p-norm."""
        return part.abs().pow(self.norm_type).sum(1)

    def scaled(self, part: Tensor, powers: Tensor, is_chosen: Tensor) -> Tensor:
        """Return an embedding shard in which looked-up rows with a norm above `max_norm` are scaled down.

        Args:
            part: the shard, with all or some columns of the embedding.
            powers: sum of |w|^p of each row over all columns.
            is_chosen: True for rows that are looked up.
        """
        norms = powers.pow(1 / self.norm_type)
        above = is_chosen & (norms > self.max_norm)
        return part * torch.where(above, self.max_norm / (norms + _SHRINK), 1.0).unsqueeze(1)

    def __str__(self) -> str:
        return f"{_text(self.looked_up)}\nrows to {self.max_norm} by norm {self.norm_type}"


WeightUpdate = ByElement | RowNorms
WeightUpdates = Mapping[str, WeightUpdate]
"""{parameter: its change before a forward}"""


def _text(graph: fx.GraphModule) -> str:
    return "\n".join(str(node.format_node()) for node in graph.graph.nodes if node.op == "call_function")


@torch.no_grad()
def update_unsharded_weights(parameters: Mapping[str, Tensor], updates: WeightUpdates, inputs: Sequence[Any]) -> None:
    """Apply the updates of a forward with these inputs to unsharded parameters, in place."""
    for name, update in updates.items():
        parameters[name].copy_(update.updated_full(parameters[name].detach(), inputs))
