"""Mixtures of experts."""

from __future__ import annotations

import sys
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

EXPERTS, WIDTH, TIMES = 4, 8, 2


class Mixture(nn.Module):
    """Experts as two stacks of matrices with biases, the product of every row with its own by `form`, and a shared one.

    `towards`: what is added to the router's logits, to send all rows to some experts.
    """

    def __init__(self, form="looked up", towards=(0.0,) * EXPERTS, experts=EXPERTS):
        super().__init__()
        self.form = form
        self.embed = nn.Embedding(32, WIDTH)
        self.router = nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 3 * WIDTH) / 3)
        self.up_bias = nn.Parameter(torch.randn(experts, 3 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(experts, 3 * WIDTH, WIDTH) / 5)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 32)
        self.register_buffer("towards", torch.tensor(towards))

    def forward(self, ids, labels):
        x = self.embed(ids)
        rows = x.reshape(-1, WIDTH)
        probabilities = (self.router(rows) + self.towards).softmax(-1)
        gates, chosen = self.choose(probabilities, ids.flatten())
        experts = chosen.reshape(-1)
        each = rows.unsqueeze(1).expand(-1, TIMES, -1).reshape(-1, WIDTH)
        if self.form == "looked up":
            hidden = torch.bmm(each.unsqueeze(1), self.up[experts]).squeeze(1) + self.up_bias[experts]
            hidden = hidden.view(-1, 3, WIDTH).flip(1).reshape(-1, 3 * WIDTH)  # a view of rows, however many
            made = torch.bmm(F.gelu(hidden).unsqueeze(1), self.down[experts]).squeeze(1)
        else:
            hidden = torch.bmm(self.up.transpose(1, 2)[experts], each.unsqueeze(-1)).squeeze(-1) + self.up_bias[experts]
            made = torch.bmm(self.down.transpose(1, 2)[experts], F.gelu(hidden).unsqueeze(-1)).squeeze(-1)
        mixed = (made * gates.reshape(-1, 1)).view(-1, TIMES, WIDTH).sum(1)
        x = x + mixed.view_as(x) + self.shared(x)
        balance = (probabilities.mean(0) ** 2).sum()  # an auxiliary loss, of means over the whole batch
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.1 * balance

    def choose(self, probabilities, ids):
        return probabilities.topk(TIMES)


def mixture(**options):
    torch.manual_seed(0)
    model = Mixture(**options).double()
    model.towards = model.towards.double()
    return model, {"ids": torch.randint(0, 32, (8, 6)), "labels": torch.randint(0, 32, (8, 6))}


def wide_mixture(monkeypatch):
    """A mixture of eight experts of 512 x 1536 and back on `meta`, for 64 rows of 64 tokens with two experts each."""
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", 512)
    with torch.device("meta"):
        model, ids = Mixture(towards=(0.0,) * 8, experts=8), torch.zeros(64, 64, dtype=torch.long)
    return model, {"ids": ids, "labels": ids}


@cache
def small(name):
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from _architectures import build

    return build(name)


TO, BACK = "S(0), S(0) -> E(0; sent)", "E(0; sent), S(0) -> S(0)"


WAYS = {
    "gathered": {"*/to_experts*": {"ep": "E(0)"}},
    "sent": {"*/to_experts*": {"ep": TO}, "*/from_experts*": {"ep": BACK}},
}
