"""Losses of segmentation, detection, metric learning, distillation, recommendation, as training scripts write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from by_others.case import CLASSES, LENGTH, ROWS, VOCAB, Case, D, images, linear, rows, states, tokens, written


def labels(count: int = CLASSES) -> Tensor:
    return torch.randint(count, (ROWS,))


def pixels(count: int = 4, size: int = 8) -> Tensor:
    return torch.randint(count, (ROWS, size, size))


def segmenter(channels: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, channels, 1))


# Segmentation and detection


def lovasz_gradient(sorted_truth: Tensor) -> Tensor:
    total = sorted_truth.sum()
    intersection = total - sorted_truth.float().cumsum(0)
    union = total + (1 - sorted_truth).float().cumsum(0)
    jaccard = 1.0 - intersection / union
    if len(sorted_truth) > 1:
        jaccard[1:] = jaccard[1:] - jaccard[:-1]
    return jaccard


def lovasz_softmax() -> Case:
    def forward(self: Any, x: Tensor, target: Tensor) -> Tensor:
        probabilities = self.net(x).softmax(1).permute(0, 2, 3, 1).reshape(-1, 4)
        target, losses = target.view(-1), []
        for c in range(4):
            truth = (target == c).float()
            if truth.sum() == 0:
                continue
            errors = (truth - probabilities[:, c]).abs()
            errors_sorted, order = torch.sort(errors, 0, descending=True)
            losses.append(torch.dot(errors_sorted, lovasz_gradient(truth[order.data])))
        return sum(losses) / len(losses)  # type: ignore[return-value]

    return written(forward, images(8), pixels(3), net=segmenter())


def online_hard_pixels() -> Case:
    def forward(self: Any, x: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(self.net(x), target, ignore_index=255, reduction="none").view(-1)
        loss, _ = torch.sort(loss, descending=True)
        if loss[self.n_min] > self.thresh:
            loss = loss[loss > self.thresh]
        else:
            loss = loss[: self.n_min]
        return torch.mean(loss)

    case = written(forward, images(8), pixels(), net=segmenter())
    case.model.n_min, case.model.thresh = 64, 0.7  # type: ignore[assignment]
    return case


def tversky_focal() -> Case:
    def forward(self: Any, x: Tensor, target: Tensor) -> Tensor:
        p = torch.sigmoid(self.net(x)).flatten(1)
        t = target.float().flatten(1)
        true, false_positive, false_negative = (p * t).sum(1), (p * (1 - t)).sum(1), ((1 - p) * t).sum(1)
        index = (true + 1) / (true + 0.3 * false_positive + 0.7 * false_negative + 1)
        return (1 - index).pow(0.75).mean()

    return written(forward, images(8), pixels(2), net=segmenter(1))


def distance_map_loss() -> Case:
    from scipy.ndimage import distance_transform_edt

    def forward(self: Any, x: Tensor, target: Tensor) -> Tensor:
        probabilities = self.net(x).softmax(1)[:, 1]
        with torch.no_grad():
            mask = target.cpu().numpy().astype(bool)
            field = np.zeros(mask.shape, dtype=np.float32)
            for i in range(len(mask)):
                if mask[i].any():
                    field[i] = distance_transform_edt(~mask[i]) - distance_transform_edt(mask[i])
            distances = torch.from_numpy(field).to(probabilities)
        return (probabilities * distances).mean()

    return written(forward, images(8), pixels(2), net=segmenter(2))


def heat_map_loss() -> Case:
    def forward(self: Any, x: Tensor, truth: Tensor) -> Tensor:
        predicted = torch.clamp(self.net(x).sigmoid_(), min=1e-4, max=1 - 1e-4)
        positive, negative = truth.eq(1).float(), truth.lt(1).float()
        weights = torch.pow(1 - truth, 4)
        loss: Tensor | int = 0
        gain = torch.log(predicted) * torch.pow(1 - predicted, 2) * positive
        penalty = torch.log(1 - predicted) * torch.pow(predicted, 2) * weights * negative
        count, gain, penalty = positive.float().sum(), gain.sum(), penalty.sum()
        if count == 0:
            loss = loss - penalty
        else:
            loss = loss - (gain + penalty) / count
        return loss

    truth = torch.rand(ROWS, 4, 8, 8)
    truth[:, :, 3, 4] = 1.0
    return written(forward, images(8), truth, net=segmenter())


def gathered_regression() -> Case:
    def forward(self: Any, x: Tensor, index: Tensor, mask: Tensor, size: Tensor) -> Tensor:
        feature = self.net(x).permute(0, 2, 3, 1).contiguous()
        feature = feature.view(feature.size(0), -1, feature.size(3))
        index = index.unsqueeze(2).expand(index.size(0), index.size(1), feature.size(2))
        predicted = feature.gather(1, index)
        weight = mask.unsqueeze(2).expand_as(predicted).float()
        return F.l1_loss(predicted * weight, size * weight, reduction="sum") / (weight.sum() + 1e-4)

    index, mask = torch.randint(64, (ROWS, 5)), torch.rand(ROWS, 5) < 0.6
    return written(forward, images(8), index, mask, torch.rand(ROWS, 5, 2), net=segmenter(2))


def matched_priors() -> Case:
    """SSD: every truth takes its best prior, every prior its best truth; labels by overlap."""

    def forward(self: Any, x: Tensor, truths: Tensor, kinds: Tensor) -> Tensor:
        location, confidence = self.box(x).view(len(x), -1, 4), self.kind(x).view(len(x), -1, 4)
        wanted, wanted_kind = torch.zeros_like(location), torch.zeros(location.shape[:2], dtype=torch.long)
        for row in range(len(x)):
            low = torch.max(truths[row][:, None, :2], self.priors[None, :, :2])
            high = torch.min(truths[row][:, None, 2:], self.priors[None, :, 2:])
            inter = (high - low).clamp(min=0).prod(2)
            area = (truths[row][:, 2:] - truths[row][:, :2]).prod(1)[:, None]
            overlaps = inter / (area + (self.priors[:, 2:] - self.priors[:, :2]).prod(1)[None] - inter)
            best_prior = overlaps.max(1)[1]
            best_overlap, best_truth = overlaps.max(0)
            best_overlap.index_fill_(0, best_prior, 2)
            for j in range(best_prior.size(0)):
                best_truth[best_prior[j]] = j
            kind = kinds[row][best_truth] + 1
            kind[best_overlap < 0.5] = 0
            wanted[row], wanted_kind[row] = truths[row][best_truth] - self.priors, kind
        positive = wanted_kind > 0
        mask = positive.unsqueeze(2).expand_as(location)
        near = F.smooth_l1_loss(location[mask].view(-1, 4), wanted[mask].view(-1, 4), reduction="sum")
        return (near + F.cross_entropy(confidence.view(-1, 4), wanted_kind.view(-1))) / positive.sum()

    corners = torch.rand(ROWS, 3, 2) * 0.5
    truths = torch.cat([corners, corners + 0.2 + 0.3 * torch.rand(ROWS, 3, 2)], -1)
    start = torch.rand(10, 2) * 0.5
    priors = torch.cat([start, start + 0.4], -1)
    kinds = torch.randint(3, (ROWS, 3))
    return written(forward, rows(), truths, kinds, box=nn.Linear(D, 40), kind=nn.Linear(D, 40), priors=priors)


# Metric learning, self-supervision, distillation


def additive_margin() -> Case:
    def forward(self: Any, x: Tensor, label: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(self.a(x)), F.normalize(self.weight))
        sine = torch.sqrt((1.0 - torch.pow(cosine, 2)).clamp(0, 1))
        phi = cosine * np.cos(0.5) - sine * np.sin(0.5)
        phi = torch.where(cosine > np.cos(np.pi - 0.5), phi, cosine - np.sin(np.pi - 0.5) * 0.5)
        one_hot = torch.zeros(cosine.size(), device=x.device)
        one_hot.scatter_(1, label.view(-1, 1).long(), 1)
        return F.cross_entropy(30.0 * ((one_hot * phi) + ((1.0 - one_hot) * cosine)), label)

    return written(forward, rows(), labels(), a=linear(), weight=nn.Parameter(torch.randn(CLASSES, D)))


def batch_hard_triplets() -> Case:
    def forward(self: Any, x: Tensor, label: Tensor) -> Tensor:
        h = self.a(x)
        n = h.size(0)
        distance = torch.pow(h, 2).sum(dim=1, keepdim=True).expand(n, n)
        distance = distance + distance.t()
        distance.addmm_(h, h.t(), beta=1, alpha=-2)
        distance = distance.clamp(min=1e-12).sqrt()
        mask = label.expand(n, n).eq(label.expand(n, n).t())
        hard_positive, hard_negative = [], []
        for i in range(n):
            hard_positive.append(distance[i][mask[i]].max().unsqueeze(0))
            hard_negative.append(distance[i][mask[i] == 0].min().unsqueeze(0))
        near, far = torch.cat(hard_positive), torch.cat(hard_negative)
        return F.margin_ranking_loss(far, near, torch.ones_like(far), margin=0.3)

    return written(forward, rows(), torch.arange(ROWS) // 2, a=linear())


def two_views() -> Case:
    def forward(self: Any, one: Tensor, two: Tensor) -> Tensor:
        h = F.normalize(torch.cat([self.a(one), self.a(two)]), dim=1)
        similarity = h @ h.T
        n = len(one)
        diagonal = torch.eye(2 * n, dtype=torch.bool, device=h.device)
        label = (torch.arange(2 * n).unsqueeze(0) - torch.arange(2 * n).unsqueeze(1)).abs() == n
        label, similarity = label[~diagonal].view(2 * n, -1), similarity[~diagonal].view(2 * n, -1)
        positives = similarity[label].view(2 * n, -1)
        negatives = similarity[~label].view(2 * n, -1)
        logits = torch.cat([positives, negatives], dim=1) / 0.07
        return F.cross_entropy(logits, torch.zeros(2 * n, dtype=torch.long))

    return written(forward, rows(), rows(), a=nn.Sequential(linear(), nn.BatchNorm1d(D), nn.ReLU(), linear()))


def variance_and_covariance() -> Case:
    def forward(self: Any, one: Tensor, two: Tensor) -> Tensor:
        x, y = self.a(one), self.a(two)
        near = F.mse_loss(x, y)
        x, y = x - x.mean(dim=0), y - y.mean(dim=0)
        spread = (F.relu(1 - torch.sqrt(x.var(dim=0) + 1e-4)).mean() + F.relu(1 - (y.var(0) + 1e-4).sqrt()).mean()) / 2
        covariance = (x.T @ x) / (len(x) - 1)
        mixed = covariance.flatten()[:-1].view(D - 1, D + 1)[:, 1:].flatten().pow_(2).sum().div(D)
        return 25 * near + 25 * spread + mixed

    return written(forward, rows(), rows(), a=nn.Sequential(linear(), nn.ReLU(), linear()))


def self_distillation_with_center() -> Case:
    def forward(self: Any, globals_: Tensor, locals_: Tensor) -> Tensor:
        student = self.student(torch.cat([globals_, locals_]).flatten(0, 1)) / 0.1
        with torch.no_grad():
            for p, old in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                old.data.mul_(0.996).add_((1 - 0.996) * p.detach().data)
            raw = self.teacher(globals_.flatten(0, 1))
            teacher = F.softmax((raw - self.center) / 0.04, dim=-1).chunk(2)
        total, count = 0.0, 0
        for i, wanted in enumerate(teacher):
            for j, given in enumerate(student.chunk(4)):
                if i == j:
                    continue
                total = total + torch.sum(-wanted * F.log_softmax(given, dim=-1), dim=-1).mean()
                count += 1
        self.center.mul_(0.9).add_(raw.mean(0, keepdim=True), alpha=0.1)
        return total / count  # type: ignore[return-value]

    teacher = linear().requires_grad_(False)
    crops = torch.randn(2, ROWS, D), torch.randn(2, ROWS, D)
    return written(forward, *crops, student=linear(), teacher=teacher, center=torch.zeros(1, D))


def balanced_assignments() -> Case:
    def forward(self: Any, one: Tensor, two: Tensor) -> Tensor:
        scores = [self.prototypes(F.normalize(self.a(x), dim=1)) for x in (one, two)]
        loss = 0.0
        for at, score in enumerate(scores):
            with torch.no_grad():
                q = torch.exp(score.detach() / 0.05).t()
                q /= torch.sum(q)
                for _ in range(3):
                    q /= torch.sum(q, dim=1, keepdim=True)
                    q /= q.shape[0]
                    q /= torch.sum(q, dim=0, keepdim=True)
                    q /= q.shape[1]
                q = (q * q.shape[1]).t()
            loss -= torch.mean(torch.sum(q * F.log_softmax(scores[1 - at] / 0.1, dim=1), dim=1))
        return loss / 2  # type: ignore[return-value]

    return written(forward, rows(), rows(), a=linear(), prototypes=nn.Linear(D, 6, bias=False))


def decoupled_distillation() -> Case:
    def forward(self: Any, x: Tensor, target: Tensor) -> Tensor:
        student = self.student(x)
        with torch.no_grad():
            teacher = self.teacher(x)
        truth = torch.zeros_like(student).scatter_(1, target.unsqueeze(1), 1).bool()
        other = torch.ones_like(student).scatter_(1, target.unsqueeze(1), 0).bool()

        def two(p: Tensor) -> Tensor:
            return torch.cat([(p * truth).sum(1, keepdims=True), (p * other).sum(1, keepdims=True)], 1)

        of_target = F.kl_div(
            torch.log(two(F.softmax(student / 4, 1))), two(F.softmax(teacher / 4, 1)), size_average=False
        )
        of_others = F.kl_div(
            F.log_softmax(student / 4 - 1000.0 * truth, dim=1),
            F.softmax(teacher / 4 - 1000.0 * truth, dim=1), size_average=False,
        )  # fmt: skip
        return F.cross_entropy(student, target) + (of_target + 8.0 * of_others) * 16 / target.shape[0]

    teacher = nn.Linear(D, CLASSES).requires_grad_(False)
    return written(forward, rows(), labels(), student=nn.Linear(D, CLASSES), teacher=teacher)


def relational_distillation() -> Case:
    def distances(e: Tensor) -> Tensor:
        square = e.pow(2).sum(dim=1)
        found = (square.unsqueeze(1) + square.unsqueeze(0) - 2 * (e @ e.t())).clamp(min=1e-12).sqrt()
        found = found.clone()
        found[range(len(e)), range(len(e))] = 0
        return found

    def forward(self: Any, x: Tensor) -> Tensor:
        student = self.student(x)
        with torch.no_grad():
            t = distances(self.teacher(x))
            t = t / t[t > 0].mean()
        d = distances(student)
        d = d / d[d > 0].mean()
        return F.smooth_l1_loss(d, t)

    return written(forward, student=linear(), teacher=linear().requires_grad_(False))


def prototypes_of_an_episode() -> Case:
    def forward(self: Any, x: Tensor, target: Tensor) -> Any:
        h = self.a(x)
        classes = torch.unique(target)
        support = [target.eq(c).nonzero()[:2].squeeze(1) for c in classes]
        prototypes = torch.stack([h[at].mean(0) for at in support])
        query = torch.stack([target.eq(c).nonzero()[2:] for c in classes]).view(-1)
        distances = torch.cdist(h[query], prototypes) ** 2
        logp = F.log_softmax(-distances, dim=1).view(len(classes), -1, len(classes))
        wanted = torch.arange(len(classes)).view(-1, 1, 1).expand(len(classes), logp.size(1), 1)
        loss = -logp.gather(2, wanted).squeeze().view(-1).mean()
        return loss, logp.argmax(2).eq(wanted.squeeze(-1)).float().mean()

    return written(forward, rows(), torch.arange(ROWS) % 2, a=linear())


# Recommendation


def pairwise_ranking() -> Case:
    def forward(self: Any, user: Tensor, item: Tensor) -> Tensor:
        negative = torch.randint(0, VOCAB, item.shape, device=item.device)
        u, i, j = self.users(user), self.items(item), self.items(negative)
        loss = -F.logsigmoid((u * i).sum(-1) - (u * j).sum(-1)).mean()
        return loss + 1e-4 * (u.norm(2).pow(2) + i.norm(2).pow(2) + j.norm(2).pow(2)) / float(len(user))

    return written(forward, labels(20), labels(VOCAB), users=nn.Embedding(20, D), items=nn.Embedding(VOCAB, D))


def propagated_embeddings() -> Case:
    def forward(self: Any, user: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        every = torch.cat([self.users.weight, self.items.weight])
        layers = [every]
        for _ in range(2):
            every = torch.sparse.mm(self.graph, every)
            layers.append(every)
        users, items = torch.split(torch.stack(layers, dim=1).mean(dim=1), [20, 30])
        scores = (users[user] * items[positive]).sum(1), (users[user] * items[negative]).sum(1)
        return F.softplus(scores[1] - scores[0]).mean()

    at = torch.stack([torch.randint(20, (60,)), 20 + torch.randint(30, (60,))])
    at = torch.cat([at, at.flip(0)], 1)
    graph = torch.sparse_coo_tensor(at, torch.full((120,), 0.2), (50, 50)).coalesce()
    args = labels(20), labels(30), labels(30)
    return written(forward, *args, users=nn.Embedding(20, D), items=nn.Embedding(30, D), graph=graph)


def interest_in_a_history() -> Case:
    def forward(self: Any, item: Tensor, history: Tensor, length: Tensor, label: Tensor) -> Tensor:
        query, keys = self.items(item), self.items(history)
        queries = query.repeat(1, keys.shape[1]).view(-1, keys.shape[1], keys.shape[2])
        outputs = self.score(torch.cat([queries, keys, queries - keys, queries * keys], dim=-1)).transpose(1, 2)
        mask = torch.arange(keys.shape[1], device=keys.device).repeat(len(keys), 1) < length.view(-1, 1)
        outputs = torch.where(mask.unsqueeze(1), outputs, torch.ones_like(outputs) * (-(2**32) + 1))
        interest = torch.matmul(F.softmax(outputs / keys.shape[-1] ** 0.5, dim=-1), keys).squeeze(1)
        return F.binary_cross_entropy_with_logits(self.out(torch.cat([query, interest], 1)).squeeze(), label)

    score = nn.Sequential(nn.Linear(4 * D, 16), nn.Sigmoid(), nn.Linear(16, 1))
    args = labels(VOCAB), tokens(), torch.randint(1, LENGTH, (ROWS,)), torch.randint(2, (ROWS,)).float()
    return written(forward, *args, items=nn.Embedding(VOCAB, D), score=score, out=nn.Linear(2 * D, 1))


def sequences_of_items() -> Case:
    """SASRec, whose batches are arrays of numpy."""

    def forward(self: Any, seen: np.ndarray, positive: np.ndarray, negative: np.ndarray) -> Tensor:
        x = self.items(torch.LongTensor(seen)) * D**0.5
        places = np.tile(np.array(range(seen.shape[1])), [seen.shape[0], 1])
        x = x + self.places(torch.LongTensor(places))
        timeline = torch.BoolTensor(seen == 0)
        x = x * ~timeline.unsqueeze(-1)
        causal = ~torch.tril(torch.ones((x.shape[1], x.shape[1]), dtype=torch.bool))
        h, _ = self.attention(self.norm(x), x, x, attn_mask=causal)
        h = self.norm(h + x) * ~timeline.unsqueeze(-1)
        good = (h * self.items(torch.LongTensor(positive))).sum(-1)
        bad = (h * self.items(torch.LongTensor(negative))).sum(-1)
        at = np.where(positive != 0)
        loss = F.binary_cross_entropy_with_logits(good[at], torch.ones_like(good)[at])
        return loss + F.binary_cross_entropy_with_logits(bad[at], torch.zeros_like(bad)[at])

    seen, positive, negative = (tokens(6).numpy() for _ in range(3))
    return written(
        forward, seen, positive, negative, items=nn.Embedding(VOCAB, D, padding_idx=0), places=nn.Embedding(6, D),
        attention=nn.MultiheadAttention(D, 2, batch_first=True), norm=nn.LayerNorm(D),
    )  # fmt: skip


def corrected_softmax() -> Case:
    def forward(self: Any, query: Tensor, item: Tensor, frequency: Tensor) -> Tensor:
        q, i = F.normalize(self.query(query), dim=-1), F.normalize(self.items(item), dim=-1)
        scores = q @ i.t() / 0.1 - torch.log(frequency).unsqueeze(0)
        same = item.unsqueeze(0) == item.unsqueeze(1)
        scores = scores.masked_fill(same & ~torch.eye(len(item), dtype=torch.bool), torch.finfo(scores.dtype).min)
        return F.cross_entropy(scores, torch.arange(len(item), device=scores.device))

    args = states(1).squeeze(1)[:, :D], labels(10), torch.rand(ROWS) + 0.1
    return written(forward, *args, query=linear(), items=nn.Embedding(10, D))


IDIOMS: dict[str, Callable[[], Case]] = {
    "a Lovasz softmax": lovasz_softmax,
    "the hardest pixels by a threshold": online_hard_pixels,
    "a focal Tversky loss": tversky_focal,
    "a loss by distance maps of scipy": distance_map_loss,
    "a focal loss of heat maps": heat_map_loss,
    "a regression gathered at centers": gathered_regression,
    "priors matched with boxes": matched_priors,
    "an additive angular margin": additive_margin,
    "triplets by the hardest of a batch": batch_hard_triplets,
    "two views without a diagonal": two_views,
    "variance and covariance of a batch": variance_and_covariance,
    "self-distillation with a center": self_distillation_with_center,
    "balanced assignments": balanced_assignments,
    "decoupled distillation": decoupled_distillation,
    "relational distillation": relational_distillation,
    "prototypes of an episode": prototypes_of_an_episode,
    "pairwise ranking with drawn negatives": pairwise_ranking,
    "embeddings propagated over a graph": propagated_embeddings,
    "interest in a history": interest_in_a_history,
    "a batch of numpy arrays": sequences_of_items,
    "a softmax corrected by frequency": corrected_softmax,
}
MODELS = {f"plain: {name}": build for name, build in IDIOMS.items()}
