"""Sharding strategies of an operator on one mesh axis, derived from its sharding rule.

A `Strategy` gives the placement of every tensor input and output on one axis of `n` ranks. A sharding rule names the
dims of all inputs and outputs by letters, as einsum does: `b s k, n k -> b s n` for a linear layer. Each letter is a
factor of the rule. An operator has these strategies:

- One for each factor that can be sharded. Inputs that have the factor are sharded. Other inputs are replicated, and
  their gradients are partial sums. Outputs that have the factor are sharded. Other outputs are partial sums, because
  the operator sums over the factor.
- Partial sums as inputs and outputs, if the operator is linear.
- Replication: every rank runs the full operator, and values and gradients are replicated (`R`).
- Replication with partial sums as gradients (`R(grad P)`), if the operator's backward is linear in the gradient. The
  backward of a user's autograd Function may be nonlinear: for example, it may clip the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from autopart.ir.atoms import BATCH, DATA_DIM, FEATURE, Atoms, factor_atoms, selected_atoms, selections_in
from autopart.ir.decisions import Strategy
from autopart.ir.facts import DATA, INPUT, PARAMETER, WEIGHT, facts
from autopart.ir.graph import (
    argument,
    draws_random_numbers,
    dropout_probability,
    is_tensor,
    source_of,
    tensor_inputs,
    tuple_values,
    value,
)
from autopart.ir.layout import (
    DISPATCHED,
    EXPERT_PLACEMENTS,
    ON_EXPERT_RANK,
    R_GRAD_P,
    P,
    Placement,
    R,
    Sections,
    section_sizes,
    shard,
)
from autopart.ir.mesh import Cuts
from autopart.ir.pattern import Pattern, is_innermost
from autopart.ir.selection import is_selection
from autopart.passes.rules.operators.selection_rules import shifts_indices

TENSOR_KINDS = frozenset({FEATURE})
ALL_TENSOR_KINDS = frozenset({FEATURE, DATA_DIM})
ANY_KIND = frozenset({BATCH, DATA_DIM, FEATURE})
"""Kinds of dims (`ir/atoms.py`) that an axis may shard.

`TENSOR_KINDS`: features of weights. `ALL_TENSOR_KINDS`: features and all other dims but the batch, such as the sequence
(sequence parallelism).
"""

_KINDS: Mapping[Cuts, frozenset[str]] = {
    "features": ALL_TENSOR_KINDS, "positions": ALL_TENSOR_KINDS, "experts": frozenset({BATCH, FEATURE})
}  # fmt: skip
"""{what an axis shards (`Axis.cuts`): kinds of dims that it may shard}.

