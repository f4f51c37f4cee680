"""Watchdog: if a rank waits longer than `timeout=` seconds, report the rank that hangs or has ended.

Every call begins with a collective on the CPU (`same_call.py`), in which ranks wait for a missing rank. A rank that has
waited too long requests the state of all ranks through torch.distributed's store. In each process, a background thread
answers with the stack of the main thread. Nothing is recorded during a step, so the watchdog takes almost no time.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from torch import Tensor

from autopart.compat.torch_function_internals import local_values
from autopart.compat.torch_internals import clone_of, default_store, keep_for_ever, set_group_timeout
from autopart.errors import HangError
from autopart.runtime.comm.one_caller import one_caller
from autopart.runtime.comm.stack_traces import place_in_stack, place_in_traceback

FIRST = 10
"""Factor on the time limit `timeout=` while a module is created, and in the first call of a program."""

PATIENCE = timedelta(days=7)
"""Time limit that the collectives of the CPU process group get from torch.

It is long, because the watchdog itself waits for them in short steps.
"""

BEAT_S = 1.0
RANKS_PER_BEAT = 200  # on a larger mesh, processes look less often
BEATS_TO_ANSWER = 3
CONNECT_S = 5.0  # time limit of a connection to the store: its process can have ended
SHOWN = 16  # maximum number of ranks in an error

LOST = ("Timed out waiting", "Operation timed out", "Connection closed", "Connection reset", "Broken pipe",
        "timeout caused pair closure", "connectFullMesh failed", "Read error", "Write error")  # fmt: skip
"""Parts of gloo's error messages that mean: a rank does not arrive, or has ended."""


@dataclass
class Record:
    """State that a rank reports to a rank that waits for it.

    Attributes:
        state: "inside" a call, "outside" of calls, "paused", "waiting" (it has given up) or "ended".
        doing: description of the call or state.
        place: description of the operator or line that the rank runs.
        for_s: seconds since the last change of state.
        answer: number of the request that this record answers.
    """

    state: str
    doing: str
    place: str
    for_s: float = 0.0
    answer: int = 0

    @property
    def where(self) -> str:
        return f"{self.doing}, {self.place}" if self.place else self.doing

    def __str__(self) -> str:
        return f"{self.where}, for {self.for_s:.1f} s" if self.state != "ended" else self.doing


NOT_MET = ("Timed out after", "wait timeout after", "timed out after", "recvValue failed", "failed to recv")
"""Parts of messages of torch's store that mean: a rank does not join the first process group."""


def is_lost(error: RuntimeError) -> bool:
    """Return True if the error means that another rank does not arrive, or has ended."""
    return any(text in str(error) for text in LOST)


