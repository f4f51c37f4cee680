"""Analysis of every value of a traced graph, before the plan is chosen.

`annotate` writes facts on the nodes, which `ir/facts.py` lists. Two of them in detail:

- `role`, the origin of a value: `INPUT`, a model input; `DATA`, computed only from inputs, buffers and constants;
  `PARAMETER`; `WEIGHT`, computed only from parameters (a transposed weight); `ACTIVE`, all other values, and inputs
  that need a gradient.
- `atoms`, for every dim the indivisible factors of its size, outermost first (a dim of merged heads has the atoms
  "heads" and "head size"). Each atom has a kind: `BATCH`, samples of the batch; `FEATURE`, a dim of a weight, which
  tensor parallelism can shard; `DATA_DIM`, all others.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from autopart.errors import Refusal, TraceError
from autopart.ir.atoms import BATCH, DATA_DIM, FEATURE, Atom, Atoms, factor_atoms, selected_atoms, selections_in
from autopart.ir.facts import ACTIVE, DATA, INPUT, PARAMETER, WEIGHT, facts, weighted
from autopart.ir.graph import (
    assign_keys,
    describe,
    draws_random_numbers,
    is_floating,
    is_tensor,
    on_parameters,
    operator_name,
    reads_weights,
    shape,
    short_name,
    source_of,
    tensor_inputs,
    tuple_values,
    value,
)
from autopart.ir.layout import Sections
from autopart.ir.pattern import SELECTED, Pattern
from autopart.ir.selection import is_data_dependent, is_selection, positions_of
from autopart.ir.trace import Trace, batch_size
from autopart.passes.facts.batch_dims import find_batch_dims, find_other_dims
from autopart.passes.facts.find_blocks import BlockPosition, places
from autopart.passes.pass_pipeline import driven
from autopart.passes.rules import pattern_for, rule_of
from autopart.passes.rules.call_keys import CallCache
from autopart.passes.rules.local_forms import takes_shape
from autopart.passes.rules.operators.autograd_function_rules import backward_is_linear


def facts_of(node: fx.Node) -> Iterator[str]:
    """Yield a node's analysis results (facts) for the graph dump: `active`, `grad`, `b k, n k -> b n`."""
    if node.op == "output":
        return
    yield facts(node)["role"]
    yield "grad" * facts(node)["needs_grad"]
    yield str(facts(node)["pattern"] or "")


@driven(notes=lambda _: facts_of)
def annotate(trace: Trace) -> None:
    """Write on every node the facts that planning needs: `role`, `needs_grad`, `pattern`, `atoms`, ...

    `ir/facts.py` lists all facts.
    """
    batch = batch_size(trace)
    for node in trace.graph.nodes:
        if node.op != "output":
            facts(node)["role"] = _role(node, trace)
            facts(node)["needs_grad"] = _needs_grad(node, trace)
    _note_draws(trace.graph)
    _note_host(trace.graph)
    assign_keys(trace.graph)
    kinds = CallCache()
    for node in trace.graph.nodes:
        if node.op == "output":
            continue
        known = node.op == "call_function" and node.target is not operator.getitem
        facts(node)["pattern"] = kinds.once(node, pattern_for) if known else None
        facts(node)["moves"] = known and rule_of(node).moves
        facts(node)["whole_grads"] = known and not backward_is_linear(node)
        facts(node)["sections"], facts(node)["rows"] = {}, set()
    _note_dispatched(trace.graph)
    _write_atoms(trace.graph, batch)
    while find_batch_dims(trace.graph) or find_other_dims(trace.graph, batch):
        _write_atoms(trace.graph, batch)
    updates = set(trace.buffer_updates.values())
    for node in reversed(trace.graph.nodes):
        _ask_for_sections(node)
        facts(node)["for_buffers"] = node in updates or (
            node.op != "output" and all(facts(user)["for_buffers"] for user in node.users)
        )
    for node in trace.graph.nodes:
        _offer_sections(node)
    _leave_sizes_open(trace.graph)
    reads = _reads(trace.graph)
    _share_strategies(trace.graph, reads)
    _find_places(trace.graph, reads)


