"""Forked processes that run a training function. Because of the fork, it need not be picklable.

Each child sends a report when it ends. If a child raises, exits or sends no report in time, all children are stopped,
so that no process waits forever.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopart.errors import AutopartError, RuntimeSetupError

GRACE_S = 10.0
"""Seconds that the other ranks may run after one has failed."""


@dataclass
class Failure:
    """Exception of a child process, as text.

    `refusal` is the exception object if it is an error of autopart.
    """

    kind: str
    text: str
    where: str
    time_s: float = 0.0
    refusal: AutopartError | None = None


@dataclass
class Report:
    """Result of one child process: its returned value, or its failure."""

    value: Any = None
    failure: Failure | None = None


def run_forked(
    work: Callable[[int], Any], count: int, time_limit_s: float, folder: str, where: Callable[[BaseException], str],
    connected: bool,
) -> dict[int, Report]:  # fmt: skip
    """Call `work(rank)` in `count` forked processes and return their reports.

    Args:
        folder: folder for temporary files, such as the stack of a process that exceeds the time limit.
        where: function that returns the source line of the user's code that raised an exception.
        connected: True to initialise a gloo process group, with the environment variables of torchrun.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise RuntimeSetupError(
            "verify_loop() starts processes with os.fork",
            why="this operating system does not have it",
            hint="run it on Linux",
        )
    context = multiprocessing.get_context("fork")
    store = tempfile.mktemp(dir=folder) if connected else ""
    children: dict[int, tuple[Any, Connection]] = {}
    try:
        for rank in range(count):
            ours, theirs = context.Pipe()
            arguments = (theirs, work, rank, count, store, folder, where, time_limit_s)
            process = context.Process(target=_child, args=arguments, daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # forking a threaded process is safe: the child uses none of its threads
                process.start()
            theirs.close()
            children[rank] = (process, ours)
        reports = _collect(children, time.monotonic() + time_limit_s)
        for rank in children.keys() - reports.keys():
            reports[rank] = _timeout_report(children[rank][0], rank, folder, time_limit_s)
        return reports
    finally:
        for process, connection in children.values():
            process.kill()
            process.join()
            connection.close()


def _collect(children: dict[int, tuple[Any, Connection]], deadline: float) -> dict[int, Report]:
    """Return {rank: report}, for reports that arrive before the deadline."""
    reports: dict[int, Report] = {}
    while len(reports) < len(children) and time.monotonic() < deadline:
        pending = {connection: rank for rank, (_, connection) in children.items() if rank not in reports}
        for connection in wait(list(pending), max(0.0, deadline - time.monotonic())):
            assert isinstance(connection, Connection)
            rank = pending[connection]
            try:
                reports[rank] = pickle.loads(connection.recv_bytes())
            except EOFError:
                process = children[rank][0]
                process.join(1.0)
                text = f"the process ended with exit code {process.exitcode}"
                reports[rank] = Report(
                    failure=Failure("ended", text, "")
                )  # report this before the failures that it causes on other ranks
            if reports[rank].failure is not None:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return reports


def _timeout_report(process: Any, rank: int, folder: str, time_limit_s: float) -> Report:
    """Return a report for a process that sent none, with the source line of the user's code that it runs."""
    dump = Path(folder, f"stack{rank}")
    place = ""
    if process.is_alive() and dump.exists():
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', dump.read_text(errors="replace"))
        user_frames = [f for f in frames if f[0] and not is_library(f[0])]
        place = (
            f"line {user_frames[0][1]} of {Path(user_frames[0][0]).name}, in {user_frames[0][2]}" if user_frames else ""
        )
    return Report(failure=Failure("waits", f"no answer within {time_limit_s:g} s", place, float("inf")))


TORCH = str(Path(torch.__file__).parent) + os.sep
PYTHON = str(Path(os.__file__).parent) + os.sep
PACKAGE = str(Path(__file__).parents[2]) + os.sep


def is_library(file: str) -> bool:
    """Return True for a source file of Python, autopart, torch or another installed package."""
    return file.startswith((TORCH, PYTHON, PACKAGE, "<")) or "site-packages" in file


def _child(
    connection: Connection, work: Callable[[int], Any], rank: int, count: int, store: str, folder: str,
    where: Callable[[BaseException], str], time_limit_s: float,
) -> None:  # fmt: skip
    torch.set_num_threads(1)  # the parent's threads do not survive a fork
    torch.set_default_dtype(torch.float64)
    with open(Path(folder, f"stack{rank}"), "w") as dump, open(os.devnull, "w") as nowhere:
        faulthandler.register(signal.SIGUSR1, file=dump, all_threads=False)
        if rank or store:
            os.dup2(nowhere.fileno(), 1)
        try:
            if store:
                _connect(rank, count, store, time_limit_s)
            report = Report(work(rank))
        except BaseException as error:  # report sys.exit() too
            text = "".join(traceback.format_exception_only(error)).strip()
            refusal = error if isinstance(error, AutopartError) else None
            report = Report(failure=Failure(type(error).__name__, text, where(error), time.monotonic(), refusal))
        connection.send_bytes(pickle.dumps(report))
        if report.failure is None:
            with suppress(EOFError, OSError):
                connection.recv_bytes()  # stay alive until all ranks have ended; the parent kills this process
        os._exit(0)


def _connect(rank: int, count: int, store: str, time_limit_s: float) -> None:
    values = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
    os.environ.update({name: str(value) for name, value in values.items()})
    limit = timedelta(seconds=time_limit_s)
    dist.init_process_group("gloo", store=dist.FileStore(store, count), rank=rank, world_size=count, timeout=limit)
