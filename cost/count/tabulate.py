"""A model as a `Table`: what the operators of a program do."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

from torch import fx

from autopart.compat import stored_bytes
from autopart.cost.count.alive import Alive
from autopart.cost.count.counting import Counted, counted
from autopart.cost.count.divided import divided
from autopart.cost.count.footprint import (
    Memory,
    Value,
    Walk,
    memories,
    needs_grad,
    rerun_memory,
    saved_memory,
    saved_others,
)
from autopart.cost.count.growth import Growth, tokens
from autopart.cost.count.sending import local_bytes
from autopart.cost.flops import matrix_work, work
from autopart.cost.rows import Parameter, Row
from autopart.cost.table import Table
from autopart.cost.work import CHOSEN, NOTHING, Powers, Size, chosen_ranks
from autopart.ir.blocks import blocks as repeated_blocks
from autopart.ir.buckets import bucketed, in_order_of_use
from autopart.ir.facts import facts, times
from autopart.ir.fold import later, unrolled
from autopart.ir.graph import active_operators, source_of, tensor_inputs
from autopart.ir.layout import MIN_DIMS, P, parts_of
from autopart.ir.mesh import Mesh
from autopart.ir.operators import is_cast, stored_source
from autopart.ir.program import Program, StoredTensor
from autopart.ir.scattering import in_parts
from autopart.ir.storing import source_name, storing_axes
from autopart.tracing.trace import Trace, batch_size

Blocks = Mapping[str, Sequence[int]]
"""{path of a container: for every block of the model, which block of the traced copy it is like}."""

PARTS = ("forward", "recompute", "input_backward", "weight_backward", "accumulate")


class BlocksApart(Exception):
    """The operators of a repeated block do not lie together, so that one cannot stand for others."""


class _At(NamedTuple):
    """A repeated block: its container, and its number in the traced copy."""

    path: str
    number: int


def tabulate(trace: Trace, program: Program, walks: Sequence[Walk], blocks: Blocks, fused: bool = False) -> Table:
    """The table of a program in which blocks stand for all that are like them; `fused` as in `counted`. `walks`: of
    every stage.

    Raises BlocksApart where the operators of such a block do not lie together. Of a folded trace the order has the
    blocks that are there; `folded` puts in those left out.
    """
    growth, mesh = Growth(trace, program), program.mesh
    stages = counted(trace, program, walks, fused)
    held = list[_Held]()
    for walk in walks:
        held.append(_Held(walk, growth, held[-1].sends_kept if held else set()))
    nodes = [each.node for found in stages for each in found]
    places, loads = _places(trace, nodes), _loads(trace, growth, nodes)
    places |= {found[0].node for found in stages[1:]}  # maybe a conversion of what is received
    rows = [
        one.row(each, each.node in places, loads.get(each.node, NOTHING))
        for one, found in zip(held, stages, strict=True) for each in found
    ]  # fmt: skip
    starts = tuple(accumulate(map(len, stages)))[:-1]
    trained = frozenset().union(*(one.trained for one in held))
    again = frozenset().union(*(one.cast_again for one in held))
    is_stored = bool(storing_axes(program))
    gathers = is_stored and program.zero not in (1, 2)
    parameters = {
        name: Parameter(
            _stored(trace, program, name), _summed_over(mesh, stored), name in trained,
            _cut_over(mesh, stored, is_stored), *_shares(trace, name), name in again, *_form(trace, program, name),
        ) for name, stored in program.parameters.items()
    }  # fmt: skip
    order = _order(_blocks_of([one for found in stages for one in found], blocks), blocks)
    if trace.folds:
        nodes = [one.node for found in stages for one in found]
        order = ((row, *facts(node).get("block", ("", 0))) for row, node in enumerate(nodes))
    active = active_operators(trace.graph)
    flops = sum(matrix_work(n) * _copies(facts(n).get("key", ""), blocks) * times(n) for n in active)
    buffers = {id(buffer): stored_bytes(buffer) * _copies(name, blocks) for name, buffer in trace.buffers.items()}
    batch = batch_size(trace)
    of_rank = max(1, batch // (program.row_ranks * program.microbatches))  # a call without rows is alike on every rank
    return Table(
        tuple(rows), tuple(order), parameters, of_rank, tokens(trace),
        chosen_ranks(mesh)["tp"], flops / batch, sum(tensor.nbytes for tensor in trace.call.tensors) / batch,
        sum(buffers.values()), gathers, _hidden(trace, program), chosen_ranks(mesh)["cp"], chosen_ranks(mesh)["ep"],
        {len(walks): starts}, divided(trace, program),
    )  # fmt: skip


def _places(trace: Trace, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The written operators before which plans cut: the first of those that are written for an operator of the trace
    that depends on parameters, with what is done to its inputs. What makes a partial sum whole is the operator's."""
    keys = {facts(node).get("key") for node in active_operators(trace.graph)}
    places, last, begins, is_made = set[fx.Node](), None, True, False
    for node in nodes:
        if node.target is operator.getitem:
            continue
        key = facts(node).get("key")
        is_same = key is not None and key == last
        is_one = key in keys and not (is_same and is_made)  # else what is made is converted for another
        if begins and not (is_one and is_same):
            places.add(node)
        begins, last = is_one, key if is_one else last
        is_made = is_made if not is_one else P not in facts(node).get("layout", {}).values()
    return places


