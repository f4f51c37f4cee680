"""Modules, state and control flow as training repositories write them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from by_others.case import CLASSES, LENGTH, ROWS, VOCAB, Case, D, images, linear, rows, states, tokens, written

# State that the forward changes


def moving_codebook() -> Case:
    def forward(self: Any, x: Tensor) -> Any:
        z = self.encoder(x)
        flat = z.reshape(-1, D)
        distances = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codes.T + self.codes.pow(2).sum(1)
        indices = distances.argmin(1)
        chosen = F.one_hot(indices, 16).type(flat.dtype)
        quantized = self.codes[indices].view_as(z)
        if self.training:
            with torch.no_grad():
                self.counts.data.mul_(0.99).add_(chosen.sum(0), alpha=0.01)
                self.sums.data.mul_(0.99).add_(chosen.T @ flat, alpha=0.01)
                n = self.counts.sum()
                smoothed = (self.counts + 1e-5) / (n + 16 * 1e-5) * n
                self.codes.data.copy_(self.sums / smoothed.unsqueeze(1))
        commitment = F.mse_loss(quantized.detach(), z)
        z = z + (quantized - z).detach()
        used = chosen.mean(0)
        perplexity = torch.exp(-torch.sum(used * torch.log(used + 1e-10)))
        return F.mse_loss(self.decoder(z), x) + 0.25 * commitment, perplexity

    codes = torch.randn(16, D)
    frozen = {"codes": codes, "sums": codes.clone(), "counts": torch.ones(16)}
    parts = {name: nn.Parameter(value, requires_grad=False) for name, value in frozen.items()}
    return written(forward, states(LENGTH, D), encoder=linear(), decoder=linear(), **parts)


def running_statistics() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.training:
            mean, var, count = x.mean(0), x.var(0, unbiased=False), x.shape[0]
            delta, total = mean - self.mean, self.count + count
            m2 = self.var * self.count + var * count + delta**2 * self.count * count / total
            self.mean = self.mean + delta * count / total
            self.var = m2 / total
            self.count = total
        return self.net(((x - self.mean) / torch.sqrt(self.var + 1e-5)).clamp(-5.0, 5.0))

    buffers = {"mean": torch.zeros(D), "var": torch.ones(D), "count": torch.tensor(1e-4)}
    return written(forward, rows(), net=nn.Linear(D, CLASSES), **buffers)


def target_network() -> Case:
    def forward(self: Any, seen: Tensor, action: Tensor, reward: Tensor, after: Tensor) -> Tensor:
        with torch.no_grad():
            for p, target in zip(self.critic.parameters(), self.target.parameters(), strict=True):
                target.data.mul_(0.995)
                target.data.add_(0.005 * p.data)
            next_action = self.actor(after).tanh()
            wanted = reward + 0.99 * torch.min(*self.target(torch.cat([after, next_action], -1)).chunk(2, -1))
        one, two = self.critic(torch.cat([seen, action], -1)).chunk(2, -1)
        return F.mse_loss(one, wanted) + F.mse_loss(two, wanted)

    critic = nn.Sequential(nn.Linear(D + 2, 16), nn.ReLU(), nn.Linear(16, 2))
    return written(
        forward, rows(), torch.randn(ROWS, 2), torch.randn(ROWS, 1), rows(),
        actor=nn.Linear(D, 2), critic=critic, target=copy.deepcopy(critic).requires_grad_(False),
    )  # fmt: skip


def quantization_aware() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.low.copy_(torch.min(self.low, x.min()))
                self.high.copy_(torch.max(self.high, x.max()))
        scale = (self.high - self.low) / 255
        quantized = (torch.round(x / scale).clamp(-128, 127)) * scale
        x = x + (quantized - x).detach()
        w = self.a.weight
        step = w.abs().max() / 127
        w = w + ((w / step).round() * step - w).detach()
        return F.linear(x, w, self.a.bias)

    return written(forward, a=linear(), low=torch.tensor(0.0), high=torch.tensor(0.0))


def tempered_choice() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.temperature.mul_(0.999).clamp_(min=0.5)
        return self.b(F.gumbel_softmax(self.a(x), tau=self.temperature, hard=True))

    return written(forward, a=linear(), b=linear(), temperature=torch.tensor(1.0))


class FrozenBackbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(8, CLASSES)
        for p in self.backbone.parameters():
            p.requires_grad = False
        self.train()

    def train(self, mode: bool = True) -> FrozenBackbone:
        super().train(mode)
        for m in self.backbone.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.backbone(x)
        return self.head(h.flatten(1))


def frozen_backbone() -> Case:
    return Case(FrozenBackbone(), (images(16),), loss_fn=F.cross_entropy, target=torch.randint(CLASSES, (ROWS,)))


def metrics_inside() -> Case:
    from torchmetrics.classification import MulticlassAccuracy

    def forward(self: Any, x: Tensor, label: Tensor) -> Any:
        logits = self.net(x)
        self.accuracy(logits.softmax(-1), label)
        return F.cross_entropy(logits, label)

    return written(
        forward,
        rows(),
        torch.randint(CLASSES, (ROWS,)),
        net=nn.Linear(D, CLASSES),
        accuracy=MulticlassAccuracy(CLASSES),
    )


def lightning_module() -> Case:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(D, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, CLASSES))

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def forward(self, *batch: Tensor) -> Tensor:
            return self.training_step(batch, 0)  # type: ignore[arg-type]

    return Case(Module(), (rows(), torch.randint(CLASSES, (ROWS,))))


# Weights


class Reverse(torch.autograd.Function):
    """The identity, with the gradient reversed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor) -> Tensor:
        ctx.save_for_backward(alpha)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (alpha,) = ctx.saved_tensors
        return -alpha * gradient, None


