"""`pm.stop_requested`: SIGTERM to one rank is known to all ranks after the same call."""

from __future__ import annotations

import os
import signal
import threading

import dist
import pytest
import torch
from step_models import batch, small

import autopart
from autopart.errors import UsageError
from autopart.runtime.comm import stop_signal


@pytest.fixture(autouse=True)
def _handler():
    earlier = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, earlier)
    stop_signal._received.clear()


def stops(mesh):
    """Return `stop_requested` of this rank after each of four steps; the last rank gets the signal in the second."""
    earlier = signal.getsignal(signal.SIGTERM)
    pm = autopart.parallelize(small(), mesh, example_kwargs=batch())
    seen = [pm.stop_requested]
    try:
        for step in range(4):
            if step == 1 and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            pm.step(**batch())
            seen.append(pm.stop_requested)
    finally:
        signal.signal(signal.SIGTERM, earlier)
        stop_signal._received.clear()
    return seen


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2"])
def test_all_ranks_know_after_the_same_step(mesh):
    assert dist.run_ranks(stops, 2, mesh) == [[False, False, True, True, True]] * 2


def test_one_rank_knows_after_its_next_step():
    pm = autopart.parallelize(small(), "dp1", example_kwargs=batch())
    assert not pm.stop_requested
    os.kill(os.getpid(), signal.SIGTERM)
    pm.step(**batch())
    assert pm.stop_requested


def test_an_earlier_handler_runs_too():
    calls = []
    signal.signal(signal.SIGTERM, lambda *_: calls.append("earlier"))
    for _ in range(2):
        stop_signal.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    assert calls == ["earlier"]
    assert stop_signal.is_received()


def test_the_main_thread_installs_the_handler():
    errors = []

    def read():
        with pytest.raises(UsageError, match=r"pm.stop_requested is first read outside of the main thread") as error:
            stop_signal.listen()
        errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert errors