def _leave_sizes_open(graph: fx.Graph) -> None:
    """Replace sizes in the arguments of views by -1, if they depend on the number of selected elements.

    A boolean mask selects the elements, so their number is known only at run time. With -1, the view infers the size.
    """
    for node in graph.nodes:
        if takes_shape(facts(node).get("pattern")):
            counted = [bool(selections_in(atoms)) for atoms in facts(node)["atoms"]]
            if any(counted) and -1 not in node.args[1] and facts(node).get("counted", True):
                sizes = [-1 if is_open else size for size, is_open in zip(node.args[1], counted, strict=True)]
                node.args = (node.args[0], sizes, *node.args[2:])


def _note_host(graph: fx.Graph) -> None:
    """If the model runs on a GPU, set `on_host` on the values that the model keeps on the CPU.

    These include random numbers that the model draws there. The generated program creates these values on the CPU too.
    """
    devices = {node: value(node).device.type for node in graph.nodes if is_tensor(node)}
    if "cuda" in devices.values():
        for node, kind in devices.items():
            if kind == "cpu":
                facts(node)["on_host"] = True


def _note_dispatched(graph: fx.Graph) -> None:
    """Mark dispatched tokens with `routed`: values between a MoE dispatch and its combine."""
    routed: set[fx.Node] = set()
    for node in graph.nodes:
        pattern = facts(node).get("pattern")
        routes = pattern.routes if pattern is not None else ""
        if routes == "out" or any(used in routed for used in node.all_input_nodes):
            if node.op != "output":
                facts(node)["routed"] = True
            if routes != "back":
                routed.add(node)


def _share_strategies(graph: fx.Graph, reads: Mapping[fx.Node, Hashable]) -> None:
    """Give nodes that have equal strategies one shared cache for the results of `strategies`.

    Args:
        reads: {call: number}; calls with equal numbers have equal strategies (`_reads`).
    """
    shared: dict[Any, dict[Any, Any]] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            has_rule = facts(node)["pattern"] is not None
            facts(node)["strategies"] = shared.setdefault(reads[node], {}) if has_rule else {}


def _reads(graph: fx.Graph) -> dict[fx.Node, Hashable]:
    """Number the calls so that calls with equal rule, inputs and output have equal numbers."""
    numbers: dict[Hashable, int] = {}
    known: dict[int, int] = {}  # by id of a pattern or of atoms, which equivalent nodes share
    values: dict[fx.Node, int] = {}
    reads: dict[fx.Node, Hashable] = {}

    def number(thing: Hashable) -> int:
        return numbers.setdefault(thing, len(numbers))

    for node in graph.nodes:
        if node.op == "output":
            continue
        atoms, pattern = facts(node)["atoms"], facts(node)["pattern"]
        if id(atoms) not in known:
            known[id(atoms)] = number(("atoms", atoms))
        if id(pattern) not in known:
            known[id(pattern)] = number(("pattern", pattern and pattern.key))
        form = (_shapes(node), facts(node)["needs_grad"], known[id(atoms)], _frozen(facts(node)["sections"]),
               positions_of(node))  # fmt: skip
        values[node] = number((form, _frozen(facts(node)["offered"])))
        if node.op == "call_function":
            inputs = tuple([values[source] for source in tensor_inputs(node)])
            reads[node] = number((known[id(pattern)], inputs, form, facts(node)["whole_grads"], _routing(node)))
    return reads


def _routing(node: fx.Node) -> tuple:
    """Return a key of a MoE call: the number of experts, and which operands are dispatched tokens."""
    if not facts(node).get("routed"):
        return ()
    return (operator_name(node), *node.args[3:4], *(facts(s).get("routed", False) for s in tensor_inputs(node)))


def _shapes(node: fx.Node) -> tuple:
    return tuple(getattr(v, "shape", None) for v in tuple_values(node))


