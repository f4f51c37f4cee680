"""Methods with which every data rank has its own model, against their transcriptions in numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import dp_sync_oracle as oracle
import numpy as np
import pytest
import torch

from autopart.extras.dp_sync.data_sync import DataSync
from autopart.extras.dp_sync.gradient_methods import State
from autopart.extras.dp_sync.mixing_matrices import mixing_rows, receivers
from autopart.extras.dp_sync.model_averaging import after_step, before_step
from autopart.extras.dp_sync.sync_options import GRAPHS, Method
from autopart.extras.dp_sync.transports import ListTransport

SHAPES = {"up": (4, 3), "bias": (5,)}
STEPS = 50

MATRICES: dict[str, Callable[[int, int], np.ndarray]] = {
    "ring": lambda n, step: oracle.ring(n),
    "grid": lambda n, step: oracle.grid(n),
    "exp": lambda n, step: oracle.exponential(n),
    "one_peer": oracle.one_peer,
    "complete": lambda n, step: oracle.complete(n),
}

Make = Callable[[Any, Any, int], Any]

METHODS: dict[str, Make] = {
    "gossip:ring": lambda x, opts, n: oracle.DSGD(x, opts, oracle.always(oracle.ring(n))),
    "gossip:grid": lambda x, opts, n: oracle.DSGD(x, opts, oracle.always(oracle.grid(n))),
    "gossip:exp": lambda x, opts, n: oracle.DSGD(x, opts, oracle.always(oracle.exponential(n))),
    "gossip:one_peer": lambda x, opts, n: oracle.DSGD(x, opts, lambda step: oracle.one_peer(n, step)),
    "gossip:complete": lambda x, opts, n: oracle.DSGD(x, opts, oracle.always(oracle.complete(n))),
    "gossip:ring,4": lambda x, opts, n: oracle.GossipPGA(x, opts, oracle.always(oracle.ring(n)), 4),
    "exact_diffusion:ring": lambda x, opts, n: oracle.ExactDiffusion(x, opts, oracle.ring(n)),
    "gradient_tracking:ring": lambda x, opts, n: oracle.GradientTracking(x, opts, oracle.ring(n)),
    "local:4": lambda x, opts, n: oracle.LocalSGD(x, opts, 4),
    "diloco:5": lambda x, opts, n: oracle.DiLoCo(x, opts, 5),
}

OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda: oracle.SGD(0.1, momentum=0.9)),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), lambda: oracle.AdamW(0.01, weight_decay=0.1)),
}


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("text", METHODS)
def test_methods_do_what_they_are_defined_to(text: str, kind: str, num_ranks: int):
    made = torch.Generator().manual_seed(1)
    first = {name: torch.randn(shape, generator=made, dtype=torch.float64) for name, shape in SHAPES.items()}
    targets = [{name: torch.randn(shape, generator=made, dtype=torch.float64) for name, shape in SHAPES.items()}
               for _ in range(num_ranks)]  # fmt: skip
    replicas = [{name: value.clone().requires_grad_() for name, value in first.items()} for _ in range(num_ranks)]
    optimizers = [OPTIMIZERS[kind][0](list(own.values())) for own in replicas]
    x = [[value.numpy().copy() for value in first.values()] for _ in range(num_ranks)]
    right = METHODS[text](x, [OPTIMIZERS[kind][1]() for _ in range(num_ranks)], num_ranks)
    method, wire = Method.parse(text), ListTransport(num_ranks)
    states: list[State] = [{} for _ in range(num_ranks)]
    for step in range(STEPS):
        grads = []
        for own, target in zip(replicas, targets, strict=True):
            for name, value in own.items():
                value.grad = (value.detach() - target[name]) * (1 + step % 3)
            grads.append([value.grad.numpy().copy() for value in own.values()])
        with torch.no_grad():
            before_step(method, replicas, states, wire, step)
            for optimizer in optimizers:
                optimizer.step()
            after_step(method, replicas, states, wire, step)
        expected = right.step(grads)
        for own, params in zip(replicas, expected, strict=True):
            for value, param in zip(own.values(), params, strict=True):
                assert np.abs(value.detach().numpy() - param).max() < 1e-12, step


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 8, 12, 16])
@pytest.mark.parametrize("graph", GRAPHS)
def test_rows_are_those_of_the_matrices(graph: str, num_ranks: int):
    for step in range(5):
        rows = mixing_rows(graph, num_ranks, step)
        matrix = np.array([[dict(row).get(other, 0.0) for other in range(num_ranks)] for row in rows])
        assert np.abs(matrix - MATRICES[graph](num_ranks, step)).max() < 1e-15
        assert np.abs(matrix.sum(0) - 1).max() < 1e-15
        to = receivers(rows)
        assert all((rank in to[other]) == (other != rank and other in dict(rows[rank]))
                   for rank in range(num_ranks) for other in range(num_ranks))  # fmt: skip


def test_means_of_several_dtypes_go_out_in_the_order_of_parameters():
    """Every rank sums in this order, so it may not be that of a set, which differs from process to process."""
    sent = []

    class Recorded(ListTransport):
        def sum(self, vectors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            sent.extend(vector.dtype for vector in vectors)
            return super().sum(vectors)

    dtypes = [torch.float16, torch.float64, torch.bfloat16, torch.float32, torch.complex64, torch.complex128]
    values = {f"w{dtype}": torch.ones(2, dtype=dtype) for dtype in dtypes}
    sync = DataSync(cast(Any, None))
    sync.sync = cast(Any, SimpleNamespace(changes_models=True))
    sync.methods = dict.fromkeys(values, Method.parse("local:4"))
    sync.wire = cast(Any, Recorded(1))
    means = sync.replica_mean(values)
    assert sent == dtypes
    assert all(torch.equal(means[name], value) for name, value in values.items())
