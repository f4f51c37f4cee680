"""Dims of the batch in values whose sizes alone do not show it.

Usually a dim of an input is the batch if it is the first dim and has the batch's size. Two kinds of values need more
analysis: tensors that the model creates, and inputs whose first dim is a sequence as long as the batch is large.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from autopart.ir.atoms import BATCH, DATA_DIM, factor_atoms, split_atoms
from autopart.ir.facts import facts
from autopart.ir.graph import shape, tensor_inputs
from autopart.ir.pattern import Pattern


def find_batch_dims(graph: fx.Graph) -> bool:
    """Find the batch dims of tensors that the model creates without inputs, such as `zeros(8, 12)`.

    A dim is a batch dim if a later operator combines it with another batch dim. The dim is then added to
    `rows` in the metadata of the tensor's node. Returns True if a dim was added.
    """
    used: dict[fx.Node, set[int]] = {}
    known: dict[Hashable, tuple[set[str], list[tuple[int, int, str]]]] = {}
    new = False
    for node in reversed(graph.nodes):
        pattern: Pattern | None = facts(node).get("pattern")
        if node.op == "call_function" and not tensor_inputs(node) and used.get(node, set()) - facts(node)["rows"]:
            facts(node)["rows"] |= used[node]
            new = True
        if pattern is None:
            continue
        sources = tensor_inputs(node)
        key = (id(pattern), *[id(facts(source)["atoms"]) for source in sources])
        if key not in known:
            known[key] = _rows_and_data(node, pattern)
        rows, data = known[key]
        if node in used:
            rows = rows | {f for i in used[node] for f in pattern.outputs[0][i]}
        for position, i, factor in data:
            if factor in rows:
                used.setdefault(sources[position], set()).add(i)
    return new


def _rows_and_data(node: fx.Node, pattern: Pattern) -> tuple[set[str], list[tuple[int, int, str]]]:
    """Return the letters of the call's rule that name the batch, and input dims of kind `DATA_DIM`.

    `DATA_DIM` means neither the batch nor a dim of a weight. Each input dim is a tuple (index of the input, dim,
    letter).
    """
    rows = {f for f, atoms in factor_atoms(node, pattern).items() if [a.kind for a in atoms] == [BATCH]}
    data = [
        (position, i, dim[0])
        for position, (dims, source) in enumerate(zip(pattern.inputs, tensor_inputs(node), strict=True))
        for i, (dim, atoms) in enumerate(zip(dims, facts(source)["atoms"], strict=True))
        if len(dim) == 1 and [a.kind for a in atoms] == [DATA_DIM]
    ]
    return rows, data


def find_other_dims(graph: fx.Graph, batch: int) -> bool:
    """Find inputs whose first dim has the size of the batch, but is not the batch.

    Example: in `tokens [batch, sequence, width] + positions [sequence, width]`, `positions` is such an input if
    sequence and batch have equal sizes. Its first dim is aligned with the sequence of `tokens`, so it cannot be the
    batch. These inputs get the fact `first_dim_is_data`. Returns True if an input was found.
    """
    inputs = {n: shape(n) for n in graph.find_nodes(op="placeholder") if shape(n) and shape(n)[0] == batch}
    if not any(batch in sizes[1:] for sizes in inputs.values()):
        return False
    sources: dict[fx.Node, frozenset[fx.Node]] = {}
    found: set[fx.Node] = set()
    for node in graph.nodes:
        own = frozenset([node]) if node in inputs and not facts(node).get("first_dim_is_data") else frozenset()
        sources[node] = own.union(*(sources[used] for used in node.all_input_nodes))
        pattern: Pattern | None = facts(node).get("pattern")
        if pattern is not None and node.op == "call_function":
            found |= {
                one for used in _with_other_dims(node, pattern) if len(sources[used]) == 1 for one in sources[used]
            }
    for node in found:
        facts(node)["first_dim_is_data"] = True
    return bool(found)


def _with_other_dims(node: fx.Node, pattern: Pattern) -> list[fx.Node]:
    """Return the inputs of a call whose first dim was taken for the batch, but cannot be the batch.

    The rule of the call aligns this dim with a dim of another input that is not the batch (kind `DATA_DIM`). The other
    input also has a batch dim, which the returned input lacks.
    """
    kinds: list[tuple[fx.Node, dict[str, list[str]]]] = []
    for dims, source in zip(pattern.inputs, tensor_inputs(node), strict=True):
        of_source: dict[str, list[str]] = {}
        for dim, atoms in zip(dims, facts(source)["atoms"], strict=True):
            parts = split_atoms(atoms, [pattern.sizes[f] for f in dim])
            of_source |= {f: [atom.kind for atom in part] for f, part in zip(dim, parts, strict=True)}
        kinds.append((source, of_source))
    return [
        source
        for source, own in kinds
        for _, other in kinds
        if any(own.get(f) == [BATCH] and other.get(f) == [DATA_DIM] for f in own)
        and any(kind == [BATCH] and f not in own for f, kind in other.items())
    ]
