"""Functions of a forward that run on the host: SpecAugment, mixup, Hungarian matching, `autopart.host_function`."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import dist
import numpy as np
import pytest
import sympy.core.random as sympy_random
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC, WhisperConfig, WhisperForConditionalGeneration

import autopart
from autopart.errors import Refusal, TraceError
from autopart.tracing.python.python_random import OwnGenerators

MESHES = ["dp2", "tp2", "pp2"]
ROWS = 8


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def run(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Matched(TwoLayers):
    """Boxes that are matched to targets as in DETR."""

    @torch.no_grad()
    def match(self, boxes: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
        cost = torch.cdist(boxes.flatten(0, 1), target.flatten(0, 1), p=1).view(*boxes.shape[:2], -1).cpu()
        costs = cost.split([len(one) for one in target], -1)
        pairs = [linear_sum_assignment(one[i]) for i, one in enumerate(costs)]
        return [(torch.as_tensor(i, dtype=torch.int64), torch.as_tensor(j, dtype=torch.int64)) for i, j in pairs]

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        boxes = self.run(x).sigmoid()
        pairs = self.match(boxes, target)
        rows = torch.cat([torch.full_like(i, row) for row, (i, _) in enumerate(pairs)])
        chosen = torch.cat([one[j] for one, (_, j) in zip(target, pairs, strict=True)])
        return F.l1_loss(boxes[rows, torch.cat([i for i, _ in pairs])], chosen)


class MatchedInNumpy(Matched):
    @torch.no_grad()
    def match(self, boxes: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        for box, one in zip(boxes, target, strict=True):
            i, j = linear_sum_assignment(torch.cdist(box, one).detach().cpu().numpy())
            pairs.append((torch.from_numpy(i), torch.from_numpy(j)))
        return pairs


class Mixup(TwoLayers):
    def mixed(self, x: Tensor, y: Tensor, share: Any, order: Any) -> Tensor:
        z = self.run(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(z, y) + (1 - share) * F.cross_entropy(z, y[order])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.mixed(x, y, np.random.beta(1.0, 1.0), torch.from_numpy(np.random.permutation(len(x))))


class MixupInPython(Mixup):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.mixed(x, y, random.betavariate(1.0, 1.0), random.sample(range(len(x)), len(x)))


@autopart.host_function
def box(size: int) -> tuple[Tensor, float]:
    mask, begin = np.ones(size, dtype=np.float32), np.random.randint(size)
    mask[begin : begin + 3] = 0
    return torch.from_numpy(mask), float(mask.mean())


class Cutmix(Mixup):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask, share = box(x.shape[1])
        z = self.run(x * mask.to(x) + x.flip(0) * (1 - mask.to(x)))
        return share * F.cross_entropy(z, y) + (1 - share) * F.cross_entropy(z, y.flip(0))


@autopart.host_function(like=lambda lengths, size: torch.empty(len(lengths), size, dtype=torch.bool))
def masked_of(lengths: Tensor, size: int) -> Tensor:
    rows = [np.arange(size) < np.random.randint(1, int(length) + 1) for length in lengths]
    return torch.from_numpy(np.stack(rows))


class Lengths(TwoLayers):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.run(x * masked_of(lengths, x.shape[1])).square().mean()


class Drawn(TwoLayers):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.run(x) if random.randint(0, 9) < 5 else self.run(x.flip(0))
        return F.cross_entropy(z, y) * float(np.random.rand())


class ByNumpy(TwoLayers):
    """Arrays of activations, computed with in the forward itself."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.run(x)
        scores = z.detach().cpu().numpy() * 2 - 1
        order = torch.from_numpy(np.argsort(-scores, axis=1))
        weight = torch.from_numpy((scores > 0).astype(np.int64).sum(1)).to(z)
        return (z.gather(1, order) * torch.arange(4.0).to(z)).sum(1).mul(weight).mean() + F.cross_entropy(z, y)


def aligned() -> nn.Module:
    def path_of(costs: np.ndarray) -> np.ndarray:
        path = np.zeros_like(costs, dtype=np.int64)
        for row, cost in enumerate(costs):
            best = 0
            for place in range(1, len(cost)):
                if cost[place] < cost[best]:
                    best = place
            path[row, best] = 1
        return path

    class Aligned(TwoLayers):
        """A loop of Python over the values of activations, in a function of a closure."""

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = self.run(x)
            with torch.no_grad():
                path = torch.from_numpy(path_of(z.cpu().numpy())).to(z)
            return (z * path).square().mean() + F.cross_entropy(z, y)

    return Aligned()


