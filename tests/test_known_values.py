"""Values that depend on nothing are known in a trace: Python may decide by them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.errors import TraceError
from autopart.ir.graph import operator_name
from autopart.recipe import prepare
from autopart.tracing.trace import bind_call


class Deciding(nn.Module):
    """A linear layer scaled by what `number` reads from constants."""

    def __init__(self, number):
        super().__init__()
        self.linear, self.number = nn.Linear(16, 16), number

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean() * self.number()


def listed() -> float:
    rates = [1, 2, 3]
    made = torch.tensor(rates)
    rates[2] = 100
    return float(made.max())


NUMBERS = {
    "linspace": lambda: sum(rate.item() for rate in torch.linspace(0, 0.3, 4)),
    "mask": lambda: 2 if bool((torch.ones(3, 3).triu(1) == torch.ones(3, 3).triu(diagonal=1)).all()) else 3,
    "equal": lambda: 2 if torch.equal(torch.arange(3), torch.arange(4)) else 3,
    "list that changes": listed,
    "list": lambda: sum(torch.arange(5).flip(0).tolist()[:2]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_python_reads_constants(name):
    found = autopart.verify(Deciding(NUMBERS[name]), "tp2", example_args=(torch.randn(4, 16),))
    assert found.ok, found.first_mismatch


def written() -> int:
    made = torch.arange(4)
    made[0] = 9
    return 2 if made.max() > 5 else 3


def written_through_a_view() -> int:
    made = torch.arange(4)
    made[1:].mul_(2)
    return 2 if made.max() > 5 else 3


def random_choice() -> int:
    return 2 if torch.zeros(8).bernoulli(0.5).sum() > 4 else 3


@pytest.mark.parametrize("number", [written, written_through_a_view, random_choice])
def test_what_is_written_or_random_is_not_known(number):
    with pytest.raises(TraceError, match="decides what to run by the values in a tensor"):
        autopart.verify(Deciding(number), "tp2", example_args=(torch.randn(4, 16),))


def written_elsewhere() -> float:
    times, states = torch.linspace(0, 1, 3), torch.zeros(3, 4)
    states[0] = 1.0
    return 2.0 if times[1] > times[0] else 3.0


def computed_before() -> float:
    times = torch.arange(4)
    largest = times.max()
    times[0] = 9
    return float(largest)


@pytest.mark.parametrize(("number", "value"), [(written_elsewhere, 2.0), (computed_before, 3.0)])
def test_a_write_makes_only_that_memory_unknown(number, value):
    result = autopart.verify(model := Deciding(number), "tp2", example_args=(torch.randn(4, 16),))
    assert result.ok and model.number() == value, result


class Translator(nn.Module):
    """torch's own transformer with a causal mask, by which its layers decide."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.transformer = nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.head.weight.dtype)
        made = self.transformer(self.embed(source), self.embed(target), tgt_mask=mask)
        return F.cross_entropy(self.head(made).flatten(0, 1), labels.flatten())


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_transformer_of_torch(mesh):
    batch = {name: torch.randint(32, (4, 8)) for name in ("source", "target", "labels")}
    found = autopart.verify(Translator(), mesh, example_kwargs=batch)
    assert found.ok, found.first_mismatch


class Bags(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(32, 16, **options), nn.Linear(16, 4)

    def forward(self, rows: Tensor, labels: Tensor, offsets: Tensor | None = None) -> Tensor:
        return F.cross_entropy(self.head(self.bags(rows, offsets)), labels)


BAGS = [{}, {"mode": "sum"}, {"mode": "max"}, {"padding_idx": 3}, {"mode": "sum", "padding_idx": -1}]


@pytest.mark.parametrize("options", BAGS, ids=str)
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_embedding_bags(options, mesh):
    rows = torch.randint(32, (4, 6))
    rows[0, :3], rows[1] = 3, 31
    found = autopart.verify(Bags(**options), mesh, example_args=(rows, torch.randint(4, (4,))))
    assert found.ok, found.first_mismatch


def test_the_table_of_bags_is_sharded():
    traced = prepare(model := Bags(), bind_call(model, (torch.randint(32, (4, 6)), torch.randint(4, (4,))), {}))
    assert "aten::embedding" in {operator_name(n) for n in traced.graph.nodes if n.op == "call_function"}
