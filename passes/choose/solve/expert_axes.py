"""Expert folding: experts cut over several axes, also over some that cut positions or features elsewhere.

An axis that cuts experts cuts those of every mixture. Another one does where a pin asks for it, or a plan has it so: a
weight of the mixture that is cut by expert there, or an operator whose rows are on the ranks of their experts. Over all
these axes together they are cut as over one (`cut_together`): Megatron's parallel folding (Liu et al. 2025,
arXiv:2504.14960), for one mixture at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import networkx as nx
from torch import fx

from autopart.errors import LayoutError
from autopart.ir.atoms import factor_atoms
from autopart.ir.decisions import Strategy
from autopart.ir.facts import PARAMETER, WEIGHT, facts
from autopart.ir.graph import argument, describe, tensor_inputs
from autopart.ir.layout import Placement, num_sections, shard
from autopart.ir.mesh import Mesh
from autopart.ir.trace import Trace
from autopart.passes.choose.solve.nested_shards import Taken
from autopart.passes.facts.strategies import divides_positions

Stacks = Mapping[fx.Node | str, int]
"""{operator of a mixture, or name of one of its weights: how many experts it has}."""


class Mixture(NamedTuple):
    """The operators on the rows of some experts, with the views of their weights; the names of these weights."""

    num_experts: int
    operators: tuple[fx.Node, ...]
    weights: tuple[str, ...]

    @property
    def stacks(self) -> Stacks:
        return dict.fromkeys((*self.operators, *self.weights), self.num_experts)

    @property
    def product(self) -> fx.Node:
        """The first product with a matrix of each row's expert."""
        return next(n for n in self.operators if facts(n)["pattern"] and facts(n)["pattern"].flops)


def mixtures(trace: Trace) -> list[Mixture]:
    """The mixtures of a model whose experts are stacks of matrices, in order."""
    rows = nx.Graph()
    for node in (node for node in trace.graph.nodes if facts(node).get("routed")):
        rows.add_node(node)
        rows.add_edges_from((node, used) for used in node.all_input_nodes if _has_rows(used))
    all_mixtures = []
    position = {node: i for i, node in enumerate(trace.graph.nodes)} if rows else {}
    for part in nx.connected_components(rows):
        nodes = sorted(part, key=position.__getitem__)
        start = next(node for node in nodes if _routes(node))
        views, names = _stacks_read(nodes)
        all_mixtures.append(Mixture(argument(start, "num_experts"), (*nodes, *views), tuple(names)))
    return all_mixtures


def _routes(node: fx.Node) -> str:
    pattern = facts(node).get("pattern")
    return pattern.routes if pattern is not None else ""


def _has_rows(node: fx.Node) -> bool:
    """Whether a value has rows of experts, and is not what they add to their tokens."""
    return bool(facts(node).get("routed")) and _routes(node) != "back"


def _stacks_read(nodes: Iterable[fx.Node]) -> tuple[list[fx.Node], list[str]]:
    """What is looked up by expert: the views of weights, and the weights."""
    views, names = dict[fx.Node, None](), dict[str, None]()
    todo: list[fx.Node] = []
    for node in nodes:
        pattern = facts(node).get("pattern")
        if pattern is not None and pattern.lookup:
            tables = zip(tensor_inputs(node), pattern.inputs, strict=True)
            todo += [table for table, dims in tables if dims and dims[0] == (pattern.lookup,)]
    while todo:
        table = todo.pop()
        if facts(table)["role"] == PARAMETER:
            names[str(table.target)] = None
        elif facts(table)["role"] == WEIGHT and table not in views:
            views[table] = None
            todo += tensor_inputs(table)
    return list(views), list(names)