class Watch:
    """Watchdog of one rank: the rank's current state, and the time limits of collectives.

    Attributes:
        ranks: global ranks of the mesh, sorted.
        send_s: time limit of a send or receive between pipeline stages. It is long, because the sender may be
            compiling.
    """

    def __init__(self, ranks: list[int], host_groups: list[dist.ProcessGroup], timeout_s: float, compile: bool = False):
        self.send_s = timeout_s * (FIRST if compile else 1)
        self.timeout_s, self.limit_s = timeout_s, FIRST * timeout_s
        self.rank, self.ranks = dist.get_rank(), ranks
        self.timed_groups: list[dist.ProcessGroup] = []
        self._note("inside", "making the module")
        self.beat_s = min(max(BEAT_S, len(self.ranks) / RANKS_PER_BEAT), max(timeout_s / 6, 0.05))
        self.main = threading.get_ident()
        self._store = _store_of(ranks)
        for group in host_groups:
            set_group_timeout(group, PATIENCE)
            _WATCHES[group.group_name] = self
        stopped = threading.Event()
        weakref.finalize(self, stopped.set)
        thread = threading.Thread(target=_answer, args=(weakref.ref(self), stopped), daemon=True)
        thread.start()
        atexit.register(_say_goodbye, weakref.ref(self), stopped, thread)

    def over(self, groups: list[dist.ProcessGroup]) -> None:
        """Apply the watchdog's time limit and error messages to collectives of these process groups."""
        for group in groups:
            if group not in self.timed_groups:
                self.timed_groups.append(group)
                _WATCHES[group.group_name] = self
                set_group_timeout(group, timedelta(seconds=self.limit_s))

    def allow(self, first: bool) -> None:
        """Set the time limit of collectives to `timeout=`, or to ten times as much for a program's first call."""
        limit_s = self.timeout_s * (FIRST if first else 1)
        if limit_s != self.limit_s:
            self.limit_s = limit_s
            for group in self.timed_groups:
                set_group_timeout(group, timedelta(seconds=limit_s))

    @contextmanager
    def inside(self, doing: str) -> Iterator[None]:
        """Context manager that marks this rank as inside the call `doing`.

        Raises HangError if a collective in the block fails because another rank is missing.
        """
        before = self.state, self.doing
        self._note("inside", doing)
        try:
            yield
        except RuntimeError as error:
            self.raise_if_lost(error)
            raise
        finally:
            if self.state != "waiting":
                self._note(*(before if before[0] == "inside" else ("outside", f"after {doing}")))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager that marks this rank as paused. Other ranks then wait for it without a time limit."""
        before = self.state, self.doing
        self._note("paused", f"paused {self.doing}")
        try:
            yield
        finally:
            self._note(*before)

    def made(self) -> None:
        """Record that the module has been created: this rank is now outside of calls."""
        self._note("outside", "after making the module")

    def wait(self, work: dist.Work, group: dist.ProcessGroup) -> None:
        """Wait for a collective on a CPU group, for at most `limit_s` seconds.

        If another rank is paused at the end of this time, wait again. Otherwise raise HangError.
        """
        if work.is_completed():
            work.wait()
            return
        started = time.monotonic()
        while True:
            try:
                work.wait(timedelta(seconds=self.limit_s))
                return
            except RuntimeError as error:
                still_runs = not work.is_completed()
                waited_s = time.monotonic() - started
                records = self._ask()
                if still_runs and any(record.state == "paused" for record in (records or {}).values()):
                    continue
                keep_for_ever(group, work)  # else Python could not exit before other ranks arrive
                raise self._error(error, records, waited_s) from error

    def raise_if_lost(self, error: RuntimeError) -> None:
        """Raise HangError if `error` means that another rank does not arrive, or has ended."""
        if is_lost(error):
            raise self._error(error, self._ask(), time.monotonic() - self.since) from error

    def record(self, place: str = "") -> Record:
        """Return the current state of this rank, for the error messages of other ranks."""
        if not place and self.state != "ended" and threading.get_ident() != self.main:
            place = place_in_stack(self.main, self.state == "inside")
        return Record(self.state, self.doing, place, time.monotonic() - self.since)

    def publish(self, record: Record) -> None:
        self._store().set(str(self.rank), json.dumps(asdict(record)))

    def _note(self, state: str, doing: str) -> None:
        self.state, self.doing, self.since = state, doing, time.monotonic()

    def _ask(self) -> dict[int, Record] | None:
        """Request the state of all other ranks. Return {rank: state} of ranks that answer in a few seconds.

        Returns None if the process that hosts the store has ended.
        """
        try:
            return self._answers()
        except RuntimeError:
            return None

    def _answers(self) -> dict[int, Record]:
        store, records = self._store(), {}
        number = store.add("asked", 1)
        deadline = time.monotonic() + BEATS_TO_ANSWER * self.beat_s + 0.5
        missing = {rank for rank in self.ranks if rank != self.rank}
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                record = self._read(store, rank)
                if record is not None and (record.answer >= number or record.state in ("ended", "waiting")):
                    records[rank] = record
            missing -= set(records)
            time.sleep(self.beat_s / 10)
        return records

    def _read(self, store: dist.Store, rank: int) -> Record | None:
        return Record(**json.loads(store.get(str(rank)))) if store.check([str(rank)]) else None

    def _error(self, error: RuntimeError, records: dict[int, Record] | None, waited_s: float) -> HangError:
        mine = self.record(place_in_traceback(error))
        mine.state, mine.for_s = "waiting", waited_s
        if records is not None:
            try:
                self.publish(mine)
            except RuntimeError:
                records = None
        self.state = "waiting"
        waited = f"rank {self.rank} waited {waited_s:.1f} s in {mine.where}"
        if records is None:
            return HangError(
                f"the process that hosts torch.distributed's store is gone: {waited}",
                why="this rank cannot find out what the other ranks do",
                hint="read the last lines of the output of rank 0, and of torchrun",
            )
        gone = [rank for rank in self.ranks if rank not in records and rank != self.rank]
        gone += [rank for rank, record in records.items() if record.state == "ended"]
        away = [rank for rank, record in records.items() if record.state in ("outside", "paused")]
        if gone:
            what = f"{_ranks(gone)} {'are' if len(gone) > 1 else 'is'} gone"
            hint = "read the last lines of its output, above or in its log"
        elif away:
            what = f"{_ranks(away)} {'make' if len(away) > 1 else 'makes'} no call"
            hint = (
                "make the same calls on every rank; use pm.pause_timeout() around long work of your own, or timeout=600"
            )
        else:
            what = "the ranks wait in different calls"
            hint = "make the same calls on every rank; timeout=600 if one is slow"
        states = {**dict.fromkeys(gone, "does not answer: killed, or frozen"), **records, self.rank: mine}
        lines = [f"rank {rank}: {states[rank]}" for rank in sorted(states)]
        why = "\n         ".join(lines[:SHOWN] + ["..."] * (len(lines) > SHOWN))
        return HangError(f"{what}: {waited}", why=why, hint=hint)


_WATCHES: weakref.WeakValueDictionary[str, Watch] = weakref.WeakValueDictionary()
"""{name of a process group: its watchdog}. It is a weak dict: it keeps no watchdog alive."""


P = ParamSpec("P")
R = TypeVar("R")


def watched(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a collective method of ParallelModule, so that the watchdog can name it in errors."""
    name = method.__name__

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        module: Any = args[0]
        with one_caller(module._process, name):
            module._calls[name] += 1
            watch = module._process.watch
            with local_values(), nullcontext() if watch is None else watch.inside(f"{name} {module._calls[name]}"):
                return method(*args, **kwargs)

    return call