def gradient_reversal() -> Case:
    def forward(self: Any, x: Tensor, label: Tensor, domain: Tensor) -> Tensor:
        h = self.features(x).relu()
        reversed_h = Reverse.apply(h, self.alpha)
        return F.cross_entropy(self.label(h), label) + F.cross_entropy(self.domain(reversed_h), domain)

    args = (rows(), torch.randint(CLASSES, (ROWS,)), torch.randint(2, (ROWS,)))
    case = written(forward, *args, features=linear(), label=nn.Linear(D, CLASSES), domain=nn.Linear(D, 2))
    case.model.__dict__["alpha"] = torch.tensor(0.5, requires_grad=False)
    return case


def tied_by_functional() -> Case:
    def forward(self: Any, ids: Tensor) -> Tensor:
        h = self.words(ids) * D**0.5
        h = self.norm(h + self.body(h)[0])
        logits = F.linear(h, self.words.weight, self.bias)
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))

    return written(
        forward, tokens(), words=nn.Embedding(VOCAB, D, padding_idx=0), norm=nn.LayerNorm(D),
        body=nn.LSTM(D, D, batch_first=True), bias=nn.Parameter(torch.zeros(VOCAB)),
    )  # fmt: skip


def low_rank_by_hand() -> Case:
    class LoRALinear(nn.Linear):
        def __init__(self) -> None:
            super().__init__(D, D)
            self.weight.requires_grad = False
            self.lora_A = nn.Parameter(torch.randn(2, D))
            self.lora_B = nn.Parameter(torch.zeros(D, 2))
            self.drop = nn.Dropout(0.05)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias) + (self.drop(x) @ self.lora_A.T @ self.lora_B.T) * 8.0

    return Case(nn.Sequential(LoRALinear(), nn.GELU(), LoRALinear()), (states(LENGTH, D),))


class MaskedConv(nn.Conv2d):
    """A convolution that sees only pixels before, as PixelCNN has it."""

    def __init__(self, kind: str, channels: int):
        super().__init__(channels, 8, 5, padding=2)
        self.register_buffer("mask", torch.ones_like(self.weight))
        self.mask[:, :, 2, 2 + (kind == "B") :] = 0
        self.mask[:, :, 3:] = 0

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


