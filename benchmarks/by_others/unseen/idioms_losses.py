"""Losses, batches and outputs as training repositories write them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from by_others.case import CLASSES, LENGTH, ROWS, VOCAB, Case, D, images, linear, rows, states, tokens, written


def labels(count: int = CLASSES) -> Tensor:
    return torch.randint(count, (ROWS,))


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, 16), nn.ReLU(), nn.Linear(16, CLASSES))


# Losses


def uncertainty_weights() -> Case:
    def forward(self: Any, x: Tensor, depth: Tensor, label: Tensor) -> Any:
        h = self.trunk(x).relu()
        first, second = F.mse_loss(self.depth(h).squeeze(-1), depth), F.cross_entropy(self.label(h), label)
        loss = torch.exp(-self.log_vars[0]) * first + self.log_vars[0]
        loss += torch.exp(-self.log_vars[1]) * second + self.log_vars[1]
        return loss, self.log_vars.data.tolist()

    return written(
        forward, rows(), torch.randn(ROWS), labels(), trunk=linear(), depth=nn.Linear(D, 1),
        label=nn.Linear(D, CLASSES), log_vars=nn.Parameter(torch.zeros(2)),
    )  # fmt: skip


class TinyLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(VOCAB, D), nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.words(ids))[0])


def sequence_logps(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    logps = torch.gather(logits[:, :-1].log_softmax(-1), 2, ids[:, 1:].unsqueeze(2)).squeeze(2)
    return (logps * mask[:, 1:]).sum(-1)


def preference_loss() -> Case:
    def forward(self: Any, chosen: Tensor, rejected: Tensor, mask: Tensor) -> Any:
        ids, masks = torch.cat([chosen, rejected]), torch.cat([mask, mask])
        policy = sequence_logps(self.policy(ids), ids, masks)
        with torch.no_grad():
            reference = sequence_logps(self.reference(ids), ids, masks)
        chosen_ratio, rejected_ratio = (policy - reference).chunk(2)
        loss = -F.logsigmoid(0.1 * (chosen_ratio - rejected_ratio)).mean()
        return loss, (0.1 * chosen_ratio).detach(), (0.1 * rejected_ratio).detach()

    mask = (torch.arange(LENGTH) >= torch.randint(2, 6, (ROWS, 1))).float()
    return written(forward, tokens(), tokens(), mask, policy=TinyLM(), reference=TinyLM().requires_grad_(False))


def hard_negatives() -> Case:
    def forward(self: Any, x: Tensor, label: Tensor) -> Tensor:
        confidence = self.a(x)
        loss = F.cross_entropy(confidence.view(-1, 4), label.view(-1), reduction="none").view(label.shape)
        positive = label > 0
        count = positive.long().sum(1, keepdim=True)
        _, order = loss.masked_fill(positive, 0).sort(1, descending=True)
        _, rank = order.sort(1)
        negative = rank < (3 * count).clamp(max=label.size(1) - 1)
        chosen = positive | negative
        return F.cross_entropy(confidence[chosen], label[chosen], reduction="sum") / count.sum()

    label = torch.randint(4, (ROWS, 20)) * (torch.rand(ROWS, 20) < 0.2).long()
    label[:, 0] = 1
    return written(forward, states(20, D), label, a=nn.Linear(D, 4))


def focal_loss() -> Case:
    def forward(self: Any, x: Tensor, label: Tensor) -> Tensor:
        logps = F.log_softmax(self.a(x), dim=1).gather(1, label.view(-1, 1)).view(-1)
        share = logps.exp()
        return (-self.alpha.gather(0, label) * (1 - share) ** 2.0 * logps).mean()

    return written(forward, rows(), labels(), a=classifier(), alpha=torch.rand(CLASSES))


def smoothed_labels() -> Case:
    def forward(self: Any, x: Tensor, target: Tensor) -> Tensor:
        logits = self.a(x).log_softmax(-1)
        with torch.no_grad():
            smooth = torch.zeros_like(logits)
            smooth.fill_(0.1 / (logits.size(-1) - 1))
            smooth.scatter_(1, target.data.unsqueeze(1), 0.9)
        return torch.mean(torch.sum(-smooth * logits, dim=-1))

    return written(forward, rows(), labels(), a=classifier())


def dice_and_entropy() -> Case:
    def forward(self: Any, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        share = logits.softmax(1)
        wanted = F.one_hot(target, 4).permute(0, 3, 1, 2).float()
        over = (share * wanted).sum((0, 2, 3))
        dice = 1 - ((2 * over + 1e-5) / (share.sum((0, 2, 3)) + wanted.sum((0, 2, 3)) + 1e-5)).mean()
        entropy = F.cross_entropy(logits, target)
        return {"loss": dice + entropy, "dice": dice.detach(), "ce": entropy.detach()}

    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 1))
    return written(forward, images(16), torch.randint(4, (ROWS, 16, 16)), net=net)


def center_loss() -> Case:
    def forward(self: Any, x: Tensor, label: Tensor) -> Tensor:
        h, size = self.a(x), x.size(0)
        distances = (
            torch.pow(h, 2).sum(dim=1, keepdim=True).expand(size, CLASSES)
            + torch.pow(self.centers, 2).sum(dim=1, keepdim=True).expand(CLASSES, size).t()
        )
        distances.addmm_(h, self.centers.t(), beta=1, alpha=-2)
        mask = label.unsqueeze(1).expand(size, CLASSES).eq(torch.arange(CLASSES).expand(size, CLASSES))
        return (distances * mask.float()).clamp(min=1e-12, max=1e12).sum() / size

    return written(forward, rows(), labels(), a=linear(), centers=nn.Parameter(torch.randn(CLASSES, D)))


def supervised_contrast() -> Case:
    def forward(self: Any, x: Tensor, label: Tensor) -> Tensor:
        h = F.normalize(self.a(x), dim=1)
        mask = torch.eq(label.view(-1, 1), label.view(-1, 1).T).float()
        logits = h @ h.T / 0.07
        logits = logits - logits.max(1, keepdim=True)[0].detach()
        others = torch.scatter(torch.ones_like(mask), 1, torch.arange(len(x)).view(-1, 1), 0)
        mask = mask * others
        logp = logits - torch.log((torch.exp(logits) * others).sum(1, keepdim=True))
        pairs = mask.sum(1)
        pairs = torch.where(pairs < 1e-6, 1, pairs)
        return -((mask * logp).sum(1) / pairs).mean()

    return written(forward, rows(), labels(3), a=linear())


def off_diagonal(x: Tensor) -> Tensor:
    n, _ = x.shape
    return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


def redundancy_reduction() -> Case:
    def forward(self: Any, one: Tensor, two: Tensor) -> Tensor:
        c = self.bn(self.a(one)).T @ self.bn(self.a(two))
        c.div_(len(one))
        on = torch.diagonal(c).add_(-1).pow_(2).sum()
        return on + 0.005 * off_diagonal(c).pow_(2).sum()

    return written(forward, rows(), rows(), a=linear(), bn=nn.BatchNorm1d(D, affine=False))


def clipped_policy() -> Case:
    def forward(self: Any, seen: Tensor, action: Tensor, before: Tensor, advantage: Tensor, returns: Tensor) -> Any:
        h = self.trunk(seen).tanh()
        chosen = torch.distributions.Categorical(logits=self.actor(h))
        ratio = (chosen.log_prob(action) - before).exp()
        with torch.no_grad():
            clipped = ((ratio - 1.0).abs() > 0.2).float().mean().item()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy = torch.max(-advantage * ratio, -advantage * torch.clamp(ratio, 0.8, 1.2)).mean()
        value = 0.5 * ((self.critic(h).view(-1) - returns) ** 2).mean()
        return policy - 0.01 * chosen.entropy().mean() + 0.5 * value, clipped

    args = (rows(), torch.randint(4, (ROWS,)), -torch.rand(ROWS), torch.randn(ROWS), torch.randn(ROWS))
    return written(forward, *args, trunk=linear(), actor=nn.Linear(D, 4), critic=nn.Linear(D, 1))


def mixture_density() -> Case:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        weights, mean, spread = self.a(x).view(len(x), 3, 3).unbind(-1)
        parts = torch.distributions.Normal(mean, F.softplus(spread) + 1e-3)
        mixed = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(logits=weights), parts)
        return -mixed.log_prob(y).mean()

    return written(forward, rows(), torch.randn(ROWS), a=nn.Linear(D, 9))


def variational() -> Case:
    def forward(self: Any, x: Tensor) -> Any:
        mean, log_var = self.encoder(x).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, (0.5 * log_var).exp())
        z = posterior.rsample()
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        kl = torch.distributions.kl_divergence(posterior, prior).sum(-1).mean()
        reconstruction = F.binary_cross_entropy_with_logits(self.decoder(z), x.sigmoid(), reduction="sum") / len(x)
        return {"loss": reconstruction + kl, "kl": kl}

    return written(forward, rows(), encoder=nn.Linear(D, 8), decoder=nn.Linear(4, D))


def divided_by_item() -> Case:
    def forward(self: Any, ids: Tensor, label: Tensor) -> Tensor:
        loss = F.cross_entropy(self.lm(ids).flatten(0, 1), label.flatten(), ignore_index=-100, reduction="sum")
        return loss / (label != -100).sum().item()

    label = tokens().masked_fill(torch.rand(ROWS, LENGTH) < 0.3, -100)
    return written(forward, tokens(), label, lm=TinyLM())


def gradient_penalty() -> Case:
    def forward(self: Any, real: Tensor, noise: Tensor) -> Tensor:
        fake = self.generator(noise).detach()
        part = torch.rand(len(real), 1)
        between = (part * real + (1 - part) * fake).requires_grad_(True)
        score = self.critic(between)
        gradient = torch.autograd.grad(
            score, between, grad_outputs=torch.ones_like(score), create_graph=True, retain_graph=True
        )[0]
        penalty = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
        return self.critic(fake).mean() - self.critic(real).mean() + 10.0 * penalty

    critic = nn.Sequential(nn.Linear(D, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    return written(forward, rows(), torch.randn(ROWS, 4), generator=nn.Linear(4, D), critic=critic)


def mixed_up() -> Case:
    def forward(self: Any, x: Tensor, label: Tensor) -> Tensor:
        share = np.random.beta(0.2, 0.2)
        order = torch.randperm(x.size(0))
        logits = self.net(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(logits, label) + (1 - share) * F.cross_entropy(logits, label[order])

    np.random.seed(0)
    return written(forward, rows(), labels(), net=classifier())


# Batches and outputs


def teacher_forcing() -> Case:
    def forward(self: Any, source: Tensor, target: Tensor) -> Tensor:
        size, length = target.shape
        outputs = torch.zeros(length, size, VOCAB).to(source.device)
        _, hidden = self.encoder(self.words(source))
        token = target[:, 0]
        for t in range(1, length):
            step, hidden = self.decoder(self.words(token).unsqueeze(1), hidden)
            outputs[t] = self.head(step.squeeze(1))
            token = target[:, t] if random.random() < 0.5 else outputs[t].argmax(1)
        return F.cross_entropy(outputs[1:].reshape(-1, VOCAB), target.T[1:].reshape(-1))

    random.seed(0)
    return written(
        forward, tokens(6), tokens(5), words=nn.Embedding(VOCAB, D), encoder=nn.GRU(D, D, batch_first=True),
        decoder=nn.GRU(D, D, batch_first=True), head=nn.Linear(D, VOCAB),
    )  # fmt: skip


def list_of_tensors() -> Case:
    def forward(self: Any, pieces: list[Tensor], label: Tensor) -> Tensor:
        lengths = torch.tensor([len(piece) for piece in pieces])
        x = nn.utils.rnn.pad_sequence(pieces, batch_first=True)
        mask = torch.arange(x.size(1))[None] < lengths[:, None]
        h = self.a(x).relu().masked_fill(~mask.unsqueeze(-1), 0)
        return F.cross_entropy(self.b(h.sum(1) / lengths[:, None]), label)

    pieces = [torch.randn(3 + row % 4, D) for row in range(ROWS)]
    return written(forward, pieces, labels(), a=linear(), b=nn.Linear(D, CLASSES))


def batch_with_text() -> Case:
    def forward(self: Any, batch: dict[str, Any]) -> dict[str, Any]:
        logits = self.heads[batch["task"]](self.a(batch["x"]).relu())
        return {"loss": F.cross_entropy(logits, batch["y"]), "logits": logits, "id": batch["id"]}

    batch = {"x": rows(), "y": labels(), "task": "first", "id": [f"row{i}" for i in range(ROWS)]}
    heads = nn.ModuleDict({"first": nn.Linear(D, CLASSES), "second": nn.Linear(D, 3)})
    return written(forward, batch, a=linear(), heads=heads)


@dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor]
    loss: Tensor | None = None


def dataclass_output() -> Case:
    def forward(self: Any, x: Tensor, label: Tensor | None = None) -> Output:
        hidden = []
        for layer in self.layers:
            x = layer(x).relu()
            hidden.append(x)
        logits = self.head(x)
        return Output(logits, hidden, None if label is None else F.cross_entropy(logits, label))

    layers = nn.ModuleList(linear() for _ in range(2))
    return written(forward, rows(), labels(), layers=layers, head=nn.Linear(D, CLASSES))


@dataclass
class Batch:
    x: Tensor
    y: Tensor
    weight: Tensor


def dataclass_batch() -> Case:
    def forward(self: Any, batch: Batch) -> Tensor:
        return (F.cross_entropy(self.net(batch.x), batch.y, reduction="none") * batch.weight).mean()

    return written(forward, Batch(rows(), labels(), torch.rand(ROWS)), net=classifier())


class Losses(NamedTuple):
    total: Tensor
    pieces: dict[str, Tensor]


def namedtuple_of_losses() -> Case:
    def forward(self: Any, x: Tensor, label: Tensor) -> Losses:
        h = self.a(x)
        pieces = {"ce": F.cross_entropy(self.b(h.relu()), label), "norm": 1e-3 * h.pow(2).mean()}
        return Losses(sum(pieces.values()), {k: v.detach() for k, v in pieces.items()})  # type: ignore[arg-type]

    return written(forward, rows(), labels(), a=linear(), b=nn.Linear(D, CLASSES))


def epoch_and_mode() -> Case:
    def forward(self: Any, x: Tensor, label: Tensor, epoch: int = 0, mode: str = "train") -> Tensor:
        h = self.a(x)
        if mode == "train" and epoch >= self.warm_up:
            h = h + self.b(h) * min(1.0, (epoch - self.warm_up) / 10)
        return F.cross_entropy(self.head(h), label)

    case = written(forward, a=linear(), b=linear(), head=nn.Linear(D, CLASSES))
    case.model.warm_up = 2  # type: ignore[assignment]
    return Case(case.model, (rows(), labels()), {"epoch": 4, "mode": "train"})


def deep_supervision() -> Case:
    def forward(self: Any, x: Tensor, target: Tensor) -> Tensor:
        outputs = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x)
            outputs.append(F.interpolate(head(x), size=target.shape[-2:], mode="bilinear", align_corners=False))
        return sum(w * F.cross_entropy(o, target) for w, o in zip((0.25, 0.5, 1.0), outputs, strict=True))

    stages = [nn.Sequential(nn.Conv2d(a, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU()) for a in (3, 8, 8)]
    heads = nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in stages)
    return written(forward, images(16), torch.randint(4, (ROWS, 16, 16)), stages=nn.ModuleList(stages), heads=heads)


IDIOMS: dict[str, Callable[[], Case]] = {
    "losses weighted by trained variances": uncertainty_weights,
    "a preference loss with a reference model": preference_loss,
    "hard negatives by rank": hard_negatives,
    "a focal loss": focal_loss,
    "labels smoothed by scatter_": smoothed_labels,
    "a dict of Dice and cross-entropy": dice_and_entropy,
    "a center loss": center_loss,
    "a supervised contrastive loss": supervised_contrast,
    "off-diagonal elements by view": redundancy_reduction,
    "a clipped policy loss": clipped_policy,
    "a mixture density head": mixture_density,
    "a variational autoencoder of distributions": variational,
    "a loss divided by .item() of a count": divided_by_item,
    "a gradient penalty": gradient_penalty,
    "mixup in the forward": mixed_up,
    "teacher forcing": teacher_forcing,
    "a list of tensors padded in the forward": list_of_tensors,
    "a batch with text in it": batch_with_text,
    "a dataclass as output": dataclass_output,
    "a dataclass as input": dataclass_batch,
    "a named tuple of losses": namedtuple_of_losses,
    "an epoch and a mode as arguments": epoch_and_mode,
    "deep supervision": deep_supervision,
}
MODELS = {f"plain: {name}": build for name, build in IDIOMS.items()}
