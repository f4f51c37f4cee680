"""Measures the machine it runs on: matrix products, memory, the launch of an operator, and collectives where there are
several ranks, all of which measure at once, as they compute at once in a step.

`torch.utils.benchmark.Timer` times what one rank does alone on a CPU, with one thread by that thread's processor time,
from which what else runs on the machine takes nothing. On a GPU a call is made many times in a row, as a CUDA graph.
Every measurement is made several times, some time apart, and the fastest counts: other work can only slow it.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer as default_timer

from autopart.compat.torch_internals import is_gloo
from autopart.extras.calibrate.gpu_calls import Maker, between, calls, in_turn
from autopart.extras.calibrate.measurement import ISSUE, Device, Measured
from autopart.ir.mesh import Mesh
from autopart.ir.sharding import Cut
from autopart.runtime.comm.collectives import PRIMITIVES
from autopart.runtime.comm.process_mesh import Process, connect, reduce_over_all

_CHAIN = 100  # operators in a row whose launch is measured
_CALLS = 4  # of a collective, between two barriers
_RECORDED_S = 2e-4  # of the calls in one CUDA graph
_BURSTS = 4  # of calls on a GPU, of which the fastest counts
_STEADY_S = 0.1  # after which what runs in turn takes the power that it will take
_SUSTAINED_S = 0.5  # after which a GPU's clock has come down to what its power allows
_GROUPS = {"link": "tp", "node_link": "dp"}  # the axes of the mesh that stands for nodes of processes


@dataclass(frozen=True)
class Effort:
    """What is measured, and for how long."""

    widths: tuple[int, ...]
    """Of square products; others of as many FLOPs are tall, wide and deep."""
    tensor_bytes: tuple[int, ...]
    message_bytes: tuple[int, ...]
    kept_bytes: int
    """What operators in a row write before anything is freed, as the forward of a training step does."""
    run_s: float
    """Of one call repeated. On a GPU a millisecond, after which its power limit lowers the clock: in a step products
    come between operators that take less power."""
    rounds: int
    repeats: int
    """Of a collective in a round."""
    is_of_gpus: bool = False
    """Measures what `gpu_calls` has, too."""

    @staticmethod
    def of(quick: bool, on_gpu: bool) -> Effort:
        if quick:
            return Effort((32, 128, 256), (2**14, 2**18, 2**21), (2**12, 2**16, 2**20), 2**22, 0.002, 1, 1)
        widths = (32, 64, 128, 256, 512, 1024, 2048)
        tensors, messages = tuple(2**n for n in range(12, 28, 2)), tuple(2**n for n in range(10, 26, 2))
        if on_gpu:
            return Effort((*widths, 4096, 8192), (*tensors, 2**28), (*messages, 2**26, 2**28), 2**31, 0.001, 1, 5, True)
        return Effort(widths, tensors, messages, 2**28, 0.05, 3, 5)


Task = tuple[Measured, Callable[[], float]]


@dataclass(frozen=True)
class Bench:
    """The device of this rank, and how its work is timed."""

    process: Process
    effort: Effort

    @property
    def device(self) -> torch.device:
        return self.process.device

    def tasks(self) -> list[Task]:
        """What there is to measure, the same on every rank, and how to measure it once."""
        return [*self.products(), *self.memory(), *self.launches(), *self.of_gpus(), *self.collectives()]

    def alone(self, call: Callable[[], Any]) -> float:
        """Seconds of a call that no other rank takes part in. All ranks begin at once."""
        if self.device.type == "cuda":
            return self.on_gpu(lambda _: call, self.effort.run_s)
        self.barrier()
        threads = torch.get_num_threads()
        clock = time.thread_time if self.device.type == "cpu" and threads == 1 else default_timer
        timer = Timer("call()", globals={"call": call}, num_threads=threads, timer=clock)
        return timer.blocked_autorange(min_run_time=self.effort.run_s).median

    def issued(self, call: Callable[[], Any]) -> float:
        """Seconds of one of many calls in a row that the host issues: of the kernel, or of that where it is longer."""
        self.barrier()
        seconds(call, 2)  # kernels are chosen and loaded
        return seconds(call, most_calls(self.effort.run_s, seconds(call, 3)))

    def on_gpu(self, maker: Maker, run_s: float) -> float:
        """Seconds of one of many calls in a row on the GPU alone: they are recorded as a CUDA graph, which one call
        replays. Infinite where the device has no such thing, as float8 before Hopper, or not the memory for it."""
        self.barrier()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                call = maker(self.device)
                call()  # kernels are chosen and loaded
                count = most_calls(_RECORDED_S, seconds(call, 3))
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(count):
                    call()
        except (RuntimeError, NotImplementedError):
            return math.inf
        number = most_calls(run_s, seconds(graph.replay, 3))
        return min(seconds(graph.replay, number) for _ in range(_BURSTS)) / count

    def of_gpus(self) -> Iterator[Task]:
        if self.effort.is_of_gpus:
            for what, maker in calls():
                run_s = _SUSTAINED_S if what.kind == "sustained" else self.effort.run_s
                yield what, partial(self.on_gpu, maker, run_s)
            for what, maker, other in between():
                yield what, partial(self.after, other, maker)

    def after(self, other: Maker, maker: Maker) -> float:
        """Seconds of a call each time another one has run, in many of both."""
        return self.on_gpu(in_turn(other, maker), _STEADY_S) - self.on_gpu(other, _STEADY_S)

    def together(self, call: Callable[[], Any]) -> float:
        """Seconds of a call that all ranks take part in."""
        return min(self._together_once(call) for _ in range(self.effort.repeats))

    def _together_once(self, call: Callable[[], Any]) -> float:
        call()
        self.wait()
        self.barrier()
        start_s = time.perf_counter()
        for _ in range(_CALLS):
            call()
        self.wait()
        return (time.perf_counter() - start_s) / _CALLS

    def barrier(self) -> None:
        if self.process.host_group is not None:
            dist.barrier(group=self.process.host_group)

    def wait(self) -> None:
        """For what was launched on a GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def products(self) -> Iterator[Task]:
        for dtype in _dtypes(self.device):
            for width in self.effort.widths:
                for shape in _shapes(width):
                    yield (
                        Measured("matmul", dtype=str(dtype).removeprefix("torch."), shape=shape),
                        self.product(shape, dtype),
                    )

    def product(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Callable[[], float]:
        def run() -> float:
            rows, inner, columns = shape
            x, weight = self.random(rows, inner, dtype=dtype), self.random(columns, inner, dtype=dtype)
            weight.requires_grad_()  # as a step records it
            return self.alone(lambda: F.linear(x, weight))

        return run

    def memory(self) -> Iterator[Task]:
        for size in self.effort.tensor_bytes:
            yield Measured("memory", size_bytes=2.5 * size), self.fresh(size)
        size = self.effort.tensor_bytes[-1]
        yield Measured("memory in place", size_bytes=3.0 * size), self.in_place(size)

    def fresh(self, size: int) -> Callable[[], float]:
        """Products with a number and sums of two tensors, 2.5 values read or written on average, whose results are kept
        as a forward keeps them."""
        count = 2 * max(1, min(500, self.effort.kept_bytes // size // 2))

        def run() -> float:
            x = self.random(size // 4)

            def chain() -> None:
                kept = [x]
                for _ in range(count // 2):
                    kept.append(kept[-1] * 0.5)
                    kept.append(kept[-1] + x)

            return self.alone(chain) / count

        return run

    def in_place(self, size: int) -> Callable[[], float]:
        def run() -> float:
            x, y = self.random(size // 4), self.random(size // 4)
            return self.alone(lambda: torch.add(x, y, out=y))

        return run

    def launches(self) -> Iterator[Task]:
        """An operator on one value, forward and backward, as autograd issues them."""

        def run() -> float:
            x = torch.ones(1, device=self.device, requires_grad=True)

            def chain() -> None:
                y = x
                for _ in range(_CHAIN):
                    y = y * 0.5
                y.backward()
                x.grad = None

            return (self.issued(chain) if self.device.type == "cuda" else self.alone(chain)) / (2 * _CHAIN)

        if self.device.type != "cuda":
            yield Measured("launch"), run
            return
        yield Measured(ISSUE), run
        yield Measured("launch"), self.smallest()

    def smallest(self) -> Callable[[], float]:
        """An operator on one value, alone."""

        def run() -> float:
            x = torch.ones(1, device=self.device)
            return self.alone(lambda: x * 0.5)

        return run

    def collectives(self) -> Iterator[Task]:
        for link, axis in _GROUPS.items():
            if axis not in self.process.groups:
                continue
            group = self.process.groups[axis]
            for kind in ("all_reduce", "all_gather", "reduce_scatter", "send"):
                for size in self.effort.message_bytes:
                    call = self.exchange(size, group) if kind == "send" else self.collective(kind, size, group)
                    yield Measured(kind, size_bytes=size, link=link, num_ranks=group.size()), call

    def collective(self, kind: str, size: int, group: dist.ProcessGroup) -> Callable[[], float]:
        """A collective over an array of `size` bytes, as programs run it."""

        def run() -> float:
            count = size // 4 // group.size() * group.size()
            x = self.random(count // group.size() if kind == "all_gather" else count)
            cuts = () if kind == "all_reduce" else (Cut(0, count, (), group.size()),)
            return self.together(lambda: PRIMITIVES[kind](x, group.group_name, *cuts))

        return run

    def exchange(self, size: int, group: dist.ProcessGroup) -> Callable[[], float]:
        """There and back between neighbours, half of which is one send; through the host where the group is gloo's, as
        stages send."""
        through_host = self.device.type == "cuda" and is_gloo(group, self.device)

        def run() -> float:
            values, rank = self.random(size // 4), group.rank()
            peer = rank ^ 1

            def call() -> None:
                if peer >= group.size():
                    return
                first, second = (dist.send, dist.recv) if rank < peer else (dist.recv, dist.send)
                x = values.cpu() if through_host else values
                for move in (first, second):
                    move(x, group=group, **{"group_dst" if move is dist.send else "group_src": peer})
                if through_host:
                    values.copy_(x)

            return self.together(call) / 2

        return run


def seconds(call: Callable[[], Any], count: int) -> float:
    """Of one of so many calls in a row, until a GPU has done them."""
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / count


def most_calls(in_s: float, one_s: float) -> int:
    return max(3, min(1000, int(in_s / one_s)))


def measure(quick: bool, progress: Callable[[list[Any]], Any]) -> tuple[Device, list[Measured]]:
    """Measures this machine: alone, or on every process that torchrun has started, which then all get the same figures,
    means over the ranks.

    Args:
        quick: few sizes, once.
        progress: wraps the measurements that are to be made, in their order, as tqdm does.
    """
    process = connect(_nodes(), torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    effort = Effort.of(quick, process.device.type == "cuda")
    tasks = Bench(process, effort).tasks()
    times: dict[Measured, float] = {}
    gc.freeze()  # torch collects garbage before each CUDA graph, through all that has been made so far
    try:
        for what, run in progress(tasks * effort.rounds):
            times[what] = min(run(), times.get(what, math.inf))
    finally:
        gc.unfreeze()
    mean_times = torch.tensor(list(times.values()), dtype=torch.float64)
    if process.host_group is not None:
        reduce_over_all(mean_times, dist.ReduceOp.SUM, process)
        mean_times /= dist.get_world_size(process.host_group)
    rows = [replace(what, time_s=s) for what, s in zip(times, mean_times.tolist(), strict=True)]
    return device_of(process), [row for row in rows if math.isfinite(row.time_s)]


def device_of(process: Process) -> Device:
    """What there is to say of this rank's device."""
    local = process.mesh.size("tp")
    if process.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(process.device)
        software = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
        return Device(gpu.name, "cuda", software, gpu.total_memory, local, process.mesh.num_ranks, process.rank)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    threads = torch.get_num_threads()
    software = f"torch {torch.__version__}, {threads} thread{'s' * (threads > 1)} a process, {os.cpu_count()} cores"
    return Device(_cpu_name(), "cpu", software, memory / local, local, process.mesh.num_ranks, process.rank)


def _nodes() -> Mesh:
    """The processes of torchrun as a mesh: those of one node on `tp`, nodes on `dp`."""
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    return Mesh.parse({"dp": ranks // local, "tp": local})


def _shapes(width: int) -> list[tuple[int, int, int]]:
    """Of as many FLOPs: square, tall, wide, deep."""
    half, four = width // 2, 4 * width
    return [(width, width, width), (four, half, half), (half, half, four), (half, four, half)]


def _dtypes(device: torch.device) -> list[torch.dtype]:
    """What the device has units for. On CPUs 16 bits are often emulated, so they are left out."""
    if device.type != "cuda":
        return [torch.float32, torch.float64]
    bfloat16 = [torch.bfloat16] if torch.cuda.is_bf16_supported(including_emulation=False) else []
    return [*bfloat16, torch.float16, torch.float32, torch.float64]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