def masked_convolutions() -> Case:
    return Case(
        nn.Sequential(MaskedConv("A", 1), nn.BatchNorm2d(8), nn.ReLU(True), MaskedConv("B", 8)), (images(8, 1),)
    )


def modulated_convolution() -> Case:
    def forward(self: Any, x: Tensor, style: Tensor) -> Tensor:
        b, c, h, w = x.shape
        s = self.affine(style).view(b, 1, c, 1, 1) + 1
        weight = self.weight.unsqueeze(0) * s
        weight = weight * torch.rsqrt(weight.pow(2).sum([2, 3, 4]) + 1e-8).view(b, 8, 1, 1, 1)
        x = x.reshape(1, b * c, h, w)
        out = F.conv2d(x, weight.view(b * 8, c, 3, 3), padding=1, groups=b).view(b, 8, h, w)
        return F.leaky_relu(out + self.noise * torch.randn(b, 1, h, w, device=x.device), 0.2)

    return written(
        forward, images(8, 4), rows(), affine=nn.Linear(D, 4), weight=nn.Parameter(torch.randn(8, 4, 3, 3)),
        noise=nn.Parameter(torch.zeros(1)),
    )  # fmt: skip


def hypernetwork() -> Case:
    def forward(self: Any, x: Tensor, context: Tensor) -> Tensor:
        made = self.hyper(context)
        w1, b1, w2 = made.split([D * 16, 16, 16 * 4], -1)
        h = torch.baddbmm(b1.unsqueeze(1), x, w1.view(-1, D, 16)).relu()
        return torch.bmm(h, w2.view(-1, 16, 4))

    return written(forward, states(LENGTH, D), rows(), hyper=nn.Linear(D, D * 16 + 16 + 16 * 4))


def ensemble() -> Case:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            members = [nn.Sequential(nn.Linear(D, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(4)]
            parameters, _ = torch.func.stack_module_state(members)  # type: ignore[arg-type]
            self.names = list(parameters)
            self.stacked = nn.ParameterList(parameters.values())
            self.__dict__["base"] = copy.deepcopy(members[0]).to("meta")

        def forward(self, x: Tensor) -> Tensor:
            def call(parameters: dict[str, Tensor]) -> Tensor:
                return torch.func.functional_call(self.base, parameters, (x,))

            return torch.vmap(call)(dict(zip(self.names, self.stacked, strict=True)))

    return Case(Ensemble(), (rows(),))


def inner_step() -> Case:
    def forward(self: Any, x: Tensor, y: Tensor, x2: Tensor, y2: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        for _ in range(2):
            loss = F.mse_loss(torch.func.functional_call(self.net, weights, (x,)), y)
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), gradients, strict=True)}
        return F.mse_loss(torch.func.functional_call(self.net, weights, (x2,)), y2)

    net = nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.Linear(16, 1))
    return written(forward, rows(), torch.randn(ROWS, 1), rows(), torch.randn(ROWS, 1), net=net)


# Memory and attention


def checkpointed_blocks() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.training else block(x))
        return x

    blocks = [nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, D))]
    return written(forward, states(LENGTH, D), blocks=nn.ModuleList(copy.deepcopy(blocks[0]) for _ in range(3)))


def checkpointed_sequence() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(checkpoint_sequential(self.layers, 2, x, use_reentrant=False))

    layers = nn.Sequential(*(nn.Sequential(linear(), nn.ReLU()) for _ in range(4)))
    return written(forward, rows(), layers=layers, head=linear())