def meeting(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a collective method of ParallelModule, so that it first waits until all ranks call it.

    Errors name missing ranks.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        module: Any = args[0]
        with one_caller(module._process, method.__name__), local_values():
            module._meet(method.__name__)
        return method(*args, **kwargs)

    return watched(call)


def finish(work: dist.Work | None, group: dist.ProcessGroup) -> None:
    """Wait for a collective on a mesh's CPU group, under its watchdog.

    Raises HangError if a rank does not arrive.
    """
    watch = _WATCHES.get(group.group_name)
    assert work is not None
    if watch is None:
        work.wait()
    else:
        watch.wait(work, group)


@contextmanager
def watching(group_name: str) -> Iterator[None]:
    """Context manager that raises HangError if a group's collective fails because a rank is missing."""
    try:
        yield
    except RuntimeError as error:
        watch = _WATCHES.get(group_name)
        if watch is not None:
            watch.raise_if_lost(error)
        raise


def limit(group: dist.ProcessGroup) -> timedelta:
    """Return the time limit of point-to-point sends and receives of a group."""
    watch = _WATCHES.get(group.group_name)
    return PATIENCE if watch is None else timedelta(seconds=watch.limit_s)


def sum_over(group: dist.ProcessGroup, values: Tensor) -> None:
    """All-reduce `values` over a group, in place. Raises HangError if a rank does not arrive."""
    with watching(group.group_name):
        dist.all_reduce(values, group=group)


_NUM_WATCHES: Counter[tuple[int, ...]] = Counter()
"""Number of watchdogs so far, by ranks. All of these ranks create the same number, so it can name their reports."""


def _store_of(ranks: list[int]) -> Callable[[], dist.Store]:
    """Return a function that returns the torch.distributed store in which these ranks report.

    Each thread gets a separate connection to the store.
    """
    first, key = default_store(), tuple(ranks)
    _NUM_WATCHES[key] += 1
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()
    name = f"{digest}/{_NUM_WATCHES[key]}"
    clients = threading.local()

    def client() -> dist.Store:
        if not hasattr(clients, "store"):
            clients.store = dist.PrefixStore(f"autopart/{name}", clone_of(first, CONNECT_S))
        return clients.store

    return client


def _answer(watch_ref: weakref.ref[Watch], stopped: threading.Event) -> None:
    """Loop of the background thread: report what the main thread is doing when a rank requests it.

    Reports are written to torch.distributed's store.
    """
    answered, beat_s, is_last = 0, BEAT_S, False
    while not is_last:
        is_last = stopped.wait(beat_s)
        watch = watch_ref()
        if watch is None or not (is_last or dist.is_initialized()):
            return
        beat_s = watch.beat_s
        try:
            store = watch._store()
            asked = int(store.get("asked")) if store.check(["asked"]) else 0
            if watch.state != "waiting" and (is_last or asked > answered):  # else the error is complete
                record = watch.record()
                record.answer = answered = asked
                watch.publish(record)
        except RuntimeError:  # the store is gone, and with it the run
            return
        del watch


def _say_goodbye(watch_ref: weakref.ref[Watch], stopped: threading.Event, thread: threading.Thread) -> None:
    """Report to the store that this process ends, and stop the watchdog's thread.

    It is called before the process exits, because Python aborts if the thread still uses the store then.
    """
    watch = watch_ref()
    if watch is not None and watch.state != "waiting":
        watch._note("ended", f"its process has ended, {watch.doing}")
    stopped.set()
    thread.join(BEATS_TO_ANSWER * BEAT_S)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
