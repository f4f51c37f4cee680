"""The numpy transcriptions of dp_sync's methods: their laws, and the behaviour that the literature reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial, reduce
from itertools import combinations
from typing import Any

import dp_sync_oracle as oracle
import numpy as np
import pytest
import torch
from dp_sync_oracle import SGD, Array, GradientKind, Params, Ranks
from hypothesis import given
from hypothesis import strategies as st

# ---- mixing matrices

MATRICES = {
    "complete": oracle.complete,
    "ring": oracle.ring,
    "grid": oracle.grid,
    "exponential": oracle.exponential,
    "one_peer 0": lambda n: oracle.one_peer(n, 0),
    "one_peer 1": lambda n: oracle.one_peer(n, 1),
    "one_peer 5": lambda n: oracle.one_peer(n, 5),
}
RHO = {  # |W - J|_2 for 4, 8, 16, 32, 64 and 256 ranks
    "ring": (0.3333, 0.8047, 0.9493, 0.9872, 0.9968, 0.9998),
    "exponential": (0.3333, 0.5, 0.6, 0.6667, 0.7143, 0.7778),
    "grid": (0.3333, 0.8536, 0.8686, 0.9658, 0.9677, 0.9921),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", MATRICES)
def test_mixing_is_doubly_stochastic(name):
    for n in [*range(1, 17), 30, 64]:
        weights = MATRICES[name](n)
        assert (weights >= 0).all()
        np.testing.assert_allclose(weights.sum(0), 1, atol=1e-14)
        np.testing.assert_allclose(weights.sum(1), 1, atol=1e-14)


@pytest.mark.whole
@pytest.mark.parametrize("name", RHO)
def test_spectral_values(name):
    sizes = (4, 8, 16, 32, 64, 256)
    measured = [np.linalg.norm(MATRICES[name](n) - oracle.complete(n), 2) for n in sizes]
    np.testing.assert_allclose(measured, RHO[name], atol=5.1e-5)


def one_peer_product(n: int) -> Array:
    return reduce(np.matmul, (oracle.one_peer(n, step) for step in range(oracle.num_powers(n))))


def test_one_peer_is_the_mean_after_log2_steps():
    for n in (2, 4, 8, 16, 32, 64, 128, 256):
        np.testing.assert_array_equal(one_peer_product(n), oracle.complete(n))
        assert (oracle.one_peer(n, 1) == oracle.one_peer(n, 1).T).all()
    for n, error in ((6, 0.083), (12, 0.042)):
        assert np.abs(one_peer_product(n) - oracle.complete(n)).max() == pytest.approx(error, abs=5e-4)


def test_small_matrices():
    np.testing.assert_array_equal(oracle.ring(2), [[0.5, 0.5], [0.5, 0.5]])
    np.testing.assert_allclose(oracle.exponential(4)[0], [1 / 3, 0, 1 / 3, 1 / 3])
    np.testing.assert_allclose(oracle.exponential(5)[1], [1 / 4, 1 / 4, 1 / 4, 0, 1 / 4])
    np.testing.assert_array_equal(oracle.one_peer(5, 1)[0], [0.5, 0, 0, 0.5, 0])
    np.testing.assert_array_equal(oracle.one_peer(4, 3)[0], [0.5, 0, 0.5, 0])
    np.testing.assert_allclose(
        oracle.grid(6)[:2], [[5 / 12, 1 / 4, 0, 1 / 3, 0, 0], [1 / 4, 1 / 4, 1 / 4, 0, 1 / 4, 0]]
    )


# ---- compressors

SIZES = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40)
RATIOS = st.floats(0.01, 1)


def squares(x: Array) -> float:
    return float((x * x).sum())


def test_compressors_by_hand():
    x = np.array([[1.0, -3.0, 0.0], [3.0, -2.0, 1.0]])
    np.testing.assert_array_equal(oracle.top_k(x, 1 / 6), [[0, -3, 0], [0, 0, 0]])
    np.testing.assert_array_equal(oracle.top_k(x, 4 / 6), [[1, -3, 0], [3, -2, 0]])
    np.testing.assert_array_equal(oracle.top_k(x, 0.001), oracle.top_k(x, 1 / 6))
    np.testing.assert_array_equal(oracle.top_k(x, 2.5 / 6), oracle.top_k(x, 2 / 6))  # round(2.5) is 2
    np.testing.assert_array_equal(oracle.rand_k(x, [1, 3, 5]), [[0, -6, 0], [6, 0, 2]])
    np.testing.assert_allclose(oracle.sign(x), 2 * np.array([[1, -1, 1], [1, -1, 1]]))
    draws = np.array([0.1, 0.5])
    np.testing.assert_allclose(oracle.qsgd(np.array([3.0, -4.0]), 4, draws), [5 * 3 / 4, -5 * 3 / 4])
    assert oracle.qsgd_levels(4) == 7
    for zero in (oracle.sign(0 * x), oracle.qsgd(0 * x, 7, x), oracle.top_k(0 * x, 0.5)):
        np.testing.assert_array_equal(zero, np.zeros((2, 3)))


@given(SIZES, RATIOS, st.integers(1, 4))
def test_top_k_is_contractive(values, ratio, rounds):
    x = np.array(values)
    kept = max(1, round(ratio * x.size)) / x.size
    assert squares(oracle.top_k(x, ratio) - x) <= (1 - kept) * squares(x) * (1 + 1e-12)
    sent = oracle.fcc(x, partial(oracle.top_k, ratio=ratio), rounds)
    assert squares(sent - x) <= (1 - kept) ** rounds * squares(x) * (1 + 1e-12) + 1e-30


@given(SIZES, st.integers(1, 5), st.integers(1, 4))
def test_fcc_of_top_k_is_top_of_more(values, k, rounds):
    x = np.array(values)
    sent = oracle.fcc(x, partial(oracle.top_k, ratio=k / x.size), rounds)
    np.testing.assert_array_equal(sent, oracle.top_k(x, rounds * k / x.size))


@given(SIZES, st.integers(1, 3))
def test_sign_contracts_by_its_density(values, rounds):
    x = np.array(values)
    norm = math.sqrt(squares(x))
    kept = 2 * np.abs(x).sum() / (math.sqrt(x.size) * norm) - 1 if norm > 1e-100 else 1
    np.testing.assert_allclose(squares(oracle.sign(x) - x), (1 - kept) * squares(x), rtol=1e-9, atol=1e-9 * squares(x))


def assert_unbiased(draws: Array, x: Array) -> None:
    """The mean of `draws`, one a row, is x within 5 standard errors."""
    error = np.abs(draws.mean(0) - x)
    assert (error <= 5 * draws.std(0) / math.sqrt(len(draws)) + 1e-12).all()


@pytest.mark.few
@pytest.mark.parametrize("levels", [1, 7, 127])
def test_qsgd_is_unbiased(levels):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(12)
    draws = np.array([oracle.qsgd(x, levels, u) for u in rng.random((100_000, 12))])
    assert_unbiased(draws, x)
    variance = squares(draws - x) / len(draws)
    assert variance <= min(x.size / levels**2, math.sqrt(x.size) / levels) * squares(x)
    with pytest.raises(AssertionError):
        assert_unbiased(draws * 1.1, x)


def test_rand_k_is_unbiased():
    x = np.random.default_rng(0).standard_normal(6)
    sent = np.array([oracle.rand_k(x, indices) for indices in combinations(range(6), 2)])
    np.testing.assert_allclose(sent.mean(0), x, atol=1e-14)
    np.testing.assert_allclose(squares(sent - x) / len(sent), (6 / 2 - 1) * squares(x))


# ---- gradient kinds

SHAPES = ((3, 4), (5,), (1,))
TOP = partial(oracle.top_k, ratio=0.3)


def gradients(num_steps: int, num_ranks: int = 4, seed: int = 0) -> Iterator[Ranks]:
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        yield [[rng.standard_normal(shape) for shape in SHAPES] for _ in range(num_ranks)]


def assert_close(got: Params, expected: Params, atol: float = 1e-12) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


WITHOUT_COMPRESSION: dict[str, Callable[[], GradientKind]] = {
    "compressed": lambda: oracle.Compressed(oracle.identity),
    "error feedback": lambda: oracle.ErrorFeedback(oracle.identity),
    "double squeeze": lambda: oracle.DoubleSqueeze(oracle.identity),
    "neolithic": lambda: oracle.Neolithic(partial(oracle.top_k, ratio=0.4), 3),
    "ef21": lambda: oracle.EF21(oracle.identity),
    "ef21 momentum": lambda: oracle.EF21Momentum(oracle.identity, eta=1.0),
    "qsgd": lambda: oracle.Qsgd(2**40, lambda step, rank, param, shape: np.full(shape, 0.5)),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", WITHOUT_COMPRESSION)
def test_without_compression_it_is_the_mean(name):
    kind = WITHOUT_COMPRESSION[name]()
    for grads in gradients(6):
        expected = [np.mean(arrays, axis=0) for arrays in zip(*grads, strict=True)]
        assert_close(kind.step(grads), expected, atol=1e-11 if name == "qsgd" else 1e-12)
        assert_close(oracle.Mean().step(grads), expected)


@pytest.mark.whole
@pytest.mark.parametrize("compress", [TOP, oracle.sign], ids=["top_k", "sign"])
def test_memory_holds_what_was_not_sent(compress):
    """What was handed on and what the memories hold add up to all gradients."""
    one, two = oracle.ErrorFeedback(compress), oracle.DoubleSqueeze(compress)
    total, handed_one, handed_two = ([np.zeros(shape) for shape in SHAPES] for _ in range(3))

    def add(sums: Params, terms: Params) -> Params:
        return [a + b for a, b in zip(sums, terms, strict=True)]

    for grads in gradients(20):
        total = add(total, oracle.mean(grads))
        handed_one = add(handed_one, one.step(grads))
        handed_two = add(handed_two, two.step(grads))
        assert_close(add(handed_one, oracle.mean(one.errors)), total)
        assert_close(add(add(handed_two, oracle.mean(two.workers.errors)), two.server_errors), total)


def test_each_memory_compresses_once():
    """Halving is no projection, as top-k is: p = 4, then 2 + 4; and on the server s = 2, then 1 + 3."""
    one, two = oracle.ErrorFeedback(lambda x: x / 2), oracle.DoubleSqueeze(lambda x: x / 2)
    for from_one, from_two in ((2.0, 1.0), (3.0, 2.0)):
        assert_close(one.step([[np.array([4.0])]]), [np.array([from_one])])
        assert_close(two.step([[np.array([4.0])]]), [np.array([from_two])])


def test_ef21_by_hand():
    """One rank, the largest entry: the first gradient whole, then h with the gradient of the same step."""
    kind = oracle.EF21(partial(oracle.top_k, ratio=0.5))
    steps = [([4.0, 1.0], [4.0, 1.0]), ([5.0, 3.0], [4.0, 3.0]), ([5.0, 3.0], [5.0, 3.0])]
    for gradient, expected in steps:
        assert_close(kind.step([[np.array(gradient)]]), [np.array(expected)])


def test_ef21_momentum_by_hand():
    kind = oracle.EF21Momentum(partial(oracle.top_k, ratio=0.5), eta=0.5)
    steps = [([4.0, 1.0], [4.0, 1.0]), ([6.0, 5.0], [4.0, 3.0]), ([6.0, 3.0], [5.5, 3.0])]
    for gradient, expected in steps:
        assert_close(kind.step([[np.array(gradient)]]), [np.array(expected)])


def test_double_squeeze_by_hand():
    kind = oracle.DoubleSqueeze(partial(oracle.top_k, ratio=0.5))
    ranks = [[np.array([4.0, 1.0])], [np.array([0.0, 2.0])]]
    assert_close(kind.step(ranks), [np.array([2.0, 0.0])])  # q = (4, 0), (0, 2); s = (2, 1)
    assert_close(kind.server_errors, [np.array([0.0, 1.0])])
    assert_close(kind.step(ranks), [np.array([2.0, 0.0])])  # p = (4, 2), (0, 2); s = (2, 1) + (0, 1)
    assert_close(kind.server_errors, [np.array([0.0, 2.0])])
    assert_close(kind.workers.errors[0], [np.array([0.0, 2.0])])


def test_qsgd_takes_the_draws_of_step_rank_and_parameter():
    asked = []

    def draw(step: int, rank: int, param: int, shape: tuple[int, ...]) -> Array:
        asked.append((step, rank, param, shape))
        return np.random.default_rng((step, rank, param)).random(shape)

    kind = oracle.Qsgd(7, draw)
    for step, grads in enumerate(gradients(2, num_ranks=2)):
        sent = [
            oracle.qsgd(g[0], 7, np.random.default_rng((step, rank, 0)).random((3, 4))) for rank, g in enumerate(grads)
        ]
        np.testing.assert_array_equal(kind.step(grads)[0], (sent[0] + sent[1]) / 2)
    assert asked == [(s, r, p, shape) for s in range(2) for r in range(2) for p, shape in enumerate(SHAPES)]


# ---- optimizers

OPTIMIZERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "sgd": (SGD, torch.optim.SGD, {"lr": 0.1}),
    "sgd decay": (SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.2}),
    "momentum": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}),
    "nesterov": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.2}),
    "adamw": (oracle.AdamW, torch.optim.AdamW, {}),
    "adamw options": (
        oracle.AdamW,
        torch.optim.AdamW,
        {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-2, "weight_decay": 0.3},
    ),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_is_torchs(name):
    transcribed, torchs, options = OPTIMIZERS[name]
    params = next(gradients(1, num_ranks=1, seed=1))[0]
    weights = [torch.tensor(p, requires_grad=True) for p in params]
    ours, theirs = transcribed(**options), torchs(weights, **options)
    for [grads] in gradients(50, num_ranks=1):
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = torch.tensor(grad)
        theirs.step()
        params = ours.step(params, grads)
        assert_close(params, [w.detach().numpy() for w in weights], atol=1e-13)
