"""What each normalising pass writes, as text: a small model for each, its graph before and after that pass alone.

Every pass runs where it stands in the pipeline, after those before it: where it first changes its sample. Read the
difference before updating a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden_text import without_paths
from sorted_experts import SortedExperts
from torch import Tensor, fx, nn

from autopart.passes.dump import graph_text
from autopart.passes.normalize import AS_TRACED, IN_DOUBLE, NORMALIZE, PASSES
from autopart.passes.pass_pipeline import run_passes
from autopart.tracing.trace_model import bind_call, trace

aten = torch.ops.aten


class Sample(nn.Module):
    """A function of an input [4, 6] and a weight [6, 6]."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(6, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.weight)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.RNN(6, 6, num_layers=2, dropout=0.5, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.unsqueeze(1))[0]


def heads(x: Tensor) -> Tensor:
    return x.view(1, 2, 2, 6)


def cache(x: Tensor, w: Tensor) -> Tensor:
    """Keys beside those of an empty cache."""
    return torch.cat([x.new_empty(0), x @ w], dim=0)


def overwritten(x: Tensor, w: Tensor) -> Tensor:
    """A spectrum of which a part is written."""
    spectrum = torch.fft.rfft(x @ w)
    spectrum[:, 1:3] = 0
    spectrum[:, -1] = spectrum[:, 0]
    return torch.fft.irfft(spectrum, n=6)


def by_looked_up_matrix(x: Tensor, w: Tensor) -> Tensor:
    """Every row twice, each time by the matrix of its expert, and the sum of both."""
    experts = (x[:, :2] > 0).long().view(-1)
    rows = x.unsqueeze(1).expand(-1, 2, -1).reshape(-1, 6)
    made = torch.bmm(rows.unsqueeze(1), w.view(2, 3, 6).transpose(1, 2)[experts]).squeeze(1)
    return made.relu().view(-1, 2, 3).sum(1)


def labels(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long()


SAMPLES: dict[str, Callable[[], nn.Module]] = {
    "explicit_attention_dropout": lambda: Sample(
        lambda x, w: F.scaled_dot_product_attention(heads(x @ w), heads(x), heads(x), dropout_p=0.5)
    ),
    "explicit_recurrent_dropout": Recurrent,
    "draws_as_data": lambda: Sample(lambda x, w: torch.randn_like(x @ w) + torch.normal(x @ w, 1.0)),
    "one_reshape": lambda: Sample(lambda x, w: (x @ w).view(2, 2, 6).flatten(1).unflatten(1, (6, 2))),
    "in_double": lambda: Sample(lambda x, w: (x @ w).float().softmax(-1).double()),
    "positional_arguments": lambda: Sample(lambda x, w: (x @ w).sum(1, keepdim=True)),
    "exact_squeeze": lambda: Sample(lambda x, w: (x @ w).unsqueeze(1).squeeze()),
    "plain_copies": lambda: Sample(lambda x, w: (x @ w).view(-1).view_as(x).type_as(x) + aten.copy.default(x, w[:4])),
    "complex_writes": lambda: Sample(overwritten),
    "contiguous_operands": lambda: Sample(lambda x, w: torch.view_as_complex(torch.stack([x @ w, x], -1)).abs()),
    "drop_no_ops": lambda: Sample(lambda x, w: F.dropout((x @ w).clone().to(torch.float64), 0.0)),
    "plain_broadcasts": lambda: Sample(lambda x, w: torch.broadcast_tensors(x @ w, w[0])[1]),
    "no_empty_parts": lambda: Sample(cache),
    "explicit_repeats": lambda: Sample(lambda x, w: (x @ w).repeat(1, 2)),
    "one_split": lambda: Sample(lambda x, w: torch.cat([*(x @ w).chunk(2, -1), x[:, :3] * 2, x[:, 3:]], -1)),
    "batch_statistics": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double(),
    "plain_creation": lambda: Sample(lambda x, w: (x @ w).new_zeros(4, 6) + w.new_ones(6)),
    "plain_numbers": lambda: Sample(lambda x, w: torch.where(x > 0, x @ w, torch.scalar_tensor(0.0, dtype=x.dtype))),
    "plain_norms": lambda: Sample(lambda x, w: torch.native_layer_norm(x @ w, [6], w[0], None, 1e-5)[0]),
    "unsorted_experts": lambda: SortedExperts().double(),
    "looked_up_products": lambda: Sample(by_looked_up_matrix),
    "rows_to_experts": lambda: Sample(by_looked_up_matrix),
    "explicit_causal_masks": lambda: Sample(
        lambda x, w: F.scaled_dot_product_attention(heads(x @ w), heads(x), heads(x), is_causal=True)
    ),
    "plain_products": lambda: Sample(lambda x, w: torch.mv(x, w[0]) + torch.addmm(x, x, w, beta=0.5)[:, 0]),
    "pairs_of_factors": lambda: Sample(lambda x, w: torch.einsum("ab,bc,cd->ad", x, w, w)),
    "one_linear": lambda: Sample(lambda x, w: F.linear(torch.addmm(w[0], x, w.t()), w, w[0])),
    "losses_of_all_positions": lambda: Sample(lambda x, w: F.cross_entropy((x @ w)[:-1], labels(x)[1:])),
    "explicit_reductions": lambda: Sample(lambda x, w: F.cross_entropy(x @ w, labels(x), ignore_index=0)),
    "whole_means": lambda: Sample(lambda x, w: (x @ w).mean()),
    "take_apart": lambda: Sample(lambda x, w: F.glu(x @ w)),
}


def by_name(graph: fx.Graph) -> None:
    """Dims of a sum by their name, as decompositions give them."""
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    (source, dim, keepdim) = node.args
    node.args, node.kwargs = (source,), {"dim": dim, "keepdim": keepdim}


def effect(name: str, graph: fx.Graph) -> tuple[str, str]:
    """The text of a graph before and after the first run of a pass in the pipeline that changes it."""
    for rewrite in (*AS_TRACED, IN_DOUBLE, *NORMALIZE):
        before = graph_text(graph)
        run_passes(graph, (rewrite,))
        if rewrite.name == name and graph_text(graph) != before:
            return before, graph_text(graph)
    raise AssertionError(f"{name} changes nothing of its sample")


@pytest.mark.whole
@pytest.mark.parametrize("name", SAMPLES)
def test_what_a_pass_writes(name, golden):
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64)
    model = SAMPLES[name]().train()
    graph = trace(model, bind_call(model, (x,), {})).graph
    if name == "positional_arguments":
        by_name(graph)
    before, after = effect(name, graph)
    golden(f"passes/{name}", without_paths(f"before\n\n{before}\nafter\n\n{after}"))


def test_every_pass_has_a_sample():
    assert set(PASSES) == set(SAMPLES)
