"""Generation of every stage's program: a pure function of the annotated graph and the decisions.

Each operator computes its result in the layout of its strategies. The result is converted to the layouts that its
consumers need, once for each layout. Weights are read on the stage that uses them.

Values that depend only on the model's inputs are not sent between stages: every stage that needs them computes them.
The stage's prologue (a graph that runs once per call, before the first microbatch) computes such values for the global
batch. The stage graph computes them for one rank's samples. All other values that a later stage needs are sent through
the stages between.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

import networkx as nx
import torch
from torch import fx

from autopart.errors import InputError, OptionError
from autopart.ir.decisions import Decisions
from autopart.ir.facts import ACTIVE, DATA, INPUT, PARAMETER, WEIGHT, facts
from autopart.ir.graph import (
    RNG_EXACT_UNSUPPORTED,
    describe,
    draws_random_numbers,
    inexact,
    operators,
    reads,
    source_of,
    tensor_inputs,
    tuple_values,
    value,
)
from autopart.ir.layout import R_GRAD_P, Layout, P, Placement, R, local_shape, mesh_axes_of
from autopart.ir.program import (
    MICROBATCH_AXIS,
    SEEDS,
    BufferUpdate,
    Output,
    Program,
    Rng,
    StageInput,
)
from autopart.ir.trace import Trace
from autopart.passes.choose.recompute_regions import region_marker
from autopart.passes.choose.storage.parameter_storage import stored_tensors
from autopart.passes.dump import program_files
from autopart.passes.facts.strategies import local_batch_placement, rows_of
from autopart.passes.pass_pipeline import driven
from autopart.passes.rules import local_form, rule_of
from autopart.passes.rules.local_forms import LocalCall, local_value
from autopart.passes.write.convert_layout import Converter
from autopart.passes.write.stage_draft import Key, StageDraft, parameter_stages

aten = torch.ops.aten

CARRIED = ("nn_module_stack", "stack_trace", "key", "inexact_on_gpu", "on_host", "band", "queries", "attention")
"""Facts of a traced node that are copied to the nodes generated for it."""


@driven(files=program_files)
def lower(
    trace: Trace, decisions: Decisions, outputs: Sequence[Any], whole_outputs: bool, rng: Rng = "fast",
    beside: Sequence[Any] = (), local_rows: bool = False,
) -> Program:  # fmt: skip
    """Return the program that computes `outputs` (nodes of the graph, or constants) under these decisions.

    Args:
        whole_outputs: True for a call: outputs are gathered over the batch axes. False for a training step: outputs
            keep their placement. For example, the loss stays a partial sum, which the step reduces once.
        rng: "exact" draws the random numbers of a single device, "fast" draws dropout noise on each rank.
        beside: additional outputs, listed after `outputs`. They are always gathered over the batch axes.
        local_rows: True to return to each data-parallel rank only its own samples of a gathered output.
    """
    writer = _Writer(trace, decisions, rng, local_rows)
    ends = [o for o in (*outputs, *beside, *trace.buffer_updates.values()) if isinstance(o, fx.Node)]
    needed: set[fx.Node] = set().union(*nx.bfs_layers(reads(trace.graph), ends))
    for node in operators(trace.graph):
        if node in decisions.stage_of and node in needed:
            writer.writer_of(node).write_in_block(node)
    return writer.finish([*((o, whole_outputs) for o in outputs), *((o, True) for o in beside)])


def _replaced_noise(random: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the random operators that the program omits, because ranks draw their noise locally.

    Their noise is used only by dropouts that depend on a parameter. In each of these dropouts, a rank draws the noise
    of its own shard.
    """
    return {
        node for node in random
        if node.users and all(rule_of(n).draws_noise and facts(n)["role"] == ACTIVE for n in node.users)
    }  # fmt: skip


def _check_draws(draws: Sequence[fx.Node], rng: Rng) -> None:
    """Raise OptionError if `rng="exact"` but a random operator cannot draw a single device's numbers."""
    for node in draws:
        if rng == "exact" and (why := inexact(node, tuple_values(node)[0].device)):
            raise OptionError(RNG_EXACT_UNSUPPORTED, why=why, where=describe(node), hint="rng='fast'")


