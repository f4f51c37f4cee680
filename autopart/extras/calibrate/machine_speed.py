"""Measurements of this machine: matrix products, memory, launch overhead and collectives.

All ranks measure simultaneously, because they compute simultaneously in a step.

On a CPU, `torch.utils.benchmark.Timer` times calls without communication. With one thread it reads the CPU time of that
thread, which other processes do not affect. On a GPU, many calls run in a row as a CUDA graph. Every measurement is
repeated after some time. The fastest repetition counts, because other work on the machine can only slow a call down.
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
from autopart.ir.sharding import DimSharding
from autopart.runtime.comm.collectives import PRIMITIVES
from autopart.runtime.comm.process_mesh import Process, connect, reduce_over_all

_CHAIN = 100  # operators in a row to measure launch overhead
_CALLS = 4  # calls of a collective between two barriers
_RECORDED_S = 2e-4  # duration of the calls in one CUDA graph
_BURSTS = 4  # bursts of calls on a GPU, of which the fastest counts
_STEADY_S = 0.1  # duration after which the power of alternating calls is steady
_SUSTAINED_S = 0.5  # duration after which a GPU's clock has dropped to its power limit
_GROUPS = {"link": "tp", "node_link": "dp"}  # {kind of link: axis of the mesh from `_nodes`}


@dataclass(frozen=True)
class Effort:
    """Settings of a calibration: the sizes to measure, and the durations of measurements."""

    widths: tuple[int, ...]
    """Widths of square products. Tall, wide and deep products of equal FLOPs are measured too."""
    tensor_bytes: tuple[int, ...]
    message_bytes: tuple[int, ...]
    kept_bytes: int
    """Bytes that a chain of operators writes before it frees its results, as the forward of a step does."""
    run_s: float
    """Seconds for which one measurement repeats a call.

    On a GPU, it is a millisecond. Products that run longer in a row reach the power limit, which lowers the clock. In a
    step they do not, because they alternate with operators that use less power.
    """
    rounds: int
    repeats: int
    """Number of repetitions of a collective in a round."""
    is_of_gpus: bool = False
    """True to also measure the calls of `gpu_calls`."""

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
    """Benchmarks on the device of this rank."""

    process: Process
    effort: Effort

    @property
    def device(self) -> torch.device:
        return self.process.device

    def tasks(self) -> list[Task]:
        """Return all measurements, as (description, function that measures once). All ranks get equal lists."""
        return [*self.products(), *self.memory(), *self.launches(), *self.of_gpus(), *self.collectives()]

    def alone(self, call: Callable[[], Any]) -> float:
        """Measure the seconds of a call without communication. All ranks start their calls simultaneously."""
        if self.device.type == "cuda":
            return self.on_gpu(lambda _: call, self.effort.run_s)
        self.barrier()
        threads = torch.get_num_threads()
        clock = time.thread_time if self.device.type == "cpu" and threads == 1 else default_timer
        timer = Timer("call()", globals={"call": call}, num_threads=threads, timer=clock)
        return timer.blocked_autorange(min_run_time=self.effort.run_s).median

    def issued(self, call: Callable[[], Any]) -> float:
        """Measure the seconds per call of many calls in a row.

        On a GPU, the result is the run time of the kernels or the CPU time to launch them, whichever is longer.
        """
        self.barrier()
        seconds(call, 2)  # warm-up: torch selects and loads kernels
        return seconds(call, most_calls(self.effort.run_s, seconds(call, 3)))

    def on_gpu(self, maker: Maker, run_s: float) -> float:
        """Measure the GPU seconds per call of many calls in a row, replayed as a CUDA graph.

        Returns infinity if the GPU does not support the call (float8 before Hopper) or has too little memory.
        """
        self.barrier()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                call = maker(self.device)
                call()  # warm-up: torch selects and loads kernels
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
        """Measure the seconds of a call that alternates with another call.

        The two calls are timed together, and the time of the other call alone is subtracted.
        """
        return self.on_gpu(in_turn(other, maker), _STEADY_S) - self.on_gpu(other, _STEADY_S)

    def together(self, call: Callable[[], Any]) -> float:
        """Measure the seconds of a call in which all ranks take part, such as a collective."""
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
        reduce_over_all(torch.zeros(1), dist.ReduceOp.SUM, self.process)

    def wait(self) -> None:
        """Wait until a GPU has run all launched kernels."""
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
            weight.requires_grad_()  # autograd records the product, as in a step
            return self.alone(lambda: F.linear(x, weight))

        return run

    def memory(self) -> Iterator[Task]:
        for size in self.effort.tensor_bytes:
            yield Measured("memory", size_bytes=2.5 * size), self.fresh(size)
        size = self.effort.tensor_bytes[-1]
        yield Measured("memory in place", size_bytes=3.0 * size), self.in_place(size)

    def fresh(self, size: int) -> Callable[[], float]:
        """Return a function that measures elementwise operators that write into newly allocated memory.

        Two operators alternate: a tensor times a number, and the sum of two tensors. On average, they read and write
        2.5 values per element. All results stay allocated, as in a forward.
        """
        count = 2 * max(1, min(500, self.effort.kept_bytes // size // 2))

        def run() -> float:
            x = self.random(size // 4)

            def chain() -> None:
                results = [x]
                for _ in range(count // 2):
                    results.append(results[-1] * 0.5)
                    results.append(results[-1] + x)

            return self.alone(chain) / count

        return run

    def in_place(self, size: int) -> Callable[[], float]:
        def run() -> float:
            x, y = self.random(size // 4), self.random(size // 4)
            return self.alone(lambda: torch.add(x, y, out=y))

        return run

    def launches(self) -> Iterator[Task]:
        """Yield measurements of the launch of one operator. CPU times are means over forward and backward."""

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
        """Return a function that measures one operator on a tensor of one element."""

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
        """Return a function that measures a collective on an array of `size` bytes.

        It measures the function with which partitioned programs run this collective.
        """

        def run() -> float:
            count = size // 4 // group.size() * group.size()
            x = self.random(count // group.size() if kind == "all_gather" else count)
            cuts = () if kind == "all_reduce" else (DimSharding(0, count, (), group.size()),)
            return self.together(lambda: PRIMITIVES[kind](x, group.group_name, *cuts))

        return run

    def exchange(self, size: int, group: dist.ProcessGroup) -> Callable[[], float]:
        """Return a function that measures one send, as half of a round trip between neighbouring ranks.

        If the group uses gloo, GPU tensors are copied through CPU memory, as between pipeline stages.
        """
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
    """Return the seconds per call of `count` calls in a row, including GPU work."""
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / count


def most_calls(in_s: float, one_s: float) -> int:
    return max(3, min(1000, int(in_s / one_s)))


def measure(quick: bool, progress: Callable[[list[Any]], Any]) -> tuple[Device, list[Measured]]:
    """Measure this machine, in one process or in all processes of torchrun.

    All processes return equal figures: means over the ranks.

    Args:
        quick: True to measure few sizes, and each only once.
        progress: wraps the sequence of measurements, as tqdm does.
    Returns:
        The device, and the measurements that are finite.
    """
    process = connect(_nodes(), torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    effort = Effort.of(quick, process.device.type == "cuda")
    tasks = Bench(process, effort).tasks()
    times: dict[Measured, float] = {}
    gc.freeze()  # torch collects garbage before each CUDA graph, which would visit all existing objects
    try:
        for what, run in progress(tasks * effort.rounds):
            times[what] = min(run(), times.get(what, math.inf))
    finally:
        gc.unfreeze()
    mean_times = torch.tensor(list(times.values()), dtype=torch.float64)
    if process.host_group is not None:
        reduce_over_all(mean_times, dist.ReduceOp.SUM, process)
        mean_times /= process.host_group.size
    rows = [replace(what, time_s=s) for what, s in zip(times, mean_times.tolist(), strict=True)]
    return device_of(process), [row for row in rows if math.isfinite(row.time_s)]


def device_of(process: Process) -> Device:
    """Describe the device of this rank."""
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
    """Return torchrun's processes as a mesh: ranks of one node along `tp`, nodes along `dp`."""
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    return Mesh.parse({"dp": ranks // local, "tp": local})


def _shapes(width: int) -> list[tuple[int, int, int]]:
    """Return four shapes (m, k, n) of matrix products with equal FLOPs: square, tall, wide and deep."""
    half, four = width // 2, 4 * width
    return [(width, width, width), (four, half, half), (half, half, four), (half, four, half)]


def _dtypes(device: torch.device) -> list[torch.dtype]:
    """Return the dtypes to measure. A CPU is not measured in 16-bit dtypes, which CPUs often emulate."""
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
