"""Layers, states and losses of research code that no earlier list has."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, parametrize, prune

from by_others.case import CLASSES, LENGTH, ROWS, VOCAB, Case, D, images, linear, rows, states, tokens, written

# State


def queue_of_negatives() -> Case:
    """MoCo: keys of a slow encoder, and a queue of the keys of earlier batches."""

    def forward(self: Any, one: Tensor, two: Tensor) -> Tensor:
        q = F.normalize(self.encoder(one), dim=1)
        with torch.no_grad():
            for p, slow in zip(self.encoder.parameters(), self.slow.parameters(), strict=True):
                slow.data = slow.data * 0.99 + p.data * 0.01
            order = torch.randperm(len(two))
            k = F.normalize(self.slow(two[order]), dim=1)[torch.argsort(order)]
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([positive, negative], dim=1) / 0.2
        start = int(self.pointer)
        self.queue[:, start : start + len(k)] = k.T
        self.pointer[0] = (start + len(k)) % self.queue.shape[1]
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    encoder = nn.Sequential(linear(), nn.ReLU(), linear())
    queue, pointer = F.normalize(torch.randn(D, 4 * ROWS), dim=0), torch.zeros(1, dtype=torch.long)
    slow = copy.deepcopy(encoder).requires_grad_(False)
    return written(forward, rows(), rows(), encoder=encoder, slow=slow, queue=queue, pointer=pointer)


def bank_of_instances() -> Case:
    def forward(self: Any, x: Tensor, index: Tensor) -> Tensor:
        z = F.normalize(self.net(x), dim=-1)
        logits = z @ self.bank.clone().t() / 0.1
        with torch.no_grad():
            self.bank.index_copy_(0, index, F.normalize(0.5 * self.bank[index] + 0.5 * z, dim=-1))
        return F.cross_entropy(logits, index)

    return written(
        forward, rows(), torch.randperm(20)[:ROWS], net=linear(), bank=F.normalize(torch.randn(20, D), dim=1)
    )


def batch_renormalization() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        mean, std = x.mean(0), x.std(0, unbiased=False) + 1e-5
        r_max = 1 + (self.count / 10).clamp(0, 2)
        r = (std.detach() / self.std).clamp(1 / r_max.item(), r_max.item())
        d = ((mean.detach() - self.mean) / self.std).clamp(-1, 1)
        self.mean += 0.1 * (mean.detach() - self.mean)
        self.std += 0.1 * (std.detach() - self.std)
        self.count += 1
        return self.out(self.gain * ((x - mean) / std * r + d))

    parts = {"mean": torch.zeros(D), "std": torch.ones(D), "count": torch.tensor(0)}
    return written(forward, gain=nn.Parameter(torch.ones(D)), out=linear(), **parts)


class GrownRotation(nn.Module):
    """Rotary tables that grow when a longer sequence arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.known = nn.Linear(D, 3 * D), 0

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length > self.known:
            self.known = length
            angles = torch.outer(torch.arange(length), 1e4 ** -(torch.arange(0, D, 2) / D))
            self.register_buffer("cos", torch.cat([angles, angles], -1).cos().to(x.dtype), persistent=False)
            self.register_buffer("sin", torch.cat([angles, angles], -1).sin().to(x.dtype), persistent=False)
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = (
            t * self.cos[:length] + torch.cat([-t[..., D // 2 :], t[..., : D // 2]], -1) * self.sin[:length]
            for t in (q, k)
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def grown_rotation() -> Case:
    return Case(GrownRotation(), (states(LENGTH, D),))


# Weights


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


def parametrized_weights() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.b(torch.tanh(self.a(self.b(self.a(x))))) + self.c(x)

    a, b, c = parametrizations.orthogonal(linear()), linear(), parametrizations.spectral_norm(linear())
    parametrize.register_parametrization(b, "weight", Symmetric())
    return written(forward, a=a, b=b, c=c)


def pruned_weights() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())

    a, b = linear(), linear()
    prune.l1_unstructured(a, "weight", amount=0.5)
    prune.ln_structured(b, "weight", amount=0.25, n=2, dim=0)
    return written(forward, a=a, b=b)


def adapters_by_row() -> Case:
    def forward(self: Any, x: Tensor, adapter: Tensor) -> Tensor:
        low = torch.einsum("bld,bdr->blr", x, self.down[adapter])
        return self.base(x) + torch.bmm(low, self.up[adapter]) * self.scale[adapter].view(-1, 1, 1)

    down, up = nn.Parameter(torch.randn(3, D, 2)), nn.Parameter(torch.randn(3, 2, D))
    base = linear().requires_grad_(False)
    args = states(LENGTH, D), torch.randint(3, (ROWS,))
    return written(forward, *args, base=base, down=down, up=up, scale=torch.tensor([1.0, 0.5, 2.0]))


def tensor_train() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x.view(-1, 2, 2, 2)
        return torch.einsum("nabc,apx,xbqy,ycr->npqr", x, self.first, self.second, self.third).flatten(1)

    shapes = {"first": (2, 2, 3), "second": (3, 2, 2, 3), "third": (3, 2, 2)}
    return written(forward, **{name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()})


# Sequences


def linear_attention_by_sums() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, D // 2)).unbind(2)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        memory = torch.einsum("nlhd,nlhm->nlhdm", k, v).cumsum(1)
        scale = 1 / (torch.einsum("nlhd,nlhd->nlh", q, k.cumsum(1)) + 1e-6)
        return torch.einsum("nlhd,nlhdm,nlh->nlhm", q, memory, scale).flatten(2)

    return written(forward, states(LENGTH, D), qkv=nn.Linear(D, 3 * D))


def delta_rule() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        k, beta = F.normalize(k, dim=-1), torch.sigmoid(self.beta(x))
        state = x.new_zeros(x.shape[0], D, D)
        outputs = torch.empty_like(v)
        for t in range(x.shape[1]):
            error = v[:, t] - torch.einsum("nkv,nk->nv", state, k[:, t])
            state = state + torch.einsum("nk,nv->nkv", k[:, t], error * beta[:, t])
            outputs[:, t] = torch.einsum("nkv,nk->nv", state, q[:, t])
        return self.out(outputs)

    return written(forward, states(6, D), qkv=nn.Linear(D, 3 * D), beta=nn.Linear(D, 1), out=linear())


def state_space_by_fft() -> Case:
    """S4D: a diagonal complex state space, as a convolution by FFT."""

    def forward(self: Any, u: Tensor) -> Tensor:
        length, dt = u.shape[1], self.log_dt.exp()
        c = torch.view_as_complex(self.c)
        a = -self.log_a.exp() + 1j * self.imaginary
        da = a * dt.unsqueeze(-1)
        kernel = da.unsqueeze(-1) * torch.arange(length)
        kernel = 2 * torch.einsum("hn,hnl->hl", c * (da.exp() - 1) / a, kernel.exp()).real
        spectrum = torch.fft.rfft(u.transpose(1, 2), n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        y = torch.fft.irfft(spectrum, n=2 * length)[..., :length] + u.transpose(1, 2) * self.skip.unsqueeze(-1)
        return self.out(F.gelu(y).transpose(1, 2))

    parts = {"log_dt": torch.rand(D) - 3, "c": torch.randn(D, 4, 2), "log_a": torch.zeros(D, 4), "skip": torch.randn(D)}
    parts["imaginary"] = math.pi * torch.arange(4.0).repeat(D, 1)
    named = {name: nn.Parameter(value) for name, value in parts.items()}
    return written(forward, states(LENGTH, D), out=linear(), **named)


def last_valid_states() -> Case:
    def forward(self: Any, ids: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True)
        h, _ = self.rnn(self.table(ids[order]))
        last = h[torch.arange(len(ids)), lengths[order] - 1]
        mask = torch.arange(ids.shape[1])[None] < lengths[order][:, None]
        pooled = h.masked_fill(~mask.unsqueeze(-1), float("-inf")).max(1).values
        return self.out(torch.cat([last, pooled], -1))[order.argsort()]

    args = tokens(), torch.randint(2, LENGTH, (ROWS,))
    rnn = nn.GRU(D, D, batch_first=True)
    return written(forward, *args, table=nn.Embedding(VOCAB, D), rnn=rnn, out=nn.Linear(2 * D, CLASSES))


def pointer_network() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        memory, (h, c) = self.encoder(x)
        h, c = h[0], c[0]
        step, mask, total = self.start.expand(n, -1), torch.zeros(n, length, dtype=torch.bool), 0.0
        for i in range(length):
            h, c = self.decoder(step, (h, c))
            scores = self.score(torch.tanh(self.a(memory) + self.b(h).unsqueeze(1))).squeeze(-1)
            chances = scores.masked_fill(mask, float("-inf")).log_softmax(-1)
            chosen = chances.argmax(-1)
            total = total - chances.gather(1, chosen.unsqueeze(1)).mean() * (i + 1)
            mask = mask.scatter(1, chosen.unsqueeze(1), True)
            step = x[torch.arange(n), chosen]
        return total

    parts = {"encoder": nn.LSTM(D, D, batch_first=True), "decoder": nn.LSTMCell(D, D), "a": linear(), "b": linear()}
    return written(forward, states(5, D), score=nn.Linear(D, 1), start=nn.Parameter(torch.randn(1, D)), **parts)


def segments_of_a_sequence() -> Case:
    """Means of segments that begin where a mask says; the number of segments is that of the fullest row."""

    def forward(self: Any, x: Tensor, starts: Tensor) -> Tensor:
        segment = starts.long().cumsum(1) - 1
        count = int(segment.max()) + 1
        member = F.one_hot(segment, count).to(x.dtype)
        means = torch.einsum("nlk,nld->nkd", member, self.net(x)) / member.sum(1).clamp(min=1).unsqueeze(-1)
        return self.out(means) * (member.sum(1) > 0).unsqueeze(-1)

    starts = torch.rand(ROWS, LENGTH) < 0.3
    starts[:, 0] = True
    return written(forward, states(LENGTH, D), starts, net=linear(), out=linear())


def halting() -> Case:
    """A universal transformer: one shared layer, and a learned number of steps of each token."""

    def forward(self: Any, x: Tensor) -> Any:
        halted, remainder, steps = (torch.zeros(x.shape[:2]) for _ in range(3))
        mixed = torch.zeros_like(x)
        for _ in range(4):
            p = torch.sigmoid(self.halt(x)).squeeze(-1)
            running = (halted < 1.0).float()
            ends = (halted + p * running > 0.9).float() * running
            running = (halted + p * running <= 0.9).float() * running
            halted = halted + p * running
            remainder = remainder + ends * (1 - halted)
            halted = halted + ends * remainder
            steps = steps + running + ends
            x = self.layer(x)
            weight = (p * running + ends * remainder).unsqueeze(-1)
            mixed = x * weight + mixed * (1 - weight)
        return mixed, (steps + remainder).mean()

    layer = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True)
    return written(forward, states(6, D), layer=layer, halt=nn.Linear(D, 1))


def merged_tokens() -> Case:
    """ToMe: the most similar tokens of two halves are merged."""

    def forward(self: Any, x: Tensor) -> Tensor:
        metric = F.normalize(self.key(x), dim=-1)
        scores = metric[:, ::2] @ metric[:, 1::2].transpose(-1, -2)
        best, to = scores.max(dim=-1)
        order = best.argsort(dim=-1, descending=True)[..., None]
        kept, merged = order[:, 2:], order[:, :2]
        to = to[..., None].gather(dim=-2, index=merged)
        a, b = x[:, ::2], x[:, 1::2]
        n, t, c = a.shape
        rest = a.gather(dim=-2, index=kept.expand(n, t - 2, c))
        source = a.gather(dim=-2, index=merged.expand(n, 2, c))
        b = b.scatter_reduce(-2, to.expand(n, 2, c), source, reduce="mean")
        return self.out(torch.cat([rest, b], dim=1))

    return written(forward, states(LENGTH, D), key=linear(), out=linear())


def shifted_windows() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        region = torch.zeros(1, h, w, 1)
        number = 0
        for rows_ in (slice(0, -4), slice(-4, -2), slice(-2, None)):
            for columns in (slice(0, -4), slice(-4, -2), slice(-2, None)):
                region[:, rows_, columns, :] = number
                number += 1
        x = torch.roll(x.permute(0, 2, 3, 1), shifts=(-2, -2), dims=(1, 2))

        def windows(t: Tensor) -> Tensor:
            k = t.shape[-1]
            return t.view(-1, h // 4, 4, w // 4, 4, k).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, k)

        mask = windows(region).squeeze(-1)
        mask = mask.unsqueeze(1) - mask.unsqueeze(2)
        mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
        y = windows(x)
        bias = self.bias[self.index.view(-1)].view(16, 16)
        scores = self.q(y) @ self.k(y).transpose(1, 2) * c**-0.5 + bias
        scores = (scores.view(n, -1, 16, 16) + mask).view(-1, 16, 16)
        y = (scores.softmax(-1) @ y).view(n, h // 4, w // 4, 4, 4, c).permute(0, 5, 1, 3, 2, 4).reshape(n, c, h, w)
        return torch.roll(y, shifts=(2, 2), dims=(2, 3))

    at = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
    away = (at[:, :, None] - at[:, None]).permute(1, 2, 0) + 3
    index, bias = away[..., 0] * 7 + away[..., 1], nn.Parameter(torch.randn(49))
    return written(forward, images(8, D), q=linear(), k=linear(), index=index, bias=bias)


def convolutional_memory() -> Case:
    def forward(self: Any, video: Tensor) -> Tensor:
        n, time, _, h, w = video.size()
        hidden, cell = (torch.zeros(n, D, h, w, device=video.device) for _ in range(2))
        outputs = []
        for t in range(time):
            gates = self.gates(torch.cat([video[:, t], hidden], dim=1))
            i, f, o, g = torch.split(gates, D, dim=1)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
            hidden = torch.sigmoid(o) * torch.tanh(cell)
            outputs.append(hidden)
        return torch.stack(outputs, dim=1)

    return written(forward, torch.randn(ROWS, 3, 2, 6, 6), gates=nn.Conv2d(2 + D, 4 * D, 3, padding=1))


def task_of_functions() -> Case:
    """MAML: the rows are tasks; each adapts weights by one step of its own, under vmap."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())

        def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(functional_call(self.net, weights, (x,)), y)

        def of_task(x: Tensor, y: Tensor) -> Tensor:
            step = grad(loss)(weights, x[:3], y[:3])
            return loss({name: w - 0.1 * step[name] for name, w in weights.items()}, x[3:], y[3:])

        return vmap(of_task)(x, y).mean()

    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    return written(forward, torch.randn(ROWS, 6, 2), torch.randn(ROWS, 6, 1), net=net)


def context_and_targets() -> Case:
    """A neural process: Python's `random` chooses how many points are context."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        count = random.randint(2, 5)
        r = self.encoder(torch.cat([x, y], -1)[:, :count]).mean(1, keepdim=True).expand(-1, x.shape[1], -1)
        mean, raw = self.decoder(torch.cat([x, r], -1)).chunk(2, -1)
        return -torch.distributions.Normal(mean, 0.1 + 0.9 * F.softplus(raw)).log_prob(y).mean()

    args = torch.randn(ROWS, 8, 1), torch.randn(ROWS, 8, 1)
    return written(forward, *args, encoder=nn.Linear(2, D), decoder=nn.Linear(1 + D, 2))


IDIOMS: dict[str, Callable[[], Case]] = {
    "a queue of negatives": queue_of_negatives,
    "a bank of instances": bank_of_instances,
    "batch renormalization": batch_renormalization,
    "rotary tables that grow": grown_rotation,
    "parametrized weights": parametrized_weights,
    "pruned weights": pruned_weights,
    "adapters chosen by row": adapters_by_row,
    "a tensor train": tensor_train,
    "linear attention by sums": linear_attention_by_sums,
    "a delta rule": delta_rule,
    "a state space by FFT": state_space_by_fft,
    "states at the last valid step": last_valid_states,
    "a pointer network": pointer_network,
    "segments of a sequence": segments_of_a_sequence,
    "a learned number of steps": halting,
    "merged tokens": merged_tokens,
    "shifted windows": shifted_windows,
    "a convolutional LSTM": convolutional_memory,
    "tasks under vmap": task_of_functions,
    "context and targets": context_and_targets,
}
MODELS = {f"plain: {name}": build for name, build in IDIOMS.items()}
