"""Notes for the user on sizes that `tp` does not divide, with the layouts that the plan uses instead."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import fx

from autopart.cost.predict.collective_costs import wire_bytes
from autopart.ir.atoms import FEATURE
from autopart.ir.decisions import Decisions
from autopart.ir.facts import facts, weighted
from autopart.ir.graph import active_operators, pattern_of, shape, size_bytes, source_of, tensor_inputs
from autopart.ir.layout import Placement, R, conversion, is_direct, shard_sizes
from autopart.ir.pattern import Pattern
from autopart.ir.trace import Trace


def size_notes(trace: Trace, decisions: Decisions) -> tuple[str, ...]:
    """Return notes on weights with unequal shards, and on feature splits that `tp` does not divide.

    For example, a view splits features into heads, and `tp` does not divide the number of heads. Repeated blocks share
    a note.
    """
    lines = [_uneven_weights, _undivided_splits]
    axes = decisions.mesh.along("features")
    return tuple(dict.fromkeys(line for axis in axes for note in lines for line in note(trace, decisions, axis)))


def _uneven_weights(trace: Trace, decisions: Decisions, axis: str) -> Iterator[str]:
    ranks = decisions.mesh.size(axis)
    for name in decisions.stored:
        full, place = trace.parameters[name].shape, decisions.place(name, axis)
        if place.is_shard and not place.sections and full[place.dim] % ranks:
            sizes = ", ".join(map(str, shard_sizes(full[place.dim], ranks)))
            yield f"{pattern_of(name)}: dim {place.dim} of size {full[place.dim]} on {axis}={ranks}: shards of {sizes}"


def _undivided_splits(trace: Trace, decisions: Decisions, axis: str) -> Iterator[str]:
    ranks = decisions.mesh.size(axis)
    sent_by_line: dict[tuple[str, str, str], float] = {}
    for node, weight in weighted(active_operators(trace.graph)):
        pattern: Pattern | None = facts(node)["pattern"]
        for factors in _splits(node, pattern) if pattern is not None else ():
            number, *inner = (pattern.sizes[f] for f in factors)
            if number % ranks == 0:
                continue
            how, sent = _fallback(node, decisions, axis)
            fits = ", ".join(str(n) for n in range(2, number + 1) if number % n == 0)
            line = (
                f"{number} x {math.prod(inner)} features on {axis}={ranks}",
                f"; {axis}={fits} would divide" if fits else "",
            )
            key = facts(node)["group"].rsplit("/", 1)[0], f"{line[0]}: {how}", line[1]
            sent_by_line[key] = sent_by_line.get(key, 0.0) + sent * weight
    for (where, text, fits), sent in sent_by_line.items():
        moved = f", {sent / 1e6:.3g} MB sent per rank and microbatch" if sent else ""
        yield f"{where}: {text}{moved}{fits}"


def _splits(node: fx.Node, pattern: Pattern) -> Iterator[tuple[str, ...]]:
    """Yield, for each feature dim that a view splits, the resulting factors, such as (heads, head size)."""
    alone = {dim[0] for dims in pattern.outputs for dim in dims if len(dim) == 1}
    for dims, source in zip(pattern.inputs, tensor_inputs(node), strict=True):
        for dim, atoms in zip(dims, facts(source)["atoms"], strict=True):
            if len(dim) > 1 and dim[0] in alone and any(atom.kind == FEATURE for atom in atoms):
                yield dim


def _fallback(node: fx.Node, decisions: Decisions, axis: str) -> tuple[str, float]:
    """Return how the plan runs a view if `tp` does not divide the view's outer dim, such as the heads.

    Returns (text for the note, bytes that a rank sends for it). For example: "replicated", 0.
    """
    chosen = decisions.strategies[axis]
    wanted = chosen[node].inputs[0]
    if wanted.is_shard:
        return f"each group is sharded ({wanted})", _moved(tensor_inputs(node)[0], wanted, decisions, axis)
    used = tensor_inputs(node)[0]
    while True:  # go back to the operator that computes the features; the first conversion found gathers them
        source, index = source_of(used)
        if source not in chosen:
            return "replicated", 0.0
        place = chosen[source].outputs[index]
        if place != wanted:
            sent = _moved(used, wanted, decisions, axis)
            return (
                "sharded up to this split, which gathers them" if place.is_shard else "reduced before this split"
            ) if sent else "replicated", sent
        inputs = tensor_inputs(source)
        if len(inputs) != 1:
            return "replicated", 0.0
        used, wanted = inputs[0], chosen[source].inputs[0]


def _moved(used: fx.Node, wanted: Placement, decisions: Decisions, axis: str) -> float:
    source, index = source_of(used)
    chosen, ranks, rows = decisions.strategies[axis], decisions.mesh.size(axis), decisions.batch_shards
    place = chosen[source].outputs[index] if source in chosen else R
    step = conversion(place, wanted)
    if step is None or not is_direct(place, wanted, shape(used), ranks):
        return 0.0
    ways = (step.forward, step.backward) if facts(used)["needs_grad"] else (step.forward,)
    return sum(wire_bytes(way, ranks, size_bytes(used) / rows) for way in ways)
