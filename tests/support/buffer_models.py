"""Models that write buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

ROWS, SIZE = 8, 8


class Images(nn.Module):
    """Convolutions and a linear layer, each with a batch norm of its kind."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, SIZE, 3, padding=1), nn.BatchNorm2d(SIZE, **options)
        self.conv2, self.norm2 = nn.Conv2d(SIZE, SIZE, 3, padding=1, bias=False), nn.BatchNorm2d(SIZE, **options)
        self.head, self.norm3 = nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE, **options)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        h = F.relu(self.norm2(self.conv2(h))) + h
        return F.cross_entropy(self.norm3(self.head(h.mean((2, 3)))), y)


class Synchronised(Images):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.SyncBatchNorm(SIZE) for _ in range(2))


def instance_norms(**options: Any) -> nn.Module:
    """Running statistics of instance norms."""
    model = Images()
    model.norm1, model.norm2 = (nn.InstanceNorm2d(SIZE, affine=True, track_running_stats=True, **options) for _ in "12")
    return model


class Base(nn.Module):
    """Two linear layers, and buffers; subclasses write them in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)
        self.register_buffer("mean", torch.zeros(2 * SIZE))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.randn(4, 2 * SIZE))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(self.between(torch.tanh(self.up(x)))), y)

    def between(self, h: Tensor) -> Tensor:
        return h


class MovingMean(Base):
    """A moving average that is used after it has moved; it moves in training only."""

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
                self.count += 1
        return h - self.mean * torch.rsqrt(1.0 + self.count)


class Assigned(Base):
    def between(self, h: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


class WithGradient(Base):
    """A buffer that is given a value which has a gradient: it keeps the value alone."""

    def between(self, h: Tensor) -> Tensor:
        kept = h.mean(0)
        self.mean.data.copy_(kept)
        return h - self.mean + kept


class Codebook(Base):
    """Vector quantisation with codes that follow their members (van den Oord et al. 2017, appendix A.1)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.ones(4))
        self.register_buffer("sums", self.table.clone())

    def between(self, h: Tensor) -> Tensor:
        codes = self.table
        distances = h.pow(2).sum(1, keepdim=True) - 2 * h @ codes.t() + codes.pow(2).sum(1)
        chosen = F.one_hot(distances.argmin(1), 4).to(h.dtype)
        quantised = chosen @ codes
        if self.training:
            with torch.no_grad():
                self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(chosen.t() @ h, alpha=0.1)
                self.table.copy_(self.sums / self.sizes[:, None])
        return h + (quantised - h).detach()


class Cache(Base):
    """A cache with a place for each row, of which some rows are written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(ROWS, 2 * SIZE))
        self.register_buffer("seen", torch.zeros(ROWS, SIZE), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.cache[2:6] = torch.tanh(self.up(x))[2:6]
            self.seen.copy_(x)
        return super().forward(x, y) + self.cache.mean() * self.down.bias.sum()


class OfWeights(Base):
    """Averages of weights, as they are and as one of their views."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(2 * SIZE, SIZE))
        self.register_buffer("turned", torch.zeros(SIZE, 2 * SIZE))

    def between(self, h: Tensor) -> Tensor:
        self.average.copy_(0.9 * self.average + 0.1 * self.up.weight.detach())
        self.turned.copy_(self.up.weight.detach().t())
        return h + self.turned.sum(0)


class Shared(Base):
    """One batch norm under two names, called three times: each call starts from what the last one left."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2 * SIZE)
        self.again = self.norm

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h) + self.again(h * 2) + self.norm(h.abs())


class Spectral(Base):
    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.spectral_norm(self.up)
        self.down = nn.utils.spectral_norm(self.down)


class Returned(Base):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        before = self.mean + 0
        self.mean.add_(self.up(x).detach().sum(0))
        return {"loss": super().forward(x, y), "before": before, "mean": self.mean}


MODELS = {
    "batch norm": Images,
    "batch norm without weights": lambda: Images(affine=False),
    "batch norm without buffers": lambda: Images(track_running_stats=False),
    "cumulative batch norm": lambda: Images(momentum=None),
    "synchronised batch norm": Synchronised,
    "instance norm": lambda: instance_norms(momentum=0.3),
    **{cls.__name__: cls for cls in (
        MovingMean, Assigned, WithGradient, Codebook, Cache, OfWeights, Shared, Spectral, Returned)},
}  # fmt: skip


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model.train()


def batch(name: str, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if "norm" in name:
        image = 2 * torch.randn(ROWS, 3, 4, 4, generator=generator, dtype=torch.float64) + 1
        return {"x": image, "y": torch.randint(SIZE, (ROWS,), generator=generator)}
    x, y = torch.randn(2, ROWS, SIZE, generator=generator, dtype=torch.float64)
    return {"x": x.clone(), "y": y.clone()}
