"""Physics, proteins, time series, quantization, custom gradients and state, as research repositories write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from by_others.case import CLASSES, LENGTH, ROWS, VOCAB, Case, D, images, linear, rows, states, tokens, written

# Physics and proteins


def residual_of_an_equation() -> Case:
    def forward(self: Any, x: Tensor, t: Tensor) -> Tensor:
        x.requires_grad_(True)
        t.requires_grad_(True)
        u = self.net(torch.cat([x, t], 1))
        u_t = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)[0]
        u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)[0]
        return (u_t + u * u_x - 0.01 / math.pi * u_xx).pow(2).mean() + (u[:4] + torch.sin(math.pi * x[:4])).pow(
            2
        ).mean()

    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    return written(forward, torch.rand(ROWS, 1), torch.rand(ROWS, 1), net=net)


def hamiltonian_field() -> Case:
    def forward(self: Any, x: Tensor, wanted: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.net(x)
            gradient = torch.autograd.grad(energy.sum(), x, create_graph=True)[0]
        return F.mse_loss(gradient @ self.m.t(), wanted)

    m = torch.cat([torch.eye(D)[D // 2 :], -torch.eye(D)[: D // 2]])
    return written(forward, rows(), rows(), net=nn.Sequential(nn.Linear(D, 16), nn.Softplus(), nn.Linear(16, 1)), m=m)


def aligned_structures() -> Case:
    """Kabsch's alignment by a singular value decomposition, then a clamped distance."""

    def forward(self: Any, x: Tensor, truth: Tensor) -> Tensor:
        p = self.net(x)
        p_center, q_center = p.mean(dim=1, keepdim=True), truth.mean(dim=1, keepdim=True)
        p, q = p - p_center, truth - q_center
        with torch.no_grad():
            u, _, vt = torch.linalg.svd(torch.matmul(p.transpose(1, 2), q))
            sign = torch.det(torch.matmul(vt.transpose(1, 2), u.transpose(1, 2))) < 0.0
            vt[sign, -1] *= -1.0
            r = torch.matmul(vt.transpose(1, 2), u.transpose(1, 2))
        moved = torch.matmul(p, r.transpose(1, 2))
        return torch.clamp(torch.sqrt(torch.sum((moved - q) ** 2, -1) + 1e-8), 0, 10).mean()

    return written(forward, states(6, D), torch.randn(ROWS, 6, 3), net=nn.Linear(D, 3))


def frames_of_residues() -> Case:
    def forward(self: Any, x: Tensor, truth: Tensor) -> Tensor:
        q = self.rotation(x)
        q = torch.cat([torch.ones_like(q[..., :1]), q], -1)
        a, b, c, d = torch.unbind(q / torch.norm(q, dim=-1, keepdim=True), -1)
        r = torch.stack([
            torch.stack([a**2 + b**2 - c**2 - d**2, 2 * b * c - 2 * a * d, 2 * b * d + 2 * a * c], -1),
            torch.stack([2 * b * c + 2 * a * d, a**2 - b**2 + c**2 - d**2, 2 * c * d - 2 * a * b], -1),
            torch.stack([2 * b * d - 2 * a * c, 2 * c * d + 2 * a * b, a**2 - b**2 - c**2 + d**2], -1),
        ], -2)  # fmt: skip
        t = self.move(x)
        local = torch.einsum("nlji,nlmj->nlmi", r, t[:, None] - t[:, :, None])
        wanted = truth[:, None] - truth[:, :, None]
        pairs = self.outer(torch.einsum("nia,njb->nijab", x, x).flatten(-2)).squeeze(-1)
        return (
            torch.clamp((local - wanted).norm(dim=-1), max=10.0).mean()
            + 0.1 * (pairs - wanted.norm(dim=-1)).abs().mean()
        )

    args = states(5, D), torch.randn(ROWS, 5, 3)
    return written(forward, *args, rotation=nn.Linear(D, 3), move=nn.Linear(D, 3), outer=nn.Linear(D * D, 1))