`_keeps_weights` restricts the sharding of weights further.
"""


def strategies(node: fx.Node, num_shards: int, kinds: frozenset[str], positions: str = "") -> tuple[Strategy, ...]:
    """Return all strategies of `node` on an axis of `num_shards` ranks.

    The first one replicates everything.

    Args:
        kinds: kinds of dims that can be sharded, such as `FEATURE` (`ir/atoms.py`).
        positions: "in order" for contiguous shards of a sequence, "zigzag" for shards of one chunk from its start and
            one from its end. With either, the shards may be uneven. "": sequences are sharded like other dims.
    """
    known, key = facts(node)["strategies"], (num_shards, kinds, positions)  # shared by equivalent nodes
    if key not in known:
        known[key] = tuple(dict.fromkeys(_strategies(node, num_shards, kinds, positions)))
    return known[key]


def strategies_on_axis(node: fx.Node, num_shards: int, cuts: Cuts, cuts_experts: bool = False) -> tuple[Strategy, ...]:
    """Return the strategies of an operator on an axis that shards features, sequences or experts.

    Args:
        num_shards: number of ranks of the axis.
        cuts: "features", "positions" (sequences) or "experts" (`Axis.cuts`).
        cuts_experts: True if the axis can also shard the experts of the mixture that the operator belongs to.
    """
    cuts_experts = cuts_experts or cuts == "experts"
    if cuts == "features" and not cuts_experts:
        return strategies(node, num_shards, ALL_TENSOR_KINDS)
    known, zigzag = facts(node)["strategies"], facts(node).get("zigzag", False)
    others = facts(node).get("other_positions", frozenset()) if cuts == "positions" else frozenset()
    key = num_shards, cuts, zigzag, others, cuts_experts
    if key not in known:
        positions = ("zigzag" if zigzag else "in order") if cuts == "positions" else ""
        plain = strategies(node, num_shards, _KINDS[cuts], positions)
        routed = _routed(node, num_shards, plain) if cuts_experts and facts(node).get("routed") else ()
        kept = [s for s in plain if _keeps_weights(node, s, cuts, cuts_experts) and s.factor not in others]
        rings = _rings(node, kept) if cuts == "positions" else ()
        known[key] = (*kept, *routed, *rings)
    return known[key]


def strategies_on_weight_dims(
    node: fx.Node, num_shards: int, cuts: Cuts, cuts_experts: bool = False
) -> tuple[Strategy, ...]:  # fmt: skip
    """Return the strategies that shard only experts, dims of weights, and dims that come from weights.

    For example, the output features of a linear layer come from its weight.

    Args:
        num_shards: number of ranks of the axis.
        cuts: "features", "positions" (sequences) or "experts" (`Axis.cuts`).
        cuts_experts: True if the axis can also shard the experts of the mixture that the operator belongs to.
    """
    plain = strategies(node, num_shards, TENSOR_KINDS)
    if not cuts_experts:
        return plain if cuts == "features" else tuple([s for s in plain if _keeps_weights(node, s, cuts)])
    routed = _routed(node, num_shards, plain) if facts(node).get("routed") else ()
    return (*[s for s in plain if _keeps_weights(node, s, cuts, cuts_experts)], *routed)


def _routed(node: fx.Node, num_shards: int, plain: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Return the strategies in which tokens are dispatched: each token is on the rank of its expert.

    Args:
        plain: the operator's strategies without dispatched tokens.
    """
    pattern, sources = facts(node)["pattern"], tensor_inputs(node)
    if pattern is None:
        return ()
    whole = tuple(R_GRAD_P if facts(source)["needs_grad"] else R for source in sources)
    if not pattern.routes:
        return tuple(
            [way for place in EXPERT_PLACEMENTS for way in _at_experts(node, pattern, whole, place, num_shards)]
        )
    if not can_shard_sequence(argument(node, "num_experts"), num_shards):
        return ()
    own_tokens = _local_tokens(plain)
    if pattern.routes == "out":
        sent = [Strategy((place,) * 2, (DISPATCHED,), factor) for factor, place in own_tokens]
        return (Strategy(whole, (ON_EXPERT_RANK,), pattern.inputs[0][0][0]), *sent)
    sent = [Strategy((DISPATCHED, place), (place,), factor) for factor, place in own_tokens]
    return (Strategy((ON_EXPERT_RANK, R), (P,), pattern.outputs[0][0][0]), *sent)


def _local_tokens(plain: Iterable[Strategy]) -> list[tuple[str, Placement]]:
    """Return [(letter of the token dim in the sharding rule, placement that shards the tokens)].

    Only one of the possible placements is returned, so that a dispatch and its combine use equal placements, and the
    combine returns tokens to the rank that dispatched them. The list is empty if tokens cannot be sharded.
    """
    tokens = [(s.factor, s.inputs[0]) for s in plain if len({*s.places}) == 1 and s.inputs[0].is_shard]
    return sorted(((factor, place) for factor, place in tokens if place.dim == 0), key=lambda one: one[1])[:1]