def _loads(trace: Trace, growth: Growth, nodes: Sequence[fx.Node]) -> dict[fx.Node, Size]:
    """What plans balance stages by, on the first operator that is written for each of the trace; of what is written
    together with another, on that one."""
    first = {key: node for node in reversed(nodes) if (key := facts(node).get("key")) is not None}
    loads, total = dict[fx.Node, Size](), 0.0
    for traced in active_operators(trace.graph):
        total += work(traced)
        node = first.get(facts(traced)["key"])
        if node is not None:
            loads[node], total = Size.of(total, Powers(s=growth.of_product(node).s)), 0.0
    return loads


def _hidden(trace: Trace, program: Program) -> float:
    """The share of gradients that are not in the bucket which a backward completes last: the first that is read."""
    total = last = 0
    for stage in program.stages:
        read = [n for n in in_order_of_use(stage.graph.graph, stage.parameters) if trace.parameters[n].requires_grad]
        names = unrolled(trace.folds, read, str, partial(later, trace.folds))
        sizes = {name: trace.parameters[trace.originals[name]].nbytes for name in names}
        buckets = bucketed(sizes)
        total += sum(sizes.values())
        last += sum(sizes[name] for name in buckets[0]) if buckets else 0
    return 1 - last / total if total else 0.0


def _stored(trace: Trace, program: Program, name: str) -> Size:
    """What a rank stores of a parameter, before ZeRO cuts it."""
    mesh, stored = program.mesh, program.parameters[name]
    axes = {name: mesh.innermost(cuts) for name, cuts in CHOSEN.items()}
    cut = {name: int(axis in stored.layout and stored.layout[axis].is_shard) for name, axis in axes.items()}
    parts = mesh.size(mesh.stored_over(stored.layout) or "")
    whole = local_bytes(trace, program, stored) * parts
    return Size.of(whole, Powers(**cut))


def _form(trace: Trace, program: Program, name: str) -> tuple[int, int]:
    """Bytes of an element, and the first dim, where that counts for what data-parallel ranks send."""
    tensor = trace.parameters[name]
    if program.dp_sync.is_default:
        return 4, 0
    return tensor.dtype.itemsize, tensor.shape[0] if tensor.dim() > 1 else 0


def _summed_over(mesh: Mesh, stored: StoredTensor) -> tuple[str, ...]:
    """The axes over which its gradient is summed, or would be if it were not stored in parts."""
    over = parts_of(mesh.stored_over(stored.layout) or mesh.data_axis)
    return tuple(dict.fromkeys((mesh.data_axis, *over, *stored.grad_axes)))


def _cut_over(mesh: Mesh, stored: StoredTensor, is_stored: bool) -> tuple[str, ...]:
    """The axes over which ZeRO-3 cuts it on a mesh on which all of them have several ranks; `is_stored`: as this
    program has it."""
    over = mesh.stored_over(stored.layout)
    if over is None and (is_stored or len(stored.shape) < MIN_DIMS):
        return ()
    cutting = {axis for axis, place in stored.layout.items() if place.is_shard}
    left = set() if over is None else {axis for axis in mesh.sizes if mesh.size(axis) > 1} - set(parts_of(over))
    return tuple(axis.name for axis in mesh.axes if axis.stores and axis.name not in cutting | left)


def _shares(trace: Trace, name: str) -> tuple[float, float]:
    """Bytes that are read of a parameter, and summed of its gradient, for each that is stored."""
    stored, precision = trace.parameters[name].dtype, trace.precision
    if precision is None or not stored.is_floating_point:
        return 1.0, 1.0
    return precision.compute.itemsize / stored.itemsize, precision.reduce.itemsize / stored.itemsize


# Repeated blocks


