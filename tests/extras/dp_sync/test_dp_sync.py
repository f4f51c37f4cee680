"""Methods of data parallelism against their transcriptions in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from dp_sync_oracle import (
    EF21,
    Compressed,
    DoubleSqueeze,
    EF21Momentum,
    ErrorFeedback,
    Mean,
    Neolithic,
    Qsgd,
    qsgd_levels,
    sign,
    top_k,
)

from autopart.extras.dp_sync.gradient_methods import MethodSeeds, State, synchronised
from autopart.extras.dp_sync.sync_options import Method
from autopart.extras.dp_sync.transports import ListTransport

SHAPES = {"up": (7, 5), "bias": (9,), "scale": (1,), "down": (4, 3, 2)}
STEPS = 50


def draw(step: int, rank: int, index: int, shape: tuple[int, ...]) -> np.ndarray:
    name = list(SHAPES)[index]
    return MethodSeeds(3, step).of(name, rank)(int(np.prod(shape))).numpy().reshape(shape)


METHODS: dict[str, Callable[[], Any]] = {
    "all_reduce": Mean,
    "parameter_server": Mean,
    "qsgd:4bit": lambda: Qsgd(qsgd_levels(4), draw),
    "top_k:0.2": lambda: ErrorFeedback(lambda x: top_k(x, 0.2)),
    "top_k:0.2,false": lambda: Compressed(lambda x: top_k(x, 0.2)),
    "sign": lambda: ErrorFeedback(sign),
    "double_squeeze:top_k:0.2": lambda: DoubleSqueeze(lambda x: top_k(x, 0.2)),
    "double_squeeze:sign": lambda: DoubleSqueeze(sign),
    "ef21:0.2": lambda: EF21(lambda x: top_k(x, 0.2)),
    "ef21_sgdm:0.2,0.3": lambda: EF21Momentum(lambda x: top_k(x, 0.2), 0.3),
    "neolithic:0.1,3": lambda: Neolithic(lambda x: top_k(x, 0.1), 3),
}


def gradients(step: int, num_ranks: int) -> list[dict[str, torch.Tensor]]:
    """Of every rank, of its own rows' mean; with elements of equal size where the division by the ranks is exact."""
    made = torch.Generator().manual_seed(step)
    grid = 4 if num_ranks != 3 else 2**40

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64).mul(grid).round().div(grid)

    return [{name: drawn(shape) for name, shape in SHAPES.items()} for _ in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("text", METHODS)
def test_methods_do_what_they_are_defined_to(text: str, num_ranks: int):
    method, oracle, wire = Method.parse(text), METHODS[text](), ListTransport(num_ranks)
    states: list[State] = [{} for _ in range(num_ranks)]
    for step in range(STEPS):
        given = gradients(step, num_ranks)
        parts = [{name: gradient / num_ranks for name, gradient in of.items()} for of in given]
        made = synchronised(method, parts, states, wire, MethodSeeds(3, step))
        expected = oracle.step([[gradient.numpy() for gradient in of.values()] for of in given])
        for rank in range(num_ranks):
            for value, right in zip(made[rank].values(), expected, strict=True):
                assert np.abs(value.numpy() - right).max() < 1e-12, (step, rank)
                assert value.shape == right.shape


@pytest.mark.parametrize("text", ["parameter_server", "top_k:1", "double_squeeze:top_k:1", "neolithic:1,1"])
def test_what_leaves_nothing_out_is_the_sum_in_bits(text: str):
    states: list[State] = [{} for _ in range(3)]
    for step in range(3):
        parts = gradients(step, 3)
        exact = synchronised(Method.parse("all_reduce"), parts, [{}] * 3, ListTransport(3), MethodSeeds(0, step))
        made = synchronised(Method.parse(text), parts, states, ListTransport(3), MethodSeeds(0, step))
        assert all(torch.equal(made[rank][name], exact[rank][name]) for rank in range(3) for name in SHAPES)
