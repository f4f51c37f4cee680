"""Memory of every rank of a plan by kind: persistent state, what a step adds, and the largest tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from autopart.compat.torch_internals import stored_bytes
from autopart.cost.count.gradient_communication import exchanged_by_method, local_bytes, reduce_dtype_of
from autopart.cost.count.memory_peaks import StageMemory, stage_memory
from autopart.cost.count.stage_footprint import Liveness
from autopart.cost.memory_kinds import OPTIMIZER_VALUES, RankMemory
from autopart.cost.predict.comm_buffers import received_bytes
from autopart.ir.facts import facts, times
from autopart.ir.graph import pattern_of, short_name
from autopart.ir.program import Boundary, Program
from autopart.ir.run.buckets import BUCKET_BYTES
from autopart.ir.run.schedule_actions import Action, actions, peak_activations, peak_stage_bytes
from autopart.ir.run.schedules import Schedule, versions_of
from autopart.ir.trace import Trace


def memory_of(trace: Trace, program: Program, schedule: Schedule, walks: Sequence[Liveness]) -> tuple[RankMemory, ...]:
    """Return one entry per pipeline coordinate: the memory of its rank that holds the most.

    This is the rank at index 0 of all other axes.

    Args:
        walks: the liveness analysis of each stage.
    """
    stages = [stage_memory(walk) for walk in walks]
    orders = actions(schedule.name, len(stages), program.mesh.size("pp"), program.microbatches)
    home = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    versions = versions_of(schedule.name)
    return tuple(_rank_memory(trace, program, stages, home, order, versions) for order in orders)


def _rank_memory(
    trace: Trace, program: Program, memories: Sequence[StageMemory], home: Mapping[int, int], order: tuple[Action, ...],
    versions: int,
) -> RankMemory:  # fmt: skip
    mine = sorted({action.stage for action in order})
    trained_somewhere = frozenset().union(*(memory.trained for memory in memories))
    held = {name: stored for name, stored in program.parameters.items() if set(stored.stages) & set(mine)}
    sizes = trace.expand_to_all({name: local_bytes(trace, program, stored) for name, stored in held.items()})
    trained = {name: size for name, size in sizes.items() if name in trained_somewhere}
    whole = {s for s in mine if memories[s].never_splits_backward}
    ran = tuple(a._replace(kind="B" if a.kind == "I" else a.kind) if a.stage in whole else a for a in order
                if not (a.stage in whole and a.kind == "W"))  # fmt: skip
    taken = {s: memories[s].bytes for s in mine}
    most = peak_activations(
        ran, {s: one.held for s, one in taken.items()}, {s: one.delayed for s, one in taken.items()}
    )
    gradients, pipeline = sum(trained.values()), versions * _pipeline_bytes(program, mine, home, order)
    bucket = _bucket_bytes(trace, trained, program, home)
    wholes = {name: size for stage in mine for name, size in memories[stage].whole.items()}
    received = received_bytes(memories[stage].traffic for stage in mine)
    kept = {name for stage in mine for sent in memories[stage].traffic.sent if sent.kept_bytes for name in sent.names}
    grown = sum(_grown(trace, program, name, size, wholes, name in kept) for name, size in trained.items())
    optimizer = {f"optimizer state of {name}": OPTIMIZER_VALUES * size for name, size in trained.items()}
    stored = {f"parameter {name}": size for name, size in sizes.items()}
    largest = stored | {f"gradient of {name}": size for name, size in trained.items()} | optimizer
    lasting = (versions * sum(sizes.values()), sum(optimizer.values()), _buffer_bytes(trace),
               versions * (_input_bytes(trace) + sum(memories[stage].input_bytes for stage in mine)))  # fmt: skip
    remembered = _remembered_bytes(trace, program, trained)
    passing = max(peak_stage_bytes(ran, taken, grown), received, gradients + bucket)
    return RankMemory(
        tuple(mine), lasting[0], gradients, *lasting[1:], most.size_bytes,
        max(memories[stage].temporary_bytes for stage in mine), pipeline + bucket + remembered,
        sum(wholes.values()) + grown - gradients,
        sum(lasting) + pipeline + remembered + sum(wholes.values()) + passing,
        most.in_flight, _largest(largest | _largest_activations(memories, most.in_flight)),
    )  # fmt: skip


def _remembered_bytes(trace: Trace, program: Program, trained: Mapping[str, int]) -> int:
    """Return the bytes of state that data-parallel methods keep for this rank's trained parameters."""
    here = [name for name in trained if name in program.parameters]  # deduplicated traces have no data-parallel method
    return round(
        sum(one.method.state_bytes(one, program.data_ranks) for one in exchanged_by_method(trace, program, here))
    )


