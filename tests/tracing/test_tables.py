"""Tables of embeddings: sparse gradients, and models that are nothing else."""

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.errors import LayoutError

ROWS, WIDTH = 12, 8


def tokens(*size: int) -> Tensor:
    return torch.randint(ROWS, size, generator=torch.Generator().manual_seed(0))


class Words(nn.Module):
    """A table, read once or in bags, and a layer on top of it."""

    def __init__(self, table: nn.Module):
        super().__init__()
        self.table, self.out = table, nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids)).square().mean()


class Bags(nn.Module):
    """Bags of all sizes, one after the other; one is empty."""

    def __init__(self, **options):
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(ROWS, WIDTH, **options), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.out(self.table(ids, offsets, weights)).tanh()


STARTS = torch.tensor([0, 3, 3, 4])
BAGS: dict[str, tuple] = {
    "sum": ({"mode": "sum"}, STARTS),
    "mean": ({}, STARTS),
    "padding": ({"padding_idx": 5}, STARTS),
    "summed padding": ({"mode": "sum", "padding_idx": -1}, STARTS),
    "ends": ({"include_last_offset": True}, torch.tensor([0, 3, 3, 6])),
    "largest": ({"mode": "max"}, STARTS),
}


@pytest.mark.whole
@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2"])
@pytest.mark.parametrize("name", BAGS)
def test_bags_one_after_the_other(name, mesh):
    torch.manual_seed(0)
    options, offsets = BAGS[name]
    found = autopart.verify(Bags(**options), mesh, example_args=(tokens(8), offsets))
    notes = [note for note in found.notes if not note.startswith("run in full")]  # the largest of a bag
    assert found.ok and found.max_error < 1e-10 and not notes, str(found)


def test_weighted_bags():
    torch.manual_seed(0)
    weights = torch.rand(8, requires_grad=True)
    found = autopart.verify(Bags(mode="sum"), "tp2", example_args=(tokens(8), STARTS, weights))
    assert found.ok and found.max_error < 1e-10 and "input weights" in found.errors, str(found)


def test_the_table_of_bags_is_cut():
    places = autopart.plan(Bags(), "tp2", example_args=(tokens(8), STARTS)).parameters
    assert places["table.weight"] == {"tp": "S(0)"}


DENSE = (
    "sparse=True is not kept: the gradient of 'table.weight' is dense, for optimizers that take one (not SparseAdam)"
)


@pytest.mark.whole
@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_dense_here(kind, mesh):
    torch.manual_seed(0)
    model = Words(kind(ROWS, WIDTH, sparse=True))
    found = autopart.verify(model, mesh, example_kwargs={"ids": tokens(4, 3)}, steps=2)
    assert found.ok and found.max_error < 1e-10 and found.notes == (DENSE,), str(found)
    assert DENSE in autopart.plan(model, mesh, example_kwargs={"ids": tokens(4, 3)}).notes


def test_a_table_alone_is_cut_by_rows():
    table = nn.Embedding(ROWS, WIDTH)
    found = autopart.verify(table, "tp2", example_args=(tokens(4, 3),))
    assert found.ok and found.max_error < 1e-10, str(found)
    assert autopart.plan(table, "tp2", example_args=(tokens(4, 3),)).parameters["weight"] == {"tp": "S(0)"}


def test_a_table_that_cannot_be_cut_is_refused():
    with pytest.raises(LayoutError, match="no matrix product with a parameter, and no embedding table that can be"):
        autopart.plan(nn.Embedding(ROWS, WIDTH, scale_grad_by_freq=True), "tp2", example_args=(tokens(4, 3),))
