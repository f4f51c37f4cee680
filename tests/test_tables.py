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
    with pytest.raises(LayoutError, match="no matrix product with a parameter, and no table of embeddings that can be"):
        autopart.plan(nn.Embedding(ROWS, WIDTH, scale_grad_by_freq=True), "tp2", example_args=(tokens(4, 3),))
