"""Expert folding: axes that shard the sequence or features of other operators also shard experts.

An expert axis (`ep`) shards the experts of every mixture of experts. An axis of another kind (`cp`, `tp`) shards the
experts of a mixture only if a pin or a plan shards a weight of the mixture by expert over this axis, or dispatches
the mixture's tokens over it. All these axes together shard the experts like one flattened axis. This
is Megatron's parallel folding (Liu et al. 2025, arXiv:2504.14960), chosen separately for each mixture.
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
from autopart.passes.choose.solve.nested_shards import InnerSharding
from autopart.passes.facts.strategies import can_shard_sequence

Stacks = Mapping[fx.Node | str, int]
"""{operator of a mixture of experts, or name of one of its weights: number of experts}."""


class Mixture(NamedTuple):
    """A mixture of experts in the traced graph.

    Args:
        operators: operators on dispatched tokens, and views of the experts' weights.
        weights: names of the experts' weights.
    """

    num_experts: int
    operators: tuple[fx.Node, ...]
    weights: tuple[str, ...]

    @property
    def stacks(self) -> Stacks:
        return dict.fromkeys((*self.operators, *self.weights), self.num_experts)

    @property
    def product(self) -> fx.Node:
        """The first matrix product with the experts' stacked weights."""
        return next(n for n in self.operators if facts(n)["pattern"] and facts(n)["pattern"].flops)


def mixtures(trace: Trace) -> list[Mixture]:
    """Return the mixtures of experts in graph order.

    The weights of a mixture are stacks of one matrix per expert. Experts that a loop runs one by one are not included.
    """
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
    return bool(facts(node).get("routed")) and _routes(node) != "back"


def _stacks_read(nodes: Iterable[fx.Node]) -> tuple[list[fx.Node], list[str]]:
    """Return the expert weights that these nodes use: a list of views, and a list of parameter names.

    Each weight is a stack of one matrix per expert.
    """
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


def mixtures_on_axis(
    all_mixtures: Sequence[Mixture], cuts: str, names: Set[str], operators: Set[fx.Node] = frozenset()
) -> dict[fx.Node | str, int]:  # fmt: skip
    """Return {operator or weight: number of experts} for the mixtures of experts that an axis may shard.

    An expert axis may shard all mixtures. Another axis may shard only the mixtures that contain one of `names` or
    `operators`.

    Args:
        cuts: kind of dim that the axis shards, such as "experts" or "features" (`Axis.cuts`).
        names: weights that the axis is requested to shard by expert.
        operators: operators whose tokens the axis is requested to dispatch.
    """
    stacks: dict[fx.Node | str, int] = {}
    for mixture in all_mixtures:
        asked = not names.isdisjoint(mixture.weights) or not operators.isdisjoint(mixture.operators)
        if asked or cuts == "experts":
            stacks |= mixture.stacks
    return stacks


def shards_experts_equally(node: fx.Node, option: Strategy, other: Strategy) -> bool:
    """Return True if strategies on two axes shard the experts of an operator in the same way.

    Either both dispatch tokens to the experts' ranks, or both shard a view of the stacked weights by expert.
    """
    if option.is_dispatched or other.is_dispatched:
        return option.is_dispatched and other.is_dispatched
    return facts(node)["role"] == WEIGHT and {*option.places} == {*other.places} == {shard(0)}


def can_shard_experts_again(
    node: fx.Node, num_experts: int, option: Strategy, taken: Sequence[InnerSharding], ranks: int
) -> bool:  # fmt: skip
    """Return True if one more mesh axis may shard experts that already solved (inner) axes shard.

    All these axes must shard the experts in the same way (`shards_experts_equally`). The product of their sizes must
    not exceed the number of experts. If several axes shard the tokens, the product must divide the number of tokens.

    Args:
        option: strategy on the additional axis.
        taken: the operator's strategies on the already solved axes.
        ranks: size of the additional axis.
    """
    if not all(shards_experts_equally(node, option, one.strategy) for one in taken):
        return False
    parts = math.prod(one.ranks for one in taken) * ranks
    return can_shard_sequence(num_experts, parts) and can_shard_tokens_again(node, option, taken, ranks)


def can_shard_tokens_again(node: fx.Node, option: Strategy, taken: Sequence[InnerSharding], ranks: int) -> bool:
    """Return True if one more axis of `ranks` ranks can shard the tokens of a MoE dispatch or combine.

    The number of tokens must be a multiple of `ranks` times the number of ranks that shard the tokens on axes that are
    already solved.
    """
    pattern = facts(node)["pattern"]
    cut = next((place.in_order for place in option.places if place.is_shard), None)
    if pattern is None or not pattern.routes or cut is None:
        return True
    again = [one.ranks for one in taken if any(place.in_order == cut for place in one.strategy.places)]
    outer = 1
    for atom in factor_atoms(node, pattern).get(option.factor, ()):
        if outer == num_sections(cut.sections):  # the atom (indivisible factor of the dim) that is sharded
            return not again or atom.size % (math.prod(again) * ranks) == 0
        outer *= atom.size
    return not again


def check_expert_axes(mesh: Mesh, all_mixtures: Sequence[Mixture], asked: Mapping[str, Stacks]) -> None:
    """Raise LayoutError if a mixture has too few experts for the ranks of the axes that shard them.

    Args:
        asked: {axis: {operator or weight of experts that the axis is requested to shard: number of experts}}.
    """
    for mixture in all_mixtures:
        axes = [axis for axis, stacks in asked.items() if mixture.product in stacks and mesh.size(axis) > 1]
        folded = [axis for axis in axes if mesh.axis(axis).cuts != "experts"]
        if not folded or can_shard_sequence(mixture.num_experts, _ranks(mesh, axes)):
            continue
        fixed = [axis for axis in axes if axis not in folded]
        fewer = (
            left for number in range(len(folded) - 1, -1, -1) for left in itertools.combinations(folded, number)
            if can_shard_sequence(mixture.num_experts, _ranks(mesh, (*left, *fixed)))
        )  # fmt: skip
        left = next(fewer, None)
        rest = " and ".join(axis for axis in axes if left is not None and axis in (*left, *fixed))
        hint = f"pins that shard them over {rest} alone" if rest else "no pins that shard them"
        raise LayoutError(
            f"experts cannot be sharded over {' x '.join(f'{axis}={mesh.size(axis)}' for axis in axes)}",
            why=f"there are {mixture.num_experts} experts for {_ranks(mesh, axes)} ranks; unequal shards need at "
            "least two experts per rank on average, and one on the last rank", where=describe(mixture.product),
            hint=hint,
        )  # fmt: skip


def _ranks(mesh: Mesh, axes: Iterable[str]) -> int:
    return math.prod(map(mesh.size, axes))


def has_dispatched_tokens(text: str) -> bool:
    """Return True if placements in text form, such as `E(0), R -> E(0)`, have dispatched tokens (`E`)."""
    sides = text.replace("->", ",").split(",")
    return any(Placement.parse(side).is_dispatched for side in sides if side.strip())
