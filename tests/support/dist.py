"""Run a function on several ranks: a pool of long-lived worker processes, gloo on the CPU.

Importing torch and transformers takes seconds and a test takes milliseconds, so the workers stay alive between
tests, and are forked from a process that has imported both. Every rank sees the environment that torchrun gives. The
groups made here meet in a file: a TCP store looks its clients' names up, which takes seconds where DNS is slow.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed

PRELOAD = ["torch", "torch.distributed.pipelining", "torch._dynamo", "scipy.optimize", "transformers.modeling_utils",
           "autopart", "autopart.recipe.make_plan"]  # fmt: skip
START_S = 120.0  # for workers to import torch on a busy machine
CLOSE_S = 10.0  # for workers to leave the process group after a task
GRACE_S = 5.0  # for the other ranks once one of them has failed
PROCESS_GROUP_SHARE = 0.8  # of a task's time limit: a stuck collective raises in its rank before the pool is killed


class RankError(RuntimeError):
    """A rank raised. `rank` is the first to fail, `traceback` its text; `errors` and `results` are by rank."""

    def __init__(self, rank: int, errors: dict[int, str], results: dict[int, Any]) -> None:
        self.rank, self.traceback, self.errors, self.results = rank, errors[rank], errors, results
        others = [f"  rank {r}: {text.strip().splitlines()[-1]}" for r, text in sorted(errors.items()) if r != rank]
        after = "\nthen also:\n" + "\n".join(others) if others else ""
        super().__init__(f"rank {rank} failed\n{errors[rank]}{after}")


def whole_float32() -> None:
    """On a GPU convolutions and products of float32 values are made of float32, not of TF32, which is 1e-3 off."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def run_ranks(
    fn: Callable, world_size: int, *args: Any, timeout_s: float = 60.0, init: bool = True, **kwargs: Any
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on ranks 0..world_size-1, in a gloo group, and return the results by rank.

    `fn` must be a function at the top level of a module. `init=False` leaves the process group to `fn`.
    What the ranks print is printed here when all are done. Raises `RankError` when a rank raises, and
    `TimeoutError` naming the ranks that did not answer in `timeout_s` seconds.
    """
    call = pickle.dumps((fn, args, kwargs))
    return _POOL.run(call, getattr(fn, "__name__", repr(fn)), world_size, timeout_s, init)


def shutdown() -> None:
    """End the workers; the next `run_ranks` starts new ones."""
    _POOL.stop()


# --- the worker's side ---------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """What one rank is told to do."""

    call: bytes  # the pickled (fn, args, kwargs)
    path: list[str]  # sys.path of the parent, so that the function's module is found
    environ: dict[str, str]
    store: str  # a new file for the process group to meet in; empty: no process group
    group_timeout_s: float


class Report(NamedTuple):
    """What one rank has to say: a pickled result, or a traceback."""

    result: bytes | None
    error: str
    time_s: float  # on the clock that all processes share
    reusable: bool  # torch's state for process groups can be reset: it cannot after a failure to make one


def _serve(connection: Connection, log_path: str) -> None:
    """A worker's main loop: task in, report out, wait for the others, leave the group."""
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    threading.Thread(target=_exit_with_parent, args=(Path(log_path).parent,), daemon=True).start()
    gc.freeze()  # what is imported stays: only what a task has made is looked through
    try:
        connection.send_bytes(b"ready")
        while True:
            report = _perform(pickle.loads(connection.recv_bytes()))
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send_bytes(pickle.dumps(report))
            if report.error:
                _leave_group()  # at once: the peers' collectives then fail instead of waiting
            connection.recv_bytes()  # all ranks have reported
            _leave_group()
            connection.send_bytes(b"closed")
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone, or shut the pool down


def _perform(task: Task) -> Report:
    """Run one task in a clean state; whatever is raised becomes the report."""
    os.environ.clear()
    os.environ.update(task.environ)
    sys.path[:] = task.path
    torch.set_num_threads(1)
    whole_float32()
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    joined = False
    try:
        fn, args, kwargs = pickle.loads(task.call)
        if task.store:
            _join_group(task)
            joined = True
        return Report(pickle.dumps(fn(*args, **kwargs)), "", time.monotonic(), reusable=True)
    except BaseException:  # pytest.fail() and sys.exit() are not an Exception, and must be reported too
        return Report(None, traceback.format_exc(), time.monotonic(), reusable=joined)