def packed_documents() -> Case:
    def forward(self: Any, ids: Tensor, document: Tensor) -> Tensor:
        b, n = ids.shape
        causal = torch.tril(torch.ones(n, n, dtype=torch.bool, device=ids.device))
        mask = (document[:, :, None] == document[:, None, :]) & causal
        q, k, v = self.qkv(self.words(ids)).view(b, n, 3, 2, D // 2).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], dropout_p=0.1 if self.training else 0.0)
        return self.out(h.transpose(1, 2).reshape(b, n, D))

    document = (torch.rand(ROWS, LENGTH) < 0.2).long().cumsum(1)
    return written(
        forward, tokens(), document, words=nn.Embedding(VOCAB, D), qkv=nn.Linear(D, 3 * D), out=nn.Linear(D, VOCAB)
    )


def positions_of_a_mask() -> Case:
    def forward(self: Any, ids: Tensor, mask: Tensor) -> Tensor:
        position = mask.long().cumsum(-1) - 1
        position.masked_fill_(mask == 0, 1)
        h = self.words(ids) + self.positions(position)
        h = self.encoder(h, mask=self.causal, src_key_padding_mask=mask == 0)
        last = h[torch.arange(len(ids)), -1]
        return self.head(last)

    mask = (torch.arange(LENGTH) >= torch.randint(0, 5, (ROWS, 1))).long()
    layer = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
    causal = torch.full((LENGTH, LENGTH), -1e9).triu(1)
    return written(
        forward, tokens(), mask, words=nn.Embedding(VOCAB, D), positions=nn.Embedding(LENGTH, D), causal=causal,
        encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), head=nn.Linear(D, CLASSES),
    )  # fmt: skip


def weights_of_attention() -> Case:
    def forward(self: Any, query: Tensor, memory: Tensor, padding: Tensor) -> Any:
        h, weights = self.attention(query, memory, memory, key_padding_mask=padding, average_attn_weights=False)
        return self.norm(query + h), weights

    padding = torch.arange(LENGTH) >= torch.randint(3, LENGTH + 1, (ROWS, 1))
    attention = nn.MultiheadAttention(D, 2, dropout=0.1, batch_first=True)
    return written(forward, states(5, D), states(LENGTH, D), padding, attention=attention, norm=nn.LayerNorm(D))


def jagged_batch() -> Case:
    def forward(self: Any, values: Tensor, offsets: Tensor) -> Tensor:
        jagged = torch.nested.nested_tensor_from_jagged(self.a(values), offsets)
        padded = torch.nested.to_padded_tensor(jagged, 0.0)
        return self.b(padded.sum(1))

    offsets = torch.tensor([0, 3, 5, 9, 12, 13, 17, 20, 24])
    return written(forward, torch.randn(24, D), offsets, a=linear(), b=linear())


def relative_shift() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        position = torch.einsum("bnd,md->bnm", q + self.v, self.r)
        position = F.pad(position, (1, 0)).view(b, n + 1, n)[:, 1:].view(b, n, n)
        scores = (torch.einsum("bnd,bmd->bnm", q + self.u, k) + position) / D**0.5
        hidden = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v

    parts = {name: nn.Parameter(torch.randn(D)) for name in "uv"}
    return written(forward, states(LENGTH, D), qkv=nn.Linear(D, 3 * D), r=nn.Parameter(torch.randn(LENGTH, D)), **parts)


def slots() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        b, _, d = x.shape
        slots = self.mu + self.log_sigma.exp() * torch.randn(b, 4, d, device=x.device, dtype=x.dtype)
        x = self.norm(x)
        k, v = self.k(x), self.v(x)
        for _ in range(3):
            weights = (torch.einsum("bid,bjd->bij", self.q(slots), k) * d**-0.5).softmax(1) + 1e-8
            weights = weights / weights.sum(-1, keepdim=True)
            update = torch.einsum("bjd,bij->bid", v, weights)
            slots = self.gru(update.reshape(-1, d), slots.reshape(-1, d)).reshape(b, -1, d)
        return slots

    start = {"mu": nn.Parameter(torch.randn(1, 1, D)), "log_sigma": nn.Parameter(torch.zeros(1, 1, D))}
    return written(
        forward, states(LENGTH, D), norm=nn.LayerNorm(D), q=linear(), k=linear(), v=linear(), gru=nn.GRUCell(D, D),
        **start,
    )  # fmt: skip


