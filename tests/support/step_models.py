"""A small model with a loss, its batch and its gradients."""

import dist
import torch
import torch.nn.functional as F
import zoo
from torch import nn

from autopart.ir.mesh import Mesh

TIMEOUT_S = 100.0


IGNORED = -100


class Small(nn.Module):
    """Two blocks between an embedding and a head; returns logits, and a loss where there are labels."""

    def __init__(self, vocab=32, hidden=16, blocks=2, norm=False):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.ups = nn.ModuleList(nn.Linear(hidden, 2 * hidden) for _ in range(blocks))
        self.downs = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(blocks))
        self.head = nn.Linear(hidden, vocab)
        self.norm = nn.BatchNorm1d(hidden) if norm else None

    def forward(self, tokens, labels=None):
        x = self.embedding(tokens)
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(x)))
        if self.norm is not None:
            x = self.norm(x.flatten(0, 1)).view(x.shape)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits, "kind": "logits"}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return {"loss": loss, "logits": logits, "last": x.detach().square().mean(), "kind": "loss"}


def small(**sizes):
    torch.manual_seed(0)
    return Small(**sizes).double()


def batch(seed=0, rows=4, length=6, vocab=32, share=0.6):
    """Labels of which another number counts in every row."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(vocab, (2, rows, length), generator=generator)
    ignored = torch.rand(rows, length, generator=generator) > share
    return {"tokens": tokens, "labels": labels.masked_fill(ignored, IGNORED)}


def run(fn, mesh, *args, **options):
    """`fn(mesh, *args, **options)` on all ranks of a mesh."""
    return dist.run_ranks(fn, Mesh.parse(mesh).num_ranks, mesh, *args, timeout_s=TIMEOUT_S, **options)


def grads_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_grads(pm, expected):
    found = pm.full_grads()
    zoo.assert_same_grads(found, expected)
    assert set(found) == set(expected)