def _join_group(task: Task) -> None:
    rank, world_size = int(task.environ["RANK"]), int(task.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=task.group_timeout_s)
    store = torch.distributed.FileStore(task.store, world_size)
    store.set_timeout(timeout)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _leave_group() -> None:
    """Also frees the groups that a module's cycles hold: each has threads that wake a hundred times a second."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        gc.collect()
        gc.freeze()  # what is left is imported: the next task does not look through it


def _exit_with_parent(folder: Path) -> None:
    multiprocessing.parent_process().join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


# --- the parent's side ---------------------------------------------------------------------------------------------


@dataclass
class Worker:
    process: Any
    connection: Connection
    log: Path


@dataclass
class Pool:
    workers: list[Worker] = field(default_factory=list)
    folder: str = ""  # for the logs and the stores
    tcp_store: torch.distributed.TCPStore | None = None  # for functions that make their own group from the environment
    num_tasks: int = 0

    def run(self, call: bytes, name: str, world_size: int, timeout_s: float, init: bool) -> list[Any]:
        healthy = False  # anything unexpected from here on, an interrupt included, costs the pool
        try:
            self._grow(world_size)
            store = f"{self.folder}/store{self.num_tasks}" if init else ""
            if self.tcp_store is None or not init:  # a used one may hold addresses of the previous task's ranks
                self.tcp_store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for rank, worker in enumerate(self.workers[:world_size]):
                task = Task(call, sys.path, self._environ(rank, world_size), store, timeout_s * PROCESS_GROUP_SHARE)
                worker.connection.send_bytes(pickle.dumps(task))
            reports = self._collect(world_size, time.monotonic() + timeout_s)
            silent = sorted(set(range(world_size)) - set(reports))
            stacks = self._stacks(silent)
            healthy = not silent and all(r.reusable for r in reports.values()) and self._close(world_size)
        finally:
            self._print_logs(world_size)
            if not healthy:
                self.kill()
        results = {rank: pickle.loads(r.result) for rank, r in reports.items() if r.result is not None}
        errors = {rank: r.error for rank, r in reports.items() if r.error}
        if errors:
            first = min(errors, key=lambda rank: reports[rank].time_s)
            stopped = f"stopped: no answer within {GRACE_S:g} s of rank {first}'s failure"
            errors |= {rank: f"{stack}\n{stopped}" for rank, stack in stacks.items()}
            raise RankError(first, errors, results)
        if silent:
            what = f"no answer from rank {', '.join(map(str, silent))} of {world_size} within {timeout_s:g} s in {name}"
            raise TimeoutError("\n".join([what, *stacks.values()]))
        return [results[rank] for rank in range(world_size)]

    def kill(self) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.connection.close()
        self.workers = []
        shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self) -> None:
        """Let idle workers exit by themselves."""
        for worker in self.workers:
            worker.connection.close()
        deadline = time.monotonic() + GRACE_S
        for worker in self.workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def _grow(self, world_size: int) -> None:
        """Have at least `world_size` workers that are alive and ready, and what a new task needs."""
        self.num_tasks += 1
        if not all(worker.process.is_alive() for worker in self.workers):
            self.kill()
        if not self.workers:
            self.folder = tempfile.mkdtemp(prefix="ranks-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        new = []
        while len(self.workers) < world_size:
            ours, theirs = context.Pipe()
            log = Path(self.folder, f"rank{len(self.workers)}.log")
            log.touch()
            process = context.Process(target=_serve, args=(theirs, str(log)), daemon=True)
            process.start()
            theirs.close()
            new.append(Worker(process, ours, log))
            self.workers.append(new[-1])
        for worker in new:
            if not worker.connection.poll(START_S):
                raise TimeoutError(f"a worker process did not start within {START_S:g} s")
            worker.connection.recv_bytes()

    def _collect(self, world_size: int, deadline: float) -> dict[int, Report]:
        """The reports by rank, as far as they come before the deadline; a worker that dies gets one too."""
        rank_of = {worker.connection: rank for rank, worker in enumerate(self.workers[:world_size])}
        reports: dict[int, Report] = {}
        while rank_of and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(rank_of), timeout=left):
                rank = rank_of.pop(connection)
                try:
                    reports[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    process = self.workers[rank].process
                    process.join(CLOSE_S)
                    text = f"the process of rank {rank} died, exit code {process.exitcode}"
                    reports[rank] = Report(None, text, time_s=0.0, reusable=False)  # before what it causes in others
                if reports[rank].error:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return reports

    def _close(self, world_size: int) -> bool:
        """Tell the ranks that all have reported; whether every one has left its group."""
        for worker in self.workers[:world_size]:
            worker.connection.send_bytes(b"close")
        deadline = time.monotonic() + CLOSE_S
        for worker in self.workers[:world_size]:
            if not worker.connection.poll(max(0.0, deadline - time.monotonic())):
                return False
            worker.connection.recv_bytes()
        return True

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Where the ranks are stuck, in Python terms."""
        stacks = {}
        for rank in ranks:
            log = self.workers[rank].log
            before = log.stat().st_size
            os.kill(self.workers[rank].process.pid, signal.SIGUSR1)
            time.sleep(0.2)
            stacks[rank] = f"rank {rank} is at:\n{log.read_bytes()[before:].decode(errors='replace')}"
        return stacks

    def _print_logs(self, world_size: int) -> None:
        """Print what the ranks printed, so that pytest shows it with the test that ran."""
        for rank, worker in enumerate(self.workers[:world_size]):
            if text := worker.log.read_text(errors="replace"):
                os.truncate(worker.log, 0)
                print(f"--- printed by rank {rank}\n{text.rstrip()}")

    def _environ(self, rank: int, world_size: int) -> dict[str, str]:
        """The caller's environment plus what torchrun sets. As there, the store is hosted outside the ranks."""
        values = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
        values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.tcp_store.port, "OMP_NUM_THREADS": 1}
        values |= {"TORCH_DIST_INIT_BARRIER": 1}  # no rank can fail, and close its connections, while others connect
        values |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        return {**os.environ, **{name: str(value) for name, value in values.items()}}


_POOL = Pool()
atexit.register(_POOL.kill)
