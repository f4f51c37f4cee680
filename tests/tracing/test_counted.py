"""Sizes and numbers that depend on values: selections by masks, experts in a loop, `.item()` in arithmetic."""

from __future__ import annotations

import copy
import random
from typing import Any

import dist
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

import autopart
from autopart.errors import OptionError, TraceError
from autopart.ir.facts import facts
from autopart.ir.selection import is_selection
from autopart.recipe.make_plan import prepare
from autopart.tracing.trace_model import bind_call

ROWS, TOKENS, SIZE, EXPERTS = 4, 6, 16, 4


class Experts(nn.Module):
    """A mixture of experts as most people write it: a loop, each expert on the tokens that are routed to it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(SIZE, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.SiLU(), nn.Linear(2 * SIZE, SIZE)) for _ in range(EXPERTS)
        )


class RowsAdded(Experts):
    """Rows are read and written by indices (LitGPT)."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, SIZE)
        weights, chosen = torch.topk(self.gate(tokens), 2)
        weights = weights.softmax(1)
        masks = (chosen.unsqueeze(-1) == torch.arange(EXPERTS)).permute(2, 0, 1)
        y = torch.zeros_like(tokens)
        for mask, expert in zip(masks, self.experts, strict=True):
            token, place = torch.where(mask)
            y[token] += weights[token, place, None] * expert(tokens[token])
        return y.view(x.shape)


class IndexAdded(Experts):
    """The mask has its rows last (transformers' Mixtral)."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, SIZE)
        weights, chosen = torch.topk(self.gate(tokens).softmax(1), 2)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros(len(tokens), SIZE, dtype=x.dtype)
        masks = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        for i, expert in enumerate(self.experts):
            place, token = torch.where(masks[i])
            made = expert(tokens[None, token].reshape(-1, SIZE)) * weights[token, place, None]
            y.index_add_(0, token, made)
        return y.reshape(x.shape)


class Model(nn.Module):
    """Two layers of experts, and a loss over the labels that are not ignored."""

    def __init__(self, experts: type[Experts]):
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), nn.Linear(SIZE, 10)
        self.layers = nn.ModuleList([experts(), experts()])

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(self.norm(x))
        kept = labels != -100
        return F.cross_entropy(self.head(x)[kept], labels[kept])


def batch(rows: int = ROWS) -> dict[str, Tensor]:
    """Rows have unequal numbers of labels, the first none: half of the ranks of `dp` may be without any."""
    torch.manual_seed(1)
    labels = torch.randint(0, 10, (rows, TOKENS))
    labels[:, ::2] = -100
    labels[0] = -100
    return {"x": torch.randn(rows, TOKENS, SIZE), "labels": labels}


MESHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tp2", {}), ("dp2", {}), ("dp2,tp2", {"zero": 3}), ("pp2", {"microbatches": 4}),
    ("dp2,pp2", {"microbatches": 2}), ("pp2,tp2", {"recompute": "full"}), ("tp2", {"sequence_parallel": True}),
)  # fmt: skip


@pytest.mark.large
@pytest.mark.parametrize("experts", [RowsAdded, IndexAdded])
@pytest.mark.parametrize(("mesh", "options"), MESHES)
def test_a_loop_over_experts_is_exact(experts, mesh, options):
    torch.manual_seed(0)
    report = autopart.verify(Model(experts), mesh, example_kwargs=batch(8), **options)
    assert report.ok and "not compared" not in str(report), report


@pytest.mark.large
def test_experts_are_cut_and_rows_stay_where_they_are():
    """Nothing of a selection is gathered over data parallelism, and both products of an expert are cut over `tp`."""
    torch.manual_seed(0)
    plan = autopart.plan(Model(RowsAdded), "dp2,tp2", example_kwargs=batch())
    moved = {kind for row in plan.collectives if row.axis == "dp" for kind in (row.forward, row.backward)}
    assert moved <= {"", "all_reduce"}, moved
    experts = {name: layout["tp"] for name, layout in plan.parameters.items() if ".experts." in name}
    assert all(layout.startswith("S") for name, layout in experts.items() if name.endswith("weight")), experts


@pytest.mark.large
def test_a_plan_counts_the_share_that_is_selected():
    """Experts of one loop share the tokens evenly; labels are those of the example."""
    plan = autopart.plan(Model(RowsAdded), "dp2", example_kwargs=batch())
    selected = (batch()["labels"] != -100).double().mean().item() * 100
    assert f"{2 * EXPERTS} selections by values (a mask, nonzero) assumed to select 25 % of the elements" in plan.notes
    assert f"1 selection by values (a mask, nonzero) assumed to select {selected:.3g} % of the elements" in plan.notes


@pytest.mark.large
def test_equal_masks_select_once():
    model = Model(RowsAdded)
    traced = prepare(model, bind_call(model, (), batch()))
    assert sum(map(is_selection, traced.graph.nodes)) == 2 * EXPERTS + 1
    assert all(facts(n)["atoms"] for n in traced.graph.nodes if is_selection(n))


# --- Other ways of selecting ---------------------------------------------------------------------------------------


class Parts(nn.Module):
    """Layers for the functions below."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.norm, self.batch_norm = nn.LayerNorm(SIZE), nn.BatchNorm1d(SIZE)
        self.register_buffer("t", torch.tensor(0.5))
        self.run = forward

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return self.run(self, x, ids)


