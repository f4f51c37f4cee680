"""Activations of a GPT block as Korthikanti et al. 2022 (arXiv:2205.05198) count them, term by term.

The block is theirs: 16 bits, GELU as one operator, scores and softmax written out. What autopart's program keeps beyond
their count: mean and inverse deviation of two layer norms (8 s b in 16 bits, as on a CPU); and under sequence
parallelism what is gathered for the first product of attention and of the MLP, 4 s b h, whole on every rank: they
gather it again in the backward.
"""

from functools import cache

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn

import autopart
from autopart.cost.formula.step_formula import SIZES

b, s, tp, *_ = SIZES
HIDDEN, HEADS, ROWS, TOKENS = 64, 4, 8, 32
NORMS = 8 * s * b


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        rows, tokens, _ = x.shape
        y = self.first(x)
        q, k, v = (f(y).view(rows, tokens, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = F.dropout(torch.softmax(q @ k.transpose(2, 3), dim=-1), 0.1)
        x = x + F.dropout(self.out((scores @ v).transpose(1, 2).reshape(rows, tokens, HIDDEN)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1)


class Gpt(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embed = nn.Embedding(96, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(HIDDEN, 96, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


@cache
def per_layer(mesh, **options):
    """Bytes that a block keeps: what three have more than two."""
    found = []
    for layers in (2, 3):
        with torch.device("meta"):
            model, ids = Gpt(layers).half(), torch.zeros(ROWS, TOKENS, dtype=torch.long)
        plan = autopart.plan(model, mesh, example_kwargs={"ids": ids}, **options)
        found.append(plan.cost.formula.of(plan.cost.formula.totals.kept))
    return sympy.expand(found[1] - found[0])


LINEAR, SQUARE = s * b * HIDDEN, 5 * HEADS * s**2 * b


@pytest.mark.few
@pytest.mark.parametrize(
    ("mesh", "options", "published"),
    [
        ("dp1", {}, 34 * LINEAR + SQUARE + NORMS),
        ("tp2", {"sequence_parallel": False}, 10 * LINEAR + 24 * LINEAR / tp + SQUARE / tp + NORMS),
        ("tp2", {"sequence_parallel": True}, 4 * LINEAR + (30 * LINEAR + SQUARE + NORMS) / tp),
        ("dp1", {"recompute": "selective"}, 34 * LINEAR + NORMS),
        ("dp1", {"recompute": "full"}, 2 * LINEAR),
    ],
    ids=["equation 1", "equation 2", "equation 4", "selective", "full"],
)
def test_a_block_keeps_what_is_published(mesh, options, published):
    difference = sympy.expand(per_layer(mesh, **options) - published)
    assert difference == 0, difference
