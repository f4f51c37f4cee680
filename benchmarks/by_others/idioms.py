"""Ways of writing a model that are harder to trace than most, in as few lines as show them: what is done to tensors."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from by_others.case import CLASSES, LENGTH, ROWS, VOCAB, Case, D, linear, squared, states, tokens, written

# Numbers out of tensors


def item_of_an_activation() -> Case:
    return written(lambda self, x: self.a(x) * x.norm().item(), a=linear())


def item_of_a_buffer() -> Case:
    return written(lambda self, x: self.a(x) * self.scale.item(), a=linear(), scale=torch.tensor(0.5))


def logged_item() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        self.last_norm = h.detach().norm().item()
        return h

    return written(forward, a=linear())


def branch_on_a_buffer() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.a(x) if self.warm else self.a(x).relu()

    return written(forward, a=linear(), warm=torch.tensor(True))


def branch_on_an_activation() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)

    return written(forward, a=linear(), b=linear())


# Counts that depend on values


class Experts(nn.Module):
    """A mixture of experts as most write it: for each expert the tokens that chose it."""

    def __init__(self, way: str):
        super().__init__()
        self.way, self.gate = way, nn.Linear(D, 4)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if self.way == "where":
                row, place = torch.where(chosen == number)
                out[row] += weights[row, place, None] * expert(x[row])
            elif self.way == "nonzero":
                row = (chosen == number).any(-1).nonzero().squeeze(-1)
                share = (weights * (chosen == number)).sum(-1)[row, None]
                out = out.index_add(0, row, share * expert(x[row]))
            elif self.way == "any":
                mask = (chosen == number).any(-1)
                if mask.any():
                    out[mask] += expert(x[mask])
            elif self.way == "counts":
                if torch.bincount(chosen.flatten(), minlength=4).tolist()[number] == 0:
                    continue
                row, place = torch.where(chosen == number)
                out[row] += weights[row, place, None] * expert(x[row])
            else:
                mask = (chosen == number).any(-1)
                out[mask] = out[mask] + expert(x[mask])
        return out


def experts(way: str) -> Case:
    return squared(Experts(way), torch.randn(ROWS, D))


def masked_loss() -> Case:
    def forward(self: Any, x: Tensor, labels: Tensor) -> Tensor:
        kept = labels != -100
        return F.cross_entropy(self.a(x)[kept], labels[kept])

    labels = torch.randint(D, (ROWS, LENGTH)).masked_fill(torch.rand(ROWS, LENGTH) < 0.3, -100)
    return written(forward, states(LENGTH, D), labels, a=linear())


def unique_tokens() -> Case:
    def forward(self: Any, ids: Tensor) -> Tensor:
        words, where = ids.unique(return_inverse=True)
        return self.words(words)[where].mean(1)

    return written(forward, tokens(), words=nn.Embedding(VOCAB, D))


def random_drop_of_layers() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() > 0.2:
                x = layer(x)
        return x

    random.seed(0)
    return written(forward, layers=nn.ModuleList(linear() for _ in range(4)))


# Precision


def float32_made_in_forward() -> Case:
    return written(lambda self, x: torch.zeros(ROWS, D).index_add(0, torch.arange(ROWS), self.a(x)), a=linear())


def float32_cast_in_forward() -> Case:
    return written(lambda self, x: self.a(x.float()), a=linear())


def bfloat16_model() -> Case:
    return written(lambda self, x: self.a(x.bfloat16()).float(), a=linear().bfloat16())


def autocast_inside() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.a(x)
        return self.b(h.float())

    return written(forward, a=linear(), b=linear())


def complex_parameter() -> Case:
    weight = nn.Parameter(torch.randn(D, D, dtype=torch.cfloat))
    return written(lambda self, x: torch.view_as_real(torch.fft.fft(x) @ self.w), w=weight)


def complex_rotary() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.a(x).view(ROWS, D // 2, 2))
        return torch.view_as_real(pairs * self.turns)

    return written(forward, a=linear(), turns=torch.polar(torch.ones(D // 2), torch.arange(D // 2.0)))


def write_to_a_complex_slice() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(self.a(x))
        kept = torch.zeros_like(waves)
        kept[:, :2] = waves[:, :2] * 2
        return torch.fft.irfft(kept, n=D)

    return written(forward, a=linear())


# Sparse tensors, packed sequences, bags


def sparse_adjacency() -> Case:
    return written(
        lambda self, x: torch.sparse.mm(self.edges, self.a(x)), a=linear(), edges=torch.eye(ROWS).to_sparse()
    )


def sparse_embedding() -> Case:
    return written(
        lambda self, ids: self.b(self.words(ids)), tokens(), words=nn.Embedding(VOCAB, D, sparse=True), b=linear()
    )


def bag_with_offsets() -> Case:
    def forward(self: Any, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.a(self.bag(ids, offsets))

    ids = torch.randint(VOCAB, (3 * ROWS,))
    return written(forward, ids, torch.arange(ROWS) * 3, bag=nn.EmbeddingBag(VOCAB, D, mode="sum"), a=linear())


def packed_sequence() -> Case:
    def forward(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.a(packed)[0], batch_first=True)[0]

    lengths = torch.tensor([LENGTH, *torch.randint(1, LENGTH, (ROWS - 1,))])
    return written(forward, states(LENGTH, D), lengths, a=nn.GRU(D, D, batch_first=True))


def connectionist_loss() -> Case:
    def forward(self: Any, x: Tensor, labels: Tensor) -> Tensor:
        steps, words = torch.full((ROWS,), 6), torch.full((ROWS,), 3)
        return F.ctc_loss(self.a(x).log_softmax(-1).transpose(0, 1), labels, steps, words)

    return written(forward, states(6, D), torch.randint(1, D, (ROWS, 3)), a=linear())


# Plain recurrent nets and torch's own modules


def recurrent(kind: str) -> Case:
    cell = getattr(nn, kind)(D, 16, num_layers=2, batch_first=True)
    return written(
        lambda self, x: self.head(self.cell(x)[0]), states(LENGTH, D), cell=cell, head=nn.Linear(16, CLASSES)
    )


def recurrent_cell() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 16)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.head(h)

    return written(forward, states(6, D), cell=nn.GRUCell(D, 16), head=nn.Linear(16, CLASSES))


def torch_transformer() -> Case:
    model = nn.Transformer(16, 4, 1, 1, dim_feedforward=32, dropout=0.1, batch_first=True)
    return Case(model, (states(6, 16), states(5, 16)))


def einops_layer() -> Case:
    from einops import rearrange, reduce
    from einops.layers.torch import Rearrange

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.net(rearrange(x, "b (n s) d -> (b n) s d", n=2))
        return reduce(h, "(b n) d -> b d", "mean", n=2)

    net = nn.Sequential(Rearrange("b s d -> b (s d)"), nn.Linear(6 * D, D))
    return written(forward, states(LENGTH, D), net=net)


def without_rows() -> Case:
    def forward(self: Any) -> Tensor:
        return self.b(self.a(self.start).relu())

    case = written(forward, start=nn.Parameter(torch.randn(ROWS, D)), a=linear(), b=linear())
    return Case(case.model)


IDIOMS: dict[str, Callable[[], Case]] = {
    ".item() of an activation": item_of_an_activation,
    ".item() of a buffer": item_of_a_buffer,
    ".item() that is only logged": logged_item,
    "a branch on a buffer": branch_on_a_buffer,
    "a branch on an activation": branch_on_an_activation,
    "experts by torch.where": functools.partial(experts, "where"),
    "experts by nonzero": functools.partial(experts, "nonzero"),
    "experts by a boolean mask": functools.partial(experts, "mask"),
    "experts skipped by a mask": functools.partial(experts, "any"),
    "experts skipped by counts": functools.partial(experts, "counts"),
    "a loss over the labelled tokens": masked_loss,
    "unique tokens": unique_tokens,
    "layers dropped at random": random_drop_of_layers,
    "float32 made in the forward": float32_made_in_forward,
    "float32 cast in the forward": float32_cast_in_forward,
    "bfloat16 weights": bfloat16_model,
    "autocast inside": autocast_inside,
    "a complex parameter": complex_parameter,
    "rotary positions as complex numbers": complex_rotary,
    "a write to a complex slice": write_to_a_complex_slice,
    "a sparse adjacency": sparse_adjacency,
    "a sparse embedding": sparse_embedding,
    "an embedding bag with offsets": bag_with_offsets,
    "a packed sequence": packed_sequence,
    "CTC loss": connectionist_loss,
    "nn.LSTM": functools.partial(recurrent, "LSTM"),
    "nn.GRU": functools.partial(recurrent, "GRU"),
    "nn.RNN": functools.partial(recurrent, "RNN"),
    "nn.GRUCell in a loop": recurrent_cell,
    "nn.Transformer": torch_transformer,
    "einops layers": einops_layer,
    "a call without inputs": without_rows,
}
MODELS = {f"plain: {name}": build for name, build in IDIOMS.items()}
