"""The seconds that a program's operators take on a rank, from its stage graphs with their local shapes.

The FLOPs of a matrix product are those that torch counts on the local shapes. Everything else takes the time of its
memory traffic; what makes no memory of its own (views) takes none.

Of a matrix product each operand's gradient takes as long as the product; of fused attention, which computes its scores
again (Dao et al. 2022, arXiv:2205.14135, section 3.1), five products where the forward has two. Of all others the
backward reads the gradient of the output and what was kept, and writes the gradients of the inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from autopart.cost.collectives import time_s, wire_bytes
from autopart.cost.flops import counted_flops
from autopart.cost.hardware import Hardware
from autopart.cost.memory import BUCKET_BYTES
from autopart.graph import operator_name, tensor_inputs
from autopart.layout import DIRECTIONS
from autopart.mesh import Mesh
from autopart.plan import TIMING_PARTS, Schedule
from autopart.program import Program, Stage, StoredTensor
from autopart.trace import Trace

from .footprint import Value, Walk
from .memory import homes, local_bytes
from .partition import active_operators, matrix_work

ATTENTION = "aten::scaled_dot_product_attention"
_ATTENTION_BACKWARD = 2.5
_OPTIMIZER_TRAFFIC = 7
"""Values that AdamW reads (parameter, gradient, two moments) and writes (all but the gradient), per parameter."""

_BUCKET_COPIES = 4
"""How often a gradient is read or written to be put into a flat bucket, and taken out again."""

_SUMMED = 3
"""Values that adding a gradient to the sum of earlier microbatches reads and writes."""


@dataclass
class StageTime:
    """Seconds of one microbatch of a stage on a rank, by kind of work (`"matmul"`, `"attention"`, `"other"`, and
    `"tp all_reduce"` and the like): its forward, and the backwards of what it receives and of its weights."""

    forward: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    input_backward: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    weight_backward: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    collectives: dict[tuple[str, str], tuple[int, float, float]] = field(default_factory=dict)

    def moves(self, part: dict[str, float], axis: str, kind: str, size: float, mesh: Mesh, hardware: Hardware) -> None:
        """Count a collective over an array of `size` bytes."""
        if not kind or mesh.size(axis) == 1:
            return
        seconds = time_s(kind, mesh.size(axis), size, hardware, mesh.stride(axis))
        if seconds:
            part[f"{axis} {kind}"] += seconds
            count, moved, whole = self.collectives.get((axis, kind), (0, 0.0, 0.0))
            sent = wire_bytes(kind, mesh.size(axis), size)
            self.collectives[axis, kind] = count + 1, moved + sent, whole + seconds


class Cost(NamedTuple):
    """Seconds of one call of an operator."""

    kind: str
    forward_s: float
    input_backward_s: float
    weight_backward_s: float


def timing(
    trace: Trace, program: Program, schedule: Schedule, hardware: Hardware, walks: Sequence[Walk]
) -> dict[str, Any]:
    """What `autopart.simulate` needs of a plan, as data: the peak of a device, `forward_flops` of the model's matrix
    work on the global batch, `stages`, one row each, and `ranks`, one for each coordinate of `pp`. Seconds are of one
    microbatch, of ranks of a step.

    Args:
        walks: one of each stage.
    """
    known: dict[Any, Cost] = {}
    rows = [_stage_row(stage_time(walk, hardware, known), walk.stage, program, hardware) for walk in walks]
    flops = sum(matrix_work(node) for node in active_operators(trace.graph))
    return {
        "peak_flops_per_s": hardware.matmul_flops_per_s, "forward_flops": flops, "stages": rows,
        "ranks": [*_rank_rows(trace, program, schedule, hardware)],
    }  # fmt: skip


def _stage_row(found: StageTime, stage: Stage, program: Program, hardware: Hardware) -> dict[str, Any]:
    size = sum(b.size_bytes for b in stage.receives)
    seconds = time_s("send", program.mesh.size("pp"), size, hardware, program.mesh.stride("pp")) if size else 0.0
    moved = [
        {"axis": axis, "kind": kind, "count": count, "bytes": round(sent), "seconds": _digits(seconds)}
        for (axis, kind), (count, sent, seconds) in found.collectives.items()
    ]
    parts = {part: {kind: _digits(s) for kind, s in getattr(found, part).items() if s} for part in TIMING_PARTS}
    return {
        "stage": stage.index, **parts, "collectives": moved, "receives_bytes": size, "receives_s": _digits(seconds),
    }  # fmt: skip


def stage_time(walk: Walk, hardware: Hardware, known: dict[Any, Cost]) -> StageTime:
    """The seconds of one microbatch of a stage on its first rank.

    Args:
        known: costs of calls, by all that they depend on; repeated blocks are priced once.
    """
    program = walk.program
    alive, weights = walk.reached(), _of_weights(walk)
    again = {memory for kept in walk.keeps.values() for memory in kept if memory.again}
    found = StageTime()
    for node in walk.values:
        if node.op != "call_function":
            continue
        name = operator_name(node).removeprefix("autopart::")
        if name in DIRECTIONS:
            forward, backward = DIRECTIONS[name]
            size = max(_size(walk.values[n]) for n in (node, node.args[0]))  # the whole array is on one side of it
            axis: Any = node.args[1]
            found.moves(found.forward, axis, forward, size, program.mesh, hardware)
            if node in alive:
                part = found.weight_backward if node in weights else found.input_backward
                found.moves(part, axis, backward, size, program.mesh, hardware)
            if walk.values[node].memory in again:  # a weight that the backward reads is gathered again
                found.moves(found.input_backward, axis, forward, size, program.mesh, hardware)
            continue
        cost = _known_cost(node, walk, node in alive, weights, hardware, known)
        found.forward[cost.kind] += cost.forward_s
        found.input_backward[cost.kind] += cost.input_backward_s
        found.weight_backward[cost.kind] += cost.weight_backward_s
    trained = [n for n in alive if n.op == "get_attr"]
    later = (program.microbatches - 1) / program.microbatches  # the first microbatch's gradient is there, not added
    for node in trained:
        traffic = _SUMMED * _size(walk.values[node]) / hardware.memory_bytes_per_s + hardware.launch_s
        found.weight_backward["other"] += traffic * later
    return found


def _known_cost(
    node: fx.Node, walk: Walk, alive: bool, weights: set[fx.Node], hardware: Hardware, known: dict[Any, Cost]
) -> Cost:
    read = [walk.values[used] for used in tensor_inputs(node)]
    forms = tuple((v.form.shape, v.form.stride, v.form.dtype, v.form.needs_grad) for v in read if isinstance(v, Value))
    others = (*(repr(a) for a in node.args if not isinstance(a, fx.Node)), str(node.kwargs))
    which = tuple(used in weights for used in tensor_inputs(node))
    key = (node.target, forms, others, which, alive)
    if key not in known:
        known[key] = _cost(node, walk, alive, which, hardware)
    return known[key]


def _cost(node: fx.Node, walk: Walk, alive: bool, of_weights: Sequence[bool], hardware: Hardware) -> Cost:
    read = [walk.values[used] for used in tensor_inputs(node)]
    made = _made(walk, node)
    size_in = sum(_size(v) for v in read)
    if not made:
        return Cost("other", 0.0, 0.0, 0.0)
    name = operator_name(node)
    flops = 0 if name.startswith("autopart::") else _flops(node)
    if flops:
        return _product(node, flops, size_in + made, read, alive, of_weights, hardware)
    if name.endswith(("::embedding", "::embedding_shard")):
        size_in = made  # a row is read for each that is made
    forward = _traffic_s(size_in + made, hardware)
    if not alive:
        return Cost("other", forward, 0.0, 0.0)
    kept = sum(memory.size_bytes for memory in set(walk.keeps.get(node, ())))
    grads = [(weight, _size(v)) for weight, v in zip(of_weights, read, strict=True) if _needs_grad(v)]
    backward = _traffic_s(made + kept + sum(size for _, size in grads), hardware)
    into_weights = all(weight for weight, _ in grads)
    return Cost("other", forward, 0.0 if into_weights else backward, backward if into_weights else 0.0)


def _product(
    node: fx.Node, flops: int, traffic: float, read: Sequence[Any], alive: bool, of_weights: Sequence[bool],
    hardware: Hardware,
) -> Cost:  # fmt: skip
    seconds = hardware.matmul_time_s(flops, traffic, _dtype(read, hardware))
    if operator_name(node) == ATTENTION:
        return Cost("attention", seconds, _ATTENTION_BACKWARD * seconds * alive, 0.0)
    inputs = weights = 0.0
    for weight, v in zip(of_weights, read, strict=True):
        if not alive or not _needs_grad(v):
            continue
        grad = seconds if len(v.form.shape) > 1 else _traffic_s(traffic, hardware)  # a bias: a sum over rows
        weights, inputs = (weights + grad, inputs) if weight else (weights, inputs + grad)
    return Cost("matmul", seconds, inputs, weights)


def _flops(node: fx.Node) -> int:
    """Its matrix work on the local shapes; none where that cannot be told without values."""
    try:
        return counted_flops(node)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        return 0


def _dtype(read: Sequence[Any], hardware: Hardware) -> str:
    """What a product computes in, the widest of its inputs; the slowest where the device has no peak for that."""
    widest = max((v.form.dtype for v in read if isinstance(v, Value)), key=lambda dtype: dtype.itemsize)
    name, peaks = str(widest).removeprefix("torch."), hardware.flops_per_s
    return name if name in peaks else min(peaks, key=lambda dtype: peaks[dtype])


def _traffic_s(size: float, hardware: Hardware) -> float:
    return size / hardware.memory_bytes_per_s + hardware.launch_s


def _of_weights(walk: Walk) -> set[fx.Node]:
    """What is computed from weights alone, as far as gradients go."""
    weights: set[fx.Node] = set()
    for node in walk.values:
        grads = [used for used in node.all_input_nodes if _needs_grad(walk.values[used])]
        if node.op == "get_attr" or (grads and all(used in weights for used in grads)):
            weights.add(node)
    return weights


def _made(walk: Walk, node: fx.Node) -> int:
    """Bytes of new memory that a call writes."""
    found = walk.values[node]
    values = found if isinstance(found, tuple) else (found,)
    own = {v.memory for v in values if isinstance(v, Value) and v.memory.made_by is node}
    return sum(memory.size_bytes for memory in own)


def _size(found: Any) -> int:
    return found.form.size_bytes if isinstance(found, Value) else 0


def _needs_grad(found: Any) -> bool:
    return isinstance(found, Value) and found.form.needs_grad


def _rank_rows(trace: Trace, program: Program, schedule: Schedule, hardware: Hardware) -> Iterator[Mapping[str, float]]:
    """Per coordinate of `pp`: the seconds of summing gradients, once a step, and of AdamW."""
    mesh, ranks = program.mesh, homes(program, schedule)
    for mine in ranks:
        sizes: dict[tuple[tuple[str, int, int], ...], int] = defaultdict(int)
        trained = 0
        for stored in program.parameters.values():
            if set(stored.stages) & mine and trace.parameters[stored.name].requires_grad:
                size = local_bytes(trace, program, stored)
                owners = sum(bool(set(stored.stages) & other) for other in ranks)
                sizes[_groups(stored, owners, mesh)] += size
                trained += size
        seconds = sum(_sum_s(size, groups, hardware) for groups, size in sizes.items() if groups)
        optimizer = _OPTIMIZER_TRAFFIC * trained / hardware.memory_bytes_per_s
        yield {"gradient_sum_s": _digits(seconds), "optimizer_s": _digits(optimizer)}


def _groups(stored: StoredTensor, owners: int, mesh: Mesh) -> tuple[tuple[str, int, int], ...]:
    """The groups of ranks that a gradient is summed over, one after the other: (axis, ranks, their distance)."""
    axes = [(axis, mesh.size(axis), mesh.stride(axis)) for axis in stored.grad_axes if mesh.size(axis) > 1]
    return (*axes, *([("pp", owners, mesh.stride("pp"))] if owners > 1 else []))


def _sum_s(size: int, groups: Sequence[tuple[str, int, int]], hardware: Hardware) -> float:
    """Seconds of summing gradients of `size` bytes, in buckets that are copied together and apart again."""
    buckets = [min(size - at, BUCKET_BYTES) for at in range(0, size, BUCKET_BYTES)]
    moved = sum(time_s("all_reduce", n, b, hardware, stride) for _, n, stride in groups for b in buckets)
    return moved + _BUCKET_COPIES * size / hardware.memory_bytes_per_s


def _digits(seconds: float) -> float:
    return float(f"{seconds:.9g}")