def spectral_layer() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        n = x.shape[0]
        grid = torch.tensor(np.linspace(0, 1, 8), dtype=torch.float).reshape(1, 1, 8, 1).repeat([n, 1, 1, 8])
        x = self.lift(torch.cat([x, grid], 1))
        transformed = torch.fft.rfft2(x)
        out = torch.zeros(n, D, x.size(-2), x.size(-1) // 2 + 1, dtype=torch.cfloat, device=x.device)
        out[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", transformed[:, :, :3, :3], self.first)
        out[:, :, -3:, :3] = torch.einsum("bixy,ioxy->boxy", transformed[:, :, -3:, :3], self.second)
        x = F.gelu(torch.fft.irfft2(out, s=(x.size(-2), x.size(-1))) + self.skip(x))
        return self.project(x)

    weights = {n: nn.Parameter(torch.rand(D, D, 3, 3, dtype=torch.cfloat) / D**2) for n in ("first", "second")}
    convs = {"lift": nn.Conv2d(4, D, 1), "skip": nn.Conv2d(D, D, 1), "project": nn.Conv2d(D, 1, 1)}
    return written(forward, images(8), **weights, **convs)


# Time series


def reversible_norm() -> Case:
    class RevIN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor, mode: str) -> Tensor:
            if mode == "norm":
                self.mean = torch.mean(x, dim=1, keepdim=True).detach()
                self.stdev = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5).detach()
                return (x - self.mean) / self.stdev * self.weight + self.bias
            return (x - self.bias) / (self.weight + 1e-10) * self.stdev + self.mean

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.norm(x, "norm").permute(0, 2, 1)
        x = F.pad(x, (0, 4), mode="replicate").unfold(-1, 8, 4)
        return self.norm(self.head(self.patch(x).flatten(2)).permute(0, 2, 1), "denorm")

    return written(forward, torch.randn(ROWS, 16, 4), norm=RevIN(), patch=nn.Linear(8, 6), head=nn.Linear(24, 5))


def sampled_queries() -> Case:
    """Informer's attention of the queries that differ most from a uniform one."""

    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        b, n, d = q.shape
        index = torch.randint(n, (n, 4))
        sampled = k.unsqueeze(1).expand(b, n, n, d)[:, torch.arange(n).unsqueeze(1), index, :]
        scores = torch.matmul(q.unsqueeze(-2), sampled.transpose(-2, -1)).squeeze(-2)
        top = (scores.max(-1)[0] - torch.div(scores.sum(-1), n)).topk(5, sorted=False)[1]
        chosen = torch.matmul(q[torch.arange(b)[:, None], top, :], k.transpose(-2, -1)) / math.sqrt(d)
        context = v.mean(dim=-2).unsqueeze(-2).expand(b, n, v.shape[-1]).clone()
        context[torch.arange(b)[:, None], top, :] = torch.matmul(chosen.softmax(-1), v).type_as(context)
        return self.out(context)

    return written(forward, states(LENGTH, D), qkv=nn.Linear(D, 3 * D), out=linear())


def delays_by_correlation() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        corr = torch.fft.irfft(torch.fft.rfft(q) * torch.conj(torch.fft.rfft(k)), n=LENGTH)
        mean = corr.mean(dim=1)
        index = torch.topk(mean.mean(0), 3, dim=-1)[1]
        weights = torch.softmax(torch.stack([mean[:, index[i]] for i in range(3)], dim=-1), dim=-1)
        out = torch.zeros_like(v)
        for i in range(3):
            out = out + torch.roll(v, -int(index[i]), -1) * weights[:, i].view(-1, 1, 1)
        return self.out(out.transpose(1, 2))

    return written(forward, states(LENGTH, D), qkv=nn.Linear(D, 3 * D), out=linear())


def decayed_hidden_states() -> Case:
    """GRU-D: values that are missing decay to the mean, hidden states to zero."""

    def forward(self: Any, x: Tensor, mask: Tensor, gap: Tensor) -> Tensor:
        h, last, losses = torch.zeros(len(x), D), torch.zeros_like(x[:, 0]), 0.0
        mean = (x * mask).sum((0, 1)) / mask.sum((0, 1)).clamp(min=1)
        for t in range(x.shape[1]):
            m, d = mask[:, t], gap[:, t]
            h = h * torch.exp(-F.relu(self.decay_h(d)))
            gamma = torch.exp(-F.relu(self.decay_x(d)))
            last = torch.where(m.bool(), x[:, t], last)
            given = m * x[:, t] + (1 - m) * (gamma * last + (1 - gamma) * mean)
            losses += torch.sum(torch.abs(x[:, t] - self.guess(h)) * m) / (torch.sum(m) + 1e-5)
            h = self.cell(torch.cat([given, m], 1), h)
        return losses / x.shape[1]  # type: ignore[return-value]

    args = torch.randn(ROWS, 5, 3), (torch.rand(ROWS, 5, 3) < 0.7).float(), torch.rand(ROWS, 5, 3)
    return written(
        forward, *args, decay_h=nn.Linear(3, D), decay_x=nn.Linear(3, 3), guess=nn.Linear(D, 3), cell=nn.GRUCell(6, D)
    )


