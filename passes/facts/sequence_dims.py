"""Sequence dims of all traced values, derived from the input dims that users name (`sequence_dims=`).

A sharding rule names each dim of an operator's inputs and outputs, as in `b s, s k -> b k`. An output dim is a sequence
dim if the rule gives it the letter of an input's sequence dim. A view can merge the sequence with another dim, or split
it again. If the rule does not relate an output dim to inputs (a convolution over the sequence), the output dim is a
sequence dim if an input has one at the same index. Position ids and position tables depend on no input. Their dims are
sequence dims if an operator combines them with a sequence dim of another value.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from autopart.errors import LayoutError, OptionError
from autopart.ir.atoms import BATCH, DATA_DIM, FEATURE, Atom, Atoms, split_atoms
from autopart.ir.facts import facts
from autopart.ir.graph import active_operators, on_parameters, shape, source_of, tensor_inputs, tuple_values
from autopart.ir.pattern import Pattern
from autopart.ir.trace import Trace
from autopart.passes.facts.strategies import all_factor_atoms, strategies_on_axis

SEQUENCE = "sequence"
"""Kind of the atoms (indivisible factors of dims) that count tokens of a sequence.

All other atoms in this file have the kind `DATA_DIM`.
"""

Dims = tuple[Atoms, ...]
"""For each dim of a value, its atoms (indivisible factors), of kind `SEQUENCE` or `DATA_DIM`."""

Named = Mapping[str, int]
"""{name of an input: index of its sequence dim, which may be negative}"""


def follow_sequences(trace: Trace, named: Named) -> None:
    """Write `other_positions` on every operator: the factors that a context-parallel axis must not shard.

    A factor is a letter of the operator's sharding rule. The written factors belong neither to a named sequence nor to
    a weight. If the user names no sequence, no factors are written. Named inputs that this call lacks are ignored.
    """
    along = _Along(trace, _dims_of(trace, named)).with_made() if named else None
    for node in on_parameters(trace.graph):
        facts(node)["other_positions"] = frozenset() if along is None else _others(node, along)


def check_named(trace: Trace, named: Named) -> None:
    """Raise OptionError if `sequence_dims` names an input or a dim that does not exist."""
    nodes = _inputs(trace)
    for name, dim in named.items():
        if name not in nodes:
            near = difflib.get_close_matches(name, nodes, 1) or list(nodes)[:1]
            raise OptionError(f"sequence_dims names '{name}', which is not an input of this call",
                              why=f"its inputs are {inputs_text(trace)}",
                              hint=f"sequence_dims={{'{near[0]}': 1}}")  # fmt: skip
        sizes = list(shape(nodes[name]))
        asked = f"sequence_dims={{'{name}': {dim}}}"
        if not -len(sizes) <= dim < len(sizes):
            raise OptionError(f"{asked} names no dim", why=f"{name} has shape {sizes}",
                              hint=f"a dim from 1 to {len(sizes) - 1}" if len(sizes) > 1 else
                              f"leave {name} out")  # fmt: skip
        if any(atom.kind == BATCH for atom in facts(nodes[name])["atoms"][dim]):
            raise OptionError(f"{asked} names the batch dim",
                              why=f"{name} has shape {sizes}; dp shards the batch dim and cp the sequence dim",
                              hint=f"sequence_dims={{'{name}': 1}}" if len(sizes) > 1 else
                              f"leave {name} out")  # fmt: skip


def check_can_be_sharded(trace: Trace, named: Named) -> None:
    """Raise LayoutError if no operator can be sharded along a dim that `sequence_dims` names."""
    lengths = lengths_of(trace, named)
    for node, dims in _dims_of(trace, named).items():
        along, (dim,) = _Along(trace, {node: dims}), dims
        if shape(node)[dim] > 1 and any(along.cut(shape(node)[dim])):
            continue
        name = _display_name(node)
        others = [other for other, length in lengths.items() if length != lengths[name]]
        if others:
            raise LayoutError(
                "sequence_dims names dims of unequal lengths",
                why=f"dim {dim} of {name} has size {lengths[name]}, dim {named[others[0]]} of {others[0]} has "
                f"size {lengths[others[0]]}, and no operator can be sharded along dim {dim} of {name}",
                hint=f"leave {name} out, or name a dim of size {lengths[others[0]]}",
            )
        raise LayoutError(
            f"sequence_dims={{'{name}': {named[name]}}}: no operator can be sharded along it",
            why=f"no operator of the model treats the {lengths[name]} entries of dim {dim} independently",
            hint=f"leave {name} out; the inputs are {inputs_text(trace)}",
        )


def lengths_of(trace: Trace, named: Named) -> dict[str, int]:
    """Return {input: length of its sequence}, for inputs in `named` that this call has."""
    return {_display_name(node): shape(node)[dim] for node, dims in _dims_of(trace, named).items() for dim in dims}


def _inputs(trace: Trace) -> dict[str, fx.Node]:
    return {_display_name(node): node for node in trace.graph.find_nodes(op="placeholder")}


def _display_name(node: fx.Node) -> str:
    """Return an input's name in the user's model.

    A trace with a loss function adds the prefix `call.`, which this function removes.
    """
    return facts(node)["input_name"].removeprefix("call.")


def inputs_text(trace: Trace) -> str:
    return ", ".join(f"{name} {list(shape(node))}" for name, node in _inputs(trace).items())


def _dims_of(trace: Trace, named: Named) -> dict[fx.Node, set[int]]:
    """Return {input node: {index of its named sequence dim}}. The index is not negative."""
    nodes = {name: node for name, node in _inputs(trace).items() if name in named}
    ranks = {name: len(shape(node)) for name, node in nodes.items()}
    return {node: {named[name] % ranks[name]} for name, node in nodes.items()
            if -ranks[name] <= named[name] < ranks[name]}  # fmt: skip


def _others(node: fx.Node, along: _Along) -> frozenset[str]:
    """Return the letters of an operator's sharding rule that belong neither to a sequence nor to a weight."""
    pattern: Pattern | None = facts(node)["pattern"]
    if pattern is None:
        return frozenset()
    of_weights = {f for f, atoms in all_factor_atoms(node, pattern).items() if any(a.kind == FEATURE for a in atoms)}
    return frozenset(pattern.factors) - along.factors(node, pattern) - of_weights


