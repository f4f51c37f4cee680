"""Models that draw random numbers in training: the zoo's with dropout, and one small module per kind of draw."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

P = 0.3


# --- models --------------------------------------------------------------------------------------------------------


def gpt2(**sizes):
    """Dropout of embeddings, residuals and attention weights."""
    return with_dropout(*zoo.gpt2(**sizes))


def t5(num_layers=1, **sizes):
    return with_dropout(*zoo.t5(num_layers=num_layers, **sizes))


def vit(num_layers=2, hidden=32, heads=4, classes=8, rows=8):
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": num_layers, "hidden_size": hidden, "intermediate_size": 2 * hidden}
    image = {"image_size": 8, "patch_size": 4}
    rates = {"hidden_dropout_prob": P, "attention_probs_dropout_prob": P}
    config = ViTConfig(**sizes, **image, **rates, num_attention_heads=heads, num_labels=classes)
    model = zoo._finish(ViTForImageClassification(config))
    pixels, labels = torch.randn(rows, 3, 8, 8, dtype=torch.float64), torch.randint(classes, (rows,))
    return model, {"pixel_values": pixels, "labels": labels}


def conv_net(channels=8, classes=8, rows=8):
    torch.manual_seed(0)
    image, target = torch.randn(rows, 3, 8, 8, dtype=torch.float64), torch.randint(classes, (rows,))
    return DroppingConvNet(channels, classes).double(), {"image": image, "target": target}


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016), written as in timm: a whole residual branch is dropped for a row."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - P)
        return x * keep.div_(1 - P)


class DroppingConvNet(nn.Module):
    """Dropout of channels, and residual blocks with stochastic depth."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(3))
        self.drop, self.path, self.norm = nn.Dropout2d(P), DropPath(), nn.GroupNorm(2, channels)
        self.head = nn.Linear(channels * 16, classes)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x = self.stem(image)
        for block in self.blocks:
            x = x + self.path(self.drop(F.relu(block(x))))
        return F.cross_entropy(self.head(F.max_pool2d(self.norm(x), 2).flatten(1)), target)


MODELS = {build.__name__: build for build in (gpt2, t5, vit, conv_net)}


def with_dropout(model: nn.Module, batch: dict) -> tuple[nn.Module, dict]:
    """Every dropout of a model of the zoo, which has none, switched on."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = P
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = P
    return model, batch


# --- one draw each -------------------------------------------------------------------------------------------------


class Around(nn.Module):
    """A draw between two linear layers, twice, so that it is cut over any axis: `draw` gets a value [8, 4, 16]."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw, self.steps = draw, nn.ModuleList(Step() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = x + step(x, self.draw)
        return x.pow(2).mean()


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(P)

    def forward(self, x: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
        return self.down(self.drop(torch.relu(draw(self.up(x)))))


def around(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Around(DRAWS[name]), {"x": torch.randn(8, 4, 8, dtype=torch.float64)}


def _heads(h: Tensor) -> Tensor:
    return h.view(8, 4, 4, 4).transpose(1, 2)


def _joined(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).reshape(8, 4, 16)


def _in_place(h: Tensor) -> Tensor:
    row = torch.empty(16).exponential_(2.0) + torch.empty(16).cauchy_().clamp(-2, 2) + torch.empty(16).random_(5)
    return h + torch.empty_like(h).uniform_(-1, 1) + row + torch.empty(16).log_normal_() + torch.empty(16).geometric_(P)


def _unused(h: Tensor) -> Tensor:
    F.dropout(h, P)
    torch.rand(3)
    return h


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, P),
    "dropout of a transposed value": lambda h: F.dropout(h.transpose(0, 1), P).transpose(0, 1),
    "dropout of its copy": lambda h: F.dropout(h.transpose(0, 1).contiguous(), P).transpose(0, 1),
    "dropout of rows in sections": lambda h: (
        F.dropout(h.transpose(0, 1).reshape(32, 16), P).view(4, 8, 16).transpose(0, 1)
    ),
    "dropout of merged rows": lambda h: F.dropout(h.reshape(32, 16), P).view(8, 4, 16),
    "dropout of heads": lambda h: F.dropout(h.reshape(32, 4, 4).transpose(1, 2), P).transpose(1, 2).reshape(8, 4, 16),
    "draws that nothing reads": _unused,
    "dropout1d": lambda h: F.dropout1d(h, P),
    "dropout2d": lambda h: F.dropout2d(h.view(8, 4, 4, 4), P).reshape(8, 4, 16),
    "alpha dropout": lambda h: F.alpha_dropout(h, P, True),
    "feature alpha dropout": lambda h: F.feature_alpha_dropout(h, P, True),
    "native dropout": lambda h: sum(torch.native_dropout(h, P, True)),
    "stochastic depth": DropPath(),
    "stochastic depth by rand": lambda h: h / 0.7 * torch.floor(0.7 + torch.rand((h.shape[0], 1, 1), dtype=h.dtype)),
    "rand_like and randn_like": lambda h: h * torch.rand_like(h) + torch.randn_like(h.transpose(0, 1)).transpose(0, 1),
    "no input": lambda h: h * torch.randn(16) + torch.randint(0, 5, (16,)) + torch.randperm(16) + torch.rand(8, 1, 1),
    "in place": _in_place,
    "gumbel softmax": lambda h: h + F.gumbel_softmax(h),
    "normal": lambda h: h + torch.normal(h, 0.5) + torch.normal(h, h.abs() + 1) + torch.normal(2.0, h.abs()),
    "reparametrised": lambda h: torch.distributions.Normal(h, h.abs() + 1, validate_args=False).rsample(),
    "bernoulli of the model's values": lambda h: h * torch.bernoulli(torch.sigmoid(h)),
    "bernoulli in place": lambda h: h * torch.empty_like(h).bernoulli_(torch.sigmoid(h)),
    "multinomial": lambda h: h + torch.multinomial(torch.softmax(h[:, 0], -1), 1).unsqueeze(1),
    "attention": lambda h: _joined(F.scaled_dot_product_attention(*[_heads(h)] * 3, dropout_p=P)),
    "causal attention": lambda h: _joined(
        F.scaled_dot_product_attention(*[_heads(h)] * 3, dropout_p=P, is_causal=True)
    ),
    "attention of one head": lambda h: F.scaled_dot_product_attention(h, h, h, dropout_p=P),
    "grouped-query attention": lambda h: _joined(
        F.scaled_dot_product_attention(_heads(h), *[_heads(h)[:, :2]] * 2, dropout_p=P, enable_gqa=True)
    ),
}
"""What is done to a value [8, 4, 16] of the model, by name."""


class Recurrent(nn.Module):
    """Recurrent layers with dropout between them."""

    def __init__(self, kind: type, **options) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)
        self.layers = kind(8, 8, num_layers=3, dropout=P, **options)

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.layers(self.inside(x))
        return out.pow(2).mean() + sum(s.sin().mean() for s in (state if isinstance(state, tuple) else (state,)))


RECURRENT = {
    "lstm": lambda: Recurrent(nn.LSTM, batch_first=True),
    "lstm in both directions": lambda: Recurrent(nn.LSTM, bidirectional=True),
    "gru": lambda: Recurrent(nn.GRU, batch_first=True, bias=False),
    "rnn": lambda: Recurrent(nn.RNN),
}


def trained(model, step, batch, weight_decay=0.1):
    """The losses of two steps of AdamW. `step`: of a partitioned module, or a call of the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=weight_decay)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        out = step(**batch)
        loss = out if isinstance(out, torch.Tensor) else out.loss
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses
