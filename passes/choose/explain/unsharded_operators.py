"""Table of the operators that every rank runs in full, with reason, cost and remedy.

`divided` returns the share of FLOPs that each mesh axis shards.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

from torch import fx

from autopart.cost.flops import matrix_work
from autopart.cost.predict.collective_costs import wire_bytes
from autopart.ir.atoms import BATCH, FEATURE, Atoms
from autopart.ir.decisions import Decisions, Strategy
from autopart.ir.facts import PARAMETER, facts, weighted
from autopart.ir.graph import (
    active_operators,
    format_value,
    operator_name,
    size_bytes,
    source_of,
    tensor_inputs,
    tuple_values,
    value,
)
from autopart.ir.layout import Placement, conversion
from autopart.ir.pattern import Pattern
from autopart.ir.program import MICROBATCH_AXIS
from autopart.ir.trace import Trace
from autopart.passes.choose.explain.sequence_notes import needs_full_sequence
from autopart.passes.choose.solve.batch_axis import placement
from autopart.passes.rules import has_rule
from autopart.passes.rules.notation import Rule
from autopart.passes.rules.registered_rules import call_text

NO_RULE = "it has no sharding rule"
PINNED = "a pin fixes it"
NOT_THIS_CALL = "its sharding rule does not cover this call"


def unsharded(
    trace: Trace, decisions: Decisions, pinned: Container[fx.Node] = frozenset()
) -> tuple[dict[str, Any], ...]:
    """Return a row (dict) for each kind of operator that every rank runs in full.

    Such an operator has no sharding rule, or is a matrix product that `tp` does not shard. Equal calls in repeated
    blocks share a row. Keys of a row:

    - `operator`, `where` (module), `count` of calls, `shapes`, `why` it is not sharded, and a remedy (`try`);
    - `flops` of all calls over the global batch, if known;
    - `bytes` of all inputs and outputs;
    - `moved_bytes` that one rank sends in forward and backward to gather inputs and to shard the outputs again.

    Args:
        pinned: operators that the user has pinned.
    """
    if decisions.mesh.num_ranks == 1:
        return ()
    rows: dict[tuple, dict[str, Any]] = {}
    for node, weight in weighted(active_operators(trace.graph)):
        why, change = _why_unsharded(node, decisions)
        if not why:
            continue
        why, change = (PINNED, "") if node in pinned else (why, change)
        where, name = facts(node)["group"].rsplit("/", 1)[0], operator_name(node)
        row = rows.setdefault((name, where, why, _shapes(node)), {
            "operator": name, "where": where, "count": 0, "why": why, "shapes": _shapes(node), "flops": 0, "bytes": 0,
            "moved_bytes": 0, "try": change,
        })  # fmt: skip
        read = sum(map(size_bytes, tensor_inputs(node)))
        written = sum(v.numel() * v.element_size() for v in tuple_values(node) if hasattr(v, "numel"))
        row["count"] += weight
        row["flops"] += matrix_work(node) * weight
        row["bytes"] += (read + written) * weight
        row["moved_bytes"] += round(sum(_moved(node, decisions))) * weight
    return tuple({key: value for key, value in row.items() if value or key == "where"} for row in rows.values())


def divided(trace: Trace, decisions: Decisions) -> dict[str, float]:
    """Return {axis: fraction of the model's matrix FLOPs that the axis shards}.

    The dict is empty if the model has no matrix product.
    """
    flops = {node: matrix_work(node) * weight for node, weight in weighted(active_operators(trace.graph))}
    total = sum(flops.values())
    if not total:
        return {}
    mesh, nowhere = decisions.mesh, dict[fx.Node, Strategy]()
    on_axes = {axis: decisions.strategies.get(axis, nowhere) for axis in (*mesh.along("rows"), *mesh.chosen)}
    return {
        axis: sum(flops[node] for node, strategy in on.items() if strategy.factor and node in flops) / total
        for axis, on in on_axes.items()
    }


def _why_unsharded(node: fx.Node, decisions: Decisions) -> tuple[str, str]:
    """Return two texts: why every rank runs this call in full, and a remedy ("" if there is none).

    Both texts are "" if the call is sharded or is not a matrix product.
    """
    pattern: Pattern | None = facts(node)["pattern"]
    if pattern is None:
        return (NOT_THIS_CALL, "") if has_rule(operator_name(node)) else (NO_RULE, suggestion(node))
    chosen = {axis: on[node] for axis, on in decisions.features.items()}
    if not chosen or not pattern.flops or any(strategy.factor for strategy in chosen.values()):
        return "", ""
    axis = next(iter(chosen))
    ranks = decisions.mesh.size(axis)
    weights = _weight_sizes(node, pattern)
    if decisions.mesh.axis(axis).cuts == "positions" and needs_full_sequence(node, ranks):
        return "it needs the full sequence of its values", ""
    sizes = {factor: size for factor, size in weights.items() if factor not in pattern.whole}
    if not weights:
        return "none of its dims comes from a weight", ""
    if not sizes:
        change = f"dp in place of {axis}: it shards the batch" if set(pattern.sizes) - pattern.whole else ""
        return "its sharding rule does not shard the dims of its weights", change
    if all(size % ranks for size in sizes.values()):
        named = ", ".join(f"{factor}={size}" for factor, size in sizes.items())
        next_sizes = " or ".join(f"{factor}={size + -size % ranks}" for factor, size in sizes.items())
        return f"{axis}={ranks} divides none of {named}", f"a size that {ranks} divides: {next_sizes}"
    return f"gathering its values for {axis}={ranks} would cost more", ""


def _weight_sizes(node: fx.Node, pattern: Pattern) -> dict[str, int]:
    """Return {letter of the operator's sharding rule: size}, for the letters that name a dim of a weight."""
    sizes: dict[str, int] = {}
    for dims, source in zip(pattern.inputs, tensor_inputs(node), strict=True):
        for dim, atoms in zip(dims, facts(source)["atoms"], strict=True):
            if any(atom.kind == FEATURE for atom in atoms):
                sizes |= {factor: pattern.sizes[factor] for factor in dim}
    return sizes


def _moved(node: fx.Node, decisions: Decisions) -> Iterator[float]:
    """Yield the bytes that one rank sends to convert an operator's inputs and outputs between placements.

    Each conversion yields one number for forward and one for backward.
    """
    for axis, chosen in decisions.strategies.items():
        if axis == MICROBATCH_AXIS:
            continue
        ways = {(s, t) for s, t in zip(tensor_inputs(node), chosen[node].inputs, strict=True)}
        for used in _results(node):
            for user in used.users:
                if user in chosen:
                    ways |= {
                        (used, t) for s, t in zip(tensor_inputs(user), chosen[user].inputs, strict=True) if s is used
                    }
        for source, target in ways:
            at = _produced_placement(source, axis, decisions)
            step = conversion(at, target) if at is not None else None
            if step is not None:
                size, ranks = size_bytes(source), decisions.mesh.size(axis)
                yield wire_bytes(step.forward, ranks, size)
                yield wire_bytes(step.backward, ranks, size) if facts(source)["needs_grad"] else 0.0


def _results(node: fx.Node) -> list[fx.Node]:
    return [node] if len(tuple_values(node)) == 1 and hasattr(value(node), "shape") else list(node.users)


def _produced_placement(used: fx.Node, axis: str, decisions: Decisions) -> Placement | None:
    """Return a value's placement on `axis`: as its operator computes it, or as a parameter is stored.

    None for a value that does not depend on parameters.
    """
    chosen = decisions.strategies[axis]
    if axis in decisions.row_axes:
        return placement(used, chosen)
    source, index = source_of(used)
    if facts(source)["role"] == PARAMETER:
        return decisions.place(source.target, axis)
    return chosen[source].outputs[index] if source in chosen else None


def _shapes(node: fx.Node) -> str:
    outputs = ", ".join(format_value(n) or str(value(n)) for n in _results(node))
    return f"{', '.join(map(format_value, tensor_inputs(node)))} -> {outputs}"


# Suggested rule for an operator


def suggestion(node: fx.Node) -> str:
    """Return a call of `autopart.rule` that might fit: `autopart.rule("my::op", "b c, c d -> b d")`.

    The suggestion is a guess: dims of equal size get one letter. Returns "" if there are too many dims.
    """
    sources, outputs = tensor_inputs(node), tuple_values(node)
    if not sources or not all(hasattr(v, "shape") for v in (*map(value, sources), *outputs)):
        return ""
    atoms_of_outputs = facts(node)["atoms"] if len(outputs) > 1 else [facts(node)["atoms"]]
    letters = iter("acdefghijklmnopqrstuvwxyz")
    sizes: dict[str, int] = {}
    operands = []
    for tensor, atoms in zip(
        [*map(value, sources), *outputs], [*(facts(s)["atoms"] for s in sources), *atoms_of_outputs], strict=True
    ):
        names = _name_dims(tensor.shape, atoms, sizes, letters)
        if names is None:
            return ""
        operands.append(names)
    left, right = operands[: len(sources)], operands[len(sources) :]
    new = {f for names in right for f in names} - {f for names in left for f in names}
    line = " -> ".join(", ".join(" ".join(names) for names in side) for side in (left, right))
    return call_text(operator_name(node), Rule(line, " ".join(sorted(new))))


def _name_dims(
    full: Sequence[int], atoms: Sequence[Atoms], sizes: dict[str, int], letters: Iterator[str]
) -> list[str] | None:
    """Return a letter for each dim of an operand; None if the alphabet has too few letters.

    The batch dim is `b`. Another dim gets the letter of an earlier dim of equal size, else a new letter. No two dims of
    an operand get the same letter.

    Args:
        sizes: {letter: size}. The function adds the new letters.
        letters: letters that are not in use yet.
    """
    names: list[str] = []
    for size, dim in zip(full, atoms, strict=True):
        is_rows = any(atom.kind == BATCH for atom in dim) and "b" not in names
        matching_names = [name for name, other in sizes.items() if other == size and name not in ("b", *names)]
        name = "b" if is_rows else matching_names[0] if matching_names else next(letters, "")
        if not name:
            return None
        sizes[name] = size
        names.append(name)
    return names