def _find_places(graph: fx.Graph, reads_of: Mapping[fx.Node, Hashable]) -> None:
    """Write the fact `place`, a position in a repeated block, on operators that depend on parameters.

    The parameters that they read get a position (`BlockPosition`) too.
    """
    nodes = on_parameters(graph)
    position = {node: i for i, node in enumerate(nodes)}
    sources = [[source_of(used)[0] for used in tensor_inputs(node)] for node in nodes]
    kinds = [(n.target, tuple([facts(s)["role"] for s in tensor_inputs(n)]), reads_of[n]) for n in nodes]
    reads = [[position[s] for s in operands if s in position] for operands in sources]
    products = {
        position[n] for n in nodes if facts(n)["pattern"] and facts(n)["pattern"].flops and reads_weights(n)
    }  # fmt: skip
    readers: dict[fx.Node, list[tuple[BlockPosition, int]]] = defaultdict(list)
    positions = places(kinds, reads, products, [weight for _, weight in weighted(nodes)])
    for node, inputs, place in zip(nodes, sources, positions, strict=True):
        facts(node)["place"] = place
        for i, source in enumerate(inputs):
            if facts(source)["role"] == PARAMETER:
                readers[source].append((place, i))
    for parameter, read in readers.items():
        like = tuple((place.like, i) for place, i in read)
        is_inside = len({place.block for place, _ in read}) == 1
        facts(parameter)["place"] = read[0][0]._replace(like=like) if is_inside else BlockPosition(parameter.target)


def _frozen(sections: dict[int, set[Sections]]) -> tuple:
    return tuple((dim, frozenset(options)) for dim, options in sorted(sections.items())) if sections else ()


def _role(node: fx.Node, trace: Trace) -> str:
    if node.op == "placeholder":
        return ACTIVE if facts(node).get("input_grad") else INPUT
    if node.op == "get_attr":
        return PARAMETER if node.target in trace.parameters else DATA
    roles = {facts(n)["role"] for n in node.all_input_nodes}
    if roles <= {INPUT, DATA}:
        # Dispatched tokens belong to a stage, even if experts are chosen by token id.
        return ACTIVE if rule_of(node).routes == "out" else DATA
    of_weights = roles <= {PARAMETER, WEIGHT, DATA} and roles & {PARAMETER, WEIGHT}
    return WEIGHT if of_weights and rule_of(node).keeps_weights else ACTIVE


def _note_draws(graph: fx.Graph) -> None:
    """Mark random operators, and operators that use their results, with `tied_to_mode`.

    Train and eval mode can have different random operators (dropout). So these operators get separate names
    (`random_...`), and all other operators have equal names in both modes.

    Raises TraceError if the distribution of a random operator depends on values that the model computes.
    """
    random: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        draws, reads = draws_random_numbers(node), any(n in random for n in node.all_input_nodes)
        if draws and facts(node)["role"] != DATA:
            raise TraceError(
                f"{short_name(node)} draws random numbers whose distribution the model computes",
                refusal=Refusal.RANDOM,
                why="all ranks must draw equal numbers, and no formula computes them from numbers of a fixed "
                "distribution", where=describe(node), hint="draw them outside the model and pass them in",
            )  # fmt: skip
        if draws or (reads and facts(node)["role"] == DATA):
            random.add(node)
        if draws or reads:
            facts(node).setdefault("named", f"random_{short_name(node)}")
            facts(node)["tied_to_mode"] = True


def _needs_grad(node: fx.Node, trace: Trace) -> bool:
    if node.op == "get_attr":
        return node.target in trace.parameters and trace.parameters[node.target].requires_grad
    if node.op == "placeholder":
        return facts(node).get("input_grad", False)
    if node.op != "call_function" or not rule_of(node).has_gradient:
        return False
    floating = is_floating(node) or not is_tensor(node)
    return floating and any(facts(n)["needs_grad"] for n in node.all_input_nodes)