# Quantization and custom gradients


class LearnedStep(torch.autograd.Function):
    """LSQ's rounding: the step size has a gradient too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, step: Tensor, low: int, high: int) -> Tensor:
        ctx.save_for_backward(value, step)
        ctx.other = low, high
        return (value / step).round().clamp(low, high) * step

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        value, step = ctx.saved_tensors
        low, high = ctx.other
        q = value / step
        small, big = (q < low).float(), (q > high).float()
        middle = 1.0 - small - big
        scale = 1.0 / math.sqrt(value.numel() * high)
        of_step = ((small * low + big * high + middle * (-q + q.round())) * gradient * scale).sum().unsqueeze(0)
        return middle * gradient, of_step.view(step.shape), None, None


def learned_step_sizes() -> Case:
    def forward(self: Any, x: Tensor, label: Tensor) -> Tensor:
        h = LearnedStep.apply(self.a(x).relu(), self.of_input, 0, 15)
        return F.cross_entropy(F.linear(h, LearnedStep.apply(self.b.weight, self.of_weight, -8, 7), self.b.bias), label)

    steps = {n: nn.Parameter(torch.tensor([0.1])) for n in ("of_input", "of_weight")}
    return written(forward, rows(), torch.randint(CLASSES, (ROWS,)), a=linear(), b=nn.Linear(D, CLASSES), **steps)


class ClippedSign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gradient = gradient.clone()
        gradient[x.ge(1)] = 0
        gradient[x.le(-1)] = 0
        return gradient


def binary_network() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = ClippedSign.apply(self.bn(x))
        w = self.conv.weight
        w = w - w.mean([1, 2, 3], keepdim=True)
        scale = w.abs().mean([1, 2, 3], keepdim=True).detach()
        x = F.conv2d(x, ClippedSign.apply(w / w.std([1, 2, 3], keepdim=True)) * scale, padding=1)
        return self.out(x.mean((2, 3)))

    return written(
        forward, images(8), bn=nn.BatchNorm2d(3), conv=nn.Conv2d(3, D, 3, bias=False), out=nn.Linear(D, CLASSES)
    )


def prepared_for_quantization() -> Case:
    """A model that `torch.ao.quantization.prepare_qat` has given observers."""
    import torch.ao.quantization as quantization

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
            self.conv, self.bn, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
            self.fc = nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.relu(self.bn(self.conv(self.quant(x))))
            return self.dequant(self.fc(x.mean((2, 3))))

    model = Net().train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    model = quantization.fuse_modules_qat(model, [["conv", "bn", "relu"]])
    model = quantization.prepare_qat(model)
    return Case(model, (images(8),), loss_fn=F.cross_entropy, target=torch.randint(CLASSES, (ROWS,)))


class LossInChunks(torch.autograd.Function):
    """A head and its cross-entropy, whose gradients are computed in the forward, some tokens at a time."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        total, g_h, g_w = h.new_zeros(()), torch.empty_like(h), torch.zeros_like(weight)
        for at in range(0, len(h), 32):
            piece, wanted = h[at : at + 32], target[at : at + 32]
            logits = piece @ weight.T
            p = logits.softmax(-1)
            total += F.cross_entropy(logits, wanted, reduction="sum")
            p[torch.arange(len(wanted)), wanted] -= 1
            p /= len(h)
            g_h[at : at + 32] = p @ weight
            g_w += p.T @ piece
        ctx.save_for_backward(g_h, g_w)
        return total / len(h)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        g_h, g_w = ctx.saved_tensors
        return g_h * gradient, g_w * gradient, None


def loss_in_chunks() -> Case:
    def forward(self: Any, ids: Tensor) -> Tensor:
        h = self.body(self.words(ids))[0][:, :-1]
        return LossInChunks.apply(h.reshape(-1, D), self.head.weight, ids[:, 1:].reshape(-1))

    parts = {"words": nn.Embedding(VOCAB, D), "body": nn.GRU(D, D, batch_first=True)}
    return written(forward, tokens(), head=nn.Linear(D, VOCAB, bias=False), **parts)