def _rings(node: fx.Node, options: Iterable[Strategy]) -> list[Strategy]:
    """Return the strategies of ring attention.

    These strategies shard queries, keys and values equally along the sequence. The list is empty if the operator is not
    attention. It is also empty for attention with dropout, with unequal numbers of queries and keys, or with a mask
    that needs a gradient.
    """
    pattern = facts(node)["pattern"]
    if pattern is None or pattern.context != "ring":
        return []
    sizes = [value(source).shape for source in tensor_inputs(node)]
    alike = all(len(size) == 4 for size in sizes[:3]) and sizes[0][2] == sizes[1][2]
    learns = any(facts(source)["needs_grad"] for source in tensor_inputs(node)[3:])
    if not alike or learns or dropout_probability(node):
        return []
    of_queries = (s for s in options if s.inputs[0].is_shard and s.inputs[0].dim == 2 and not s.inputs[1].is_shard)
    return [replace(s, inputs=(s.inputs[0],) * 3 + s.inputs[3:]) for s in of_queries]


def _at_experts(
    node: fx.Node, pattern: Pattern, whole: Sequence[Placement], place: Placement, num_shards: int
) -> tuple[Strategy, ...]:
    """Return the strategy of an operator that processes tokens on the ranks of their experts.

    The result is a tuple of one strategy. It is empty if the operator cannot process such tokens.

    Args:
        whole: replicated placement of each input, `R` or `R(grad P)`. An input that has neither tokens nor an expert
            dim keeps this placement. An input with an expert dim, such as stacked expert weights, is sharded along it.
        place: placement of the inputs and outputs that have tokens: `E(0)` if each rank selects its experts' tokens
            from all tokens, `E(0; sent)` if an all-to-all sends tokens to the ranks of their experts.
    """
    sources = tensor_inputs(node)
    routed = [bool(facts(source).get("routed")) for source in sources]
    rows = {dims[0] for dims, is_dispatched in zip(pattern.inputs, routed, strict=True) if is_dispatched and dims}
    if len(rows) != 1 or len(*rows) != 1:
        return ()
    (row,) = rows.pop()
    inputs = list(whole)
    for i, (dims, is_dispatched) in enumerate(zip(pattern.inputs, routed, strict=True)):
        if is_dispatched:
            inputs[i] = place
        elif dims and dims[0] == (pattern.lookup,) and can_shard_sequence(pattern.sizes[pattern.lookup], num_shards):
            inputs[i] = shard(0)
    alone = all([d for d, dim in enumerate(dims) if row in dim] == [0] * (source_place == place)
                for dims, source_place in zip(pattern.inputs, inputs, strict=True))  # fmt: skip
    outputs_alone = all([d for d, dim in enumerate(dims) if row in dim] == [0] for dims in pattern.outputs)
    looks_up = not pattern.lookup or any(source_place.is_shard for source_place in inputs)
    if row in pattern.whole or not (alone and outputs_alone and looks_up):
        return ()
    return (Strategy(tuple(inputs), (place,) * len(pattern.outputs), row),)


def _keeps_weights(node: fx.Node, strategy: Strategy, cuts: Cuts, cuts_experts: bool = False) -> bool:
    """Return True if the mesh axis may shard weights as this strategy does.

    - A features axis (such as `tp`) may shard every weight.
    - Any other axis may shard a weight along a dim that an activation operand and an output of the operator have too.
      For example, `cp` may shard an added position table along the sequence.
    - An experts axis (`ep`) may also shard a weight along its expert dim.
    - Only axes that shard features or experts may shard an operator that has no operands but weights.

    Args:
        cuts: what the axis shards (`Axis.cuts`).
        cuts_experts: True if the axis can also shard the experts of the mixture that the operator belongs to.
    """
    if cuts == "features":
        return True
    weights = [facts(source)["role"] in (PARAMETER, WEIGHT) for source in tensor_inputs(node)]
    if facts(node)["role"] == WEIGHT:
        return cuts == "experts" or cuts_experts or not strategy.is_sharded
    if not any(place.is_shard and weight for place, weight in zip(strategy.inputs, weights, strict=True)):
        return True
    pattern = facts(node)["pattern"]
    assert pattern is not None, "an operator without a rule is not sharded"
    if pattern.lookup and strategy.factor == pattern.lookup:
        return cuts == "experts" and bool(pattern.flops)
    beside = [dims for dims, weight in zip(pattern.inputs, weights, strict=True) if not weight]
    return all(any(strategy.factor in dim for dims in side for dim in dims) for side in (beside, pattern.outputs))


