"""Nested (jagged) tensors: their operators run on values and offsets, which are plain tensors of the trace."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.errors import TraceError

ROWS, SIZE = 8, 8
LENGTHS = torch.tensor([3, 2, 4, 3, 1, 4, 3, 4])
OFFSETS = F.pad(LENGTHS.cumsum(0), (1, 0))
TOTAL = int(LENGTHS.sum())


class Net(nn.Module):
    def __init__(self, compute: Any) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE)
        self.drop, self.table, self.compute = nn.Dropout(0.2), nn.Embedding(12, SIZE), compute

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        return self.compute(self, x, numbers)


def rows_of(x, lengths):
    return [row[:n] for row, n in zip(x, lengths.tolist(), strict=True)]


def layers_on_values(m, x, offsets):
    j = torch.nested.nested_tensor_from_jagged(m.a(x), offsets)
    j = m.norm(F.gelu(m.b(j))) + j
    return torch.nested.to_padded_tensor(j, 0.0).sum(1)


def list_of_rows(m, x, lengths):
    j = torch.nested.as_nested_tensor(rows_of(m.a(x), lengths), layout=torch.jagged)
    return torch.stack([row.mean(0) for row in m.b(F.relu(j)).unbind()])


def copied_list_of_rows(m, x, lengths):  # the copy has no gradient
    j = torch.nested.nested_tensor(rows_of(m.a(x), lengths), layout=torch.jagged)
    return m.b(j).to_padded_tensor(0.0) + m.a(x)[:, :4]


def selected_steps(m, x, lengths):
    mask = torch.arange(x.shape[1]) < lengths[:, None]
    j = torch.nested.nested_tensor_from_jagged(m.a(x)[mask], lengths=lengths)
    return torch.stack([row.sum(0) for row in m.b(j)])


def attention(m, x, lengths):
    j = torch.nested.as_nested_tensor(rows_of(x, lengths), layout=torch.jagged)
    q, k, v = (layer(j).view(ROWS, -1, 2, 4).transpose(1, 2) for layer in (m.a, m.b, m.a))
    o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
    return m.b(o).to_padded_tensor(0.0, (ROWS, 6, SIZE))


def tokens_with_dropout(m, ids, offsets):
    j = m.table(torch.nested.nested_tensor_from_jagged(ids, offsets))
    j = m.drop(m.a(j)) * m.b.bias - 0.5 * j.sigmoid()
    left, right = torch.cat([j, -j], -1).softmax(-1).chunk(2, -1)
    return torch.nested.to_padded_tensor(left * right, 1.0, [ROWS, 5, SIZE])


def without_gradient(m, x, offsets):
    j = torch.nested.nested_tensor_from_jagged(m.a(x), offsets)
    with torch.no_grad():
        target = m.b(j) * 2
    return (j - target).values().square().mean()


PADDED, VALUES = torch.Size((ROWS, 6, SIZE)), torch.Size((TOTAL, SIZE))
CASES = {
    layers_on_values: (VALUES, OFFSETS),
    list_of_rows: (PADDED, LENGTHS),
    copied_list_of_rows: (PADDED, LENGTHS),
    selected_steps: (PADDED, LENGTHS),
    attention: (PADDED, LENGTHS),
    tokens_with_dropout: (None, OFFSETS),
    without_gradient: (VALUES, OFFSETS),
}


def example(compute):
    torch.manual_seed(0)
    shape, numbers = CASES[compute]
    return Net(compute), (torch.randint(12, (TOTAL,)) if shape is None else torch.randn(shape), numbers)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compute", CASES)
def test_nested_tensors_are_exact(compute):
    model, args = example(compute)
    for mesh in ("dp2", "tp2"):
        assert (found := autopart.verify(model, mesh, example_args=args)).ok, str(found)


@pytest.mark.large
@pytest.mark.filterwarnings("ignore")
def test_offsets_are_data_and_lengths_in_a_list_are_guarded():
    model, args = example(layers_on_values)
    batch = {"x": args[0], "numbers": args[1]}
    other = {**batch, "numbers": F.pad(LENGTHS.flip(0).cumsum(0), (1, 0))}
    assert autopart.verify(model, "dp2", example_kwargs=batch, steps=2, batches=[batch, other]).ok
    assert not any("traced for" in note for note in autopart.plan(model, "dp2", example_kwargs=batch).notes)
    model, args = example(list_of_rows)
    assert any("lengths.tolist() = [3, 2, 4" in note for note in autopart.plan(model, "dp2", example_args=args).notes)


def returned(m, x, offsets):
    return torch.nested.nested_tensor_from_jagged(m.a(x), offsets)


def in_the_strided_layout(m, x, lengths):
    return torch.nested.nested_tensor(rows_of(m.a(x), lengths)).to_padded_tensor(0.0)


@pytest.mark.parametrize(
    ("compute", "shape", "numbers", "what", "hint"),
    [
        (returned, VALUES, OFFSETS, "forward() returns a nested tensor", "torch.nested.to_padded_tensor"),
        (in_the_strided_layout, PADDED, LENGTHS, "this use of a nested tensor is not supported", "layout=torch.jagged"),
    ],
)
def test_what_is_refused_says_what_to_do(compute, shape, numbers, what, hint):
    with warnings.catch_warnings(), pytest.raises(TraceError) as refused:
        warnings.simplefilter("ignore")
        autopart.plan(Net(compute), "dp2", example_args=(torch.randn(shape), numbers))
    assert what in str(refused.value) and hint in refused.value.hint


def test_a_nested_input_is_refused():
    nested = torch.nested.nested_tensor([torch.randn(n, SIZE) for n in LENGTHS.tolist()], layout=torch.jagged)
    with pytest.raises(TraceError, match="the input 'x' is a nested tensor") as refused:
        autopart.plan(Net(lambda m, x, _: m.a(x).to_padded_tensor(0.0)), "dp2", example_args=(nested, LENGTHS))
    assert "nested_tensor_from_jagged in forward()" in refused.value.hint


def narrowed(m, x, lengths):
    j = torch.nested.narrow(m.a(x), 1, torch.zeros_like(lengths), lengths, layout=torch.jagged)
    return (j * 2).contiguous().values()


@pytest.mark.large
def test_a_narrowed_tensor_cannot_be_compared_with_torch():
    """Torch has no gradient of `torch.nested.narrow` with unequal lengths; that of a partitioned model is right."""
    torch.manual_seed(0)
    model, x = Net(narrowed).double(), torch.randn(ROWS, 6, SIZE, dtype=torch.float64)
    with pytest.raises(TraceError, match="cannot be differentiated by torch itself") as refused:
        autopart.verify(model, "dp2", example_args=(x, LENGTHS))
    assert "nested_tensor_from_jagged(x[mask], offsets)" in refused.value.hint
    with pytest.raises(RuntimeError, match="invalid gradient"):
        model(x, LENGTHS).square().sum().backward()
    module = autopart.parallelize(model, "dp1", example_args=(x, LENGTHS))
    module(x, LENGTHS).square().sum().backward()
    model.zero_grad()
    (2 * torch.cat(rows_of(model.a(x), LENGTHS))).square().sum().backward()
    assert torch.allclose(module.full_grads()["a.weight"], model.a.weight.grad, atol=1e-10)
