"""Saved bytes of one microbatch of a stage, and the peaks of its forward and backward beyond them.

The liveness of values comes from `stage_footprint.py`. Communication buffers come from
`gradient_communication.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopart.cost.count.gradient_communication import stage_comm_buffers
from autopart.cost.count.memory_events import backward_bytes, forward_bytes
from autopart.cost.count.stage_footprint import (
    Liveness,
    LocalValue,
    MemoryBuffer,
    memories,
    own_saved_bytes,
    saved_buffers,
)
from autopart.cost.predict.comm_buffers import StageCommBuffers
from autopart.ir.facts import times
from autopart.ir.run.schedule_actions import StageBytes


@dataclass
class StageMemory:
    """Memory of one microbatch of a stage on one rank.

    Args:
        saved: bytes saved by autograd, by the node that saves them first.
        bytes: sizes for the actions of the schedule.
        input_bytes: bytes of values that depend on inputs alone, for all microbatches.
        trained: names of the parameters that get a gradient.
        whole: {parameter that stays unsharded for a step: its bytes}.
        never_splits_backward: True if the runtime never splits the backward, because something is recomputed in it.
        traffic: communication that overlaps with the stage's compute.
    """

    saved: dict[fx.Node, int]
    bytes: StageBytes
    input_bytes: int
    trained: frozenset[str]
    whole: Mapping[str, int]
    never_splits_backward: bool
    traffic: StageCommBuffers

    @property
    def temporary_bytes(self) -> int:
        """The larger of the forward and backward peaks, in bytes beyond the saved tensors."""
        return max(self.bytes.forward, self.bytes.backward)


def stage_memory(walk: Liveness) -> StageMemory:
    """Return the memory of one microbatch of a stage on the rank that holds the most."""
    walk = walk.in_memory
    stage, program = walk.stage, walk.program
    alive = walk.reached()
    saved = saved_buffers(walk, alive)
    by_node = {node: size for node, pieces in saved.items()
               if (size := sum(memory.size_bytes for memory in pieces) + own_saved_bytes(walk, node))}  # fmt: skip
    held = {memory for pieces in saved.values() for memory in pieces}
    trace, is_last = walk.trace, stage.index == len(program.stages) - 1
    sends = [] if is_last else [walk.values[node] for node in walk.outputs[: len(stage.sends)]]
    kept = sum(size * times(node) for node, size in by_node.items())
    read = {str(node.target): walk.values[node].memory.size_bytes for node in walk.values if node.op == "get_attr"}
    whole = trace.expand_to_all({name: read[name] for name in walk.held if name in read})
    weights = trace.expand_to_all({str(node.target): read[str(node.target)] for node in alive if node.op == "get_attr"})
    traffic = stage_comm_buffers(trace, program, stage, whole, walk.held)
    scattered = {name: sent for sent in traffic.sent if sent.scatters and sent.each for name in sent.names}
    kept_apart = {name for sent in traffic.sent if sent.kept_bytes for name in sent.names}
    lasting = sum(size for name, size in weights.items() if name not in scattered and name not in kept_apart)
    lasting += sum(sent.kept_bytes for sent in traffic.sent)
    is_split = not (regions := bool(walk.regions(alive)))
    forward = forward_bytes(walk, saved, traffic)
    first_backward, backward = backward_bytes(walk, alive, by_node, traffic)
    taken = StageBytes(
        held=kept + sum(_sent_bytes(value, held) for value in sends),
        delayed=_delayed_bytes(walk, alive) if stage.index and is_split else 0,
        forward=max(0, round(forward) - kept),
        backward=max(0, round(backward) - kept),
        first_backward=max(0, round(first_backward) - kept),
        gradients=lasting + sum(sent.part_bytes for sent in set(scattered.values())),
    )  # fmt: skip
    return StageMemory(by_node, taken, walk.input_bytes, frozenset(weights), whole, regions, traffic)


def _delayed_bytes(walk: Liveness, alive: Set[fx.Node]) -> int:
    """Return the bytes of gradients that a split backward keeps from the input part to the weight part.

    These are the gradients of values that depend on weights and on other values.
    """
    weights = walk.of_weights(alive)
    mixed = [n for n in walk.values if n in alive and n not in weights and any(u in weights for u in n.all_input_nodes)]
    kept = {memory for node in mixed for memory in memories(walk.values[node])}
    return sum(memory.size_bytes * times(memory.made_by) for memory in kept)


def _sent_bytes(sent: Any, held: set[MemoryBuffer]) -> int:
    """Return the bytes that sending a value adds.

    This is its buffer if it is not saved, or a copy if it is not contiguous.
    """
    if not isinstance(sent, LocalValue) or sent.memory.lives or (sent.form.is_contiguous and sent.memory in held):
        return 0
    return sent.memory.size_bytes if sent.form.is_contiguous else sent.form.size_bytes
