"""dp_sync's methods, as transcribed in numpy, on heterogeneous quadratics: what converges, and how far from where."""

from __future__ import annotations

from functools import partial

import dp_sync_oracle as oracle
import numpy as np
import pytest
from dp_sync_oracle import SGD, Array, GradientKind, ModelKind, Params, Ranks

NUM_RANKS, NUM_ELEMENTS = 8, 20
TOP = partial(oracle.top_k, ratio=0.1)


class Quadratics:
    """f_i(x) = (x - b_i)^T A_i (x - b_i) / 2, another A_i and b_i on every rank."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.curvatures = [self._curvature(rng) for _ in range(NUM_RANKS)]
        self.centres = [rng.standard_normal(NUM_ELEMENTS) for _ in range(NUM_RANKS)]
        pulls = [a @ b for a, b in zip(self.curvatures, self.centres, strict=True)]
        self.optimum = np.linalg.solve(sum(self.curvatures), sum(pulls)).astype(np.float64)

    @staticmethod
    def _curvature(rng: np.random.Generator) -> Array:
        basis, _ = np.linalg.qr(rng.standard_normal((NUM_ELEMENTS, NUM_ELEMENTS)))
        return basis @ np.diag(rng.uniform(0.1, 1, NUM_ELEMENTS)) @ basis.T

    def grads(self, x: Ranks) -> Ranks:
        """Each rank's gradient at its own x_i, which is one parameter."""
        return [[a @ (own - b)] for a, b, [own] in zip(self.curvatures, self.centres, x, strict=True)]

    def start(self) -> Ranks:
        return [[np.zeros(NUM_ELEMENTS)] for _ in range(NUM_RANKS)]

    def distance(self, x: Ranks) -> float:
        """Root mean square over ranks of the distance to the optimum."""
        return float(np.sqrt(np.mean([np.sum((own - self.optimum) ** 2) for [own] in x])))


PROBLEM = Quadratics()


def sgds(lr: float) -> list[SGD]:
    return [SGD(lr) for _ in range(NUM_RANKS)]


def gradient_distance(kind: GradientKind, lr: float, num_steps: int) -> float:
    """How far parallel SGD with `kind` ends from the optimum: the mean of its last 100 steps."""
    x, optimizer, distances = PROBLEM.start()[0], SGD(lr), []
    for _ in range(num_steps):
        x = optimizer.step(x, kind.step(PROBLEM.grads([x] * NUM_RANKS)))
        distances.append(PROBLEM.distance([x]))
    return float(np.mean(distances[-100:]))


def model_distance(kind: ModelKind, num_steps: int) -> float:
    for _ in range(num_steps):
        kind.step(PROBLEM.grads(kind.x))
    return PROBLEM.distance(kind.x)


RING = oracle.always(oracle.ring(NUM_RANKS))
BIASED = {  # bias proportional to the step
    "dsgd": lambda lr: oracle.DSGD(PROBLEM.start(), sgds(lr), RING),
    "one peer": lambda lr: oracle.DSGD(PROBLEM.start(), sgds(lr), partial(oracle.one_peer, NUM_RANKS)),
    "gossip pga": lambda lr: oracle.GossipPGA(PROBLEM.start(), sgds(lr), RING, every=4),
    "local": lambda lr: oracle.LocalSGD(PROBLEM.start(), sgds(lr), every=4),
    "diloco": lambda lr: oracle.DiLoCo(PROBLEM.start(), sgds(lr), every=4),
}
EXACT = {
    "exact diffusion": lambda lr: oracle.ExactDiffusion(PROBLEM.start(), sgds(lr), oracle.ring(NUM_RANKS)),
    "gradient tracking": lambda lr: oracle.GradientTracking(PROBLEM.start(), sgds(lr), oracle.ring(NUM_RANKS)),
}


@pytest.mark.few
@pytest.mark.parametrize("name", BIASED)
def test_bias_halves_with_the_step(name):
    coarse, fine = (model_distance(BIASED[name](lr), 2500) for lr in (0.02, 0.01))
    assert fine > 1e-4
    assert coarse / fine == pytest.approx(2, rel=0.25)


@pytest.mark.whole
@pytest.mark.parametrize("name", EXACT)
def test_corrected_methods_are_exact(name):
    assert model_distance(EXACT[name](0.1), 1000) < 1e-8


@pytest.mark.large
def test_ef21_is_exact():
    assert gradient_distance(oracle.EF21(TOP), 0.05, 3000) < 1e-8
    assert gradient_distance(oracle.EF21Momentum(TOP, eta=0.1), 0.02, 8000) < 1e-8


@pytest.mark.large
@pytest.mark.whole
@pytest.mark.parametrize("memory", [oracle.ErrorFeedback, oracle.DoubleSqueeze])
def test_memory_makes_top_k_converge_up_to_the_step(memory):
    coarse, fine = (gradient_distance(memory(TOP), lr, 6000) for lr in (0.02, 0.01))
    assert coarse / fine == pytest.approx(2, rel=0.25)
    without = [gradient_distance(oracle.Compressed(TOP), lr, 6000) for lr in (0.02, 0.01)]
    assert without[1] > 10 * fine
    assert without[1] > 0.75 * without[0]


def test_local_bias_grows_with_the_steps_alone():
    one, three, five = (model_distance(oracle.LocalSGD(PROBLEM.start(), sgds(0.01), k), 6000) for k in (1, 3, 5))
    assert one < 1e-8
    assert five / three == pytest.approx(4 / 2, rel=0.1)


@pytest.mark.large
def test_noise_is_averaged_over_ranks_but_by_ef21_without_momentum():
    """E|grad f|^2 under gradient noise, in units of parallel SGD's."""
    kinds: dict[str, GradientKind] = {
        "mean": oracle.Mean(),
        "memory": oracle.ErrorFeedback(TOP),
        "ef21": oracle.EF21(TOP),
        "ef21 momentum": oracle.EF21Momentum(TOP, eta=0.1),
    }
    noise = {name: stationary_gradient(kind, lr=0.01) for name, kind in kinds.items()}
    assert noise["memory"] < 1.5 * noise["mean"]
    assert noise["ef21"] > 3 * noise["mean"]
    assert noise["ef21 momentum"] < 1.5 * noise["mean"]


def stationary_gradient(kind: GradientKind, lr: float) -> float:
    rng = np.random.default_rng(1)
    x: Params = [PROBLEM.optimum]
    optimizer, squares = SGD(lr), []
    for _ in range(8000):
        exact = PROBLEM.grads([x] * NUM_RANKS)
        squares.append(np.sum(oracle.mean(exact)[0] ** 2))
        x = optimizer.step(x, kind.step([[g + rng.standard_normal(NUM_ELEMENTS)] for [g] in exact]))
    return float(np.mean(squares[2000:]))