def selected_write(m, x, ids):
    h = m.a(x)
    o = torch.zeros_like(h)
    for i, layer in enumerate((m.b, m.c)):
        o[ids == i] = layer(h[ids == i])
    return o


def nonzero_column(m, x, ids):
    h = m.a(x).view(-1, SIZE)
    rows = (ids.view(-1) == 1).nonzero()[:, 0]
    o = h.clone()
    o[rows] = o[rows] + m.b(h[rows])
    return o


def index_add(m, x, ids):
    h = m.a(x).view(-1, SIZE)
    rows = (ids.view(-1) == 1).nonzero().squeeze(-1)
    return h.index_add(0, rows, m.b(h.index_select(0, rows)))


def edges(m, x, ids):
    h = m.a(x.view(-1, SIZE))
    kept = torch.stack([torch.arange(ROWS * TOKENS), ids.view(-1) * 5])[:, ids.view(-1) != 2]
    return m.b(torch.zeros_like(h).index_add(0, kept[1], h[kept[0]]))


def with_loops(m, x, ids):
    """Edges without loops, then a loop for every node, and a weight for every edge (torch_geometric's GCN)."""
    h = m.a(x.view(-1, SIZE))
    nodes = torch.arange(ROWS * TOKENS)
    edges = torch.stack([nodes, ids.view(-1) * 5])
    edges = torch.cat([edges[:, edges[0] != edges[1]], torch.stack([nodes, nodes])], 1)
    weight = torch.ones(edges.size(1), dtype=h.dtype)
    weight = torch.where(edges[0] == edges[1], 2 * weight, weight)
    weight[edges[1] == 5] = weight[edges[1] == 5] - 3
    return torch.zeros_like(h).index_add(0, edges[1], weight.unsqueeze(-1) * m.b(h)[edges[0]])


def of_known_sizes(m, x, ids):
    h = m.a(x)[ids > 1]
    return (torch.zeros(h.shape[0], SIZE).to(h) + m.b(h)).sum() + torch.arange(h.shape[0]).sum()


SELECTING = {
    "write": selected_write,
    "column": nonzero_column,
    "index_add": index_add,
    "edges": edges,
    "loops": with_loops,
    "sizes": of_known_sizes,
    "masked_select": lambda m, x, ids: torch.masked_select(m.a(x), (ids > 1).unsqueeze(-1)).pow(2).mean(),
    "loss": lambda m, x, ids: F.mse_loss(m.b(m.a(x)[ids > 1]), x[ids > 1].detach()),
    "mean of a dim": lambda m, x, ids: m.a(x)[ids > 1].mean(0),
    "mean by hand": lambda m, x, ids: m.a(x)[ids > 1].pow(2).sum() / x[ids > 1].shape[0] + m.a(x)[ids > 1].numel(),
    "rows": lambda m, x, ids: m.b(m.a(x)[ids[:, 0] > 1]).pow(2).sum() / (ids[:, 0] > 1).sum().clamp(min=1),
    "norm": lambda m, x, ids: m.norm(m.a(x)[ids > 1]).pow(2).sum(),
    # what needs all that is selected at once: it is selected of all rows, on every rank
    "returned": lambda m, x, ids: m.b(m.a(x)[ids > 1]),
    "softmax": lambda m, x, ids: (m.a(x)[ids > 1].softmax(0) * m.b(x)[ids > 1]).sum(),
    "batch norm": lambda m, x, ids: m.batch_norm(m.a(x)[ids > 1]).pow(2).sum(),
    "joined": lambda m, x, ids: torch.cat([m.b(m.a(x)[ids == 0]), m.c(m.a(x)[ids == 1])]).pow(2).mean(),
    "a view": lambda m, x, ids: m.b(m.a(x)[(ids < 9) & (torch.arange(TOKENS) < 3)].reshape(ROWS, -1, SIZE)),
    "of a known number": lambda m, x, ids: m.b(torch.cat([x, x], -1)[..., torch.arange(2 * SIZE) % 2 == 0]),
    "positions as numbers": lambda m, x, ids: m.a(x).sum() * (ids.view(-1) > 1).nonzero().double().pow(2).sum(),
}


