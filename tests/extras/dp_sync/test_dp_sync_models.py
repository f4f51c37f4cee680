"""dp_sync's model kinds, as transcribed in numpy: their degenerate cases, invariants and first steps by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import dp_sync_oracle as oracle
import numpy as np
import pytest
from dp_sync_oracle import SGD, AdamW, Array, ModelKind, Params, Ranks

N = 6
SHAPES = ((3, 4), (5,), ())
W = {"ring": oracle.ring(N), "grid": oracle.grid(N), "exponential": oracle.exponential(N)}


def drawn(num_steps: int, seed: int = 0) -> Iterator[Ranks]:
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        yield [[np.asarray(rng.standard_normal(shape)) for shape in SHAPES] for _ in range(N)]


def apart() -> Ranks:
    """Replicas that differ."""
    return next(drawn(1, seed=1))


def equal() -> Ranks:
    return [apart()[0] for _ in range(N)]


def sgds(lr: float = 0.1) -> list[SGD]:
    return [SGD(lr) for _ in range(N)]


def assert_close(got: Ranks, expected: Ranks, atol: float = 1e-12) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def parallel_sgd(grads: list[Ranks], lr: float = 0.1) -> Iterator[Params]:
    x = equal()[0]
    for of_ranks in grads:
        x = [a - lr * np.mean(arrays, axis=0) for a, arrays in zip(x, zip(*of_ranks, strict=True), strict=True)]
        yield x


J = oracle.complete(N)
IS_PARALLEL_SGD: dict[str, Callable[[], ModelKind]] = {
    "dsgd, W = J": lambda: oracle.DSGD(equal(), sgds(), oracle.always(J)),
    "global averaging at every step": lambda: oracle.GossipPGA(equal(), sgds(), oracle.always(W["ring"]), every=1),
    "local, tau = 1": lambda: oracle.LocalSGD(equal(), sgds(), every=1),
    "diloco, H = 1 and lr 1": lambda: oracle.DiLoCo(equal(), sgds(), every=1, outer=SGD(1.0)),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", IS_PARALLEL_SGD)
def test_degenerate_case_is_parallel_sgd(name):
    kind, grads = IS_PARALLEL_SGD[name](), list(drawn(10))
    for of_ranks, expected in zip(grads, parallel_sgd(grads), strict=True):
        assert_close(kind.step(of_ranks), [expected] * N)


MEAN_FOLLOWS: dict[str, Callable[[], ModelKind]] = {
    "dsgd, ring": lambda: oracle.DSGD(apart(), sgds(), oracle.always(W["ring"])),
    "dsgd, grid": lambda: oracle.DSGD(apart(), sgds(), oracle.always(W["grid"])),
    "dsgd, exponential": lambda: oracle.DSGD(apart(), sgds(), oracle.always(W["exponential"])),
    "dsgd, one peer": lambda: oracle.DSGD(apart(), sgds(), partial(oracle.one_peer, N)),
    "global averaging": lambda: oracle.GossipPGA(apart(), sgds(), partial(oracle.one_peer, N), every=3),
    "local": lambda: oracle.LocalSGD(apart(), sgds(), every=3),
    "exact diffusion": lambda: oracle.ExactDiffusion(apart(), sgds(), W["grid"]),
    "gradient tracking": lambda: oracle.GradientTracking(apart(), sgds(), W["exponential"]),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", MEAN_FOLLOWS)
def test_mean_follows_the_mean_gradient(name):
    """mean x+ = mean x - gamma mean g_i(x_i), whatever W."""
    kind = MEAN_FOLLOWS[name]()
    for grads in drawn(10):
        expected = SGD(0.1).step(oracle.mean(kind.x), oracle.mean(grads))
        kind.step(grads)
        assert_close([oracle.mean(kind.x)], [expected])


def test_messages_go_to_the_rank_that_weighs_them():
    """In one-peer and Exp2, rank i receives from i - 2^k."""
    x = [[np.array(float(i))] for i in range(5)]
    np.testing.assert_allclose(oracle.mix(oracle.one_peer(5, 0), x), [[2.0], [0.5], [1.5], [2.5], [3.5]])
    np.testing.assert_allclose(oracle.mix(oracle.exponential(5), x)[4], [(4 + 3 + 2 + 0) / 4])


def test_replicas_agree_after_global_averaging():
    kind = oracle.GossipPGA(apart(), sgds(), oracle.always(W["ring"]), every=3)
    for step, grads in enumerate(drawn(6)):
        x = kind.step(grads)
        agree = all((params[0] == x[0][0]).all() for params in x)
        assert agree == (step in (2, 5))


def stacked(x: Ranks) -> Array:
    """[n, all elements of a rank's parameters]."""
    return np.stack([np.concatenate([a.ravel() for a in params]) for params in x])


def test_dsgd_in_matrices():
    kind = oracle.DSGD(apart(), sgds(), oracle.always(W["exponential"]))
    x = stacked(kind.x)
    for grads in drawn(5):
        x = W["exponential"] @ (x - 0.1 * stacked(grads))
        np.testing.assert_allclose(stacked(kind.step(grads)), x, atol=1e-12)


def test_exact_diffusion_is_d2_of_the_mean_of_w_and_identity():
    """x+ = Wbar (2x - x_prev - gamma (g - g_prev)), after a first step of plain diffusion."""
    kind, half, steps = oracle.ExactDiffusion(apart(), sgds(), W["ring"]), (np.eye(N) + W["ring"]) / 2, list(drawn(8))
    before, x = stacked(kind.x), half @ (stacked(kind.x) - 0.1 * stacked(steps[0]))
    np.testing.assert_allclose(stacked(kind.step(steps[0])), x, atol=1e-12)
    for old, new in pairwise(steps):
        before, x = x, half @ (2 * x - before - 0.1 * (stacked(new) - stacked(old)))
        np.testing.assert_allclose(stacked(kind.step(new)), x, atol=1e-12)


def test_gradient_tracking_in_matrices():
    kind, weights, steps = oracle.GradientTracking(apart(), sgds(), W["grid"]), W["grid"], list(drawn(8))
    x, q = stacked(kind.x), stacked(steps[0])
    for old, new in pairwise(steps):
        x = weights @ x - 0.1 * q
        np.testing.assert_allclose(stacked(kind.step(old)), x, atol=1e-12)
        q = weights @ q + stacked(new) - stacked(old)


def test_local_sgd_keeps_optimizer_states_local():
    kind = oracle.LocalSGD(equal(), [AdamW(0.1) for _ in range(N)], every=4)
    alone, x = [AdamW(0.1) for _ in range(N)], equal()
    for step, grads in enumerate(drawn(12)):
        x = [own.step(params, g) for own, params, g in zip(alone, x, grads, strict=True)]
        if step % 4 == 3:
            x = [oracle.mean(x)] * N
        assert_close(kind.step(grads), x)


def test_diloco_by_hand():
    """Two rounds of two ranks: D = mean (a - x_i), Nesterov with momentum 0.5 and lr 1."""
    x = [[np.array([1.0])], [np.array([1.0])]]
    kind = oracle.DiLoCo(x, [SGD(1.0), SGD(1.0)], every=2, outer=SGD(1.0, momentum=0.5, nesterov=True))
    push = [[np.array([1.0])], [np.array([0.0])]]
    assert_close(kind.step(push), [[np.array([0.0])], [np.array([1.0])]])
    assert_close(kind.step(push), [[np.array([-0.5])]] * 2)  # D = 1, buffer 1, D + 0.5 = 1.5
    assert_close(kind.step(push), [[np.array([-1.5])], [np.array([-0.5])]])
    assert_close(kind.step(push), [[np.array([-2.25])]] * 2)  # D = 1, buffer 1.5, D + 0.75 = 1.75


def test_checkpoint_on_another_number_of_ranks_keeps_the_mean():
    for num_ranks in (1, 4, 12):
        moved = oracle.on_ranks(apart(), num_ranks)
        assert len(moved) == num_ranks
        assert_close([oracle.mean(moved)], [oracle.mean(apart())])
