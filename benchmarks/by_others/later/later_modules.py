"""Speech, reinforcement learning, diffusion, graphs, points: modules as training repositories write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from by_others.case import CLASSES, LENGTH, ROWS, VOCAB, Case, D, images, linear, rows, states, tokens, written

# Speech and text


def stretched_by_durations() -> Case:
    """FastSpeech's length regulator."""

    def forward(self: Any, phonemes: Tensor, durations: Tensor, mel: Tensor) -> Tensor:
        h = self.phonemes(phonemes)
        predicted = self.duration(h).squeeze(-1)
        out = []
        for row, times in zip(h, durations, strict=True):
            pieces = [vector.expand(max(int(times[i].item()), 0), -1) for i, vector in enumerate(row)]
            out.append(torch.cat(pieces, 0))
        longest = max(piece.size(0) for piece in out)
        x = torch.stack([F.pad(piece, (0, 0, 0, longest - piece.size(0))) for piece in out])
        mask = torch.arange(longest)[None] < durations.sum(1)[:, None]
        near = (self.out(x) - mel[:, :longest]).abs().mean(-1).masked_select(mask).mean()
        return near + F.mse_loss(predicted, torch.log(durations.float() + 1))

    durations = torch.randint(1, 4, (ROWS, 5))
    args = tokens(5), durations, torch.randn(ROWS, 15, 4)
    return written(forward, *args, phonemes=nn.Embedding(VOCAB, D), duration=nn.Linear(D, 1), out=nn.Linear(D, 4))


def monotonic_alignment() -> Case:
    """Glow-TTS: the best path between text and frames, found by numpy on the likelihoods."""

    def best_path(value: np.ndarray) -> np.ndarray:
        path = np.zeros_like(value, dtype=np.int64)
        for b in range(len(value)):
            v = value[b].copy()
            n, m = v.shape
            for j in range(m):
                for i in range(max(0, n + j - m), min(n, j + 1)):
                    stay = -1e9 if i == j else v[i, j - 1]
                    move = (0.0 if j == 0 else -1e9) if i == 0 else v[i - 1, j - 1]
                    v[i, j] += max(stay, move)
            i = n - 1
            for j in range(m - 1, -1, -1):
                path[b, i, j] = 1
                if i != 0 and (i == j or v[i, j - 1] < v[i - 1, j - 1]):
                    i -= 1
        return path

    def forward(self: Any, text: Tensor, frames: Tensor) -> Tensor:
        mean, z = self.words(text), self.a(frames)
        with torch.no_grad():
            likelihood = -((mean.unsqueeze(2) - z.unsqueeze(1)) ** 2).sum(-1)
            path = torch.from_numpy(best_path(likelihood.cpu().numpy())).to(z.dtype)
        aligned = torch.matmul(path.transpose(1, 2), mean)
        return F.mse_loss(aligned, z) + F.l1_loss(self.duration(mean).squeeze(-1), torch.log(path.sum(-1)))

    args = tokens(4), states(9, D)
    return written(forward, *args, words=nn.Embedding(VOCAB, D), a=linear(), duration=nn.Linear(D, 1))


def several_resolutions() -> Case:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        fake = self.net(x).squeeze(1)
        loss = 0.0
        for size, hop in ((16, 4), (32, 8)):
            window = torch.hann_window(size, device=x.device)
            one, two = (
                torch.stft(signal, size, hop, size, window, return_complex=True).abs().clamp(min=1e-7).transpose(2, 1)
                for signal in (fake, y)
            )
            loss += torch.norm(two - one, p="fro") / torch.norm(two, p="fro")
            loss += F.l1_loss(torch.log(two), torch.log(one))
        return loss  # type: ignore[return-value]

    net = nn.Sequential(nn.Conv1d(1, 4, 5, padding=2), nn.LeakyReLU(0.1), nn.Conv1d(4, 1, 5, padding=2), nn.Tanh())
    return written(forward, torch.randn(ROWS, 1, 128), torch.randn(ROWS, 128), net=net)