def _atoms(node: fx.Node, batch: int) -> tuple:
    """Return the atoms (indivisible factors) of every dim of a node's output.

    If the node has several outputs, the result is a tuple with one entry for each output.
    """
    if node.target is operator.getitem:
        return facts(node.args[0])["atoms"][node.args[1]] if facts(node.args[0])["atoms"] else ()
    if not all(hasattr(v, "shape") for v in tuple_values(node)):
        return ()
    pattern: Pattern | None = facts(node)["pattern"]
    if pattern is None:
        outputs = [_plain_atoms(node, v, batch) for v in tuple_values(node)]
    else:
        factors = factor_atoms(node, pattern)
        fresh = BATCH if not _has_batch(factors) and batch > 1 else DATA_DIM
        outputs = []
        for dims, v in zip(pattern.outputs, tuple_values(node), strict=True):
            atoms = [
                tuple(
                    atom
                    for f in dim
                    for atom in factors.get(f)
                    or _new_atom(pattern.sizes[f], batch, DATA_DIM if f in pattern.whole else fresh)
                )
                for dim in dims
            ]
            if is_selection(node):
                atoms = [selected_atoms(atoms, node.name)]
            if pattern.tied:
                known = dict(zip(pattern.inputs[0], facts(tensor_inputs(node)[0])["atoms"], strict=True))
                atoms = [
                    atom if SELECTED in dim else _uncounted(atom, known.get(dim, ()))
                    for atom, dim in zip(atoms, dims, strict=True)
                ]
            if takes_shape(pattern):  # a size that the model passes as an argument is not data-dependent
                atoms = [
                    _uncounted(a, ()) if fixed else a for a, fixed in zip(atoms, _has_given_size(node), strict=True)
                ]
            outputs.append(tuple(_resized(dim, size) for dim, size in zip(atoms, v.shape, strict=True)))
    return outputs[0] if is_tensor(node) else tuple(outputs)


def _has_given_size(node: fx.Node) -> list[bool]:
    """Return, for each output dim of a view, True if the model passes the dim's size as a number.

    The function is for views of elements that a mask selected. A size that the model does not pass depends on data.
    """
    if -1 in node.args[1]:
        return [size != -1 for size in node.args[1]]
    return [facts(node).get("counted") is False] * len(node.args[1])


def _uncounted(atoms: Atoms, before: Atoms) -> Atoms:
    """Return `atoms` (factors of a dim), with kind `DATA_DIM` in place of kinds for data-dependent sizes.

    `before`: atoms of this dim in the tensor that an operator writes to. If one of them has a data-dependent size,
    `before` is returned.
    """
    if selections_in(before):
        return before
    return tuple(Atom(atom.size, DATA_DIM) if selections_in((atom,)) else atom for atom in atoms)


def _write_atoms(graph: fx.Graph, batch: int) -> None:
    """Write `atoms` (indivisible factors of the dims) on every node.

    Nodes with equal rule and equal inputs share one `atoms` object, so that later caches can use its id as a key.
    """
    known: dict[Hashable, tuple] = {}
    equal: dict[tuple, tuple] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        pattern: Pattern | None = facts(node)["pattern"]
        if pattern is not None:
            key: Hashable = (id(pattern), _shapes(node), *[id(facts(s)["atoms"]) for s in tensor_inputs(node)])
        elif node.op == "get_attr":
            key = facts(node)["role"], _shapes(node), frozenset(facts(node)["rows"])
        else:
            facts(node)["atoms"] = _atoms(node, batch)
            continue
        if key not in known:
            atoms = _atoms(node, batch)
            known[key] = equal.setdefault(atoms, atoms)  # one object, so that caches of the node's users can use its id
        facts(node)["atoms"] = known[key]


def _has_batch(factors: dict[str, Atoms]) -> bool:
    return any(atom.kind == BATCH for atoms in factors.values() for atom in atoms)


def _new_atom(size: int, batch: int, kind: str) -> Atoms:
    return (Atom(size, kind if size == batch else DATA_DIM),)


def _resized(atoms: Atoms, size: int) -> Atoms:
    """Return `atoms` (factors of a dim) if their product is `size`, else one atom of this size.

    The product differs if the tensor is concatenated with other tensors along the dim.
    """
    if math.prod(a.size for a in atoms) == size:
        return atoms
    counted = min(selections_in(atoms), default="")
    return (Atom(size, counted or (atoms[0].kind if atoms else DATA_DIM)),)