def each_block(trace: Trace) -> dict[str, tuple[int, ...]]:
    """Every repeated block that has a name as one like itself alone."""
    found: dict[str, int] = {}
    for name in repeated_blocks(trace.graph).values():
        path, _, number = name.rpartition(".")
        if path:
            found[path] = max(found.get(path, 0), int(number) + 1)
    return {path: tuple(range(number)) for path, number in found.items()}


def _block_of(name: str, blocks: Blocks) -> _At | None:
    for path in blocks:
        match = re.match(rf"{re.escape(path)}\.(\d+)(?=[./]|$)", name)
        if match is not None:
            return _At(path, int(match[1]))
    return None


def _copies(name: str, blocks: Blocks) -> int:
    """How many operators or tensors of the model one of the copy stands for."""
    at = _block_of(name, blocks)
    return 1 if at is None else list(blocks[at.path]).count(at.number)


def _blocks_of(found: Sequence[Counted], blocks: Blocks) -> list[_At | None]:
    """The block of every operator; what lies between two of a block is in it."""
    at = [_block_of(_name(one.node), blocks) for one in found]
    last: dict[_At, int] = {block: i for i, block in enumerate(at) if block is not None}
    inside: _At | None = None
    for i, block in enumerate(at):
        if block is not None and inside is not None and block != inside and i < last[inside]:
            raise BlocksApart(f"{block.path}.{block.number} begins inside {inside.path}.{inside.number}")
        inside = block or inside
        if inside is not None:
            at[i] = inside if i <= last[inside] else None
            inside = inside if i < last[inside] else None
    return at


def _name(node: fx.Node) -> str:
    """What an operator is known by: its key, or the parameter that it is done to."""
    source = source_of(node)[0]
    while "key" not in facts(source) and source.op == "call_function" and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    return facts(source).get("key", str(source.target))


def _order(at: Sequence[_At | None], blocks: Blocks) -> Iterator[tuple[int, str, int]]:
    """All operators of the model in order: the row of each, and the block of the model it is in ("" for none)."""
    for row, block in enumerate(at):
        if block is None:
            yield row, "", 0
        elif row == at.index(block):  # here begin the blocks of the model up to the next one that was traced
            like = blocks[block.path]
            ends = like.index(block.number + 1) if block.number + 1 in like else len(like)
            for number in range(like.index(block.number), ends):
                same = _At(block.path, like[number])
                yield from ((row, block.path, number) for row, other in enumerate(at) if other == same)