def masked_by_noise() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        n, length, d = x.shape
        kept = length // 4
        order = torch.argsort(torch.rand(n, length, device=x.device), dim=1)
        restore = torch.argsort(order, dim=1)
        seen = torch.gather(x, 1, order[:, :kept].unsqueeze(-1).repeat(1, 1, d))
        mask = torch.ones([n, length], device=x.device)
        mask[:, :kept] = 0
        mask = torch.gather(mask, 1, restore)
        h = self.encoder(seen)
        h = torch.cat([h, self.token.repeat(n, length - kept, 1)], 1)
        h = self.decoder(torch.gather(h, 1, restore.unsqueeze(-1).repeat(1, 1, d)))
        return (((h - x) ** 2).mean(-1) * mask).sum() / mask.sum()

    return written(
        forward, states(LENGTH, D), encoder=linear(), decoder=linear(), token=nn.Parameter(torch.zeros(1, 1, D))
    )


def spatial_transformer() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        theta = self.theta(self.locate(x).flatten(1)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.size()), align_corners=False)
        return self.net(F.grid_sample(x, grid, align_corners=False))

    locate = nn.Sequential(nn.Conv2d(1, 4, 5), nn.MaxPool2d(2, 2), nn.ReLU(True))
    return written(
        forward,
        images(12, 1),
        locate=locate,
        theta=nn.Linear(64, 6),
        net=nn.Sequential(nn.Flatten(), nn.Linear(144, 4)),
    )


def hidden_markov_model() -> Case:
    def forward(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        emission = self.emit(x).log_softmax(-1)
        transition = self.transition.log_softmax(-1)
        alphas = [self.start.log_softmax(-1) + emission[:, 0]]
        for t in range(1, x.size(1)):
            alphas.append(torch.logsumexp(alphas[-1].unsqueeze(2) + transition, dim=1) + emission[:, t])
        final = torch.stack(alphas, 1).gather(1, (lengths - 1).view(-1, 1, 1).expand(-1, 1, 4)).squeeze(1)
        return -final.logsumexp(-1).mean()

    chain = {"transition": nn.Parameter(torch.randn(4, 4)), "start": nn.Parameter(torch.zeros(4))}
    return written(forward, states(6, D), torch.randint(1, 7, (ROWS,)), emit=nn.Linear(D, 4), **chain)


IDIOMS: dict[str, Callable[[], Case]] = {
    "a codebook of moving averages": moving_codebook,
    "running statistics of the inputs": running_statistics,
    "a target network": target_network,
    "training aware of quantization": quantization_aware,
    "a temperature in a buffer": tempered_choice,
    "a frozen backbone with batch norm": frozen_backbone,
    "torchmetrics in the forward": metrics_inside,
    "a training step of Lightning": lightning_module,
    "a reversed gradient": gradient_reversal,
    "weights tied by F.linear": tied_by_functional,
    "LoRA by hand": low_rank_by_hand,
    "masked convolutions": masked_convolutions,
    "a modulated convolution": modulated_convolution,
    "a hypernetwork": hypernetwork,
    "an ensemble by vmap": ensemble,
    "an inner gradient step": inner_step,
    "checkpointed blocks": checkpointed_blocks,
    "a checkpointed sequence": checkpointed_sequence,
    "packed documents": packed_documents,
    "positions of a padding mask": positions_of_a_mask,
    "weights of attention as output": weights_of_attention,
    "a jagged batch": jagged_batch,
    "a relative shift by view": relative_shift,
    "slot attention": slots,
    "patches masked by noise": masked_by_noise,
    "a spatial transformer": spatial_transformer,
    "a hidden Markov model": hidden_markov_model,
}
MODELS = {f"plain: {name}": build for name, build in IDIOMS.items()}