def transducer() -> Case:
    """The loss of an RNN transducer by its recursion."""

    def forward(self: Any, x: Tensor, labels: Tensor) -> Tensor:
        joined = self.encoder(x).unsqueeze(2) + self.labels(F.pad(labels, (1, 0))).unsqueeze(1)
        logp = self.out(joined.tanh()).log_softmax(-1)
        blank = logp[..., 0]
        emit = logp[:, :, :-1].gather(3, labels[:, None, :, None].expand(-1, x.size(1), -1, 1)).squeeze(3)
        alpha = [torch.zeros(len(x))]
        for u in range(1, labels.size(1) + 1):
            alpha.append(alpha[-1] + emit[:, 0, u - 1])
        for t in range(1, x.size(1)):
            new = [alpha[0] + blank[:, t - 1, 0]]
            for u in range(1, labels.size(1) + 1):
                new.append(torch.logaddexp(alpha[u] + blank[:, t - 1, u], new[-1] + emit[:, t, u - 1]))
            alpha = new
        return -(alpha[-1] + blank[:, -1, -1]).mean()

    args = states(5, D), torch.randint(1, CLASSES, (ROWS, 3))
    return written(forward, *args, encoder=linear(), labels=nn.Embedding(CLASSES, D), out=nn.Linear(D, CLASSES))


def reward_of_the_last_token() -> Case:
    def forward(self: Any, ids: Tensor) -> Tensor:
        rewards = self.value(self.body(self.words(ids))[0]).squeeze(-1)
        half = ids.shape[0] // 2
        loss = 0.0
        for i in range(half):
            chosen, rejected = ids[i], ids[i + half]
            ends = (chosen == 0).nonzero()
            end = ends[0].item() if len(ends) else chosen.shape[0]
            ends_rejected = (rejected == 0).nonzero()
            end = max(end, ends_rejected[0].item() if len(ends_rejected) else rejected.shape[0])
            start = (chosen != rejected).nonzero()[0]
            good, bad = rewards[i][start:end], rewards[i + half][start:end]
            loss += -F.logsigmoid(good - bad).mean()
        return loss / half  # type: ignore[return-value]

    ids = torch.randint(1, VOCAB, (ROWS, LENGTH))
    ids[::2, 9:] = 0
    return written(
        forward, ids, words=nn.Embedding(VOCAB, D), body=nn.GRU(D, D, batch_first=True), value=nn.Linear(D, 1)
    )


def group_relative_policy() -> Case:
    def forward(self: Any, ids: Tensor, mask: Tensor, rewards: Tensor, old: Tensor) -> Any:
        grouped = rewards.view(-1, 4)
        advantages = (rewards - grouped.mean(1).repeat_interleave(4)) / (grouped.std(1).repeat_interleave(4) + 1e-4)
        logits = self.head(self.body(self.words(ids))[0])[:, :-1]
        logps = torch.stack(
            [row.log_softmax(-1).gather(1, at[1:, None]).squeeze(1) for row, at in zip(logits, ids, strict=False)]
        )
        ratio = torch.exp(logps - old)
        loss = -torch.min(ratio * advantages[:, None], torch.clamp(ratio, 0.8, 1.2) * advantages[:, None])
        kept = mask[:, 1:]
        clipped = ((ratio - 1).abs() > 0.2).float()
        return (loss * kept).sum() / kept.sum(), {"clip": (clipped * kept).sum().item() / kept.sum().item()}

    mask = (torch.arange(LENGTH) < torch.randint(6, LENGTH + 1, (ROWS, 1))).float()
    args = tokens(), mask, torch.randn(ROWS), -5 + torch.randn(ROWS, LENGTH - 1)
    parts = {"words": nn.Embedding(VOCAB, D), "body": nn.GRU(D, D, batch_first=True), "head": nn.Linear(D, VOCAB)}
    return written(forward, *args, **parts)


