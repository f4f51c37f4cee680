"""The choices: rows are followed, layouts solved for on one axis after the other, stages cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import fx

from autopart.errors import LayoutError
from autopart.ir.atoms import DATA_DIM
from autopart.ir.decisions import Decisions, Strategy, over_rows, with_places
from autopart.ir.facts import PARAMETER, WEIGHT, facts
from autopart.ir.graph import active_operators, describe, shape, spoken_name, tensor_inputs
from autopart.ir.layout import Layout
from autopart.ir.mesh import Mesh
from autopart.ir.pattern import Pattern
from autopart.passes.choose.batch import batch_strategies
from autopart.passes.choose.notes import decision_notes
from autopart.passes.choose.pins import Pinned, solve_pinned
from autopart.passes.choose.prices import Step, summed_share
from autopart.passes.choose.problem import Problem
from autopart.passes.choose.shard import Sharding, ShardingProblem, cheapest
from autopart.passes.choose.stage_pins import pinned_partition
from autopart.passes.facts.strategies import divides_positions, output_atoms
from autopart.passes.pipeline import driven
from autopart.tracing.trace import Trace


class Decided(NamedTuple):
    """What was decided, and what was solved for it, by axis."""

    decisions: Decisions
    solved: Mapping[str, tuple[ShardingProblem, Sharding]]


@driven(notes=decision_notes)
def decide(problem: Problem) -> Decided:
    """Choose layouts and cuts, around what the user has pinned."""
    trace, mesh, microbatches = problem.trace, problem.mesh, problem.microbatches
    if not active_operators(trace.graph):
        raise LayoutError(
            "the model has nothing to partition",
            why="none of its operators depends on a parameter",
            hint="run it as it is",
        )
    rows = batch_strategies(trace, mesh, microbatches)
    solved: dict[str, tuple[ShardingProblem, Sharding]] = {}
    stored: Mapping[str, Layout] = {}
    for axis, pinned in problem.pinned.items():
        solved[axis] = solve_pinned(trace, mesh, pinned, problem.pins, partial(_solve, problem, solved, stored))
        stored = with_places(stored, axis, solved[axis][1].parameters)
    chosen = {axis: sharding.strategies for axis, (_, sharding) in solved.items()}
    check_divides(trace, mesh, chosen, bool(problem.pins.layouts))
    strategies = {**over_rows(mesh, microbatches, rows), **chosen}
    return Decided(
        Decisions(
            mesh,
            microbatches,
            strategies,
            stored,
            _stages(problem),
            problem.num_stages,
            problem.recompute,
            problem.zero,
            problem.prefetch,
        ),
        solved,
    )


def _solve(
    problem: Problem,
    solved: Mapping[str, tuple[ShardingProblem, Sharding]],
    stored: Mapping[str, Layout],
    pinned: Pinned,
) -> tuple[ShardingProblem, Sharding]:
    """The cheapest sharding over an axis, beside what was `solved` before."""
    mesh, rows = problem.mesh, problem.mesh.row_ranks * problem.microbatches
    step = Step(problem.microbatches, rows, problem.storage, mesh.stride(pinned.axis), summed_share(problem.trace))
    before = {axis: sharding.strategies for axis, (_, sharding) in solved.items()}
    left = pinned.beside(before, stored, mesh)
    ranks = mesh.size(pinned.axis)
    cut_values = problem.sequence_parallel if pinned.cuts == "features" else True
    return cheapest(problem.graph, ranks, problem.hardware, cut_values, step, left)


@driven(notes=decision_notes)
def cut_again(problem: Problem, decisions: Decisions) -> Decisions:
    """These layouts with the stages and microbatches of another problem; nothing is solved for again."""
    rows = batch_strategies(problem.trace, problem.mesh, problem.microbatches)
    return replace(
        decisions, mesh=problem.mesh, microbatches=problem.microbatches, stage_of=_stages(problem),
        num_stages=problem.num_stages, recompute=problem.recompute,
        strategies={**over_rows(problem.mesh, problem.microbatches, rows), **decisions.features},
    )  # fmt: skip


def _stages(problem: Problem) -> dict[fx.Node, int]:
    """The stage of every active operator, where cuts are chosen."""
    found = pinned_partition(problem.graph, problem.mesh, problem.num_stages, problem.pins)
    return stages_from_cuts(problem.trace, found.cuts)


def stages_from_cuts(trace: Trace, cuts: tuple[int, ...]) -> dict[fx.Node, int]:
    """The stage of every active operator, from the positions where stages begin."""
    return {node: sum(cut <= i for cut in cuts) for i, node in enumerate(active_operators(trace.graph))}


def _cuts_table(node: fx.Node, strategy: Strategy) -> bool:
    """Whether a call looks up rows of a weight, of which every rank has some."""
    pattern: Pattern | None = facts(node)["pattern"]
    reads_weight = any(facts(source)["role"] in (PARAMETER, WEIGHT) for source in tensor_inputs(node))
    return pattern is not None and reads_weight and strategy.factor is not None and strategy.factor == pattern.lookup


def _products(trace: Trace) -> list[fx.Node]:
    found = [(node, facts(node)["pattern"]) for node in active_operators(trace.graph)]
    return [node for node, pattern in found if pattern is not None and pattern.flops]


def check_positions(trace: Trace, mesh: Mesh, axis: str, chosen: Mapping[fx.Node, Strategy]) -> None:
    """Raises LayoutError where an axis that cuts positions divides no work of the model."""
    products = _products(trace)
    of_weights = [n for n in products if any(facts(s)["role"] in (PARAMETER, WEIGHT) for s in tensor_inputs(n))]
    nodes = of_weights or products or active_operators(trace.graph)
    if any(chosen[node].factor for node in nodes):
        return
    ranks, inputs = mesh.size(axis), trace.graph.find_nodes(op="placeholder")
    given = ", ".join(f"{facts(node)['input_name']} {list(shape(node))}" for node in inputs)
    found = (atoms for node in nodes for dim in output_atoms(node) for atoms in dim)
    longest = max((atom.size for atom in found if atom.kind == DATA_DIM), default=1)
    if longest == 1:
        raise LayoutError(
            f"{axis}={ranks} has nothing to cut", why=f"no product of the model has a sequence: it is given {given}",
            hint=f"leave {axis} out of the mesh; dp cuts the rows of any batch",
        )  # fmt: skip
    if divides_positions(longest, ranks):
        if any(strategy.is_sharded for strategy in chosen.values()):
            return
        raise LayoutError(
            f"{axis}={ranks} cuts nothing of the model", why="its operators take all positions of a value at once",
            where=describe(nodes[0]), hint=f"leave {axis} out of the mesh; dp cuts the rows of any batch",
        )  # fmt: skip
    fits = max(n for n in range(1, ranks) if divides_positions(longest, n))
    raise LayoutError(
        f"{axis}={ranks} cuts {longest} positions", why=f"every rank needs some of the longest sequence, of {given}",
        where=describe(nodes[0]), hint=f"{axis}={fits}" if fits > 1 else f"leave {axis} out of the mesh",
    )  # fmt: skip


def check_divides(
    trace: Trace, mesh: Mesh, chosen: Mapping[str, Mapping[fx.Node, Strategy]], pinned: bool = False
) -> None:
    """Raises LayoutError where the first axis that is solved for divides no matrix product of the model; where layouts
    are pinned, no weight."""
    for name, strategies in chosen.items():
        if mesh.axis(name).cuts == "positions":
            check_positions(trace, mesh, name, strategies)
    axis = next((axis for axis in chosen if mesh.axis(axis).cuts == "features"), None)
    if axis is None:
        return
    products = _products(trace)
    ranks, leave_out = mesh.size(axis), f"leave {axis} out of the mesh"
    if not products and any(_cuts_table(n, chosen[axis][n]) for n in active_operators(trace.graph)):
        return
    if not products:
        raise LayoutError(
            f"{axis}={ranks} has nothing to split", 
            why="the model has no matrix product with a parameter, and no table of embeddings that can be cut",
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
    divides = any(size % ranks == 0 for size in sizes) or not sizes  # none: weights that the model computes
    if divides and (pinned or any(chosen[axis][n].factor for n in products)):
        return
    if divides:
        kinds = list(dict.fromkeys(spoken_name(n) for n in products))
        raise LayoutError(
            f"{axis}={ranks} divides no matrix product of the model",
            why=f"the sizes would divide, but every rank runs {' and '.join(kinds)} whole",
            where=describe(products[0]), hint=f"{leave_out}; dp works for any model",
        )  # fmt: skip
    fits = [t for t in range(2, max(sizes, default=1) + 1) if sum(s % t == 0 for s in sizes) * 2 > len(sizes)]
    raise LayoutError(
        f"{axis}={ranks} divides no weight of the model",
        why=f"the weights of its matrix products have dims {', '.join(map(str, sizes))}",
        where=describe(products[0]), hint=f"{axis}={', '.join(map(str, fits[:6]))}" if fits else leave_out,
    )  # fmt: skip
