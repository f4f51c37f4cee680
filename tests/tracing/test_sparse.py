"""Sparse buffers: every rank holds them whole, and what is multiplied by them is cut by features."""

import dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.errors import TraceError

NODES, WIDTH = 6, 8


def adjacency() -> Tensor:
    return (torch.rand(NODES, NODES, generator=torch.Generator().manual_seed(1)) > 0.5).float().to_sparse()


class GraphNet(nn.Module):
    """Two layers of a graph convolution, over the same neighbours."""

    def __init__(self, kind: str = "torch.sparse.mm", neighbours: Tensor | None = None):
        super().__init__()
        self.kind = kind
        self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("neighbours", adjacency() if neighbours is None else neighbours)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.spread(self.spread(self.inner(x)).relu()))

    def spread(self, x: Tensor) -> Tensor:
        if self.kind == "addmm":
            return torch.addmm(self.out.bias, self.neighbours, x, alpha=0.5)
        if self.kind == "mm":
            return torch.mm(self.neighbours, x)
        if self.kind == "transposed":
            return self.neighbours.t() @ x
        if self.kind == "made":
            places, entries = self.neighbours.indices(), self.neighbours.values()
            return torch.sparse_coo_tensor(places, entries * self.out.bias[0], (NODES, NODES)) @ x
        return self.neighbours @ x if self.kind == "@" else torch.sparse.mm(self.neighbours, x)


def rows() -> Tensor:
    return torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.whole
@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2"])
@pytest.mark.parametrize("kind", ["torch.sparse.mm", "@", "mm", "addmm", "transposed", "made"])
def test_a_sparse_buffer_is_multiplied_whole(kind, mesh):
    torch.manual_seed(0)
    found = autopart.verify(GraphNet(kind), mesh, example_args=(rows(),))
    assert found.ok and found.max_error < 1e-10, str(found)


def test_what_is_multiplied_by_it_is_cut_by_features():
    plan = autopart.plan(GraphNet(), "tp2", example_args=(rows(),))
    places = {name: place["tp"] for name, place in plan.operators.items() if name.endswith("_sparse_mm")}
    assert places and set(places.values()) == {"R, S(1) -> S(1)"}, plan.explain()
    held = adjacency()
    assert plan.memory[0]["buffers"] == held.indices().nbytes + held.values().nbytes


def train(mesh):
    torch.manual_seed(0)
    model = autopart.parallelize(GraphNet(), mesh, example_args=(rows(),))
    loss = model.step(rows(), loss_fn=F.mse_loss, target=rows())
    return float(loss), model.full_grads()


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
def test_processes_compute_with_it(mesh):
    torch.manual_seed(0)
    own = GraphNet()
    loss = F.mse_loss(own(rows()), rows())
    loss.backward()
    for found, grads in dist.run_ranks(train, 2, mesh):
        assert found == pytest.approx(float(loss), rel=1e-5)
        assert all(torch.allclose(grads[name], p.grad, atol=1e-5) for name, p in own.named_parameters())


def test_compressed_buffers_and_sparse_inputs_are_refused():
    with pytest.raises(TraceError) as caught:
        autopart.verify(GraphNet(neighbours=adjacency().to_sparse_csr()), "dp2", example_args=(rows(),))
    assert str(caught.value) == (
        "the buffer 'neighbours' of GraphNet has the layout sparse_csr\n"
        "  why    the only sparse tensors that can be traced are buffers in coordinate layout (sparse_coo)\n"
        "  try    register_buffer('neighbours', tensor.to_sparse_coo()), or to_dense()"
    )
    with pytest.raises(TraceError) as caught:
        autopart.plan(nn.Bilinear(NODES, WIDTH, 2), "dp2", example_kwargs={"input1": adjacency(), "input2": rows()})
    assert str(caught.value) == (
        "the input 'input1' is a sparse tensor\n"
        "  why    inputs are split by sample, which is not supported for sparse tensors\n"
        "  try    a buffer of the model (register_buffer), which every rank has in full; or input1.to_dense()"
    )