def several_tokens_ahead() -> Case:
    def forward(self: Any, ids: Tensor) -> Tensor:
        h, loss = self.body(self.words(ids))[0], 0.0
        for ahead, head in enumerate(self.heads, 1):
            logits = head(h[:, :-ahead]).relu() @ self.words.weight.T
            wanted = ids[:, ahead:]
            loss += F.cross_entropy(logits.transpose(1, 2), wanted) * 0.5**ahead
            loss += 1e-4 * torch.logsumexp(logits, dim=-1).pow(2).mean()
        return loss  # type: ignore[return-value]

    heads = nn.ModuleList(linear() for _ in range(3))
    return written(forward, tokens(), words=nn.Embedding(VOCAB, D), body=nn.GRU(D, D, batch_first=True), heads=heads)


# Reinforcement learning


def distribution_of_returns() -> Case:
    """C51's projection."""

    def forward(self: Any, seen: Tensor, action: Tensor, reward: Tensor, after: Tensor, done: Tensor) -> Tensor:
        n, low, high, atoms = len(seen), -5.0, 5.0, 11
        support = torch.linspace(low, high, atoms)
        step = (high - low) / (atoms - 1)
        with torch.no_grad():
            p = self.target(after).view(n, 3, atoms).softmax(-1)
            best = p[range(n), (p * support).sum(2).argmax(1)]
            place = (reward.unsqueeze(1) + (1 - done).unsqueeze(1) * 0.99 * support).clamp(min=low, max=high)
            b = (place - low) / step
            lower, upper = b.floor().to(torch.int64), b.ceil().to(torch.int64)
            lower[(upper > 0) * (lower == upper)] -= 1
            upper[(lower < (atoms - 1)) * (lower == upper)] += 1
            m = seen.new_zeros(n, atoms)
            offset = torch.linspace(0, ((n - 1) * atoms), n).unsqueeze(1).expand(n, atoms).to(action)
            m.view(-1).index_add_(0, (lower + offset).view(-1), (best * (upper.float() - b)).view(-1))
            m.view(-1).index_add_(0, (upper + offset).view(-1), (best * (b - lower.float())).view(-1))
        logp = self.online(seen).view(n, 3, atoms).log_softmax(-1)[range(n), action]
        return -torch.sum(m * logp, 1).mean()

    args = rows(), torch.randint(3, (ROWS,)), torch.randn(ROWS), rows(), torch.randint(2, (ROWS,)).float()
    return written(forward, *args, online=nn.Linear(D, 33), target=nn.Linear(D, 33).requires_grad_(False))


def squashed_gaussian() -> Case:
    def forward(self: Any, seen: Tensor) -> Tensor:
        mean, log_std = self.actor(seen).chunk(2, -1)
        log_std = -5 + 0.5 * (2 - -5) * (torch.tanh(log_std) + 1)
        normal = torch.distributions.Normal(mean, log_std.exp())
        x = normal.rsample()
        action = torch.tanh(x)
        logp = (normal.log_prob(x) - torch.log(1 - action.pow(2) + 1e-6)).sum(1, keepdim=True)
        q = torch.min(*self.critic(torch.cat([seen, action], 1)).chunk(2, 1))
        alpha = self.log_alpha.exp()
        return (alpha.detach() * logp - q).mean() - (alpha * (logp + 2).detach()).mean()

    critic = nn.Sequential(nn.Linear(D + 2, 16), nn.ReLU(), nn.Linear(16, 2))
    return written(forward, rows(), actor=nn.Linear(D, 4), critic=critic, log_alpha=nn.Parameter(torch.zeros(1)))


def advantages_backwards() -> Case:
    def forward(self: Any, seen: Tensor, action: Tensor, reward: Tensor, done: Tensor) -> Tensor:
        value = self.critic(seen).squeeze(-1)
        with torch.no_grad():
            advantages, last = torch.zeros_like(reward), torch.zeros(len(seen))
            for t in reversed(range(reward.shape[1] - 1)):
                going_on = 1.0 - done[:, t]
                delta = reward[:, t] + 0.99 * value[:, t + 1] * going_on - value[:, t]
                advantages[:, t] = last = delta + 0.99 * 0.95 * going_on * last
            returns = advantages + value
        policy = torch.distributions.Categorical(logits=self.actor(seen))
        return -(policy.log_prob(action) * advantages).mean() + F.smooth_l1_loss(value, returns)

    args = states(6, D), torch.randint(3, (ROWS, 6)), torch.randn(ROWS, 6), (torch.rand(ROWS, 6) < 0.2).float()
    return written(forward, *args, actor=nn.Linear(D, 3), critic=nn.Linear(D, 1))