def stacks_on(
    all_mixtures: Sequence[Mixture], cuts: str, names: Set[str], operators: Set[fx.Node] = frozenset()
) -> dict[fx.Node | str, int]:  # fmt: skip
    """The mixtures whose experts may be cut over an axis that cuts this: one with a weight of these names, which are
    cut over it, or with an operator of these, whose rows are by expert there; all, where it cuts experts."""
    stacks: dict[fx.Node | str, int] = {}
    for mixture in all_mixtures:
        asked = not names.isdisjoint(mixture.weights) or not operators.isdisjoint(mixture.operators)
        if asked or cuts == "experts":
            stacks |= mixture.stacks
    return stacks


def cuts_alike(node: fx.Node, option: Strategy, other: Strategy) -> bool:
    """Whether two axes cut the experts of an operator in one way: rows by expert, or a view of a stack of weights."""
    if option.is_routed or other.is_routed:
        return option.is_routed and other.is_routed
    return facts(node)["role"] == WEIGHT and {*option.places} == {*other.places} == {shard(0)}


def cuts_experts_again(
    node: fx.Node, num_experts: int, option: Strategy, taken: Sequence[Taken], ranks: int
) -> bool:  # fmt: skip
    """Whether an operator of a mixture may cut over so many ranks more what other axes cut: all cut experts, of whom
    there are enough, and tokens that two of them cut divide."""
    if not all(cuts_alike(node, option, one.strategy) for one in taken):
        return False
    parts = math.prod(one.ranks for one in taken) * ranks
    return divides_positions(num_experts, parts) and cuts_tokens_again(node, option, taken, ranks)


def cuts_tokens_again(node: fx.Node, option: Strategy, taken: Sequence[Taken], ranks: int) -> bool:
    """Whether tokens on their way to experts or back, which other axes may cut too, divide over so many ranks more."""
    pattern = facts(node)["pattern"]
    cut = next((place.in_order for place in option.places if place.is_shard), None)
    if pattern is None or not pattern.routes or cut is None:
        return True
    again = [one.ranks for one in taken if any(place.in_order == cut for place in one.strategy.places)]
    outer = 1
    for atom in factor_atoms(node, pattern).get(option.factor, ()):
        if outer == num_sections(cut.sections):  # what is cut
            return not again or atom.size % (math.prod(again) * ranks) == 0
        outer *= atom.size
    return not again


def check_expert_axes(mesh: Mesh, all_mixtures: Sequence[Mixture], asked: Mapping[str, Stacks]) -> None:
    """Raises LayoutError where experts do not divide over the axes that are to cut them. `asked`: {axis: `stacks_on`
    it}."""
    for mixture in all_mixtures:
        axes = [axis for axis, stacks in asked.items() if mixture.product in stacks and mesh.size(axis) > 1]
        folded = [axis for axis in axes if mesh.axis(axis).cuts != "experts"]
        if not folded or divides_positions(mixture.num_experts, _ranks(mesh, axes)):
            continue
        fixed = [axis for axis in axes if axis not in folded]
        fewer = (
            left for number in range(len(folded) - 1, -1, -1) for left in itertools.combinations(folded, number)
            if divides_positions(mixture.num_experts, _ranks(mesh, (*left, *fixed)))
        )  # fmt: skip
        left = next(fewer, None)
        rest = " and ".join(axis for axis in axes if left is not None and axis in (*left, *fixed))
        hint = f"pins that cut them over {rest} alone" if rest else "no pins that cut them"
        raise LayoutError(
            f"experts cannot be cut over {' x '.join(f'{axis}={mesh.size(axis)}' for axis in axes)}",
            why=f"there are {mixture.num_experts} for {_ranks(mesh, axes)} ranks; unequal parts need two a rank, and "
            "one in the last",
            where=describe(mixture.product), hint=hint,
        )  # fmt: skip


def _ranks(mesh: Mesh, axes: Iterable[str]) -> int:
    return math.prod(map(mesh.size, axes))


def is_by_expert(text: str) -> bool:
    """Whether what a pin asks of an operator has rows on the ranks of their experts."""
    sides = text.replace("->", ",").split(",")
    return any(Placement.parse(side).is_routed for side in sides if side.strip())
