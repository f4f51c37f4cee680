"""Calls with impossible sizes or indices: every rank raises one error in words, before any rank sends."""

import copy

import dist
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

import autopart
from autopart.errors import InputError

POSITIONS, VOCABULARY = 32, 50


class Tokens(nn.Module):
    """Embeddings of tokens and positions, and a loss. Positions count all tokens, or those that are no padding."""

    def __init__(self, counts_tokens=False):
        super().__init__()
        self.counts_tokens = counts_tokens
        self.wte, self.wpe = nn.Embedding(VOCABULARY, 16), nn.Embedding(POSITIONS, 16)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, VOCABULARY)

    def forward(self, input_ids, labels):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        if self.counts_tokens:
            positions = (input_ids != 0).long().cumsum(1)
        x = self.wte(input_ids) + self.wpe(positions)
        x = x + self.down(self.up(x).relu())
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model_of(counts_tokens=False):
    torch.manual_seed(0)
    return Tokens(counts_tokens).double()


def batch_of(rows, length, high=VOCABULARY, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    labels = ids.clone()
    if ids.numel():
        ids[-1, -1] = high - 1
    return {"input_ids": ids, "labels": labels}


TOO_LONG = "the model looks up row 39 of 'wpe.weight', which has 32 rows"
OUTSIDE = "the input 'input_ids' has the value 59, but 'wte.weight' has 50 rows"
NO_SAMPLES = "the input 'input_ids' is empty: its shape is [0, 8]"
NO_TOKENS = "the input 'input_ids' is empty: its shape is [4, 0]"


@pytest.mark.parametrize(("batch", "text"), [
    (batch_of(4, 40), TOO_LONG), (batch_of(4, 8, 60), OUTSIDE),
    (batch_of(0, 8), NO_SAMPLES), (batch_of(4, 0), NO_TOKENS),
])  # fmt: skip
@pytest.mark.parametrize("make", [autopart.plan, autopart.verify])
def test_an_example_with_impossible_sizes_is_refused(make, batch, text):
    with pytest.raises(InputError) as error:
        make(model_of(), "tp2", example_kwargs=batch)
    assert error.value.what == text and error.value.why and error.value.hint


def test_computed_positions_of_an_example_are_checked():
    autopart.plan(model_of(True), "tp2", example_kwargs=batch_of(4, POSITIONS - 1))
    with pytest.raises(InputError, match=r"row 32 of 'wpe.weight' for 'input_ids', which has 32 rows"):
        autopart.plan(model_of(True), "tp2", example_kwargs=batch_of(4, POSITIONS))
    padded = batch_of(4, 40)
    padded["input_ids"][:, :20] = 0
    assert autopart.verify(model_of(True), "tp2", example_kwargs=padded).ok


def test_an_example_without_values_is_planned():
    short, long = ({n: v.to("meta") for n, v in batch_of(4, length).items()} for length in (16, 40))
    with torch.device("meta"):
        autopart.plan(Tokens(), "tp2", example_kwargs=short)
        with pytest.raises(InputError, match="looks up row 39"):
            autopart.plan(Tokens(), "tp2", example_kwargs=long)


def calls_on_ranks(mesh, counts_tokens, options):
    """Impossible calls on all ranks, or on the last rank only. Then a possible one must be exact."""
    rank, model = torch.distributed.get_rank(), model_of(counts_tokens)
    local = options.get("local_batch", False)
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch_of(4, 16), timeout=60.0, **options)
    bad = {
        "long": (4, 40), "no samples": (0, 8), "no tokens": (4, 0), "a token outside": (4, 16, 60),
    }  # fmt: skip
    texts = {}
    for name, sizes in bad.items():
        for who, given in (("all", sizes), ("last", sizes if rank else (4, 16))):
            with pytest.raises(InputError) as error:
                pm.step(**batch_of(*given))
            texts[name, who] = str(error.value)
    with pytest.raises(InputError) as error:
        pm.step(**batch_of(4, 16 + 4 * rank))
    texts["lengths", "differ"] = str(error.value)
    batch = batch_of(3, 16)
    loss = pm.step(**batch)
    whole = {name: torch.cat([value, value]) for name, value in batch.items()} if local else batch
    expected = model(**whole)
    expected.backward()
    zoo.assert_close_outputs(loss, expected.detach(), where=f"loss on {mesh}")
    zoo.assert_same_grads(pm.full_grads(), {name: p.grad for name, p in model.named_parameters()})
    return texts


@pytest.mark.parametrize(("mesh", "counts_tokens", "options"), [
    ("pp2", False, {"microbatches": 2}), ("dp2", True, {"local_batch": True}), ("tp2", True, {}),
])  # fmt: skip
def test_every_rank_raises_one_error(mesh, counts_tokens, options):
    first, second = dist.run_ranks(calls_on_ranks, 2, mesh, counts_tokens, options, timeout_s=120.0)
    assert first == second
    long = "row 40 of 'wpe.weight' for 'input_ids'" if counts_tokens else TOO_LONG
    for name, text in {"long": long, "no samples": "is empty: its shape is [0, 8]",
                       "no tokens": "is empty: its shape is [4, 0]", "a token outside": OUTSIDE}.items():  # fmt: skip
        assert text in first[name, "all"], (name, first)
    assert OUTSIDE in first["a token outside", "last"] or "different values" in first["a token outside", "last"]
    for name in ("long", "no samples", "no tokens"):
        assert "different" in first[name, "last"] and "rank 1: " in first[name, "last"], first
    assert "different" in first["lengths", "differ"]
