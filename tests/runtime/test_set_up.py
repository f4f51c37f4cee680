"""A rank that is missing, killed, stopped or raises before the ranks meet: the other one ends with one clear error."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as td
from torch import nn

import autopart
from autopart.errors import HangError

TIMEOUT_S = 0.4  # ten times as long is waited at set-up
START_S = 14.0  # for processes to start and to trace on a busy machine


def rank(number: int, port: int, fault: str, said: Any) -> None:
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": str(number)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    if number == 1 and fault == "missing":
        return
    if number == 1 and fault == "raising":
        raise RuntimeError("no data")
    if fault in ("killed", "stopped"):
        td.init_process_group("gloo")
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    started = time.monotonic()
    try:
        autopart.parallelize(nn.Linear(4, 4), "dp2", example_kwargs={"input": torch.ones(4, 4)}, timeout=TIMEOUT_S)
    except HangError as error:
        said.put((str(error), time.monotonic() - started))
    else:
        said.put(("nothing was raised", 0.0))
    said.close()
    said.join_thread()
    os._exit(0)  # the groups wait for the other rank


@pytest.mark.few
@pytest.mark.parametrize("fault", ["missing", "raising", "killed", "stopped"])
def test_the_other_rank_ends_with_one_clear_error(fault):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    said: Any = context.Queue()
    ranks = [context.Process(target=rank, args=(number, port, fault, said), daemon=True) for number in range(2)]
    for process in ranks:
        process.start()
    try:
        text, waited_s = said.get(timeout=10 * TIMEOUT_S + START_S)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert waited_s < 10 * TIMEOUT_S + START_S
    what, *rest = text.splitlines()
    assert what.startswith("not all ranks called parallelize() within 4 s: rank 0") or "rank 1 is gone" in what, text
    assert "Gloo" not in what and rest[0].startswith("  why    ") and rest[-1].startswith("  try    "), text