def imagined_rollout() -> Case:
    """A recurrent state-space model with straight-through categories."""

    def forward(self: Any, seen: Tensor, action: Tensor) -> Tensor:
        n, length, _ = seen.shape
        h, z = torch.zeros(n, D), torch.zeros(n, 8)
        embedded, kl, near = self.encode(seen), [], []
        for t in range(length):
            h = self.cell(torch.cat([z, action[:, t]], -1), h)
            prior, posterior = (
                self.prior(h).view(n, 2, 4),
                self.posterior(torch.cat([h, embedded[:, t]], -1)).view(n, 2, 4),
            )
            q = torch.distributions.OneHotCategoricalStraightThrough(logits=posterior)
            z = q.rsample().view(n, 8)
            p = torch.distributions.OneHotCategorical(logits=prior)
            kl.append(torch.distributions.kl_divergence(q, p).sum(-1).clamp(min=0.1))
            near.append((self.decode(torch.cat([h, z], -1)) - seen[:, t]).pow(2).mean(-1))
        return torch.stack(kl).mean() + torch.stack(near).mean()

    return written(
        forward, states(4, D), torch.randn(ROWS, 4, 2), encode=linear(), cell=nn.GRUCell(10, D), prior=linear(),
        posterior=nn.Linear(2 * D, 8), decode=nn.Linear(D + 8, D),
    )  # fmt: skip


# Diffusion and generation


def preconditioned_denoiser() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        sigma = (torch.randn([x.shape[0], 1, 1, 1], device=x.device) * 1.2 - 1.2).exp()
        weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
        noisy = x + torch.randn_like(x) * sigma
        skip, out, scale = (
            0.25 / (sigma**2 + 0.25),
            sigma * 0.5 / (sigma**2 + 0.25).sqrt(),
            1 / (0.25 + sigma**2).sqrt(),
        )
        hidden = self.first(scale * noisy) + self.noise((sigma.log() / 4).flatten(1))[:, :, None, None]
        return (weight * ((skip * noisy + out * self.last(F.silu(hidden))) - x) ** 2).mean()

    first, last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
    return written(forward, images(8), first=first, last=last, noise=nn.Linear(1, 8))


def steps_weighted_by_noise() -> Case:
    def forward(self: Any, x: Tensor, label: Tensor) -> Tensor:
        t = torch.randint(0, 100, (x.shape[0],), device=x.device).long()
        noise = torch.randn_like(x)
        a = self.alphas.gather(-1, t).reshape(-1, 1)
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise
        dropped = torch.bernoulli(torch.zeros_like(label.float()) + 0.1)
        context = F.one_hot(label, num_classes=CLASSES).float() * (1 - dropped).unsqueeze(-1)
        frequency = torch.exp(-math.log(10000) * torch.arange(4) / 4)
        time = torch.cat([(t[:, None] * frequency).sin(), (t[:, None] * frequency).cos()], -1)
        predicted = self.net(torch.cat([noisy, time, context], -1))
        snr = a / (1 - a)
        wanted = a.sqrt() * noise - (1 - a).sqrt() * x
        loss = F.mse_loss(predicted, wanted, reduction="none").mean(1)
        return (loss * (torch.clamp(snr, max=5) / (snr + 1)).squeeze(1)).mean()

    net = nn.Sequential(nn.Linear(2 * D + CLASSES, 16), nn.SiLU(), nn.Linear(16, D))
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)
    return written(forward, rows(), torch.randint(CLASSES, (ROWS,)), net=net, alphas=alphas)


