"""What one microbatch of a stage holds on a rank, and how far its forward and its backward go beyond that.

The walk of a stage (`footprint.py`) says whose memory every value is and until when it is read; its traffic
(`sending.py`) what weights and gradients take on their way between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopart.cost.count.gradient_communication import traffic_of
from autopart.cost.count.memory_events import backward_bytes, forward_bytes
from autopart.cost.count.stage_footprint import Memory, Value, Walk, memories, saved_memory, saved_others
from autopart.cost.predict.comm_buffers import Traffic
from autopart.ir.facts import times
from autopart.ir.run.schedule_actions import StageBytes


@dataclass
class StageMemory:
    """What one microbatch of a stage holds on one rank.

    `saved`: what autograd keeps, by the node that keeps it first. `bytes`: how much the schedule's actions take.
    `input_bytes`: values of the inputs alone, for all microbatches. `trained`: the parameters that get a gradient.
    `whole`: {parameter that is held whole for a step: its bytes}. `whole_backward`: whether the runtime never splits
    the backward, as something is run again in it. `traffic`: what is sent beside its work.
    """

    saved: dict[fx.Node, int]
    bytes: StageBytes
    input_bytes: int
    trained: frozenset[str]
    whole: Mapping[str, int]
    whole_backward: bool
    traffic: Traffic

    @property
    def temporary_bytes(self) -> int:
        """How far a forward or backward goes beyond what is held, at its largest."""
        return max(self.bytes.forward, self.bytes.backward)


def stage_memory(walk: Walk) -> StageMemory:
    """What one microbatch of a stage holds on its heaviest rank."""
    walk = walk.in_memory
    stage, program = walk.stage, walk.program
    alive = walk.reached()
    saved = saved_memory(walk, alive)
    by_node = {node: size for node, pieces in saved.items()
               if (size := sum(memory.size_bytes for memory in pieces) + saved_others(walk, node))}  # fmt: skip
    held = {memory for pieces in saved.values() for memory in pieces}
    trace, is_last = walk.trace, stage.index == len(program.stages) - 1
    sends = [] if is_last else [walk.values[node] for node in walk.outputs[: len(stage.sends)]]
    kept = sum(size * times(node) for node, size in by_node.items())
    read = {str(node.target): walk.values[node].memory.size_bytes for node in walk.values if node.op == "get_attr"}
    whole = trace.of_all({name: read[name] for name in walk.held if name in read})
    weights = trace.of_all({str(node.target): read[str(node.target)] for node in alive if node.op == "get_attr"})
    traffic = traffic_of(trace, program, stage, whole, walk.held)
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


def _delayed_bytes(walk: Walk, alive: Set[fx.Node]) -> int:
    """The gradients that pipelining keeps for the weights' part of a backward: of all that weights and values make."""
    weights = walk.of_weights(alive)
    mixed = [n for n in walk.values if n in alive and n not in weights and any(u in weights for u in n.all_input_nodes)]
    kept = {memory for node in mixed for memory in memories(walk.values[node])}
    return sum(memory.size_bytes * times(memory.made_by) for memory in kept)


def _sent_bytes(sent: Any, held: set[Memory]) -> int:
    """What sending a value holds beside what is held anyway: a copy where it does not lie in order."""
    if not isinstance(sent, Value) or sent.memory.lives or (sent.form.is_contiguous and sent.memory in held):
        return 0
    return sent.memory.size_bytes if sent.form.is_contiguous else sent.form.size_bytes
