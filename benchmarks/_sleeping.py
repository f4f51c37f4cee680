"""Process groups over a simulated slow link: gloo collectives that sleep for the transfer time.

A separate thread runs the collectives of all groups one after the other, since a process has one link. It sleeps
without using the processor, as a network card works in parallel to a GPU, so overlapped collectives are hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo

NAME = "sleeping"


class Sent(NamedTuple):
    """A collective on the link: what it is, and when it began and ended, in seconds of `time.perf_counter`."""

    what: str
    start_s: float
    end_s: float


@dataclass
class Link:
    """What all groups of this process send over. `is_blocking`: a call returns when all has arrived, for what waits
    with Python's lock, which the thread needs."""

    is_blocking: bool = False
    rate_bytes_per_s: float = float("inf")
    sent_bytes: float = 0.0
    sent: list[Sent] = field(default_factory=list)
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def send(
        self, what: str, call: Callable[[], dist.Work | _Several], result: Any, size_bytes: float,
        arrives_last: bool = False,
    ) -> dist.Work:  # fmt: skip
        """Begins a collective of which this rank sends so many bytes; its future gives `result`. `arrives_last`: it
        sleeps before the call."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def run() -> None:
            start_s = time.perf_counter()
            try:
                if arrives_last:
                    time.sleep(size_bytes / self.rate_bytes_per_s)
                call().wait()
                time.sleep(max(0.0, size_bytes / self.rate_bytes_per_s - (time.perf_counter() - start_s)))
                self.sent_bytes += size_bytes
                self.sent.append(Sent(what, start_s, time.perf_counter()))
                future.set_result(result)
            except RuntimeError as error:
                future.set_exception(error)

        if self.is_blocking:
            run()
        else:
            self.thread.submit(run)
        return torch._C._distributed_c10d._create_work_from_future(future)


LINK = Link()


@dataclass
class _Several:
    """Collectives that are waited for as one."""

    works: list[dist.Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class SleepingGroup(dist.ProcessGroup):
    """Bytes are those that a rank sends in a ring, as NCCL counts them."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self.inner = ProcessGroupGloo(store, rank, size, timeout)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        share = 2 * (self.size() - 1) / self.size()
        return LINK.send("all-reduce", lambda: self.inner.allreduce(tensors, opts), tensors, share * _bytes(tensors))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return LINK.send("broadcast", lambda: self.inner.broadcast(tensors, opts), tensors, _bytes(tensors))

    def allgather(self, outputs: Any, inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        size = (self.size() - 1) * _bytes(inputs)
        return LINK.send("all-gather", lambda: self.inner.allgather(outputs, inputs, opts), outputs, size)

    def _allgather_base(self, output: Tensor, values: Tensor, opts: Any = None) -> dist.Work:
        size = (self.size() - 1) * values.nbytes
        return LINK.send("all-gather", lambda: self.inner._allgather_base(output, values, opts), output, size)

    def _reduce_scatter_base(self, output: Tensor, values: Tensor, opts: Any = None) -> dist.Work:
        size = (self.size() - 1) * output.nbytes
        return LINK.send(
            "reduce-scatter", lambda: self.inner._reduce_scatter_base(output, values, opts), output, size
        )  # fmt: skip

    def all_gather_single(self, output: Tensor, values: Tensor, opts: Any = None) -> dist.Work:
        return self._allgather_base(output, values, opts)

    def reduce_scatter_single(self, output: Tensor, values: Tensor, opts: Any = None) -> dist.Work:
        return self._reduce_scatter_base(output, values, opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        size = (self.size() - 1) * _bytes(inputs)
        each = [partial(self.inner._allgather_base, *pair) for pair in zip(outputs, inputs, strict=True)]
        return LINK.send("all-gather", lambda: _Several([call() for call in each]), outputs, size)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        size = (self.size() - 1) * _bytes(outputs)
        each = [partial(self.inner._reduce_scatter_base, *pair) for pair in zip(outputs, inputs, strict=True)]
        return LINK.send("reduce-scatter", lambda: _Several([call() for call in each]), outputs, size)

    def alltoall_base(self, output: Tensor, values: Tensor, outs: Any, ins: Any, opts: Any = None) -> dist.Work:
        size = values.nbytes * (self.size() - 1) / self.size()
        return LINK.send(
            "all-to-all", lambda: self.inner.alltoall_base(output, values, outs, ins, opts), output, size
        )  # fmt: skip

    def all_to_all_single(self, output: Tensor, values: Tensor, outs: Any, ins: Any, opts: Any = None) -> dist.Work:
        return self.alltoall_base(output, values, outs, ins, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Only to set up."""
        return LINK.send("scatter", lambda: self.inner.scatter(outputs, inputs, opts), outputs, 0)

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> dist.Work:
        """Its receiver has it when its bytes have arrived."""
        call = lambda: self.inner.send(tensors, to, tag)  # noqa: E731
        return LINK.send("send", call, tensors, _bytes(tensors), arrives_last=True)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> dist.Work:
        return self.inner.recv(tensors, source, tag)

    def barrier(self, opts: Any = None) -> dist.Work:
        return LINK.send("barrier", lambda: self.inner.barrier(opts), [], 0)

    def _set_group_name(self, name: str) -> None:
        self.own_name = name

    @property
    def group_name(self) -> str:
        return self.own_name

    def getBackendName(self) -> str:
        return NAME


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def register() -> None:
    """Makes `init_process_group("sleeping")` known to torch."""
    dist.Backend.register_backend(NAME, SleepingGroup, devices=["cpu"])
