"""What every value of a traced graph is, before any choice is made.

`annotate` writes on each node:

- `role`: `INPUT` a model input, `DATA` computed from inputs, buffers and constants alone, `PARAMETER`, `WEIGHT`
  computed from parameters alone (a transposed weight), `ACTIVE` everything else.
- `needs_grad`: a gradient flows through it to some parameter.
- `pattern`: its sharding rule fitted to its shapes, or None.
- `atoms`: for every dim the factors it is made of, outermost first, each with the kind of thing it counts: `BATCH`
  rows of the batch, `FEATURE` something of a weight (so it may be split by tensor parallelism), `DATA_DIM` the rest.
- `sections`: per dim, the ways of cutting it into sections that some later view or split asks for.
- `uneven`: the dims that are the rows of a look-up table (a vocabulary) and may be cut into unequal shards.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx

from autopart.graph import assign_keys, is_floating, is_tensor, operator_name, shape, tensor_inputs, value
from autopart.layout import Sections
from autopart.trace import Trace

from .rules import Pattern, pattern_for

INPUT, DATA, PARAMETER, WEIGHT, ACTIVE = "input", "data", "parameter", "weight", "active"
BATCH, FEATURE, DATA_DIM = "batch", "feature", "data"


class Atom(NamedTuple):
    size: int
    kind: str


Atoms = tuple[Atom, ...]


def annotate(trace: Trace) -> None:
    """Write `role`, `needs_grad`, `key`, `group`, `pattern`, `atoms` and `sections` on every node."""
    assign_keys(trace.graph)
    batch = batch_size(trace)
    for node in trace.graph.nodes:
        if node.op == "output":
            continue
        node.meta["role"] = _role(node, trace)
        node.meta["needs_grad"] = _needs_grad(node, trace)
        known = node.op == "call_function" and node.target is not operator.getitem
        node.meta["pattern"] = pattern_for(node) if known else None
        node.meta["atoms"] = _atoms(node, batch)
        node.meta["sections"], node.meta["uneven"] = {}, set()
    for node in reversed(trace.graph.nodes):
        _ask_for_sections(node)


def batch_size(trace: Trace) -> int:
    """Rows of the global batch: the first dim of the first input that has any (1 where none has)."""
    sizes = [shape(n)[0] for n in trace.graph.find_nodes(op="placeholder") if shape(n)]
    return max(sizes, key=sizes.count) if sizes else 1


def tuple_values(node: fx.Node) -> Sequence:
    """The outputs of a node as a sequence of fake tensors."""
    outputs = value(node)
    return outputs if isinstance(outputs, (tuple, list)) else [outputs]


def _role(node: fx.Node, trace: Trace) -> str:
    if node.op == "placeholder":
        return INPUT
    if node.op == "get_attr":
        return PARAMETER if node.target in trace.parameters else DATA
    roles = {n.meta["role"] for n in node.all_input_nodes}
    if roles <= {INPUT, DATA}:
        return DATA
    return WEIGHT if roles <= {PARAMETER, WEIGHT, DATA} and roles & {PARAMETER, WEIGHT} and _is_view(node) else ACTIVE


_VIEWS = {"aten::t", "aten::transpose", "aten::reshape", "aten::permute", "aten::unsqueeze",
          "aten::squeeze", "aten::to", "aten::_to_copy", "aten::detach"}  # fmt: skip


def _is_view(node: fx.Node) -> bool:
    return node.target is not operator.getitem and operator_name(node) in _VIEWS


def _needs_grad(node: fx.Node, trace: Trace) -> bool:
    if node.op == "get_attr":
        return node.target in trace.parameters and trace.parameters[node.target].requires_grad
    if node.op != "call_function" or (node.target is not operator.getitem and operator_name(node) == "aten::detach"):
        return False
    floating = is_floating(node) or not is_tensor(node)
    return floating and any(n.meta["needs_grad"] for n in node.all_input_nodes)


def _atoms(node: fx.Node, batch: int) -> tuple:
    """Atoms of every dim of every output: one tuple per output for multi-output operators."""
    if node.target is operator.getitem:
        return node.args[0].meta["atoms"][node.args[1]] if node.args[0].meta["atoms"] else ()
    if not all(hasattr(v, "shape") for v in tuple_values(node)):
        return ()
    pattern: Pattern | None = node.meta["pattern"]
    if pattern is None:
        found = [_plain_atoms(node, v, batch) for v in tuple_values(node)]
    else:
        factors = factor_atoms(node, pattern)
        fresh = BATCH if not _has_batch(factors) and batch > 1 else DATA_DIM
        found = []
        for dims, v in zip(pattern.outputs, tuple_values(node), strict=True):
            atoms = [
                tuple(atom for f in dim for atom in factors.get(f) or _new_atom(pattern.sizes[f], batch, fresh))
                for dim in dims
            ]
            found.append(tuple(_resized(dim, size) for dim, size in zip(atoms, v.shape, strict=True)))
    return found[0] if is_tensor(node) else tuple(found)


def _has_batch(factors: dict[str, Atoms]) -> bool:
    return any(atom.kind == BATCH for atoms in factors.values() for atom in atoms)


def _new_atom(size: int, batch: int, kind: str) -> Atoms:
    return (Atom(size, kind if size == batch else DATA_DIM),)


def _resized(atoms: Atoms, size: int) -> Atoms:
    """Atoms of a section of a concatenated dim: the outermost shrinks."""
    if math.prod(a.size for a in atoms) == size:
        return atoms
    return (Atom(size, atoms[0].kind if atoms else DATA_DIM),)


def _plain_atoms(node: fx.Node, v: torch.Tensor, batch: int) -> tuple[Atoms, ...]:
    kind = FEATURE if node.meta["role"] == PARAMETER else DATA_DIM
    inputs_batched = node.op == "placeholder" or any(
        atom.kind == BATCH for n in node.all_input_nodes if is_tensor(n) for dim in n.meta["atoms"] for atom in dim
    )
    atoms = []
    for i, size in enumerate(v.shape):
        rows = i == 0 and size == batch and batch > 1 and kind == DATA_DIM and inputs_batched
        atoms.append((Atom(size, BATCH if rows else kind),))
    return tuple(atoms)


def factor_atoms(node: fx.Node, pattern: Pattern) -> dict[str, Atoms]:
    """The atoms of every factor of a rule, from the inputs that have it; a weight's word counts over data's."""
    found: dict[str, Atoms] = {}
    for dims, source in zip(pattern.inputs, tensor_inputs(node), strict=True):
        for dim, atoms in zip(dims, source.meta["atoms"], strict=True):
            for factor, part in zip(dim, _cut(atoms, [pattern.sizes[f] for f in dim]), strict=True):
                if factor not in found or _rank(part) > _rank(found[factor]):
                    found[factor] = part
    return found


def _rank(atoms: Atoms) -> int:
    kinds = {atom.kind for atom in atoms}
    return 2 if FEATURE in kinds else 1 if BATCH in kinds else 0


def _cut(atoms: Atoms, sizes: list[int]) -> list[Atoms]:
    """Cut a dim's atoms into the factors of a rule, e.g. one atom of 32 into 4 and 8."""
    if len(sizes) == 1:
        return [atoms]
    parts: list[Atoms] = []
    rest = list(atoms)
    for size in sizes:
        part: list[Atom] = []
        need = size
        while need > 1 and rest:
            atom = rest.pop(0)
            take = math.gcd(atom.size, need)
            if take == 1 and atom.size > 1:
                kind = atom.kind if len({a.kind for a in atoms}) == 1 else DATA_DIM
                return [(Atom(s, kind),) for s in sizes]
            part.append(Atom(take, atom.kind))
            need //= take
            if atom.size > take:
                rest.insert(0, Atom(atom.size // take, atom.kind))
        parts.append(tuple(part) or (Atom(size, DATA_DIM),))
    return parts


def _ask_for_sections(node: fx.Node) -> None:
    """Tell a node's inputs which cuts into sections this node, or one after it, can use."""
    pattern: Pattern | None = node.meta.get("pattern") if node.op == "call_function" else None
    if node.op == "call_function" and node.target is operator.getitem:
        return
    if pattern is None:
        return
    asked: dict[str, set[Sections]] = {}
    for dims in pattern.outputs[:1]:
        for i, dim in enumerate(dims):
            if len(dim) == 1:
                asked.setdefault(dim[0], set()).update(node.meta["sections"].get(i, ()))
    if operator_name(node) == "aten::split_with_sizes":
        sizes = tuple(node.args[1])
        asked["cut"] = {(len(sizes),) if len(set(sizes)) == 1 else sizes}
    uneven = {dim for dims in pattern.outputs[:1] for i, dim in enumerate(dims) if i in node.meta["uneven"]}
    uneven.add((pattern.lookup,))
    for dims, source in zip(pattern.inputs, tensor_inputs(node), strict=True):
        source.meta["uneven"] |= {i for i, dim in enumerate(dims) if dim in uneven}
        for i, dim in enumerate(dims):
            wanted = set(asked.get(dim[0], ())) if len(dim) == 1 else _inner_factors(dim, pattern)
            if wanted:
                source.meta["sections"].setdefault(i, set()).update(wanted)


def _inner_factors(dim: tuple[str, ...], pattern: Pattern) -> set[Sections]:
    """Sharding an inner factor of a dim cuts the dim into as many equal sections as the outer factors count."""
    counts = [math.prod(pattern.sizes[f] for f in dim[:k]) for k in range(1, len(dim))]
    return {(count,) for count in counts if 1 < count <= 64}