def skipped(m, x, ids):
    h = m.a(x)
    o = torch.zeros_like(h)
    for i in range(5):
        row, column = torch.where(ids == i)
        if row.numel() == 0:
            continue
        o[row, column] = m.b(h[row, column])
    for i in (1, 7):
        row, column = torch.where(ids == i)
        if row.shape[0] > 0:
            o = o.index_put((row, column), m.c(h[row, column]), accumulate=True)
    return o


SELECTING["skipped"] = skipped
SELECTING |= {
    "unique": lambda m, x, ids: m.b(m.a(x)[0][ids.unique()]).pow(2).sum() / ids.unique().numel(),
    "inverse": lambda m, x, ids: (m.a(x) * ids.unique(return_inverse=True)[1].unsqueeze(-1)).sum(),
    "counts": lambda m, x, ids: m.a(x).sum() * ids.unique(return_counts=True)[1].max(),
    "of an activation": lambda m, x, ids: m.b(m.a(x)).sum() * m.a(x).argmax(-1).unique(return_counts=True)[1].max(),
    "runs": lambda m, x, ids: m.a(x).sum() * torch.unique_consecutive(ids, return_inverse=True)[1].max(),
    "returned": lambda m, x, ids: m.a(x).sum() * ids.unique(),
}


def skipped_mean(m, x, ids):
    h = m.a(x).clone()
    for i in range(5):
        row, column = torch.where(ids == i)
        if row.numel() == 0:
            continue
        h[row, column] = h[row, column] - h[row, column].mean()
    return h


def skipped_layer(m, x, ids):
    h = m.a(x)
    row, column = torch.where(ids == 7)
    if row.numel() > 0:
        h = m.b(h)
        h[row, column] = 0
    return h


def skipped_number(m, x, ids):
    h, number = m.a(x), 0
    for i in range(5):
        (row,) = torch.where(ids.view(-1) == i)
        if row.numel() > 0:
            number += 1
    return h * number


NUMBERS = {
    "norm": lambda m, x, ids: m.a(x) * x.norm().item(),
    "of an activation": lambda m, x, ids: m.a(x) / m.a(x).abs().max().item(),
    "of a buffer": lambda m, x, ids: m.a(x) * m.t.item(),
    "arithmetic": lambda m, x, ids: m.a(x) * (2 * ((ids > 1).sum().item() / 24) ** 2 - x[0, 0, 0].item()),
    "limit": lambda m, x, ids: m.a(x).clamp(max=x.mean().item(), min=-1),
    "filled": lambda m, x, ids: m.a(x) + torch.full((SIZE,), x.max().item()),
    "index": lambda m, x, ids: m.a(x) * x[0, ids[0, 0].item()].norm(),
    "of integers": lambda m, x, ids: m.a(x) * (ids * x.max().item()).unsqueeze(-1),
    "float()": lambda m, x, ids: m.a(x) * (float(m.a(x).max()) + float("1") + float(isinstance(m.t.item(), float))),
    "listed": lambda m, x, ids: m.a(x) * sum(v.item() for v in m.a(x).flatten()[:3]),
}


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, TOKENS, SIZE), torch.randint(0, 4, (ROWS, TOKENS))


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
@pytest.mark.parametrize("name", [*SELECTING, *NUMBERS])
def test_other_selections_and_numbers_are_exact(name, mesh):
    torch.manual_seed(0)
    report = autopart.verify(Parts({**SELECTING, **NUMBERS}[name]), mesh, example_args=inputs())
    assert report.ok, report