def _plain_atoms(node: fx.Node, v: torch.Tensor, batch: int) -> tuple[Atoms, ...]:
    if is_data_dependent(node):
        return tuple(selected_atoms([(Atom(size, DATA_DIM),)], node.name) for size in v.shape)
    kind = FEATURE if facts(node)["role"] == PARAMETER else DATA_DIM
    made_here = node.op == "placeholder" or (node.op == "call_function" and draws_random_numbers(node))
    inputs_batched = made_here or any(
        atom.kind == BATCH for n in node.all_input_nodes if is_tensor(n) for dim in facts(n)["atoms"] for atom in dim
    )
    selected = {
        shape: atoms for source in tensor_inputs(node)
        for shape, atoms in zip(source.meta["val"].shape, facts(source)["atoms"], strict=True) if selections_in(atoms)
    } if node.op == "call_function" else {}  # fmt: skip
    atoms = []
    for i, size in enumerate(v.shape):
        if size in selected:  # slices of such a dim would have wrong sizes
            atoms.append(selected[size])
            continue
        rows = i == 0 and size == batch and batch > 1 and kind == DATA_DIM and inputs_batched
        rows = rows and not facts(node).get("first_dim_is_data")
        atoms.append((Atom(size, BATCH if rows or i in facts(node)["rows"] else kind),))
    return tuple(atoms)


def _ask_for_sections(node: fx.Node) -> None:
    """Write on a node's inputs the sections of their dims that this node or a later one needs.

    A dim with sections, such as fused q, k and v, is sharded section by section: each rank gets a shard of q, k and v.
    """
    pattern: Pattern | None = facts(node).get("pattern")
    if pattern is None:
        return
    asked: dict[str, set[Sections]] = {}
    for dims in pattern.outputs[:1]:
        for i, dim in enumerate(dims):
            if len(dim) == 1:
                asked.setdefault(dim[0], set()).update(facts(node)["sections"].get(i, ()))
    for dims, source in zip(pattern.inputs, tensor_inputs(node), strict=True):
        for i, dim in enumerate(dims):
            wanted = set(asked.get(dim[0], ())) if len(dim) == 1 else _inner_factors(dim, pattern)
            if dim and dim[0] in pattern.joined:
                wanted = _sections_of(pattern, dim[0], shape(source)[i])
            if wanted:
                facts(source)["sections"].setdefault(i, set()).update(wanted)


def _sections_of(pattern: Pattern, factor: str, size: int) -> set[Sections]:
    """Return the sections of a concatenated dim: their number if they have equal sizes, else their sizes.

    The set is empty if the dim has another size than the full concatenation, or only one section.
    """
    sizes = pattern.joined[factor]
    if size != pattern.sizes[factor] or len(sizes) == 1:
        return set()
    return {(len(sizes),) if len(set(sizes)) == 1 else sizes}


def _offer_sections(node: fx.Node) -> None:
    """Write the fact `offered` on a node: the sizes of the tensors from which a dim was concatenated.

    The node can be an operator after the concatenation, if the operators between keep the dim unchanged. The strategies
    can then shard the dim in sections, one section per concatenated tensor.
    """
    facts(node)["offered"] = {}
    pattern: Pattern | None = facts(node).get("pattern")
    if pattern is None or not is_tensor(node):
        return
    offered: dict[str, set[Sections]] = {}
    for dims, source in zip(pattern.inputs, tensor_inputs(node), strict=True):
        for i, sections in facts(source)["offered"].items():
            if len(dims[i]) == 1:
                offered.setdefault(dims[i][0], set()).update(sections)
    for i, dim in enumerate(pattern.outputs[0]):
        if len(dim) == 1:
            joined = _sections_of(pattern, dim[0], shape(node)[i]) if dim[0] in pattern.joined else set()
            if joined or offered.get(dim[0]):
                facts(node)["offered"][i] = joined or offered[dim[0]]


def _inner_factors(dim: tuple[str, ...], pattern: Pattern) -> set[Sections]:
    """Return the section counts that shard a merged dim along one of its inner factors.

    For example, to shard a merged dim `(heads size)` with 12 heads along `size`, it is split into 12 sections, and each
    section is sharded. Counts over 64 are left out.
    """
    counts = [math.prod(pattern.sizes[f] for f in dim[:k]) for k in range(1, len(dim))]
    return {(count,) for count in counts if 1 < count <= 64}
