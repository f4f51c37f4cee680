"""Errors for mesh axes that cannot shard any operator of a model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autopart.errors import LayoutError
from autopart.ir.atoms import selections_in
from autopart.ir.decisions import Strategy
from autopart.ir.facts import PARAMETER, WEIGHT, facts
from autopart.ir.graph import active_operators, describe, display_name, reads_weights, shape, tensor_inputs
from autopart.ir.mesh import Mesh
from autopart.ir.pattern import Pattern
from autopart.ir.trace import Trace
from autopart.ops.grouped_matmul import expert_counts
from autopart.passes.choose.explain.sequence_notes import check_context_axis, matrix_products
from autopart.passes.facts.strategies import can_shard_sequence, output_atoms


def _cuts_table(node: fx.Node, strategy: Strategy) -> bool:
    pattern: Pattern | None = facts(node)["pattern"]
    return pattern is not None and reads_weights(node) and strategy.factor == pattern.lookup


def _looped_expert_products(trace: Trace) -> list[fx.Node]:
    """Return the matrix products of experts that the model calls one by one in a Python loop."""
    return [n for n in matrix_products(trace) if any(map(selections_in, output_atoms(n))) and reads_weights(n)]


def expert_notes(trace: Trace, mesh: Mesh) -> list[str]:
    """Return notes for the user on experts that a Python loop calls one by one.

    An expert axis cannot shard such experts.
    """
    axes, looped = mesh.along("experts"), _looped_expert_products(trace)
    if not axes or not looped:
        return []
    named = ",".join(axes)
    return [
        f"{named}: experts that a loop runs one by one (such as {describe(looped[0])}) are replicated, and "
        f"their tokens are sharded as over dp; {named} shards only experts that are stacks of matrices"
    ]


def check_experts(trace: Trace, mesh: Mesh, axis: str, chosen: Mapping[fx.Node, Strategy]) -> None:
    """Raise LayoutError if the model has no experts, or if an expert axis cannot shard all of its experts."""
    ranks, products = mesh.size(axis), [node for node in matrix_products(trace) if facts(node)["pattern"].lookup]
    if not products and not _looped_expert_products(trace):
        raise LayoutError(
            f"{axis}={ranks} has nothing to shard",
            why="the model has no experts: all tokens go through all of its matrix products",
            hint=f"leave {axis} out of the mesh; dp shards any batch",
        )
    whole = [node for node in products if not chosen[node].inputs[1].is_shard]  # input 1: the weights
    if whole:
        counts = expert_counts(trace.graph)
        fits = [n for n in range(2, min(counts) + 1) if all(can_shard_sequence(count, n) for count in counts)]
        if ranks in fits:
            raise LayoutError(
                f"{axis}={ranks} cannot shard the experts of the model",
                why="their number is divisible, but this product uses a weight computed from other weights (such "
                "as LoRA on the experts), and that computation cannot be sharded by expert", where=describe(whole[0]),
                hint=f"leave {axis} out of the mesh, or use the expert weights without such a computation",
            )  # fmt: skip
        raise LayoutError(
            f"{axis}={ranks} does not divide the experts of the model",
            why=f"there are {' and '.join(map(str, dict.fromkeys(counts)))} experts; unequal shards need at least "
            "two experts per rank on average, and one on the last rank", where=describe(whole[0]),
            hint=f"{axis}={', '.join(map(str, fits))}" if fits else f"leave {axis} out of the mesh",
        )  # fmt: skip


def check_axes_divide(
    trace: Trace, mesh: Mesh, chosen: Mapping[str, Mapping[fx.Node, Strategy]], pinned: bool,
    named: Mapping[str, int],
) -> None:  # fmt: skip
    """Raise LayoutError for a mesh axis that cannot shard any operator of the model.

    A feature axis (`tp`) must shard a matrix product. Exception: the user pins layouts, and the size of the axis
    divides a dim of a weight. `check_context_axis` and `check_experts` check the axes `cp` and `ep`.

    Args:
        chosen: {axis: {operator: its strategy}}.
        pinned: True if the user pins layouts.
        named: the option `sequence_dims`, {input: its sequence dim}.
    """
    for name, strategies in chosen.items():
        if mesh.axis(name).cuts == "positions":
            check_context_axis(trace, mesh, name, strategies, named)
        if mesh.axis(name).cuts == "experts" and not pinned:
            check_experts(trace, mesh, name, strategies)
    axis = next((axis for axis in chosen if mesh.axis(axis).cuts == "features"), None)
    if axis is None:
        return
    products = matrix_products(trace)
    ranks, leave_out = mesh.size(axis), f"leave {axis} out of the mesh"
    if not products and any(_cuts_table(n, chosen[axis][n]) for n in active_operators(trace.graph)):
        return
    if not products:
        raise LayoutError(
            f"{axis}={ranks} has nothing to split", 
            why="the model has no matrix product with a parameter, and no embedding table that can be sharded",
            hint=f"{leave_out}; dp works for any model",
        )  # fmt: skip
    sizes = sorted(
        {
            s
            for n in products
            for source in tensor_inputs(n)
            if facts(source)["role"] in (PARAMETER, WEIGHT)
            for s in shape(source)
        }
    )
    divides = any(size % ranks == 0 for size in sizes) or not sizes  # without sizes, the model computes the weights
    if divides and (pinned or any(chosen[axis][n].factor for n in products)):
        return
    if divides:
        kinds = list(dict.fromkeys(display_name(n) for n in products))
        raise LayoutError(
            f"{axis}={ranks} divides no matrix product of the model",
            why=f"their sizes are divisible, but every rank runs {' and '.join(kinds)} in full",
            where=describe(products[0]), hint=f"{leave_out}; dp works for any model",
        )  # fmt: skip
    fits = [t for t in range(2, max(sizes, default=1) + 1) if sum(s % t == 0 for s in sizes) * 2 > len(sizes)]
    raise LayoutError(
        f"{axis}={ranks} divides no weight of the model",
        why=f"the weights of its matrix products have dims {', '.join(map(str, sizes))}",
        where=describe(products[0]), hint=f"{axis}={', '.join(map(str, fits[:6]))}" if fits else leave_out,
    )  # fmt: skip