def write_local(call: LocalCall) -> fx.Node:
    """Write a call into the program of one rank.

    If the sharding rule of the call has a local form (a function that writes a call for one rank), the local form
    writes the call. Otherwise the call is written as traced.
    """
    local = local_form(call.node)
    written = local(call) if local is not None else None
    return call.as_traced() if written is None else written


def _decisions_of_tail(decisions: Decisions) -> Decisions:
    """Return the decisions for the operators that run once for all microbatches (the tail).

    The tail is treated as one more stage.
    """
    strategies = {axis: on for axis, on in decisions.strategies.items() if axis != MICROBATCH_AXIS}
    stage_of = {node: stage + (node in decisions.tail) for node, stage in decisions.stage_of.items()}
    return replace(
        decisions, microbatches=1, strategies=strategies, stage_of=stage_of, num_stages=decisions.num_stages + 1,
        scatter_sends=False, tail=frozenset(),
    )  # fmt: skip


class _Writer:
    """Generator of all stage graphs.

    Args:
        trunk: the writer of the pipeline stages, if this object writes the tail (operators that run once for all
            microbatches).
    """

    def __init__(
        self, trace: Trace, decisions: Decisions, rng: Rng, local_rows: bool = False, trunk: _Writer | None = None
    ):  # fmt: skip
        self.trace, self.decisions, self.local_rows = trace, decisions, local_rows
        mesh = decisions.mesh
        rows, self.features = mesh.along("rows"), mesh.chosen
        in_time = {MICROBATCH_AXIS: decisions.microbatches} if decisions.microbatches > 1 else {}
        self.sizes = {a: mesh.size(a) for a in rows} | in_time | {a: mesh.size(a) for a in self.features}
        self.chosen = {axis: decisions.strategies[axis] for axis in self.sizes if axis in decisions.strategies}
        self.row_axes = decisions.row_axes
        self.trunk = trunk
        earlier: list[StageDraft] = [] if trunk is None else trunk.stages
        new_stages = [StageDraft(i, is_tail=trunk is not None) for i in range(len(earlier), decisions.num_stages)]
        self.stages: list[StageDraft] = [*earlier, *new_stages]
        random = [node for node in operators(trace.graph) if draws_random_numbers(node)]
        self.not_drawn = _replaced_noise(random) if rng == "fast" else set()
        self.draws = [node for node in random if node not in self.not_drawn]
        _check_draws(self.draws, rng)
        self.empty: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}
        joined = {axis: mesh.size(axis) for stored in decisions.stored.values() for axis in stored}
        self.converter = Converter(trace, decisions, {**joined, **self.sizes}, self.emitter, self.mark)
        self.rng, self.has_seeds = rng, bool(random) and rng == "fast"
        for stage in new_stages:
            for node in trace.graph.find_nodes(op="placeholder"):
                stage.whole[node] = stage.prologue.node_copy(node)
            if self.has_seeds:
                stage.seeds = stage.prologue.placeholder(SEEDS)
            for node in self.draws:
                self._in_prologue(node, stage)
        self.tail = _Writer(trace, _decisions_of_tail(decisions), rng, local_rows, self) if decisions.tail else None

    def writer_of(self, node: fx.Node) -> _Writer:
        """Return the object that writes an operator: `self.tail` if it runs once for all microbatches."""
        return self.tail if self.tail is not None and node in self.decisions.tail else self

    # Layouts

    def key(self, node: fx.Node, places: Layout) -> Key:
        """Return a layout with an entry for every axis: the placements in `places`, and `R` on all other axes.

        If the value has no gradient, `R(grad P)` becomes `R`.
        """
        grad = facts(node)["needs_grad"]
        every = {axis: places.get(axis, R) for axis in self.sizes}
        return tuple((axis, R if place == R_GRAD_P and not grad else place) for axis, place in every.items())

    def produced(self, node: fx.Node) -> Key:
        """Return the layout in which a value is computed or, for a parameter, stored."""
        source, index = source_of(node)
        if source.op == "placeholder":  # an input that needs a gradient: replicated, as the caller has it
            return self.key(source, {})
        if facts(source)["role"] == PARAMETER:  # the gradient is a sum over the shards of the batch
            rows = {axis: R_GRAD_P for axis in self.sizes if axis not in self.features}
            stored = self.decisions.stored.get(source.target, {})
            joined = {axis: place for axis, place in stored.items() if axis not in self.sizes}
            gathered = {part: R_GRAD_P for axis in joined for part in mesh_axes_of(axis)}
            return (*joined.items(), *self.key(source, {**rows, **stored, **gathered}))
        return self.key(node, {axis: on[source].outputs[index] for axis, on in self.chosen.items()})

    def wanted(self, node: fx.Node, position: int, used: fx.Node) -> Key:
        """Return the layout in which `node` needs its tensor input `used`, the input with index `position`."""
        return self.key(used, {axis: on[node].inputs[position] for axis, on in self.chosen.items()})

    # Emitting

    def emitter(self, stage: StageDraft, origin: fx.Node) -> Any:
        def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            is_own = getattr(target, "namespace", "") == "autopart"
            name = target._schema.name.removeprefix("autopart::") if is_own else None
            node = stage.graph.create_node("call_function", target, args, kwargs, name=name)
            node.meta = {k: v for k, v in origin.meta.items() if k in CARRIED}
            if target is not origin.target and (val := local_value(node)) is not None:
                node.meta["val"] = val
            if (cost := rule_of(node).cost) is not None:
                facts(node)["cost"] = cost
            return node

        return emit

    def seed(self, stage: StageDraft) -> fx.Node:
        """Return the node of the microbatch's random seed, which is a keyword input of the stage graph."""
        if stage.seed is None:
            assert stage.seeds is not None, "the program has no input for random seeds"
            stage.seed = stage.placeholder(f"{SEEDS}_{stage.index}")
            stage.seed.meta["val"] = torch.empty(1, dtype=torch.int64, device="meta")
            stage.inputs.append(StageInput(stage.seed.target, 0))
            stage.prologue_outputs.append(stage.seeds)
            if stage.is_tail:  # the tail receives the seeds of all microbatches
                seeds, stage.seed = stage.seed, stage.graph.call_function(aten.slice.Tensor, (stage.seed, 0, 0, 1))
                stage.seed.meta["val"] = seeds.meta["val"]
        return stage.seed

    def mark(self, written: fx.Node, origin: fx.Node, layout: Key, dtype: torch.dtype | None = None) -> None:
        """Record on a generated node which traced value it holds, and in which layout and dtype."""
        written.meta.update(origin=origin.name, layout=dict(layout), needs_grad=facts(origin)["needs_grad"])
        written.meta.update({name: known for name, known in origin.meta.items() if name in CARRIED})
        full = value(origin)
        if isinstance(full, torch.Tensor):
            local = local_shape(full.shape, dict(layout), self.converter.sizes, self.decisions.balance)
            for dim, share in facts(origin).get("shares", {}).items():
                local[dim] = math.ceil(local[dim] * share)
            form = tuple(local), dtype or full.dtype
            if form not in self.empty:
                self.empty[form] = torch.empty(local, dtype=form[1], device="meta")
            written.meta["val"] = self.empty[form]

    def write_in_block(self, node: fx.Node) -> None:
        """Write one operator. Copy its repeated block to the generated nodes (facts `block` and `times`)."""
        block_facts = {name: known for name, known in node.meta.items() if name in ("block", "times")}
        graph = self.stages[self.decisions.stage_of[node]].graph
        last = next(iter(reversed(graph.nodes)), None)
        self.write(node)
        for written in takewhile(lambda one: one is not last, reversed(graph.nodes)) if block_facts else ():
            written.meta.update(block_facts)

    def write(self, node: fx.Node, stage: StageDraft | None = None) -> None:
        stage = stage or self.stages[self.decisions.stage_of[node]]
        positions = iter(range(len(tensor_inputs(node))))

        def local(used: fx.Node) -> fx.Node | None:
            layout = self.wanted(node, next(positions), used)
            if used in self.not_drawn:
                return None
            if facts(used)["needs_grad"] and not facts(node)["needs_grad"]:
                layout = self._same_value(used, layout, stage)
            return self.get(used, layout, stage)

        args, kwargs = fx.map_arg((node.args, node.kwargs), local)
        chosen = {axis: on[node] for axis, on in self.chosen.items()}
        self._store(node, self._write_local(node, args, kwargs, chosen, stage), stage)

    def _write_local(self, node: fx.Node, args: Any, kwargs: Any, chosen: Mapping, stage: StageDraft) -> fx.Node:
        emit = self.emitter(stage, node)
        seed, balance = partial(self.seed, stage), self.decisions.balance
        return write_local(LocalCall(node, args, kwargs, chosen, self.sizes, emit, seed, balance))

    def _store(self, node: fx.Node, written: fx.Node, stage: StageDraft) -> None:
        if isinstance(value(node), torch.Tensor):
            self._record(written, node, self.produced(node), stage)
            return
        for user in node.users:  # a tuple: write its projections
            if user.target is operator.getitem:
                part = stage.graph.call_function(operator.getitem, (written, user.args[1]))
                self._record(part, user, self.produced(user), stage)

    def _record(self, written: fx.Node, node: fx.Node, layout: Key, stage: StageDraft) -> fx.Node:
        """Record and return `written`, the generated node of a traced value in a layout on a stage."""
        self.mark(written, node, layout)
        stage.made[node, layout] = written
        return written

    # Reading

    def get(self, node: fx.Node, layout: Key, stage: StageDraft) -> fx.Node:
        """Return the node that holds a value in a layout on a stage.

        An existing node is reused. Otherwise the value is converted, received from an earlier stage, or computed.
        """
        if (node, layout) in stage.made:
            return stage.made[node, layout]
        role = facts(source_of(node)[0])["role"]
        if role in (INPUT, DATA):
            written = self._from_inputs(node, layout, stage)
        elif role == PARAMETER and self.converter.stored_dtype(node) is not None:
            written = self.converter.read(node, self.produced(node), layout, stage)
        else:
            produced = self.produced(node)
            if self._is_received(node, stage) and layout == self.converter.sent(node, produced):
                return self._receive(node, produced, stage)
            source = self._in_produced_layout(node, produced, stage, role)
            if produced == layout:
                return source
            written = self.converter.convert(source, node, produced, layout, stage)
        return self._record(written, node, layout, stage)

    def _same_value(self, node: fx.Node, layout: Key, stage: StageDraft) -> Key:
        """Return a layout equal to `layout` in which the stage already has `node`, else `layout` itself.

        The value of `node` has no gradient. Layouts that differ only in the gradient's placement count as equal.
        """
        values = tuple((axis, R if place.is_replicated else place) for axis, place in layout)
        for other, key in stage.made:
            if other is node and tuple((axis, R if place.is_replicated else place) for axis, place in key) == values:
                return key
        return layout

    def _in_produced_layout(self, node: fx.Node, produced: Key, stage: StageDraft, role: str) -> fx.Node:
        """Return the node of a value in the layout in which the stage first has it.

        A parameter, a view of a weight, or an input with a gradient is stored in this layout. A result of this stage is
        computed in it, and a result of an earlier stage is received in it.
        """
        if (node, produced) in stage.made:
            return stage.made[node, produced]
        if role == PARAMETER:
            self._record(stage.parameter(node), node, produced, stage)
        elif role == WEIGHT:
            self.write(node, stage)
        elif node.op == "placeholder":
            self._check_input_gradient(node)
            self._record(self._stage_input(node, None, stage), node, produced, stage)
        else:
            self.converter.gather(self._receive(node, produced, stage), node, produced, stage)
        return stage.made[node, produced]

    def _receive(self, node: fx.Node, produced: Key, stage: StageDraft) -> fx.Node:
        """Return the node with which a stage receives a value of an earlier stage.

        All stages between send the value on.
        """
        assert stage.index > 0, f"{node.name} is used on a stage before the one that computes it"
        if self.trunk is not None:
            return self._receive_all(node, produced, stage)
        sent, before = self.converter.sent(node, produced), self.stages[stage.index - 1]
        if (node, sent) in stage.made:
            return stage.made[node, sent]
        if (node, produced) in before.made:
            self.converter.convert(before.made[node, produced], node, produced, sent, before)
        else:
            self._receive(node, produced, before)
        before.sends.append((node, sent))
        stage.receives.append((node, sent))
        return self._record(stage.placeholder(node.name), node, sent, stage)

    def _receive_all(self, node: fx.Node, produced: Key, tail: StageDraft) -> fx.Node:
        """Return the tail's input node for a value that the last stage computes per microbatch.

        The tail is the graph that runs once for all microbatches. The runtime merges the values of all microbatches, so
        the received value has no `MICROBATCH_AXIS` placement.
        """
        assert self.trunk is not None
        last, layout = self.trunk.stages[-1], self.trunk.produced(node)
        self.trunk.get(node, layout, last)
        last.sends.append((node, layout))
        tail.receives.append((node, produced))
        return self._record(tail.placeholder(node.name), node, produced, tail)

    def _is_received(self, node: fx.Node, stage: StageDraft) -> bool:
        return self.decisions.stage_of.get(source_of(node)[0], stage.index) < stage.index

    def _check_input_gradient(self, node: fx.Node) -> None:
        """Raise InputError for an input that needs a gradient if there are several stages or microbatches."""
        if len(self.stages) == 1 and MICROBATCH_AXIS not in self.sizes:
            return
        through = "a pipeline" if len(self.stages) > 1 else "microbatches"
        raise InputError(
            f"the input {facts(node)['input_name']} needs a gradient",
            why=f"no gradient is returned through {through}",
            hint=f"{facts(node)['input_name']}.detach(); or microbatches=1 and a mesh without pp",
        )

    # Values that depend only on the inputs

    def _from_inputs(self, node: fx.Node, layout: Key, stage: StageDraft) -> fx.Node:
        places = dict(layout)
        batch = places[self.row_axes[0]] if self.row_axes else R
        if batch == P or any(places[axis] != R for axis in self.features):
            before = self.key(node, dict.fromkeys(self.row_axes, R if batch == P else batch))
            return self.converter.convert(self.get(node, before, stage), node, before, layout, stage)
        if not batch.is_shard:
            return self._stage_input(node, None, stage)
        rows = self._local_samples(node, batch, stage)
        return rows if rows is not None else self._stage_input(node, batch, stage)

    def _local_samples(self, node: fx.Node, batch: Placement, stage: StageDraft) -> fx.Node | None:
        """Write operators that compute a rank's samples of a value from the rank's samples of the inputs.

        Returns None if the operator's rule does not allow the batch to be sharded.
        """
        shards = math.prod(self.sizes[axis] for axis in self.row_axes)
        strategy = rows_of(node, batch, shards)
        if strategy is None:
            return None
        source, index = source_of(node)
        positions = iter(strategy.inputs)

        def local(used: fx.Node) -> fx.Node:
            return self.get(used, self.key(used, dict.fromkeys(self.row_axes, next(positions))), stage)

        args, kwargs = fx.map_arg((source.args, source.kwargs), local)
        written = self._write_local(source, args, kwargs, dict.fromkeys(self.row_axes, strategy), stage)
        return written if source is node else self.emitter(stage, node)(operator.getitem, written, index)

    def _stage_input(self, node: fx.Node, batch: Placement | None, stage: StageDraft) -> fx.Node:
        """Add a stage input for a value that the prologue (run before all microbatches) computes.

        Args:
            batch: placement of the shard that the runtime passes to each rank and microbatch; None: the full value.
        """
        rows = "" if batch is None or not self.row_axes else "_rows"
        placeholder = stage.placeholder(f"{node.name}_{stage.index}{rows}")
        cut = (None, ()) if batch is None else (batch.dim, batch.sections)
        stage.inputs.append(StageInput(placeholder.target, *cut))
        stage.prologue_outputs.append(self._in_prologue(node, stage))
        return placeholder

    def _in_prologue(self, node: fx.Node, stage: StageDraft) -> fx.Node:
        """Return the node that computes a full value in the stage's prologue.

        The prologue is a graph that runs before the first microbatch. Missing nodes are added to it.
        """
        if node not in stage.whole:
            if node.op == "get_attr":
                whole = stage.prologue.create_node("get_attr", node.target, (), {}, node.name)
                whole.meta = {"val": value(node)}
                stage.buffers[node.target] = None
                if node.target in self.trace.buffer_updates:  # overwritten before backward
                    whole = stage.prologue.call_function(torch.ops.aten.clone.default, (whole,))
                    whole.meta = {"val": value(node)}
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._in_prologue(n, stage))
                whole = stage.prologue.call_function(node.target, args, kwargs)
                whole.meta = {k: v for k, v in node.meta.items() if k in (*CARRIED, "val", "times")}
            stage.whole[node] = whole
        return stage.whole[node]

    # Finishing

    def finish(self, outputs: Sequence[tuple[Any, bool]]) -> Program:
        """Write the outputs, and return the finished program.

        Args:
            outputs: pairs (node or constant, True to gather it over the batch axes).
        """
        end = self.tail or self
        last = end.stages[-1]
        results: list[Output] = []
        end_node = self.trace.graph.output_node()
        flat, numbers = end_node.args[0], facts(end_node).get("numbers", ())
        nodes: list[tuple[fx.Node, Key, fx.Node]] = []
        for output, whole in outputs:
            if not isinstance(output, fx.Node):
                results.append(Output(None, {}, output))
                continue
            layout = end._output_layout(output, whole, self.local_rows)
            is_number = any(output is flat[index] for index in numbers)
            made_of = self._input_names(output)
            results.append(Output(len(nodes), dict(layout), made_of=made_of, is_number=is_number))
            nodes.append((output, layout, end.get(output, layout, last)))
        for name, node in self.trace.buffer_updates.items():
            self.writer_of(source_of(node)[0])._update(name, node)
        for stage in end.stages[:-1]:
            stage.output([stage.made[send] for send in stage.sends])
        last.output([written for _, _, written in nodes])
        last.sends = [(node, layout) for node, layout, _ in nodes]
        mark = region_marker(self.trace.graph, self.decisions.recompute)
        stages = tuple(stage.finish(self.trace, self.sizes, mark) for stage in end.stages)
        names = (*self.trace.call.names, SEEDS) if self.has_seeds else self.trace.call.names
        axes = [axis for axis in self.sizes if axis != MICROBATCH_AXIS]
        return Program(
            self.decisions.mesh, self.decisions.microbatches, names, stages,
            stored_tensors(self.trace, self.decisions, self._readers(), axes), tuple(results),
            self.trace.output_spec, self.decisions.copied, self.rng if self.draws else None,
            weight_updates=self.trace.weight_updates, zero=self.decisions.zero,
            prefetch=self.decisions.prefetch, dp_sync=self.decisions.dp_sync,
            reduce_dtype=self.trace.precision.reduce if self.trace.precision is not None else None,
        )  # fmt: skip

    def _input_names(self, output: fx.Node) -> frozenset[str]:
        """Return the inputs on which an output depends; empty unless `local_rows` (see `lower`) is set."""
        if not self.local_rows:
            return frozenset()
        used = {output, *nx.descendants(reads(self.trace.graph), output)}
        inputs = zip(self.trace.call.names, self.trace.graph.find_nodes(op="placeholder"), strict=True)
        return frozenset(name for name, node in inputs if node in used)

    def _update(self, name: str, node: fx.Node) -> None:
        """Add the new value of a buffer, unsharded, to the outputs of the stage that computes it."""
        source, _ = source_of(node)
        if facts(source)["role"] in (INPUT, DATA):
            first = self.stages[0]
            first.updates.append((BufferUpdate(name, True, {}), self._in_prologue(node, first)))
            return
        home = self.stages[self.decisions.stage_of.get(source, self._first_possible_stage(source))]
        layout = self._output_layout(node, True)
        home.updates.append((BufferUpdate(name, False, dict(layout)), self.get(node, layout, home)))

    def _first_possible_stage(self, source: fx.Node) -> int:
        """Return the first stage that can compute a value from the parameters on which it depends.

        Each of these parameters is read on this stage or on an earlier one.
        """
        readers = self._readers()
        made_of = {source, *nx.descendants(reads(self.trace.graph), source)}
        names = [n.target for n in made_of if n.op == "get_attr" and facts(n)["role"] == PARAMETER]
        return max((min(readers.get(name, {0})) for name in names), default=0)

    def _output_layout(self, node: fx.Node, whole: bool, local_rows: bool = False) -> Key:
        if (
            whole
            and local_rows
            and self.row_axes
            and (rows := local_batch_placement(node, self.decisions.rows)) is not None
        ):
            return self.key(node, dict.fromkeys(self.row_axes, rows))
        if facts(source_of(node)[0])["role"] in (INPUT, DATA):
            return self.key(node, {})
        places = dict(self.produced(node))
        for axis, place in places.items():
            # A replicated loss is differentiated once, not once per rank.
            if axis in self.features or (axis != MICROBATCH_AXIS and (whole or place == R_GRAD_P)):
                places[axis] = R
            elif place == R_GRAD_P and not whole:  # every microbatch is differentiated
                places[axis] = P
        return tuple(places.items())

    def _readers(self) -> dict[str, set[int]]:
        outputs, last = self.trace.graph.output_node(), self.decisions.num_stages - 1
        return parameter_stages(self.decisions.stage_of, outputs, last)