class OfRows(nn.Module):
    """Whole rows of the batch by an input mask of one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.a(x)[keep]


@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2", "dp2,tp2"])
@pytest.mark.parametrize("keep", [[1, 0, 1, 1, 0, 1], [0] * 6, [1] * 6])
def test_rows_of_a_mask_that_is_an_input_are_exact(mesh, keep):
    torch.manual_seed(0)
    report = autopart.verify(OfRows(), mesh, example_args=(torch.randn(6, 4), torch.tensor(keep).bool()))
    assert report.ok, report


REFUSED = {
    "end": (
        lambda m, x, ids: m.a(x)[:, : ids.max().item()].sum(),
        "'end' of slice is a number that the model computes",
    ),
    "drawn end": (
        lambda m, x, ids: m.a(x)[:, : random.randint(1, 3)].sum(),
        "'end' of slice is a random number that the model draws",
    ),
    "sizes": (
        lambda m, x, ids: torch.nn.functional.interpolate(m.a(x)[None], (ids.flatten()[0].item(), 4)).sum(),
        "'output_size' of upsample_nearest2d is a number that the model computes",
    ),
    "parts": (
        lambda m, x, ids: m.a(x).split(ids.flatten()[:2].tolist())[0].sum(),
        "'split_sizes' of split_with_sizes is a number that the model computes",
    ),
    "number of rows": (
        lambda m, x, ids: m.a(x).sum() * ids.repeat_interleave(ids.flatten()[: len(ids)], 0).shape[0],
        "a size that depends on values of a tensor is used in a computation",
    ),
    "mean": (skipped_mean, "this line skips code depending on tensor values, and the skipped code does more than"),
    "layer": (skipped_layer, "Parts cannot be traced"),
    "number": (skipped_number, "Parts cannot be traced"),
    "bins": (lambda m, x, ids: m.a(x).sum() * ids.flatten().bincount(), "Parts cannot be traced"),
}


@pytest.mark.few
@pytest.mark.parametrize("name", REFUSED)
def test_a_size_that_nobody_knows_is_refused_with_its_line(name):
    forward, text = REFUSED[name]

    def of_activations(m, x, ids):
        return forward(m, x, ids + (0 * m.a(x).sum()).long())

    with pytest.raises(TraceError) as caught:
        autopart.plan(Parts(of_activations), "tp2", example_args=inputs())
    assert str(caught.value).startswith(text) and "test_counted.py" in str(caught.value)


def dropped(m, x, ids):
    return torch.dropout(m.b(m.a(x)[ids > 1]), 0.5, m.training).sum()


@pytest.mark.large
def test_dropout_of_selected_elements_draws_on_every_rank():
    torch.manual_seed(0)
    pm = autopart.parallelize(Parts(dropped), "dp1", example_args=inputs())
    one, other = pm(*inputs()), pm(*inputs())
    assert one.isfinite() and one != other
    assert autopart.verify(Parts(dropped), "dp2", example_args=inputs(), rng="fast").ok
    with pytest.raises(OptionError, match="how many numbers it draws depends on how many elements are selected"):
        autopart.verify(Parts(dropped), "dp2", example_args=inputs())
    with pytest.raises(TraceError, match="rand_like draws as many random numbers as there are selected elements"):
        autopart.plan(Parts(lambda m, x, ids: torch.rand_like(m.a(x)[ids > 1])), "dp2", example_args=inputs())


# --- Over processes ------------------------------------------------------------------------------------------------


def trained(mesh, options):
    torch.manual_seed(0)
    model, given = (
        Model(RowsAdded).double(),
        {k: v.double() if v.is_floating_point() else v for k, v in batch(8).items()},
    )
    own = copy.deepcopy(model)
    pm = autopart.parallelize(model, mesh, example_kwargs=given, **options)
    optimizers = torch.optim.AdamW(pm.parameters(), 1e-2), torch.optim.AdamW(own.parameters(), 1e-2)
    for _ in range(3):
        loss = pm.step(**given)
        expected = own(**given)
        expected.backward()
        zoo.assert_close_outputs(loss, expected.detach(), where="loss")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = pm.full_state_dict()
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "options"), [("tp2", {}), ("dp2", {"zero": 3}), ("pp2", {"microbatches": 4})])
def test_experts_train_over_processes_as_one_device_does(mesh, options):
    dist.run_ranks(trained, 2, mesh, options, timeout_s=120.0)


class OneInEveryRow(nn.Module):
    """Adds what it selects to the rows, so that it must be one element of each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        mask = nn.functional.one_hot(label, 8)
        h = self.linear(x)
        return h + mask * h[mask == 1].cos().unsqueeze(1)


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_a_selection_whose_size_another_tensor_says_is_exact(mesh):
    torch.manual_seed(0)
    assert autopart.verify(OneInEveryRow(), mesh, example_args=(torch.randn(4, 8), torch.randint(8, (4,)))).ok