def possible(node: fx.Node, options: Iterable[Strategy]) -> list[Strategy]:
    """Drop the strategies in which an operand that depends only on model inputs is a partial sum.

    Each rank computes such an operand in full, or its own shard, so the operand is never a partial sum.
    """
    data = [facts(source)["role"] in (INPUT, DATA) for source in tensor_inputs(node)]
    if not any(data):
        return list(options)
    return [o for o in options if not any(d and place == P for d, place in zip(data, o.inputs, strict=True))]


def sharded_selections(node: fx.Node, place: Placement) -> set[str]:
    return selections_in(facts(node)["atoms"][place.dim]) if place.is_shard else set()


def rows_of(node: fx.Node, place: Placement, num_shards: int) -> Strategy | None:
    """Return the strategy with which a rank computes its shard of a value from shards of the inputs.

    Returns None if each rank must compute the full value and slice it.

    Args:
        node: a value that depends only on model inputs.
        place: placement of the value's shards.
        num_shards: number of ranks of the axis.
    """
    source, index = source_of(node)
    if source.op != "call_function" or draws_random_numbers(source) or not tensor_inputs(source):
        return None
    options = strategies(source, num_shards, ANY_KIND)
    return next((option for option in options if option.outputs[index] == place), None)


def local_batch_placement(node: fx.Node, rows: Mapping[fx.Node, Strategy]) -> Placement | None:
    """Return the placement that shards a value along the batch; None if it has no batch dim.

    Args:
        rows: {operator: its strategy on the batch axes}.
    """
    source, index = source_of(node)
    if source in rows and rows[source].outputs[index].is_shard:
        return rows[source].outputs[index]
    for dim, atoms in enumerate(facts(node)["atoms"]):
        if atoms and atoms[0].kind == BATCH and not selections_in(atoms):
            return shard(dim)
    return None


def can_compute_sharded(node: fx.Node, place: Placement, num_shards: int) -> bool:
    """Return True if a rank can compute its shard of a value that depends only on model inputs.

    A rank can always slice the full value, unless a mask selected the elements of the sharded dim.
    """
    if not sharded_selections(node, place):
        return True
    strategy = rows_of(node, place, num_shards)
    inputs = tensor_inputs(source_of(node)[0])
    return strategy is not None and all(
        can_compute_sharded(used, at, num_shards) for used, at in zip(inputs, strategy.inputs, strict=True)
    )


def _strategies(node: fx.Node, num_shards: int, kinds: frozenset[str], positions: str) -> list[Strategy]:
    sources = tensor_inputs(node)
    num_outputs = len(tuple_values(node))
    grads = [facts(s)["needs_grad"] for s in sources]
    options = [Strategy((R,) * len(sources), (R,) * num_outputs)]
    if facts(node)["needs_grad"] and not facts(node)["whole_grads"]:
        partial = tuple(R_GRAD_P if grad else R for grad in grads)
        options.append(Strategy(partial, (R_GRAD_P,) * num_outputs))
    pattern: Pattern | None = facts(node)["pattern"]
    if pattern is None:
        return options
    for linear in pattern.linear:
        inputs = tuple(P if i in linear else (R_GRAD_P if grad else R) for i, grad in enumerate(grads))
        options.append(Strategy(inputs, (P,) * num_outputs))
    return options + list(_sharded(node, pattern, grads, num_shards, kinds, positions))


