"""What masks let be seen, found without the masks, is what the masks say."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import fx

import autopart.ops.blockwise_attention as visits
import autopart.ops.mask_key_ranges as intervals
import autopart.ops.masked_attention as attention
from autopart.ir.sharding import DimSharding
from autopart.ops.mask_key_ranges import KeyRangeEvaluator, KeyRanges, key_ranges_of
from autopart.ops.masked_attention import mask_window_of
from autopart.ops.stage_masks import is_attention, mask_of
from autopart.recipe.make_plan import prepare
from autopart.tracing.trace_model import bind_call

QUERIES = KEYS = 12


def dense(found: KeyRanges) -> torch.Tensor:
    """The mask of some intervals."""
    at = torch.arange(found.keys)
    return (at >= found.first.unsqueeze(-1)) & (at < found.end.unsqueeze(-1))


def traced(mask, *inputs):
    """The mask that a function makes, traced on these inputs: its node, the graph's inputs and the mask."""
    made = torch.fx.experimental.proxy_tensor.make_fx(mask)(*inputs)
    node = made.graph.output_node().args[0]
    places = dict(zip(made.graph.find_nodes(op="placeholder"), inputs, strict=True))
    constants = {n: getattr(made, str(n.target)) for n in made.graph.find_nodes(op="get_attr")}
    return node, places | constants, mask(*inputs)


def positions():
    at = torch.arange(QUERIES)
    return at.view(1, 1, -1, 1), at.view(1, 1, 1, -1)


def causal():
    query, key = positions()
    return (key <= query).expand(3, -1, -1, -1)


def window():
    query, key = positions()
    return (key > query - 4) & (key <= query)


def both_sides():
    query, key = positions()
    return torch.logical_and(query - 2 <= key, key < query + 4)


def documents(number):
    query, key = positions()
    same = number[:, None, :, None] == number[:, None, None, :]
    return same & (key <= query)


def padded(attention_mask):
    query, key = positions()
    return (key <= query) & attention_mask[:, None, None, :]


def without_queries(attention_mask):
    query, key = positions()
    return (key <= query) & attention_mask[:, None, :, None]


def to_all_keys():
    query, _ = positions()
    return (query >= 0).expand(3, -1, -1, KEYS)


def some_queries_to_all_keys():
    query, _ = positions()
    return (query >= 5).expand(-1, -1, -1, KEYS)


def all_queries_to_some_keys(attention_mask):
    return attention_mask[:, None, None, :].expand(-1, 1, QUERIES, -1)


def everything():
    return torch.ones(1, 1, dtype=torch.bool).expand(QUERIES, KEYS)


DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 12, [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3]])
PADDING = torch.tensor([[1] * 12, [0] * 3 + [1] * 9, [1] * 8 + [0] * 4], dtype=torch.bool)
MASKS = [
    (causal, ()), (window, ()), (both_sides, ()), (documents, (DOCUMENTS,)), (padded, (PADDING,)),
    (without_queries, (PADDING,)), (to_all_keys, ()), (some_queries_to_all_keys, ()), (everything, ()),
    (all_queries_to_some_keys, (PADDING,)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def all_pairs_are_too_many(monkeypatch):
    monkeypatch.setattr(intervals, "_LARGEST", 40)


@pytest.mark.parametrize(("mask", "inputs"), MASKS, ids=lambda value: getattr(value, "__name__", ""))
def test_they_are_what_the_mask_says(mask, inputs):
    node, given, expected = traced(mask, *inputs)
    found = KeyRangeEvaluator(given).of(node)
    assert found is not None
    full = torch.broadcast_to(dense(found), expected.shape)
    assert torch.equal(full, expected)
    assert found.band() == mask_window_of(expected, QUERIES, KEYS)


@pytest.mark.parametrize("mask", [
    lambda number: number[:, None, :, None] == number.flip(-1)[:, None, None, :],  # keys out of order
    lambda number: (number[:, None, :, None] <= number[:, None, None, :]) | (number > 1)[:, None, None, :],
    lambda number: (number[:, None, :, None] * number[:, None, None, :]) > 1,
], ids=["out of order", "or", "a product"])  # fmt: skip
def test_what_is_not_known_to_be_intervals_is_none(mask):
    node, given, _ = traced(mask, DOCUMENTS)
    assert KeyRangeEvaluator(given).of(node) is None


def test_of_a_mask_that_is_there():
    mask = causal()[0, 0]
    assert torch.equal(dense(key_ranges_of(mask)), mask)
    assert key_ranges_of(mask).band() == mask_window_of(mask, QUERIES, KEYS)
    assert key_ranges_of(torch.tensor([[True, False, True]])) is None
    assert torch.equal(dense(key_ranges_of(torch.zeros(2, 3, dtype=torch.bool))), torch.zeros(2, 3, dtype=torch.bool))


def parts_of(mask, ranks, index, sections=()):
    """A rank's queries of a mask."""
    return DimSharding(mask.dim() - 2, mask.size(-2), sections, ranks).take(mask, index)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("sections", [(), (2,)])
@pytest.mark.parametrize("mask", [causal, window, both_sides])
def test_runs_see_what_the_mask_says(mask, sections, ranks):
    whole = mask()
    for index in range(ranks):
        own = parts_of(whole, ranks, index, sections)
        runs = key_ranges_of(own).runs()
        seen = [
            [max(run.low, run.first + i) <= key < min(run.high, run.end + i) for key in range(KEYS)]
            for run in runs for i in range(run.queries)
        ]  # fmt: skip
        assert torch.equal(torch.tensor(seen).expand_as(own), own)
        assert sum(run.seen for run in runs) == int(own.reshape(-1, *own.shape[-2:])[0].sum())


@pytest.mark.parametrize("rows", [512, 3])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("mask", [causal, window, both_sides])
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "with masks"])
def test_attention_in_runs_is_attention_with_the_mask(monkeypatch, mask, heads, rows, kernel):
    monkeypatch.setattr(attention, "ROWS", rows)
    monkeypatch.setattr(visits, "_has_kernel", lambda *sides: kernel)
    torch.manual_seed(0)
    whole = mask().reshape(-1, QUERIES, KEYS)[:1]
    for index in range(2):
        own = parts_of(whole, 2, index, (2,))
        sizes = ((4, 6), (heads, KEYS), (heads, KEYS))
        given = [torch.randn(3, h, n, 8, dtype=torch.float64, requires_grad=True) for h, n in sizes]
        numbers = [number for run in key_ranges_of(own).runs() for number in run]
        found = torch.ops.autopart.attention_runs(*given, numbers, scale=0.3, enable_gqa=heads == 2)
        expected = F.scaled_dot_product_attention(*given, own, scale=0.3, enable_gqa=heads == 2)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        grad = torch.randn_like(found)
        for mine, theirs in zip(*(torch.autograd.grad(y, given, grad) for y in (found, expected)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def encoder():
    """A BERT whose caller gives no mask: all positions see all."""
    model, batch = zoo.bert()
    return model, {name: tensor for name, tensor in batch.items() if name != "attention_mask"}


@pytest.mark.few
@pytest.mark.parametrize(("made", "band"), [
    (lambda: zoo.llama(rows=2), (11, 0)), (lambda: zoo.gpt2(rows=2), (11, 0)), (encoder, (11, 11)),
], ids=["llama", "gpt2", "bert"])  # fmt: skip
def test_of_a_model(made, band):
    model, batch = made()
    trace = prepare(model, bind_call(model, (), batch))
    call = next(filter(is_attention, trace.graph.nodes))
    found = KeyRangeEvaluator(dict(zip(trace.graph.find_nodes(op="placeholder"), trace.call.tensors, strict=True))).of(
        mask_of(call)
    )
    assert found is not None and found.band() == band
    assert isinstance(call, fx.Node)