def flow_between_matched_samples() -> Case:
    from scipy.optimize import linear_sum_assignment

    def forward(self: Any, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        cost = torch.cdist(noise, x) ** 2
        _, order = linear_sum_assignment(cost.detach().cpu().numpy())
        x = x[torch.from_numpy(order)]
        t = torch.rand(len(x), 1)
        return F.mse_loss(self.net(torch.cat([(1 - t) * noise + t * x, t], 1)), x - noise)

    return written(forward, net=nn.Sequential(nn.Linear(D + 1, 16), nn.SELU(), nn.Linear(16, D)))


def consistency_training() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.step += 1
        scales = min(int(2 ** math.floor(int(self.step) / 10) * 10), 80)
        sigmas = (0.002 ** (1 / 7) + torch.arange(scales) / (scales - 1) * (80 ** (1 / 7) - 0.002 ** (1 / 7))) ** 7
        index = torch.randint(0, scales - 1, (len(x),))
        low, high = sigmas[index].unsqueeze(1), sigmas[index + 1].unsqueeze(1)
        noise = torch.randn_like(x)
        student = self.net(torch.cat([x + high * noise, high.log()], 1))
        with torch.no_grad():
            teacher = self.net(torch.cat([x + low * noise, low.log()], 1))
        c = 0.00054 * math.sqrt(math.prod(x.shape[1:]))
        return ((((student - teacher) ** 2 + c**2).sqrt() - c) / (high - low)).mean()

    return written(forward, net=nn.Linear(D + 1, D), step=torch.zeros((), dtype=torch.long))


def rendered_rays() -> Case:
    """NeRF: stratified samples along rays, then samples by the weights of the first."""

    def forward(self: Any, origin: Tensor, direction: Tensor, color: Tensor) -> Tensor:
        z = torch.linspace(2.0, 6.0, 8).expand(len(origin), 8)
        middle = 0.5 * (z[..., 1:] + z[..., :-1])
        upper, lower = torch.cat([middle, z[..., -1:]], -1), torch.cat([z[..., :1], middle], -1)
        z = lower + (upper - lower) * torch.rand(z.shape)
        first, weights = self.render(origin, direction, z)
        middle = 0.5 * (z[..., 1:] + z[..., :-1])
        pdf = weights[..., 1:-1].detach() + 1e-5
        cdf = torch.cumsum(pdf / torch.sum(pdf, -1, keepdim=True), -1)
        cdf = torch.cat([torch.zeros_like(cdf[..., :1]), cdf], -1)
        u = torch.rand([*cdf.shape[:-1], 6]).contiguous()
        found = torch.searchsorted(cdf, u, right=True)
        below = torch.max(torch.zeros_like(found - 1), found - 1)
        above = torch.min((cdf.shape[-1] - 1) * torch.ones_like(found), found)
        both = torch.stack([below, above], -1)
        shape = [both.shape[0], both.shape[1], cdf.shape[-1]]
        c = torch.gather(cdf.unsqueeze(1).expand(shape), 2, both)
        b = torch.gather(middle.unsqueeze(1).expand(shape), 2, both)
        width = c[..., 1] - c[..., 0]
        width = torch.where(width < 1e-5, torch.ones_like(width), width)
        fine = b[..., 0] + (u - c[..., 0]) / width * (b[..., 1] - b[..., 0])
        second, _ = self.render(origin, direction, torch.sort(torch.cat([z, fine], -1), -1)[0])
        return F.mse_loss(first, color) + F.mse_loss(second, color)

    def render(self: Any, origin: Tensor, direction: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        points = origin[:, None] + direction[:, None] * z[..., None]
        embedded = torch.cat([points, *(f(points * 2.0**i) for i in range(2) for f in (torch.sin, torch.cos))], -1)
        raw = self.net(embedded.reshape(-1, 15)).view(*z.shape, 4)
        gaps = torch.cat([z[..., 1:] - z[..., :-1], torch.tensor([1e10]).expand(z[..., :1].shape)], -1)
        alpha = 1.0 - torch.exp(-F.relu(raw[..., 3]) * gaps)
        seen = torch.cumprod(torch.cat([torch.ones((len(z), 1)), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
        weights = alpha * seen
        return torch.sum(weights[..., None] * torch.sigmoid(raw[..., :3]), -2), weights

    args = torch.randn(ROWS, 3), torch.randn(ROWS, 3), torch.rand(ROWS, 3)
    case = written(forward, *args, net=nn.Sequential(nn.Linear(15, 16), nn.ReLU(), nn.Linear(16, 4)))
    type(case.model).render = render  # type: ignore[attr-defined]
    return case


def styles_mixed_at_random() -> Case:
    def forward(self: Any, z: Tensor, other: Tensor) -> Tensor:
        w = torch.stack([self.map(z)] * 4, 1)
        cutoff = torch.empty([], dtype=torch.int64).random_(1, 4)
        cutoff = torch.where(torch.rand([]) < 0.9, cutoff, torch.full_like(cutoff, 4))
        w = torch.where(torch.arange(4)[None, :, None] < cutoff, w, torch.stack([self.map(other)] * 4, 1))
        self.average.copy_(w[:, 0].detach().mean(dim=0).lerp(self.average, 0.995))
        return self.out(w.flatten(1)).square().mean()

    return written(forward, rows(), rows(), map=linear(), out=nn.Linear(4 * D, 3), average=torch.zeros(D))


# Graphs and points


def neighbours_in_feature_space() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        n, _, points = x.shape
        for layer in (self.first, self.second):
            inner = -2 * torch.matmul(x.transpose(2, 1), x)
            square = torch.sum(x**2, dim=1, keepdim=True)
            index = (-square - inner - square.transpose(2, 1)).topk(k=4, dim=-1)[1]
            index = (index + torch.arange(0, n, device=x.device).view(-1, 1, 1) * points).view(-1)
            flat = x.transpose(2, 1).contiguous()
            near = flat.view(n * points, -1)[index, :].view(n, points, 4, -1)
            flat = flat.view(n, points, 1, -1).repeat(1, 1, 4, 1)
            x = layer(torch.cat((near - flat, flat), dim=3).permute(0, 3, 1, 2).contiguous()).max(dim=-1)[0]
        return self.out(torch.cat([F.adaptive_max_pool1d(x, 1), F.adaptive_avg_pool1d(x, 1)], 1).view(n, -1))

    def block(before: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(2 * before, D, 1, bias=False), nn.BatchNorm2d(D), nn.LeakyReLU(0.2))

    return written(forward, torch.randn(ROWS, 3, 10), first=block(3), second=block(D), out=nn.Linear(2 * D, 4))


def farthest_points() -> Case:
    def forward(self: Any, points: Tensor) -> Tensor:
        n, count, _ = points.shape
        centers = torch.zeros(n, 4, dtype=torch.long)
        distance = torch.ones(n, count).to(points) * 1e10
        farthest = torch.randint(0, count, (n,), dtype=torch.long)
        each = torch.arange(n, dtype=torch.long)
        for i in range(4):
            centers[:, i] = farthest
            centroid = points[each, farthest, :].view(n, 1, 3)
            found = torch.sum((points - centroid) ** 2, -1)
            mask = found < distance
            distance[mask] = found[mask]
            farthest = torch.max(distance, -1)[1]
        chosen = points[each[:, None], centers]
        square = torch.cdist(chosen, points) ** 2
        group = torch.arange(count, dtype=torch.long).view(1, 1, count).repeat([n, 4, 1])
        group[square > 1.0] = count
        group = group.sort(dim=-1)[0][:, :, :5]
        first = group[:, :, 0].view(n, 4, 1).repeat([1, 1, 5])
        group[group == count] = first[group == count]
        local = points[each[:, None, None], group] - chosen.unsqueeze(2)
        return self.out(self.net(local).max(2)[0].mean(1))

    return written(forward, torch.randn(ROWS, 12, 3), net=nn.Sequential(nn.Linear(3, D), nn.ReLU()), out=linear())


def dense_graph_attention() -> Case:
    def forward(self: Any, x: Tensor, adjacency: Tensor) -> Tensor:
        wh = torch.matmul(x, self.w)
        e = F.leaky_relu(torch.matmul(wh, self.a[:D]) + torch.matmul(wh, self.a[D:]).transpose(1, 2), 0.2)
        attention = torch.where(adjacency > 0, e, -9e15 * torch.ones_like(e))
        attention = F.dropout(F.softmax(attention, dim=-1), 0.6, training=self.training)
        return F.log_softmax(F.elu(torch.matmul(attention, wh)), dim=-1)

    adjacency = ((torch.rand(ROWS, 6, 6) < 0.4) | torch.eye(6, dtype=torch.bool)).float()
    w, a = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(2 * D, 1))
    return written(forward, states(6, D), adjacency, w=w, a=a)


def edges_within_a_radius() -> Case:
    """A learned simulator: its graph is made from the positions in every call."""

    def forward(self: Any, position: Tensor, wanted: Tensor) -> Tensor:
        with torch.no_grad():
            near = (torch.cdist(position, position) < 1.5) & ~torch.eye(len(position), dtype=torch.bool)
            to, source = near.nonzero(as_tuple=True)
        away = position[to] - position[source]
        message = self.edge(torch.cat([away, away.norm(dim=-1, keepdim=True)], -1)).relu()
        x = torch.zeros(len(position), D).to(position).index_add_(0, to, message)
        return F.mse_loss(self.node(x), wanted)

    return written(forward, torch.randn(24, 2), torch.randn(24, 2), edge=nn.Linear(3, D), node=nn.Linear(D, 2))


def dropped_edges() -> Case:
    def forward(self: Any, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        edges = edges[:, torch.rand(edges.shape[1]) > 0.3]
        source, to = edges
        degree = torch.zeros(len(x)).scatter_add_(0, to, torch.ones(to.shape[0])).clamp(min=1)
        h = torch.zeros_like(x).scatter_add_(0, to[:, None].expand(-1, D), self.a(x)[source]) / degree[:, None]
        count = int(graph.max()) + 1
        pooled = torch.zeros(count, D).index_add_(0, graph, F.relu(h + x))
        return self.out(pooled / torch.bincount(graph, minlength=count).view(-1, 1))

    graph = torch.arange(ROWS).repeat_interleave(3)
    return written(forward, torch.randn(24, D), torch.randint(24, (2, 60)), graph, a=linear(), out=nn.Linear(D, 3))


def tree_recursion() -> Case:
    """A tree-LSTM that walks the same tree of Python lists for every row."""

    def walk(self: Any, tree: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(tree, int):
            h = self.leaf(x[:, tree])
            return h, torch.zeros_like(h)
        found = [walk(self, child, x) for child in tree]
        h = sum(h for h, _ in found)
        i, o, u = self.gates(h).chunk(3, -1)
        c = i.sigmoid() * u.tanh() + sum(self.forget(h).sigmoid() * c for h, c in found)
        return o.sigmoid() * c.tanh(), c

    def forward(self: Any, x: Tensor, tree: Any) -> Tensor:
        return self.out(walk(self, tree, x)[0])

    args = states(5, D), [[0, 1], [2, [3, 4]]]
    return written(forward, *args, leaf=linear(), gates=nn.Linear(D, 3 * D), forget=linear(), out=linear())


IDIOMS: dict[str, Callable[[], Case]] = {
    "vectors stretched by durations": stretched_by_durations,
    "a monotonic alignment by numpy": monotonic_alignment,
    "spectra of several resolutions": several_resolutions,
    "a transducer by its recursion": transducer,
    "rewards up to the end of each answer": reward_of_the_last_token,
    "a group-relative policy loss": group_relative_policy,
    "several tokens ahead": several_tokens_ahead,
    "a distribution of returns": distribution_of_returns,
    "a squashed Gaussian policy": squashed_gaussian,
    "advantages from the end": advantages_backwards,
    "an imagined rollout": imagined_rollout,
    "a preconditioned denoiser": preconditioned_denoiser,
    "steps weighted by their noise": steps_weighted_by_noise,
    "a flow between matched samples": flow_between_matched_samples,
    "consistency training by steps": consistency_training,
    "rendered rays": rendered_rays,
    "styles mixed at random": styles_mixed_at_random,
    "neighbours in feature space": neighbours_in_feature_space,
    "farthest points": farthest_points,
    "dense graph attention": dense_graph_attention,
    "edges within a radius": edges_within_a_radius,
    "dropped edges": dropped_edges,
    "a recursion over a tree": tree_recursion,
}
MODELS = {f"plain: {name}": build for name, build in IDIOMS.items()}