class Reversible(torch.autograd.Function):
    """RevNet's block, which computes its inputs again from its outputs in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: nn.Module, g: nn.Module, *weights: Tensor) -> Tensor:
        ctx.f, ctx.g = f, g
        with torch.no_grad():
            one, two = x.chunk(2, -1)
            one = one + f(two)
            two = two + g(one)
            y = torch.cat([one, two], -1)
        ctx.save_for_backward(y.detach())
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        one, two = y.chunk(2, -1)
        g_one, g_two = gradient.chunk(2, -1)
        with torch.enable_grad():
            one = one.detach().requires_grad_()
            of_g = ctx.g(one)
            found = torch.autograd.grad(of_g, [one, *ctx.g.parameters()], g_two)
        g_one, of_g_weights = g_one + found[0], found[1:]
        with torch.enable_grad():
            before = (two - of_g).detach().requires_grad_()
            of_f = ctx.f(before)
            found = torch.autograd.grad(of_f, [before, *ctx.f.parameters()], g_one)
        return torch.cat([g_one, g_two + found[0]], -1), None, None, *found[1:], *of_g_weights


def reversible_blocks() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        for f, g in zip(self.f, self.g, strict=True):
            x = Reversible.apply(x, f, g, *f.parameters(), *g.parameters())
        return self.out(x)

    f, g = (nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)) for _ in "fg")
    return written(forward, f=f, g=g, out=linear())


class LowerBound(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        b = torch.ones_like(x) * bound
        ctx.save_for_backward(x, b)
        return torch.max(x, b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, b = ctx.saved_tensors
        return ((x >= b) | (gradient < 0)).type(gradient.dtype) * gradient, None


def divisive_normalization() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.conv(x)
        beta = LowerBound.apply(self.beta, (1e-6 + 2**-36) ** 0.5) ** 2 - 2**-36
        gamma = (LowerBound.apply(self.gamma, 2**-18) ** 2 - 2**-36).view(8, 8, 1, 1)
        return x / torch.sqrt(F.conv2d(x**2, gamma, beta))

    start = {"beta": nn.Parameter(torch.ones(8)), "gamma": nn.Parameter(torch.sqrt(0.1 * torch.eye(8) + 2**-36))}
    return written(forward, images(8), conv=nn.Conv2d(3, 8, 5, 2, 2), **start)


class FixedPoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, x: Tensor, w: Tensor) -> Tensor:
        for _ in range(30):
            z = torch.tanh(z @ w + x)
        ctx.save_for_backward(z, x, w)
        return z

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        z, x, w = ctx.saved_tensors
        slope, g = 1 - torch.tanh(z @ w + x) ** 2, gradient
        for _ in range(30):
            g = gradient + (g * slope) @ w.T
        return None, g * slope, z.T @ (g * slope)


def deep_equilibrium() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        w = 0.4 * self.w / torch.linalg.matrix_norm(self.w, 2).detach()
        return self.out(FixedPoint.apply(torch.zeros_like(x), self.a(x), w))

    return written(forward, a=linear(), out=linear(), w=nn.Parameter(torch.randn(D, D)))


# State, switches and randomness of Python


def normalized_by_the_first_batch() -> Case:
    class ActNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loc, self.scale = nn.Parameter(torch.zeros(1, D)), nn.Parameter(torch.ones(1, D))
            self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            if self.initialized.item() == 0:
                with torch.no_grad():
                    self.loc.data.copy_(-x.mean(0, keepdim=True))
                    self.scale.data.copy_(1 / (x.std(0, keepdim=True) + 1e-6))
                self.initialized.fill_(1)
            return self.scale * (x + self.loc), self.scale.abs().log().sum()

    def forward(self: Any, x: Tensor) -> Tensor:
        logdet = 0.0
        for norm, net in zip(self.norms, self.nets, strict=True):
            x, added = norm(x)
            one, two = x.chunk(2, 1)
            s, t = net(one).chunk(2, 1)
            s = torch.sigmoid(s + 2)
            x = torch.cat([(two + t) * s, one], 1)
            logdet = logdet + added + s.log().sum(1)
        return (0.5 * x.pow(2).sum(1) - logdet).mean()

    nets = nn.ModuleList(nn.Sequential(nn.Linear(D // 2, 16), nn.ReLU(), nn.Linear(16, D)) for _ in range(2))
    return written(forward, norms=nn.ModuleList(ActNorm() for _ in range(2)), nets=nets)


def cut_and_pasted() -> Case:
    def forward(self: Any, x: Tensor, label: Tensor) -> Tensor:
        share = np.random.beta(1.0, 1.0)
        order = torch.randperm(x.size(0))
        width, height = x.size(2), x.size(3)
        cut = np.sqrt(1.0 - share)
        w, h = int(width * cut), int(height * cut)
        cx, cy = np.random.randint(width), np.random.randint(height)
        x1, y1 = np.clip(cx - w // 2, 0, width), np.clip(cy - h // 2, 0, height)
        x2, y2 = np.clip(cx + w // 2, 0, width), np.clip(cy + h // 2, 0, height)
        x = x.clone()
        x[:, :, x1:x2, y1:y2] = x[order, :, x1:x2, y1:y2]
        share = 1 - ((x2 - x1) * (y2 - y1) / (width * height))
        logits = self.net(x)
        return F.cross_entropy(logits, label) * share + F.cross_entropy(logits, label[order]) * (1.0 - share)

    np.random.seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))
    return written(forward, images(8), torch.randint(CLASSES, (ROWS,)), net=net)


def tokens_through_some_depth() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.auxiliary = 0.0
        for block, router in zip(self.blocks, self.routers, strict=True):
            weights = router(x).squeeze(-1)
            chosen, index = torch.topk(weights, 4, dim=1, sorted=False)
            index, order = torch.sort(index, dim=1)
            chosen = chosen.gather(1, order)
            at = index.unsqueeze(-1).expand(-1, -1, x.size(-1))
            x = x.scatter_add(1, at, block(x.gather(1, at)) * chosen.softmax(1).unsqueeze(-1))
            wanted = torch.zeros_like(weights).scatter(1, index, 1.0)
            self.auxiliary = self.auxiliary + F.binary_cross_entropy_with_logits(weights, wanted)
        return self.out(x).square().mean() + 0.01 * self.auxiliary

    blocks = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D)) for _ in range(2)
    )
    routers = nn.ModuleList(nn.Linear(D, 1) for _ in range(2))
    return written(forward, states(LENGTH, D), blocks=blocks, routers=routers, out=linear())


def shared_memory_of_segments() -> Case:
    def forward(self: Any, ids: Tensor) -> Tensor:
        memory: list[Tensor] | None = None
        loss = 0.0
        for segment in ids.split(4, dim=1):
            h, kept = self.words(segment), []
            for i, (q, kv) in enumerate(zip(self.q, self.kv, strict=True)):
                kept.append(h.detach())
                context = h if memory is None else torch.cat([memory[i], h], 1)
                k, v = kv(context).chunk(2, -1)
                scores = q(h) @ k.transpose(1, 2) / D**0.5
                hidden = torch.ones(h.size(1), context.size(1), dtype=torch.bool).triu(1 + context.size(1) - h.size(1))
                h = h + scores.masked_fill(hidden[None], float("-inf")).softmax(-1) @ v
            memory = kept
            logits = h[:, :-1] @ self.words.weight.t()
            loss += F.cross_entropy(logits.reshape(-1, VOCAB), segment[:, 1:].reshape(-1))
        return loss / 3  # type: ignore[return-value]

    q, kv = nn.ModuleList(linear() for _ in range(2)), nn.ModuleList(nn.Linear(D, 2 * D) for _ in range(2))
    return written(forward, tokens(), words=nn.Embedding(VOCAB, D), q=q, kv=kv)


IDIOMS: dict[str, Callable[[], Case]] = {
    "the residual of an equation": residual_of_an_equation,
    "a Hamiltonian field": hamiltonian_field,
    "structures aligned by SVD": aligned_structures,
    "frames of residues": frames_of_residues,
    "a spectral layer": spectral_layer,
    "a reversible norm": reversible_norm,
    "sampled queries": sampled_queries,
    "delays by correlation": delays_by_correlation,
    "decayed hidden states": decayed_hidden_states,
    "learned step sizes": learned_step_sizes,
    "a binary network": binary_network,
    "observers of prepare_qat": prepared_for_quantization,
    "a loss in chunks": loss_in_chunks,
    "reversible blocks": reversible_blocks,
    "a divisive normalization": divisive_normalization,
    "a deep equilibrium": deep_equilibrium,
    "a norm set by the first batch": normalized_by_the_first_batch,
    "patches cut and pasted": cut_and_pasted,
    "tokens through some depth": tokens_through_some_depth,
    "a memory of segments": shared_memory_of_segments,
}
MODELS = {f"plain: {name}": build for name, build in IDIOMS.items()}
