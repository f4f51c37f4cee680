"""Memory of each operator of a stage, as polynomials (`Size`) in batch, sequence and axis sizes.

For each operator, there are polynomials of:

- the tensors that it saves for backward
- the values that would be sent to the next stage if that stage began at it
- the buffers that exist while it runs (`liveness.py`)

Weights that are being gathered and gradients of weights are not included: `cost/predict/table_memory.py` adds them.
`table_memory.py` also computes the memory of a plan, by inserting the plan's sizes into the polynomials.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from functools import cache, cached_property
from typing import NamedTuple

from torch import fx

from autopart.cost.count.liveness import backward_steps, forward_steps
from autopart.cost.count.operator_counts import OperatorWork
from autopart.cost.count.scaling_exponents import ScalingExponents
from autopart.cost.count.stage_footprint import (
    Liveness,
    LocalValue,
    MemoryBuffer,
    memories,
    needs_grad,
    own_saved_bytes,
    recomputed_buffers,
    saved_buffers,
)
from autopart.cost.predict.operator_work import NOTHING, Exponents, Size
from autopart.cost.predict.table_rows import OperatorRow
from autopart.ir.facts import facts
from autopart.ir.graph import tensor_inputs
from autopart.ir.run.scatter_gather_sends import scatter_layout
from autopart.ir.run.unshard_policy import gathers_stored, source_name, storing_axes
from autopart.ops.operators import is_cast, stored_source

PARTS = ("forward", "recompute", "input_backward", "weight_backward", "accumulate")


class _SizeSum:
    """Sum of polynomials (`Size`) to which terms are added, and from which terms are subtracted."""

    def __init__(self) -> None:
        self.total: dict[Exponents, float] = {}

    def add(self, size: Size, times: int = 1) -> None:
        for powers, value in size.terms:
            self.total[powers] = self.total.get(powers, 0) + times * value

    def size(self) -> Size:
        return Size(tuple(sorted((powers, value) for powers, value in self.total.items() if value)))


class _SentBytes(NamedTuple):
    """Bytes of the values that would be sent if a stage began at an operator.

    The fields are those of `OperatorRow`: values that can be sent as shards, values that the sending stage does not
    save for backward, and values that only the receiving stage saves.
    """

    alike: Size = NOTHING
    unkept: Size = NOTHING
    kept_later: Size = NOTHING


class _FusedKernel:
    """Consecutive operators whose backward is one fused kernel.

    The kernel's inputs are freed only when the kernel ends.
    """

    def __init__(self) -> None:
        self.read = NOTHING
        self.saved_bytes: set[int] = set()
        """Bytes of each buffer that the operators saved. The kernel can write its output to a buffer of equal size."""

    def add(self, read: Size, saved: Iterable[MemoryBuffer]) -> None:
        """Add an operator to the kernel.

        Args:
            read: bytes that the operator's backward reads minus bytes that it writes.
            saved: buffers that the operator saved for backward.
        """
        self.read += read if read.value > 0 else NOTHING
        self.saved_bytes |= {memory.size_bytes for memory in saved}

    def needs(self, made: Size) -> Size:
        """Return the bytes of the kernel's inputs and output; 0 bytes if the output can overwrite an input.

        Args:
            made: bytes of the output.
        """
        return NOTHING if made.value in self.saved_bytes else made + self.read


class SymbolicMemory:
    """Memory of the operators of one stage, as polynomials (`Size`) in batch, sequence and axis sizes.

    Args:
        walk: liveness analysis of the stage.
        growth: scaling exponents of its values.
        saved_before: the received values that an earlier stage saves for backward, as indices into `received`.
        held_before: the received values that an earlier stage has in memory anyway, because it saves or receives
            them; as indices into `received`.
    """

    def __init__(
        self, walk: Liveness, growth: ScalingExponents, saved_before: Set[int] = frozenset(),
        held_before: Set[int] = frozenset(),
    ):  # fmt: skip
        self.walk, self.growth, self.size = walk, growth, cache(growth.of_memory)
        self.traced = {node.name: node for node in walk.trace.graph.nodes}
        self._in_parts = cache(self._can_be_scattered)
        self.alive, self.parameters = walk.reached(), set(walk.stage.parameters)
        received = [walk.values[node].memory for node in self.received]
        before = {received[number] for number in saved_before}
        self.held_before = {received[number] for number in held_before}
        self.saved = saved_buffers(walk, self.alive, {*received} - before)
        index = {node: i for i, node in enumerate(walk.values)}
        keeper = {m: index[node] for node, pieces in self.saved.items() for m in pieces}
        self.index, self.keeper = index, keeper | dict.fromkeys(before, -1)
        sends = [walk.values[node] for node in walk.outputs[: len(walk.stage.sends)]]
        self.saved_sends = {number for number, sent in enumerate(sends) if sent.memory in self.keeper}
        self.held_sends = {
            number for number, sent in enumerate(sends)
            if sent.memory.lives or (number in self.saved_sends and sent.form.is_contiguous)
        }  # fmt: skip
        self.others = {
            node: self._extra_saved_size(node, own_saved_bytes(walk, node))
            for node in walk.others
            if node in self.alive
        }
        self.kept = {
            node: Size.sum([self.others.get(node, NOTHING), *map(self.size, self.saved.get(node, ()))])
            for node in walk.values
        }
        self.rerun = {
            node: Size.sum([*map(self.size, memory), self._extra_saved_size(node, other)])
            for node, (memory, other) in recomputed_buffers(walk, self.alive).items()
        }
        self.first = next(node for node in walk.values if node.op == "call_function")
        axes = storing_axes(walk.program)
        self.gathers = {node for node in walk.values if gathers_stored(node, axes)}
        self.in_forward = self._in_forward()
        self.in_backward, self.after_backward = self._in_backward()
        self.delayed = self._split_backward_bytes()
        self.trained = {str(node.target) for node in self.alive if node.op == "get_attr"}
        casts = {memory.made_by for kept in walk.keeps.values() for memory in kept if memory.again}
        read = (stored_source(n) for n in casts if is_cast(n) or n.kwargs.get("dtype"))
        self.cast_again = {str(node.target) for node in read if node is not None}

    def row(self, one: OperatorWork, is_place: bool, load: Size, prologue_names: Mapping[str, str]) -> OperatorRow:
        """Return the cost table's row of one operator.

        Args:
            one: FLOPs, bytes and collectives of the operator.
            is_place: True if a stage may begin at this operator.
            load: FLOPs that the operator adds to the load of its stage.
            prologue_names: {name of a buffer in the stage: its name in the table}, for buffers that the stage computes
                once, before the microbatches, such as masks.
        """
        works = {part: part_works for part in PARTS if (part_works := getattr(one, part))}
        names = {str(n.target) for n in one.node.all_input_nodes if n.op == "get_attr"}
        values = [self.walk.values[n] for n in one.node.all_input_nodes]
        made_by = {memory.made_by for value in values for memory in memories(value, lasting=True)}
        also = {source_name(n) if n in self.gathers else str(n.target) for n in made_by
                if n in self.gathers or n.op == "get_attr"}  # fmt: skip
        travelling = self.crossing[one.node]
        crossing = None if None in travelling.values() or not is_place else Size.sum(filter(None, travelling.values()))
        sent = _SentBytes() if crossing is None else self._boundary_bytes(one.node, travelling)
        inputs = {prologue_names[buffer] for n in one.node.all_input_nodes
                  if n.op == "placeholder" and (buffer := self.walk.input_buffers.get(str(n.target)))}  # fmt: skip
        return OperatorRow(
            works=works,
            kept=self.kept[one.node],
            in_forward=self.in_forward[one.node],
            in_backward=self.in_backward.get(one.node, NOTHING),
            after_backward=self.after_backward.get(one.node, NOTHING),
            delayed=self.delayed.get(one.node, NOTHING),
            crossing=crossing,
            load=load,
            recomputed=self.recomputed.get(one.node),
            parameters=tuple(sorted(names & self.parameters)),
            reads_also=tuple(sorted((also & self.parameters) - names)),
            inputs=tuple(sorted(inputs)),
            once=self.walk.stage.is_tail,
            **sent._asdict(),
        )

    def _boundary_bytes(self, node: fx.Node, travelling: Mapping[fx.Node, Size | None]) -> _SentBytes:
        """Return fields of `OperatorRow`: bytes of the values that are sent if a stage begins at a node.

        Args:
            travelling: {value that is sent: its bytes}.
        """
        alike = Size.sum(size for sent, size in travelling.items() if size is not None and self._in_parts(sent))
        pieces = {memory for sent in travelling for memory in memories(self.walk.values[sent], lasting=True)}
        later = {memory for memory in pieces if self.keeper.get(memory, -1) >= self.index[node]}
        if node is self.first:  # the boundary between two stages of this program
            unkept = pieces - self.held_before
        else:
            copied = {value.memory for sent in travelling if not (value := self.walk.values[sent]).form.is_contiguous}
            unkept = {memory for memory in pieces if memory not in self.keeper} | later | copied
        return _SentBytes(alike, Size.sum(map(self.size, unkept)), Size.sum(map(self.size, later)))

    def _can_be_scattered(self, node: fx.Node) -> bool:
        """Return True if ranks can send a value as shards, which the next stage all-gathers."""
        origin, layout = self.traced.get(facts(node).get("origin", "")), facts(node).get("layout", {})
        return origin is not None and scatter_layout(origin, layout, self.walk.program.mesh) is not None

    def _in_forward(self) -> dict[fx.Node, Size]:
        """Return {node: bytes allocated while its forward runs}.

        Tensors that the node and earlier nodes save for backward are not included.
        """
        now, beyond = _SizeSum(), dict[fx.Node, Size]()
        held = {memory for pieces in self.saved.values() for memory in pieces}
        now.add(self._values(memory for memory in held if memory.lives))  # received values
        for step in forward_steps(self.walk, held):
            kept = self.kept.get(step.node, NOTHING) * -1
            needs = now.size() + self._workspace(step.node, 0) + kept
            now.add(self._values(step.made) + self.others.get(step.node, NOTHING) + kept)
            ended = self._values(step.ended)
            peak = now.size() + ended * -1 if self._writes_over(step.node) else now.size()
            now.add(ended, -1)
            beyond[step.node] = _largest(peak, needs)
        return beyond

    def _in_backward(self) -> tuple[dict[fx.Node, Size], dict[fx.Node, Size]]:
        """Return {node: bytes allocated while its backward runs} and {node: bytes allocated after it}.

        The bytes are those of gradients, recomputed values and workspace. Gradients of weights are not included.
        """
        now, beyond, after = _SizeSum(), dict[fx.Node, Size](), dict[fx.Node, Size]()
        kernel, self.recomputed = _FusedKernel(), dict[fx.Node, Size]()
        for step in backward_steps(self.walk, self.alive):
            node = step.node
            kept = self.kept.get(node, NOTHING) + self._received_of(node) * -1  # freed by its backward
            if step.rerun:
                self.recomputed[node] = Size.sum(self.rerun.get(other, NOTHING) for other in step.rerun)
                now.add(self.recomputed[node])
            of_weights = Size.sum(map(self.size, filter(self._is_weight, step.made)))  # `table_memory.py` counts these
            made, done = self._values(step.made), self._values(step.done) + self.rerun.get(node, NOTHING)
            further, begins = Size.sum(map(self._value, step.further)), now.size()
            now.add(made)
            now.add(done, -1)
            ends = now.size()
            peaks = [begins + self._workspace(node, 1) + of_weights * -1, ends + further * 2 + kept * -1]
            if self._writes_over(node):
                peaks.append(ends + further + kept * -1)
                kernel.add(done + kept + (made + of_weights) * -1, self.walk.keeps.get(node, ()))
            else:
                peaks.append(begins + made + further)
                if node in self.walk.in_place:
                    peaks.append(begins + kernel.needs(made + of_weights) + of_weights * -1)
                kernel = _FusedKernel()
            beyond[node], after[node] = _largest(*peaks), ends
        left, unsaved = NOTHING, NOTHING  # received values stay in their buffers until an operator saves them
        for node in reversed(self.walk.values):
            beyond[node] = beyond.get(node, NOTHING) + unsaved
            unsaved += self._received_of(node)
            left = after.get(node, left)
            after[node] = left + unsaved
        return beyond, after

    def _received_of(self, node: fx.Node) -> Size:
        """Return the bytes of values from the previous stage that this operator is the first to save."""
        return Size.sum(self.size(memory) for memory in self.saved.get(node, ()) if memory.lives)

    def _split_backward_bytes(self) -> dict[fx.Node, Size]:
        """Return {node: bytes of output gradients that a split backward keeps}.

        A split backward (zero-bubble schedules) computes the gradients of weights later than the gradients of
        activations. Until then, it keeps the output gradient of each node that reads both a weight and an activation
        that needs a gradient.
        """
        weights, seen, delayed = self.walk.of_weights(self.alive), set[MemoryBuffer](), dict[fx.Node, Size]()
        for node in self.walk.values:
            if node in self.alive and node not in weights and any(used in weights for used in node.all_input_nodes):
                fresh = memories(self.walk.values[node]) - seen
                seen |= fresh
                delayed[node] = Size.sum(map(self.size, fresh))
        return delayed

    def _writes_over(self, node: fx.Node) -> bool:
        """Return True if an operator can write its output into the buffer of an input.

        Its backward can then write the input's gradient into the buffer of the output's gradient. The input must have
        the element size of the output, so the result is False for a cast to another element size.
        """
        if node not in self.walk.in_place:
            return False
        made, *read = (value.form.dtype.itemsize for one in (node, *node.all_input_nodes)
                       if isinstance(value := self.walk.values[one], LocalValue))  # fmt: skip
        return made in read

    def _workspace(self, node: fx.Node, direction: int) -> Size:
        """Return the workspace of a node as a `Size`, which scales like the largest of its inputs and output.

        Args:
            direction: 0 for its forward, 1 for its backward.
        """
        if node in self.gathers:
            return NOTHING
        sides = [n for n in (node, *node.all_input_nodes) if isinstance(self.walk.values[n], LocalValue)]
        largest = max(sides or [node], key=lambda n: self.walk.values[n].form.size_bytes if sides else 0)
        return Size.of(self.walk.takes.get(node, (0, 0))[direction], self.growth.of(largest))

    def _values(self, pieces: Iterable[MemoryBuffer]) -> Size:
        """Return the total bytes of buffers. Weights and gathered weights are left out."""
        return Size.sum(self.size(memory) for memory in pieces if not self._is_weight(memory))

    def _is_weight(self, memory: MemoryBuffer) -> bool:
        return memory.made_by.op == "get_attr" or memory.made_by in self.gathers

    def _value(self, node: fx.Node) -> Size:
        return self.growth.of_value(node, self.walk.values[node])

    def _extra_saved_size(self, node: fx.Node, size_bytes: int) -> Size:
        """Return the `Size` of a saved tensor that is neither an input nor an output of its operator.

        The tensor scales like an input of equal bytes, or like all inputs together if their sum has equal bytes.
        Otherwise it scales like the output.
        """
        read = [self._value(used) for used in tensor_inputs(node) if isinstance(self.walk.values[used], LocalValue)]
        options = [Size.sum(read), *read]
        return next((o for o in options if o.value == size_bytes), Size.of(size_bytes, self.growth.of(node)))

    @property
    def received(self) -> list[fx.Node]:
        """Nodes of the stage graph whose values the previous stage sends."""
        return [n for n in self.walk.values if n.op == "placeholder" and str(n.target) not in self.walk.inputs]

    @cached_property
    def crossing(self) -> dict[fx.Node, dict[fx.Node, Size | None]]:
        """{node: {value: bytes}} of the values that would be sent if a stage began at the node.

        The bytes are None for a value without gradient, because pipelining cannot send it. Values that depend only on
        the model's inputs, or only on weights, are left out: each stage computes them itself.
        """
        nodes = list(self.walk.values)
        last = {used: i for i, node in enumerate(nodes) for used in node.all_input_nodes}
        last |= dict.fromkeys(self.walk.outputs[: len(self.walk.stage.sends)], len(nodes))
        data, weights = (
            set[fx.Node](),
            set[fx.Node](),
        )  # nodes that depend only on inputs or only on weights: each stage computes them itself
        received, travelling = set(self.received), dict[fx.Node, Size | None]()
        crossings: dict[fx.Node, dict[fx.Node, Size | None]] = {}
        for i, node in enumerate(nodes):
            travelling = {source: size for source, size in travelling.items() if last[source] >= i}
            crossings[node] = dict(travelling)
            reads, value = node.all_input_nodes, self.walk.values[node]
            if node in received:
                travelling[node] = self.size(value.memory)
            elif node.op == "placeholder" or (node.op == "call_function" and data.issuperset(reads)):
                data.add(node)
            elif node.op == "get_attr" or weights.issuperset(reads):
                weights.add(node)
            elif last.get(node, i) > i:
                single = isinstance(value, LocalValue) and needs_grad(value)
                travelling[node] = self._value(node) if single else None
        return crossings


def _largest(*sizes: Size) -> Size:
    return max(sizes, key=lambda size: size.value)