def _sharded(
    node: fx.Node, pattern: Pattern, grads: list, num_shards: int, kinds: frozenset, positions: str
) -> Iterator[Strategy]:  # fmt: skip
    atoms = all_factor_atoms(node, pattern)
    if is_selection(node):
        atoms = {factor: selected_atoms([part], node.name) for factor, part in atoms.items()}
    sources = tensor_inputs(node)
    input_shapes, output_shapes = [n.meta["val"].shape for n in sources], [v.shape for v in tuple_values(node)]
    apart = _split_selections(sources, pattern)
    for factor in pattern.factors:
        if factor in pattern.whole or pattern.sizes[factor] == 1:
            continue
        unsharded = R if factor == pattern.lookup and pattern.all_reduces else P
        for sections in _shard_sections(node, pattern, factor, atoms.get(factor, ()), num_shards, kinds, positions):
            if factor == pattern.lookup and sections:
                continue  # the index of its first row determines a rank's rows of a table
            inputs = _places(pattern.inputs, input_shapes, factor, sections, pattern)
            outputs = _places(pattern.outputs, output_shapes, factor, sections, pattern)
            if inputs is None or outputs is None or factor in apart:
                continue
            if any(p.is_shard and shifts_indices(node, i, sources[i], pattern) for i, p in enumerate(inputs)):
                continue
            yield Strategy(
                tuple(p if p.is_shard else (R_GRAD_P if grad else R) for p, grad in zip(inputs, grads, strict=True)),
                tuple(p if p.is_shard else unsharded for p in outputs),
                factor,
            )


def _split_selections(sources: Sequence[fx.Node], pattern: Pattern) -> set[str]:
    """Return the letters of the dims into which a view splits a dim of selected elements (`x[mask]`).

    These dims cannot be sharded, because the number of selected elements per index is unknown.
    """
    if pattern.tied:
        return set()
    dims = [(dim, atoms) for dims, source in zip(pattern.inputs, sources, strict=True)
            for dim, atoms in zip(dims, facts(source)["atoms"], strict=True)]  # fmt: skip
    return {factor for dim, atoms in dims if len(dim) > 1 and selections_in(atoms) for factor in dim}


def all_factor_atoms(node: fx.Node, pattern: Pattern) -> dict[str, Atoms]:
    """Return {letter of an operator's sharding rule: the dims that it merges, as atoms}.

    In a rule such as `b k, n k -> b n`, `b` has the atoms (batch, sequence) if a view merged both. The atoms are taken
    from an input with the letter or, if only the output has it (`expand`), from the output.
    """
    atoms = factor_atoms(node, pattern)
    for dims in pattern.outputs[:1]:
        for dim, dim_atoms in zip(dims, output_atoms(node), strict=True):
            if len(dim) == 1:
                atoms.setdefault(dim[0], dim_atoms)
    return atoms


def output_atoms(node: fx.Node) -> tuple:
    atoms = facts(node)["atoms"]
    return atoms if is_tensor(node) else atoms[0]


def _shard_sections(
    node: fx.Node, pattern: Pattern, factor: str, atoms: Atoms, num_shards: int, kinds: frozenset, positions: str
) -> Iterator[Sections]:
    """Yield every way to split a dim, given by its letter (`factor`) in the sharding rule, into sections.

    Each section is then sharded over all ranks. `()` is one section, which gives contiguous shards. A dim that merges
    several dims, such as (heads, head size), can have one section per head: each rank then has a shard of every head.
    A dim can also have the sections that other operators need, such as q, k and v of a fused projection.
    """
    size = pattern.sizes[factor]
    if factor in pattern.joined:
        kept = all(a.kind in kinds and a.kind != BATCH for a in atoms)  # the batch is sharded contiguously
        if kept and all(s % num_shards == 0 for s in pattern.joined[factor]):
            yield pattern.joined[factor]
        return
    outer = 1
    for i, atom in enumerate(atoms):
        even = atom.size % num_shards == 0
        if atom.kind in kinds and (even or _can_be_uneven(pattern, factor, atoms, i, num_shards, bool(positions))):
            if positions != "zigzag" or atom.kind != DATA_DIM:
                yield (outer,) if outer > 1 else ()
            elif is_innermost(pattern, factor) or atom.size % (2 * num_shards) == 0:
                yield (-outer,)
        outer *= atom.size
    if len(atoms) == 1 and atoms[0].kind in kinds:
        for sections in sorted(_requested_sections(node, pattern, factor)):
            sizes = section_sizes(size, sections)
            if sum(sizes) == size and all(s % num_shards == 0 for s in sizes):
                yield sections


