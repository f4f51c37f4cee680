"""Errors and notes on mesh axes that shard the sequence (context parallelism)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import fx

from autopart.errors import LayoutError
from autopart.ir.atoms import DATA_DIM, factor_atoms
from autopart.ir.decisions import Decisions, Strategy
from autopart.ir.facts import facts, weighted
from autopart.ir.graph import active_operators, describe, operator_name, reads_weights, shape, tensor_inputs
from autopart.ir.mesh import Mesh
from autopart.ir.sharding import DimSharding
from autopart.ir.trace import Trace
from autopart.passes.facts.sequence_dims import check_can_be_sharded, inputs_text, lengths_of
from autopart.passes.facts.strategies import can_shard_sequence, output_atoms, strategies_on_axis

_UNEVEN = 0.05
"""A plan gets a note if its largest sequence shard exceeds the mean shard by more than this share."""


def matrix_products(trace: Trace) -> list[fx.Node]:
    with_patterns = [(node, facts(node)["pattern"]) for node in active_operators(trace.graph)]
    return [node for node, pattern in with_patterns if pattern is not None and pattern.flops]


def check_context_axis(
    trace: Trace, mesh: Mesh, axis: str, chosen: Mapping[fx.Node, Strategy], named: Mapping[str, int]
) -> None:  # fmt: skip
    """Raise LayoutError if a context axis (`cp`) cannot shard any operator of the model.

    Args:
        chosen: {operator: its strategy on the axis}.
        named: the option `sequence_dims`, {input: its sequence dim}. The axis must be able to shard each of these dims.
    """
    check_can_be_sharded(trace, named)
    products = matrix_products(trace)
    nodes = list(filter(reads_weights, products)) or products or active_operators(trace.graph)
    if any(chosen[node].factor for node in nodes):
        return
    ranks, inputs = mesh.size(axis), inputs_text(trace)
    all_atoms = (atoms for node in (products or nodes) for dim in output_atoms(node) for atoms in dim)
    longest = max((atom.size for atom in all_atoms if atom.kind == DATA_DIM), default=1)
    longest = max(lengths_of(trace, named).values(), default=longest)
    if longest == 1:
        raise LayoutError(
            f"{axis}={ranks} has nothing to shard",
            why=f"no matrix product of the model has a sequence dim: its inputs are {inputs}",
            hint=f"leave {axis} out of the mesh; dp shards any batch",
        )
    if can_shard_sequence(longest, ranks):
        if any(strategy.is_sharded for strategy in chosen.values()):
            return
        raise LayoutError(
            f"{axis}={ranks} shards nothing of the model", why="its operators need the full sequence at once",
            where=describe(nodes[0]), hint=f"leave {axis} out of the mesh; dp shards any batch",
        )  # fmt: skip
    fits = max(n for n in range(1, ranks) if can_shard_sequence(longest, n))
    raise LayoutError(
        f"{axis}={ranks} cannot shard a sequence of {longest}", why="every rank needs a shard of the longest "
        f"sequence; the inputs are {inputs}",
        where=describe(nodes[0]), hint=f"{axis}={fits}" if fits > 1 else f"leave {axis} out of the mesh",
    )  # fmt: skip


def context_axis_notes(trace: Trace, decisions: Decisions) -> Iterator[str]:
    """Yield notes for the user on axes that shard the sequence (`cp`).

    The notes report an axis that shards no matrix product, operators that need the full sequence, and uneven shards.
    """
    for axis in decisions.mesh.along("positions"):
        chosen, ranks = decisions.strategies[axis], decisions.mesh.size(axis)
        products = [node for node in matrix_products(trace) if node in chosen]
        if products and not any(chosen[node].factor for node in products):
            yield (
                f"{axis}={ranks} divides no matrix product of the model, whose inputs are {inputs_text(trace)}: every "
                "rank runs all of them; dp shards any batch"
            )
        taken = Counter[str]()
        for node, weight in weighted(chosen):
            taken[operator_name(node).partition("::")[2]] += weight if needs_full_sequence(node, ranks) else 0
        if taken := +taken:
            named = ", ".join(f"{count} {name}" for name, count in taken.most_common(6))
            yield f"{axis}: every rank gathers the full sequence for {named}"
        yield from _uneven(axis, ranks, [(node, chosen[node]) for node in products])


def needs_full_sequence(node: fx.Node, ranks: int) -> bool:
    """Return True if an input has a sequence dim that no strategy of the operator can shard."""
    pattern = facts(node)["pattern"]
    atoms = factor_atoms(node, pattern) if pattern is not None else {}
    dims = (*atoms.values(), *(dim for used in tensor_inputs(node) for dim in facts(used)["atoms"] if pattern is None))
    if not any(atom.kind == DATA_DIM and atom.size >= ranks for dim in dims for atom in dim):
        return False
    atoms_cut = (atoms.get(way.factor, ()) for way in strategies_on_axis(node, ranks, "positions"))
    return not any(atom.kind == DATA_DIM for of in atoms_cut for atom in of)


def _uneven(axis: str, ranks: int, cuts: list[tuple[fx.Node, Strategy]]) -> Iterator[str]:
    """Yield a note if the largest shard of the longest sequence is more than 5 % above the mean."""
    excesses = []
    for node, strategy in cuts:
        place = strategy.outputs[0]
        if place.is_shard and [atom.kind for atom in output_atoms(node)[place.dim]] == [DATA_DIM]:
            size = shape(node)[place.dim]
            excesses.append((DimSharding(place.dim, size, place.sections, ranks).longest * ranks / size - 1, size))
    more, size = max(excesses, default=(0.0, 0))
    if more > _UNEVEN:
        yield (
            f"{axis}={ranks}: the largest shard of a sequence of {size} is {more:.0%} above the mean; "
            f"{size + -size % ranks} would divide evenly"
        )
