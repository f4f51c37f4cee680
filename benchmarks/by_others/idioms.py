"""Ways in which people write models that are harder to trace than most, each in as few lines as show it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from by_others.case import CLASSES, LENGTH, ROWS, VOCAB, Case, squared, states, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

D = 8


def written(forward: Callable[..., Any], *args: Any, **parts: Any) -> Case:
    """A module with these parts and this forward, called with a batch of rows unless `args` say more."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                    self.register_buffer(name, part)
                else:
                    setattr(self, name, part)

    Net.forward = forward  # type: ignore[assignment]
    return Case(Net(), args or (rows(),))


def rows() -> Tensor:
    return torch.randn(ROWS, D)


def linear() -> nn.Linear:
    return nn.Linear(D, D)


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
    return written(lambda self, x: torch.sparse.mm(self.edges, self.a(x)), a=linear(), edges=torch.eye(ROWS).to_sparse())


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


# Python around the tensors


def scripted_part() -> Case:
    return written(lambda self, x: self.a(x), a=torch.jit.script(linear()))


@torch.jit.script
def scripted_square(x: Tensor) -> Tensor:
    return x * x


def scripted_function() -> Case:
    return written(lambda self, x: scripted_square(self.a(x)), a=linear())


def traced_by_script() -> Case:
    return Case(torch.jit.trace(linear(), rows()), (rows(),))


def exported_before() -> Case:
    return Case(torch.export.export(linear(), (rows(),)).module(), (rows(),))


def lazy_layer() -> Case:
    return Case(nn.Sequential(nn.LazyLinear(D), nn.ReLU(), nn.LazyLinear(D)), (rows(),))


def moved_in_forward() -> Case:
    return written(lambda self, x: self.a.to(x.device)(x), a=linear())


def distribution() -> Case:
    return written(lambda self, x: torch.distributions.Normal(self.a(x), torch.ones(ROWS, D).to(x)).log_prob(x), a=linear())


def nan_check() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        assert not torch.isnan(h).any()
        return h

    return written(forward, a=linear())


def nan_check_that_raises() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        if torch.isnan(h).any():
            raise ValueError("not a number")
        return h

    return written(forward, a=linear())


@functools.lru_cache
def cached_mask(size: int) -> Tensor:
    return torch.ones(size, size).tril()


def lru_cached_mask() -> Case:
    return written(lambda self, x: self.a(x) @ cached_mask(D).to(x), a=linear())


MASKS: dict[str, Tensor] = {}


def global_cache() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        if "mask" not in MASKS:
            MASKS["mask"] = torch.ones(D, D).tril()
        return self.a(x) @ MASKS["mask"].to(x)

    return written(forward, a=linear())


def cache_filled_before() -> Case:
    case = global_cache()
    case.model(*case.args)
    return case


def kept_in_a_list() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.heads[0] = self.a(x)
        return self.heads[0]

    case = written(forward, a=linear())
    case.model.heads = [None]  # type: ignore[assignment]
    case.model(*case.args)
    return case


def known_values() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        times = torch.linspace(0, 1, 3)
        for before, after in zip(times[:-1], times[1:], strict=True):
            if after >= times[1]:
                x = x + (after - before) * self.a(x)
        return x

    return written(forward, a=linear())


def known_value_after_a_write() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        times, solution = torch.linspace(0, 1, 3), torch.zeros(3, ROWS, D).to(x)
        solution[0] = x
        if times[1] >= times[0]:
            x = self.a(x)
        return x + solution[0]

    return written(forward, a=linear())


# Training


def ema_teacher() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.a.weight, 0.1)
        return (self.a(x) - self.teacher(x)).square().mean()

    return written(forward, a=linear(), teacher=linear().requires_grad_(False))


def clamped_scale() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.scale.data.clamp_(max=2.0)
        return self.a(x) * self.scale.exp()

    return written(forward, a=linear(), scale=nn.Parameter(torch.tensor(3.0)))


def max_norm() -> Case:
    return written(lambda self, ids: self.a(self.words(ids)), tokens(), words=nn.Embedding(VOCAB, D, max_norm=1.0), a=linear())


def reentrant_checkpoint() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.a(x) + checkpoint(self.b, self.a(x), use_reentrant=True)

    return written(forward, a=linear(), b=linear())


def backward_hook() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return self.b(h)

    return written(forward, a=linear(), b=linear())


class Sign(torch.autograd.Function):
    """The sign, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def straight_through() -> Case:
    return written(lambda self, x: self.b(Sign.apply(self.a(x))), a=linear(), b=linear())


def gradient_in_forward() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        energy = self.b(self.a(x).tanh()).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    return written(forward, a=linear(), b=linear())


def functional_gradient() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: self.b(self.a(row).tanh()).sum()))(x)

    return written(forward, a=linear(), b=linear())


def cond() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda h: self.a(h), lambda h: self.b(h), (x,))

    return written(forward, a=linear(), b=linear())


def spectral_norm() -> Case:
    return Case(nn.Sequential(nn.utils.parametrizations.spectral_norm(linear()), nn.ReLU(), linear()), (rows(),))


def weight_norm() -> Case:
    return Case(nn.Sequential(nn.utils.parametrizations.weight_norm(linear()), nn.ReLU(), linear()), (rows(),))


# Plain recurrent nets and torch's own modules


def recurrent(kind: str) -> Case:
    cell = getattr(nn, kind)(D, 16, num_layers=2, batch_first=True)
    return written(lambda self, x: self.head(self.cell(x)[0]), states(LENGTH, D), cell=cell, head=nn.Linear(16, CLASSES))


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
    "a scripted module": scripted_part,
    "a scripted function": scripted_function,
    "a model of torch.jit.trace": traced_by_script,
    "a model of torch.export": exported_before,
    "lazy layers": lazy_layer,
    "a module moved in the forward": moved_in_forward,
    "torch.distributions": distribution,
    "an assert that nothing is NaN": nan_check,
    "an error where something is NaN": nan_check_that_raises,
    "a mask in an lru_cache": lru_cached_mask,
    "a mask in a global dictionary": global_cache,
    "a global dictionary filled before": cache_filled_before,
    "activations kept in a list": kept_in_a_list,
    "branches on known values": known_values,
    "a known value after a write": known_value_after_a_write,
    "a teacher averaged in the forward": ema_teacher,
    "a trained scale clamped in the forward": clamped_scale,
    "an embedding with max_norm": max_norm,
    "a reentrant checkpoint": reentrant_checkpoint,
    "a hook on a gradient": backward_hook,
    "a straight-through gradient": straight_through,
    "autograd.grad in the forward": gradient_in_forward,
    "torch.func.grad in the forward": functional_gradient,
    "torch.cond": cond,
    "spectral norm": spectral_norm,
    "weight norm": weight_norm,
    "nn.LSTM": functools.partial(recurrent, "LSTM"),
    "nn.GRU": functools.partial(recurrent, "GRU"),
    "nn.RNN": functools.partial(recurrent, "RNN"),
    "nn.GRUCell in a loop": recurrent_cell,
    "nn.Transformer": torch_transformer,
    "einops layers": einops_layer,
    "a call without inputs": without_rows,
}
MODELS = {f"plain: {name}": build for name, build in IDIOMS.items()}
