"""Models whose loss compares samples of the batch, after most of the model has run on each sample alone."""

import torch
import zoo
from torch import nn
from torch.nn import functional

SIZE, ROWS = 12, 8


class Trunk(nn.Module):
    """Some layers that run on each sample alone; subclasses define the loss of the features."""

    def __init__(self, num_layers=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(num_layers))
        self.head = nn.Linear(SIZE, 6)

    def features(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class Contrastive(Trunk):
    """In-batch negatives: sample i of the queries belongs to sample i + 1. The temperature is learned."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        z = functional.normalize(self.head(self.features(x)), dim=-1)
        scores = z @ z.t() * self.temperature.exp()
        return functional.cross_entropy(scores, torch.arange(len(x), device=x.device).roll(1))


class TwoUses(Trunk):
    """A weight that the last stage uses for each sample, and that the loss uses with a statistic of the batch."""

    def forward(self, x):
        z = self.head(self.features(x))
        centred = (z - z.mean(0)).square().mean(0).sqrt()
        return z.square().mean() + (centred @ self.head.weight).square().sum()


class Early(Trunk):
    """An auxiliary loss of the batch, of the features of an early layer."""

    def forward(self, x):
        early = self.layers[0](x).softmax(-1)
        z = self.head(self.features(early))
        usage = early.mean(0)
        return z.square().mean() + (usage * usage.log()).sum()


class Hardest(Trunk):
    """The loss of the three samples that are worst, and all losses beside it."""

    def forward(self, x):
        losses = self.head(self.features(x)).square().mean(-1)
        return losses.topk(3).values.mean(), losses


class BatchNormed(Trunk):
    """A head with batch statistics, which writes buffers."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x):
        return self.out(self.norm(self.head(self.features(x)).tanh()).relu()).square().mean()


MODELS = {
    "contrastive": Contrastive,
    "two uses": TwoUses,
    "early": Early,
    "hardest": Hardest,
    "batch norm": BatchNormed,
}


def build(name):
    torch.manual_seed(0)
    return MODELS[name]().double(), {"x": torch.randn(ROWS, SIZE, dtype=torch.float64)}


def dpo(beta=0.5):
    """A GPT-2, its batch (chosen answers, then rejected ones), the loss of its pairs, and the target of the loss."""
    model, batch = zoo.gpt2(rows=ROWS)
    labels = batch.pop("labels")
    torch.manual_seed(1)
    target = {"labels": labels, "reference": torch.randn(ROWS, dtype=torch.float64)}

    def loss_fn(output, target):
        picked = (
            output.logits[:, :-1].log_softmax(-1).gather(-1, target["labels"][:, 1:, None].clamp_min(0)).squeeze(-1)
        )
        gain = picked.sum(-1) - target["reference"]
        chosen, rejected = gain.chunk(2)
        return -functional.logsigmoid(beta * (chosen - rejected)).mean()

    return model, batch, loss_fn, target