def can_shard_sequence(size: int, num_shards: int) -> bool:
    """Return True if `num_shards` ranks can shard a sequence of this size, evenly or unevenly.

    Uneven shards need at least two elements on average, and at least one in every shard.

    >>> [can_shard_sequence(25, n) for n in (4, 7, 13)]
    [True, True, False]
    """
    uneven = size >= 2 * num_shards and -(-size // num_shards) * (num_shards - 1) < size
    return size % num_shards == 0 or uneven


def _can_be_uneven(
    pattern: Pattern, factor: str, atoms: Atoms, i: int, num_shards: int, positions: bool
) -> bool:  # fmt: skip
    """Return True if atom `i` (one of the dims that are merged to a dim) may be split into unequal shards.

    A feature (such as a vocabulary of 50257) may have uneven shards if no operand merges it with other dims. A
    sequence may have uneven shards if it is the innermost atom of its dim. In both cases an input must have the
    dim, and no shard may be empty.
    """
    size, in_inputs = atoms[i].size, any(factor in dim for dims in pattern.inputs for dim in dims)
    few = not can_shard_sequence(size, num_shards)
    if positions and atoms[i].kind == DATA_DIM:
        return in_inputs and not few and i == len(atoms) - 1 and is_innermost(pattern, factor)
    alone = all(dim == (factor,) for dims in (*pattern.inputs, *pattern.outputs) for dim in dims if factor in dim)
    return atoms[i].kind == FEATURE and len(atoms) == 1 and alone and in_inputs and not few


def _requested_sections(node: fx.Node, pattern: Pattern, factor: str) -> set[Sections]:
    """Return the sections into which other operators need the dim with the letter `factor` to be split.

    These are later operators, such as a split into q, k and v, and an earlier `cat`, whose inputs are the sections."""
    asked: set[Sections] = set()
    outputs = [(dims, facts(node)["sections"]) for dims in pattern.outputs]
    inputs = [(dims, facts(n)[kind]) for kind in ("sections", "offered")
              for dims, n in zip(pattern.inputs, tensor_inputs(node), strict=True)]  # fmt: skip
    for dims, sections in outputs + inputs:
        for i, dim in enumerate(dims):
            if dim == (factor,):
                asked |= sections.get(i, set())
    return asked


def _places(
    operands: tuple, shapes: Sequence, factor: str, sections: Sections, pattern: Pattern
) -> list[Placement] | None:
    places = [_place(dims, full, factor, sections, pattern) for dims, full in zip(operands, shapes, strict=True)]
    return None if None in places else [place for place in places if place is not None]


def _place(dims: tuple, full: Sequence[int], factor: str, sections: Sections, pattern: Pattern) -> Placement | None:
    """Return the placement of an operand if the operator shards dims with the letter `factor`.

    `sections`: sections of the dim that are sharded one by one.

    Returns `R` if no dim of the operand has this letter of the sharding rule. Returns None if several dims have it, or
    if no placement describes these sections of the dim.
    """
    places = [(i, dim) for i, dim in enumerate(dims) if factor in dim]
    if not places:
        return R
    if len(places) > 1:
        return None
    at, dim = places[0]
    if factor in pattern.joined and full[at] != pattern.sizes[factor]:
        return shard(at)  # the operand is one section of a concatenation
    outer = math.prod(pattern.sizes[f] for f in dim[: dim.index(factor)])
    inner = math.prod(pattern.sizes[f] for f in dim[dim.index(factor) + 1 :])
    if len(sections) > 1:
        sections = tuple(size * inner for size in sections)
    if outer > 1 and sections:
        return shard(at, (outer * sections[0],)) if len(sections) == 1 else None
    return shard(at, (outer,) if outer > 1 else sections)