class _Along:
    """Sequence dims of every value, derived from those of the inputs (`dims`)."""

    def __init__(self, trace: Trace, dims: Mapping[fx.Node, Collection[int]]):
        self.trace, self.dims = trace, dims
        self.made: dict[fx.Node, Sequence[Dims]] = {}
        for node in trace.graph.nodes:
            if node.op != "output" and source_of(node)[0] is node:
                self.made[node] = self._made(node)

    def with_made(self) -> _Along:
        """Return a copy that includes sequence dims of values that depend on no input (such as position ids).

        A dim of such a value is a sequence dim if an operator combines it with a sequence dim of another value.
        """
        free: set[fx.Node] = set()
        for node in self.trace.graph.nodes:
            if node.op != "placeholder" and free.issuperset(node.all_input_nodes):
                free.add(node)
        asked: dict[fx.Node, set[int]] = {}
        for node in reversed(self.trace.graph.nodes):
            pattern: Pattern | None = facts(node).get("pattern")
            if pattern is None:
                continue
            factors = self.factors(node, pattern)
            factors |= {dim[0] for i, dim in enumerate(pattern.outputs[0])
                        if len(dim) == 1 and i in asked.get(node, ())}  # fmt: skip
            for dims, source in zip(pattern.inputs, tensor_inputs(node), strict=True):
                if source in free:
                    asked.setdefault(source, set()).update(
                        i for i, dim in enumerate(dims) if len(dim) == 1 and dim[0] in factors and shape(source)[i] > 1
                    )
        return _Along(self.trace, {**self.dims, **{node: dims for node, dims in asked.items() if dims}})

    def factors(self, node: fx.Node, pattern: Pattern) -> set[str]:
        """Return the letters of an operator's rule (`pattern`) that are sequence dims of its inputs."""
        return {factor for factor, atoms in self._factors(node, pattern).items() if _is_along(atoms)}

    def cut(self, num_shards: int) -> Iterator[bool]:
        """Yield for every operator: True if `num_shards` ranks can shard it along a sequence dim."""
        for node in active_operators(self.trace.graph):
            if pattern := facts(node)["pattern"]:
                factors = self.factors(node, pattern)
                yield any(way.factor in factors for way in strategies_on_axis(node, num_shards, "positions"))

    def _of(self, used: fx.Node) -> Dims:
        source, index = source_of(used)
        return self.made[source][index]

    def _made(self, node: fx.Node) -> list[Dims]:
        pattern: Pattern | None = facts(node).get("pattern")
        if pattern is None:
            outputs = [self._in_place(node, output) for output in tuple_values(node)]
        else:
            factors = self._factors(node, pattern)
            outputs = [
                self._of_factors(node, output, dims, factors)
                for output, dims in zip(tuple_values(node), pattern.outputs, strict=True)
            ]
        for dim in self.dims.get(node, ()):
            first = list(outputs[0])
            first[dim] = (Atom(shape(node)[dim], SEQUENCE),)
            outputs[0] = tuple(first)
        return outputs

    def _factors(self, node: fx.Node, pattern: Pattern) -> dict[str, Atoms]:
        by_factor: dict[str, Atoms] = {}
        for dims, source in zip(pattern.inputs, tensor_inputs(node), strict=True):
            for dim, atoms in zip(dims, self._of(source), strict=True):
                for factor, part in zip(dim, split_atoms(atoms, [pattern.sizes[f] for f in dim]), strict=True):
                    if factor not in by_factor or _is_along(part):
                        by_factor[factor] = part
        return by_factor

    def _of_factors(self, node: fx.Node, output: Any, dims: Sequence, factors: Mapping[str, Atoms]) -> Dims:
        in_place = self._in_place(node, output)
        return tuple(
            _sized(tuple(a for f in dim for a in factors[f]), size) if all(f in factors for f in dim) else in_place[i]
            for i, (dim, size) in enumerate(zip(dims, output.shape, strict=True))
        )

    def _in_place(self, node: fx.Node, output: Any) -> Dims:
        """Return the dims of the output of an operator without a sharding rule, each as one factor (atom).

        An output dim is a sequence dim if an input's dim at the same index is one.
        """
        sizes = getattr(output, "shape", ())
        inputs = [self._of(source) for source in tensor_inputs(node)] if node.op == "call_function" else []
        alike = [dims for dims in inputs if len(dims) == len(sizes)]
        kinds = [SEQUENCE if any(_is_along(dims[i]) for dims in alike) else DATA_DIM for i in range(len(sizes))]
        return tuple((Atom(size, kind),) for size, kind in zip(sizes, kinds, strict=True))


def _is_along(atoms: Atoms) -> bool:
    return any(atom.kind == SEQUENCE for atom in atoms)


def _sized(atoms: Atoms, size: int) -> Atoms:
    """Return `atoms` (factors of a dim) if their product is `size`, else one atom of this size."""
    if math.prod(atom.size for atom in atoms) == size:
        return atoms
    return (Atom(size, SEQUENCE if _is_along(atoms) else DATA_DIM),)