class MatchedLocally(Matched):
    @torch.no_grad()
    def match(self, boxes: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
        from scipy import optimize

        pairs = [optimize.linear_sum_assignment(torch.cdist(box, one)) for box, one in zip(boxes, target, strict=True)]
        return [(torch.from_numpy(i), torch.from_numpy(j)) for i, j in pairs]


class Crop(TwoLayers):
    """A slice that begins at a drawn number."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        begin = random.randint(0, 2)
        return F.cross_entropy(self.run(F.pad(x, (1, 2))[:, begin : begin + 8]), y)


class WrittenCrop(TwoLayers):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        begin, h = torch.randint(3, ()).item(), self.run(x)
        h[:, begin : begin + 2].mul_(2)
        return F.cross_entropy(h, y)


def boxes() -> tuple[Tensor, ...]:
    return torch.randn(4, 6, 8), torch.rand(4, 3, 4)


def labelled() -> tuple[Tensor, ...]:
    return torch.randn(ROWS, 8), torch.randint(4, (ROWS,))


def lengths() -> tuple[Tensor, ...]:
    return torch.randn(ROWS, 8), torch.randint(1, 9, (ROWS,))


CASES = [(Matched, boxes), (MatchedInNumpy, boxes), (Mixup, labelled), (MixupInPython, labelled), (Cutmix, labelled),
         (Lengths, lengths), (Drawn, labelled), (ByNumpy, labelled), (aligned, labelled),
         (MatchedLocally, boxes), (Crop, labelled)]  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("kind", "call"), CASES, ids=[kind.__name__ for kind, _ in CASES])
def test_equals_the_model(kind: Any, call: Any, mesh: str) -> None:
    torch.manual_seed(0)
    run = autopart.verify(kind(), mesh, example_args=call())
    assert run.ok, run


def wav2vec2(**options: Any) -> Any:
    options = {
        "mask_time_prob": 0.3,
        "mask_time_length": 2,
        "mask_feature_prob": 0.2,
        "mask_feature_length": 2,
    } | options
    return Wav2Vec2ForCTC(Wav2Vec2Config(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        conv_dim=(8, 8), conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, **options,
    )).train()  # fmt: skip


def speech() -> dict[str, Tensor]:
    mask = torch.ones(4, 400, dtype=torch.long)
    mask[1, 300:] = 0
    return {"input_values": torch.randn(4, 400), "attention_mask": mask, "labels": torch.randint(1, 16, (4, 5))}


@pytest.mark.large
@pytest.mark.parametrize("mesh", MESHES)
def test_spec_augment_of_wav2vec2(mesh: str) -> None:
    torch.manual_seed(0)
    run = autopart.verify(wav2vec2(), mesh, example_kwargs=speech(), rng="exact")
    assert run.ok, run


@pytest.mark.large
@pytest.mark.parametrize("mesh", MESHES)
def test_spec_augment_of_whisper(mesh: str) -> None:
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=20,
        max_target_positions=16, apply_spec_augment=True, mask_time_prob=0.3, mask_time_length=2,
        mask_feature_prob=0.3, mask_feature_length=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, dropout=0.0,
    )).train()  # fmt: skip
    call = {"input_features": torch.randn(4, 8, 40), "labels": torch.randint(3, 40, (4, 6))}
    run = autopart.verify(model, mesh, example_kwargs=call)
    assert run.ok, run


class Augmented(TwoLayers):
    def __init__(self, augment: Any) -> None:
        super().__init__()
        self.augment = augment

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.augment(x)).square().mean()


def shuffle_first(order: list[int]) -> int:
    random.shuffle(order)
    return order[0]


def by_changed_list(x: Tensor) -> Tensor:
    order = list(range(len(x)))
    shuffle_first(order)
    return x[order]


def of_varying_size(x: Tensor) -> Tensor:
    return torch.from_numpy(np.zeros(random.randrange(1, 9)))


def drawn_of(x: Tensor) -> Tensor:
    return torch.from_numpy(np.random.rand(*x.shape))


marked_draw, marked_size = autopart.host_function(drawn_of), autopart.host_function(of_varying_size)
REFUSED = {
    "a list that is changed": (by_changed_list, Refusal.RANDOM),
    "results of different sizes": (lambda x: x * marked_size(x).sum(), Refusal.NUMPY),
}


class DrawsOfActivations(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return (self.run(x) * marked_draw(self.run(x))).sum()


@pytest.mark.parametrize("name", list(REFUSED))
def test_refuses(name: str) -> None:
    augment, refusal = REFUSED[name]
    with pytest.raises(TraceError, match=r"autopart\.host_function") as caught:
        autopart.plan(Augmented(augment), "dp2", example_args=(torch.randn(ROWS, 8),))
    assert caught.value.refusal is refusal


def test_a_write_to_a_slice_at_a_drawn_number_reaches_the_tensor() -> None:
    assert autopart.verify(WrittenCrop(), "dp2", example_args=labelled()).ok


def test_refuses_draws_of_activations() -> None:
    with pytest.raises(TraceError, match="reads activations and draws random numbers"):
        autopart.plan(DrawsOfActivations(), "dp2", example_args=(torch.randn(ROWS, 8),))


def _train(kind: Any, call: tuple[Tensor, ...], mesh: str | None, seed: int) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model = kind().double()
    if mesh is not None:
        model = autopart.parallelize(model, mesh, example_args=call)
    np.random.seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        loss = model.step(*call) if mesh is not None else model(*call)
        if mesh is None:
            loss.backward()
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    state = model.full_state_dict() if mesh is not None else model.state_dict()
    return losses, [value.detach().clone() for value in state.values()]


def _trained(meshes: list[str]) -> list[tuple[float, float]]:
    """Train on two ranks with different states of numpy's generator, and return the distances to one process."""
    torch.manual_seed(1)
    calls = {
        kind: tuple(t.double() if t.is_floating_point() else t for t in call())
        for kind, call in CASES if kind not in (MixupInPython, Drawn, Crop)
    }  # fmt: skip
    distances = []
    for kind, call in calls.items():
        expected = _train(kind, call, None, seed=7)
        for mesh in meshes:
            losses, weights = _train(kind, call, mesh, seed=7 + torch.distributed.get_rank())
            distances.append((
                max(abs(a - b) for a, b in zip(losses, expected[0], strict=True)),
                max(float((a - b).abs().max()) for a, b in zip(weights, expected[1], strict=True)),
            ))  # fmt: skip
    return distances


@pytest.mark.large
def test_trains_as_one_process_with_the_first_ranks_draws() -> None:
    for distances in dist.run_ranks(_trained, 2, MESHES, timeout_s=300):
        assert max(map(max, distances)) < 1e-10, distances


GLOBAL = np.random.RandomState(0)


class OwnGenerator(TwoLayers):
    """Noise from a generator that is not numpy's or Python's global one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.rng, self.python = kind, np.random.default_rng(0), random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        scale = {"attribute": lambda: self.rng.random(), "python": self.python.random, "global": GLOBAL.rand}[self.kind]
        return (self.run(x) * scale()).square().mean()


@pytest.mark.whole
@pytest.mark.parametrize(("kind", "name"), [("attribute", "self.rng"), ("python", "self.python"), ("global", "GLOBAL")])
def test_a_draw_from_a_generator_of_the_model_is_refused(kind: str, name: str) -> None:
    model = OwnGenerator(kind).double()
    before = model.rng.bit_generator.state, model.python.getstate(), GLOBAL.get_state()[1].tolist()
    with pytest.raises(TraceError) as caught:
        autopart.plan(model, "dp2", example_kwargs={"x": torch.randn(ROWS, 8).double()})
    assert caught.value.refusal is Refusal.RANDOM and f"{name} in its forward" in str(caught.value)
    assert "autopart.host_function" in str(caught.value)
    assert before == (model.rng.bit_generator.state, model.python.getstate(), GLOBAL.get_state()[1].tolist())


def _closure(generator: np.random.Generator) -> Callable[[], float]:
    return lambda: generator.random()


class HiddenGenerator(TwoLayers):
    """Noise from a generator that no module has as an attribute."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return (self.run(x) * self.draw()).square().mean()


class Sampler:
    def __init__(self) -> None:
        self.source = random.Random(0)

    def draw(self) -> float:
        return self.source.gauss(1.0, 0.1)


HIDDEN = {
    "closure": lambda: _closure(np.random.default_rng(0)),
    "list": lambda: [np.random.RandomState(0)][0].rand,
    "dict": lambda: partial(lambda held: held["noise"].normal(), {"noise": np.random.Generator(np.random.Philox(0))}),
    "object": lambda: Sampler().draw,
    "unseeded": lambda: lambda: np.random.default_rng().random(),
    "system": lambda: random.SystemRandom().random,
    "made": lambda: lambda: random.Random().random(),
}


@pytest.mark.whole
@pytest.mark.parametrize("where", HIDDEN)
def test_a_draw_from_a_hidden_generator_is_refused(where: str) -> None:
    with pytest.raises(TraceError, match=r"draws random numbers from .* in its forward") as caught:
        autopart.plan(
            HiddenGenerator(HIDDEN[where]()).double(), "dp2", example_kwargs={"x": torch.randn(ROWS, 8).double()}
        )
    assert caught.value.refusal is Refusal.RANDOM


class UnusedDraw(OwnGenerator):
    def forward(self, x: Tensor) -> Tensor:
        self.rng.random()
        return self.run(x).square().mean()


def test_a_draw_that_changes_nothing_is_no_matter() -> None:
    assert autopart.verify(UnusedDraw("").double(), "dp2", example_kwargs={"x": torch.randn(ROWS, 8).double()}).ok


def test_the_generator_of_symbolic_sizes_is_not_the_models():
    """Torch draws from it in every trace with symbols, which would need more traces."""
    generators = OwnGenerators(nn.Linear(2, 2)).generators
    assert not any(one is sympy_random._assumptions_rng for one in generators)