def _grown(trace: Trace, program: Program, name: str, size: int, wholes: Mapping[str, int], is_kept: bool) -> int:
    """Return the bytes of a parameter's gradient until the end of a step.

    With ZeRO 1 the gradient is unsharded. A gradient that a data-parallel method receives has the parameter's
    dtype.
    """
    if name not in wholes or program.zero != 1:
        return size
    original = trace.originals[name]
    is_sent = program.parameters[original].unsharded_to_sync(program.mesh) is not None
    if not is_kept and not is_sent:
        return wholes[name]
    stored = trace.parameters[original].dtype
    read = program.parameters[original].compute_dtype or stored
    return wholes[name] // read.itemsize * (stored if is_sent else reduce_dtype_of(stored, program)).itemsize


def _buffer_bytes(trace: Trace) -> int:
    """Return the bytes of all buffers, which are replicated. A buffer with two names counts once."""
    return sum(stored_bytes(buffer) for buffer in {id(buffer): buffer for buffer in trace.buffers.values()}.values())


def _input_bytes(trace: Trace) -> int:
    """Return the bytes of the global batch, which every rank receives."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in trace.call.tensors}.values())


def _pipeline_bytes(program: Program, mine: Sequence[int], home: Mapping[int, int], order: Sequence[Action]) -> int:
    """Return the bytes of the receive buffers of pipelining, one per microbatch and boundary tensor.

    Schedules that split the backward also keep the gradients of received values until the weight part.
    """
    total = 0
    for index in mine:
        stage = program.stages[index]
        if index > 0 and home[index - 1] != home[index]:
            total += program.microbatches * _bytes(stage.receives)
        if index + 1 < len(program.stages) and home[index + 1] != home[index]:
            total += program.microbatches * _bytes(stage.sends)
        total += sum(a.kind == "I" and a.stage == index for a in order) * _bytes(stage.receives)
    return total


def _bytes(boundaries: Sequence[Boundary]) -> int:
    return sum(b.size_bytes for b in boundaries)


def _bucket_bytes(trace: Trace, trained: Mapping[str, int], program: Program, home: Mapping[int, int]) -> int:
    """Return the bytes of the flat copy of the largest bucket of tied parameters' gradients.

    Gradients of tied parameters are reduced at the end of a step.

    A gradient that fills a bucket alone is reduced in place, unless it is reduced in another dtype.
    """
    buckets: dict[Any, list[int]] = defaultdict(list)
    for name, size in trained.items():
        original = trace.originals[name]
        stored, dtype = program.parameters[original], trace.parameters[original].dtype
        owners = tuple(sorted({home[stage] for stage in stored.stages}))
        if len(owners) > 1:
            buckets[owners, dtype].append(size)
    copies = [0]
    for (_, dtype), sizes in buckets.items():
        sent = reduce_dtype_of(dtype, program)
        if len(sizes) > 1 or sent != dtype:
            copies.append(min(sum(sizes), BUCKET_BYTES) * sent.itemsize // dtype.itemsize)
    return max(copies)


def _largest_activations(memories: Sequence[StageMemory], in_flight: Mapping[int, int]) -> dict[str, int]:
    """Return the bytes saved by the operators of each pattern, over all microbatches and blocks."""
    activations: dict[str, int] = defaultdict(int)
    for stage, count in in_flight.items():
        for node, size in memories[stage].saved.items():
            activations[f"activations of {_named(node)}"] += size * count * times(node)
    return activations


def _named(node: fx.Node) -> str:
    """Format a node as `model.layers.*.mlp (linear)`."""
    path = pattern_of(facts(node).get("key", "").rsplit("/", 1)[0])
    return f"{path} ({short_name(node)})" if path else short_name(node)


def _largest(items: Mapping[str, int], number: int = 8) -> dict[str, int]:
    return dict(sorted(items.items(), key=lambda item: -item[1])[:number])