class _Held:
    """What a stage's operators hold in memory. `kept_before`: which of the values that it receives, by number, the
    stages before keep."""

    def __init__(self, walk: Walk, growth: Growth, kept_before: Set[int]):
        self.walk, self.growth, self.sizes = walk, growth, dict[Memory, Size]()
        self.traced = {node.name: node for node in walk.trace.graph.nodes}
        self.scattered: dict[fx.Node, bool] = {}
        self.alive, self.parameters = walk.reached(), set(walk.stage.parameters)
        received = [walk.values[node].memory for node in self.received]
        before = {received[number] for number in kept_before}
        self.saved = saved_memory(walk, self.alive, {*received} - before)
        index = {node: i for i, node in enumerate(walk.values)}
        keeper = {m: index[node] for node, pieces in self.saved.items() for m in pieces}
        self.index, self.keeper = index, keeper | dict.fromkeys(before, -1)
        sent = [walk.values[node].memory for node in walk.outputs[: len(walk.stage.sends)]]
        self.sends_kept = {number for number, memory in enumerate(sent) if memory in self.keeper}
        others = {node: self._other(node, saved_others(walk, node)) for node in walk.others if node in self.alive}
        self.kept = {
            node: Size.sum([others.get(node, NOTHING), *map(self.size, self.saved.get(node, ()))])
            for node in walk.values
        }
        rerun = {
            node: Size.sum([*map(self.size, memory), self._other(node, other)])
            for node, (memory, other) in rerun_memory(walk, self.alive).items()
        }
        running = Alive(walk, growth, self.alive, self.saved, self.kept, others, rerun, self.size)
        self.gathers = running.gathers
        self.in_forward, self.in_backward = running.in_forward(), running.in_backward()
        self.trained = {str(node.target) for node in self.alive if node.op == "get_attr"}
        casts = {memory.made_by for kept in walk.keeps.values() for memory in kept if memory.again}
        read = (stored_source(n) for n in casts if is_cast(n) or n.kwargs.get("dtype"))
        self.cast_again = {str(node.target) for node in read if node is not None}

    def row(self, one: Counted, is_place: bool, load: Size) -> Row:
        """`is_place`: whether a stage may begin there. `load`: as the row has it."""
        works = {part: found for part in PARTS if (found := getattr(one, part))}
        names = {str(n.target) for n in one.node.all_input_nodes if n.op == "get_attr"}
        values = [self.walk.values[n] for n in one.node.all_input_nodes]
        made_by = {memory.made_by for value in values for memory in memories(value, lasting=True)}
        also = {source_name(n) if n in self.gathers else str(n.target) for n in made_by
                if n in self.gathers or n.op == "get_attr"}  # fmt: skip
        travelling = self.crossing[one.node]
        crossing = None if None in travelling.values() or not is_place else Size.sum(filter(None, travelling.values()))
        return Row(
            works, self.kept[one.node], self.in_forward[one.node], self.in_backward.get(one.node, NOTHING),
            crossing, load, tuple(sorted(names & self.parameters)), tuple(sorted((also & self.parameters) - names)),
            *((NOTHING,) * 3 if crossing is None else self._cut_before(one.node, travelling)),
        )  # fmt: skip

    def _cut_before(self, node: fx.Node, travelling: Mapping[fx.Node, Size | None]) -> tuple[Size, Size, Size]:
        """Of what a cut before a node sends: what ranks have alike, what no operator before keeps, and of that
        what one behind does."""
        alike = Size.sum(size for sent, size in travelling.items() if size is not None and self._in_parts(sent))
        pieces = {memory for sent in travelling for memory in memories(self.walk.values[sent], lasting=True)}
        after = [memory for memory in pieces if self.keeper.get(memory, -1) >= self.index[node]]
        alone = [*after, *(memory for memory in pieces if memory not in self.keeper)]
        return alike, Size.sum(map(self.size, alone)), Size.sum(map(self.size, after))

    def _in_parts(self, node: fx.Node) -> bool:
        """Whether a value of the stage can be sent in parts."""
        if node not in self.scattered:
            origin = self.traced.get(facts(node).get("origin", ""))
            layout = facts(node).get("layout", {})
            mesh = self.walk.program.mesh
            self.scattered[node] = origin is not None and in_parts(origin, layout, mesh) is not None
        return self.scattered[node]

    def size(self, memory: Memory) -> Size:
        if memory not in self.sizes:
            self.sizes[memory] = Size.of(memory.size_bytes, self.growth.of(memory.made_by))
        return self.sizes[memory]

    def _other(self, node: fx.Node, size_bytes: int) -> Size:
        """What an operator keeps that is neither its input nor its output: copies of inputs, by their size, or else
        something that grows as what it makes."""
        values = [(n, self.walk.values[n]) for n in tensor_inputs(node)]
        read = [Size.of(v.form.size_bytes, self.growth.of(n)) for n, v in values if isinstance(v, Value)]
        options = [Size.sum(read), *read]
        return next((o for o in options if o.value == size_bytes), Size.of(size_bytes, self.growth.of(node)))

    @property
    def received(self) -> list[fx.Node]:
        """What the stage before sends."""
        return [n for n in self.walk.values if n.op == "placeholder" and str(n.target) not in self.walk.inputs]

    @cached_property
    def crossing(self) -> dict[fx.Node, dict[fx.Node, Size | None]]:
        """What a stage that begins at a node would receive: None of a value without gradient, which cannot travel."""
        nodes = list(self.walk.values)
        last = {used: i for i, node in enumerate(nodes) for used in node.all_input_nodes}
        last |= dict.fromkeys(self.walk.outputs[: len(self.walk.stage.sends)], len(nodes))
        data, weights = set[fx.Node](), set[fx.Node]()  # made from inputs, from weights alone: made where they are read
        received, travelling = set(self.received), dict[fx.Node, Size | None]()
        found: dict[fx.Node, dict[fx.Node, Size | None]] = {}
        for i, node in enumerate(nodes):
            travelling = {made: size for made, size in travelling.items() if last[made] >= i}
            found[node] = dict(travelling)
            reads, value = node.all_input_nodes, self.walk.values[node]
            if node in received:
                travelling[node] = self.size(value.memory)
            elif node.op == "placeholder" or (node.op == "call_function" and data.issuperset(reads)):
                data.add(node)
            elif node.op == "get_attr" or weights.issuperset(reads):
                weights.add(node)
            elif last.get(node, i) > i:
                single = isinstance(value, Value) and needs_grad(value)
                travelling[node] = Size.of(value.form.size_bytes, self.growth.of(node)) if single else None
        return found
