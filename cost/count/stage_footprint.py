"""Liveness analysis of a stage graph on one rank: buffers, saved tensors and workspace.

The analysis evaluates every stage graph node by node on local shapes. For each value, it finds the buffer that stores
the value, and the tensors that autograd saves (`saved_tensors.py`). The predicted bytes
of a microbatch's activations therefore equal the bytes at run time.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from autopart.cost.count.saved_tensors import EFFECT_CACHE, Effect, SavedTensors, TensorIndex, TensorSpec
from autopart.ir.collective_nodes import OPERATORS, ROTATING
from autopart.ir.facts import facts, times
from autopart.ir.graph import operator_name, tensor_inputs, value
from autopart.ir.layout import DIRECTIONS, DISPATCH_CONVERSIONS, shard_sizes
from autopart.ir.program import SEEDS, Boundary, Program, Stage
from autopart.ir.run.unshard_policy import ParameterGather, unsharded_for_step
from autopart.ir.sharding import DimSharding
from autopart.ir.trace import Trace
from autopart.ops.operators import is_cast, stored_source


@dataclass(eq=False)
class MemoryBuffer:
    """A memory buffer on one rank.

    Args:
        lives: True if the buffer is persistent: it exists before and after a microbatch, such as a parameter's.
        made_by: the node that allocates it.
        again: True for a gathered or cast weight. Such a buffer is not saved for backward. A backward that reads the
            weight gathers or casts the weight again.
    """

    size_bytes: int
    lives: bool
    made_by: fx.Node
    again: bool = False


@dataclass(frozen=True)
class LocalValue:
    """A local tensor of one rank: its spec, and the buffer that stores it."""

    form: TensorSpec
    memory: MemoryBuffer


def saved_buffers(
    walk: Liveness, alive: Set[fx.Node], received: Set[MemoryBuffer] = frozenset()
) -> dict[fx.Node, list[MemoryBuffer]]:  # fmt: skip
    """Return {node: buffers that autograd saves for its backward}.

    A buffer that several nodes save is listed only at the first of them. The inputs of a recomputed region are listed
    at the region's first node.

    Args:
        walk: liveness analysis of the stage.
        alive: nodes that a gradient flows through.
        received: buffers of values received from another stage, to be included. Other persistent buffers are left out.
    """
    held: set[MemoryBuffer] = set()
    saved: dict[fx.Node, list[MemoryBuffer]] = {}
    entered: set[int] = set()
    regions = walk.regions(alive)
    for node in walk.values:
        region = facts(node).get("region")
        if region in regions:
            pieces = [] if region in entered else walk.read_by(regions[region])
            entered.add(region)
        else:
            pieces = walk.keeps.get(node, []) if node in alive else []
        lasting = (m.again or (m.lives and m not in received) for m in dict.fromkeys(pieces))
        fresh = [m for m, lasts in zip(dict.fromkeys(pieces), lasting, strict=True) if not lasts and m not in held]
        held |= set(fresh)
        if node in alive or fresh:
            saved[node] = fresh
    return saved


def own_saved_bytes(walk: Liveness, node: fx.Node) -> int:
    """Return the bytes that a node saves for its backward in addition to its inputs and outputs.

    A recomputed node saves 0 bytes.
    """
    return 0 if "region" in facts(node) else walk.others.get(node, 0)


def recomputed_buffers(walk: Liveness, alive: Set[fx.Node]) -> dict[fx.Node, tuple[set[MemoryBuffer], int]]:
    """Return the buffers that recomputation allocates in backward, by the operator that saves them first.

    Returns {operator: (buffers, bytes of saved tensors that are neither inputs nor outputs)}. The buffers are allocated
    when the backward of the recomputed region begins, and freed after the operator's backward. Buffers that were saved
    in forward are not included.
    """
    regions = walk.regions(alive)
    kept = {memory for pieces in saved_buffers(walk, alive).values() for memory in pieces} if regions else set()
    again: dict[fx.Node, tuple[set[MemoryBuffer], int]] = {}
    for node in (n for nodes in regions.values() for n in nodes if n in alive):
        fresh = {m for m in walk.keeps.get(node, ()) if not m.lives and not m.again} - kept
        kept |= fresh
        again[node] = fresh, walk.others.get(node, 0)
    return again


def liveness_of(trace: Trace, program: Program, stage: Stage) -> Liveness:
    """Return the liveness analysis of a stage for one microbatch, on the rank with the largest shards."""
    held = unsharded_for_step(program, program.stages)
    walk = Liveness(trace, program, stage, *_stage_inputs(trace, program, stage), held)
    walk.run()
    return walk


def memories(result: Any, lasting: bool = False) -> set[MemoryBuffer]:
    """Return the buffers of a value, or of all values in a nested tuple.

    Args:
        lasting: True to include persistent buffers, such as those of parameters.
    """
    if isinstance(result, tuple):
        return {memory for item in result for memory in memories(item, lasting)}
    return {result.memory} if isinstance(result, LocalValue) and (lasting or not result.memory.lives) else set()


@dataclass
class Liveness:
    """Liveness analysis of a stage graph, which `run` evaluates on tensor specs.

    The stage's prologue (a graph that runs before the microbatches) computes the stage inputs that depend only on the
    model's inputs, such as masks.

    Args:
        inputs: {stage input from the prologue: its value}.
        input_buffers: {stage input from the prologue: name of its buffer}. A buffer has the name of the first stage
            input that views it.
        input_bytes: {name of a buffer: (node that allocates it, its bytes for all microbatches)}.
        values: {node: its `LocalValue`, or a tuple of them}.
        keeps: {node: buffers of inputs and outputs that autograd saves for its backward}.
        others: {node: bytes of tensors that autograd saves for its backward and that are not inputs or outputs}.
        takes: {node: peak bytes of new memory in its forward, and in its backward}.
        outputs: outputs of the stage graph.
        compiled: the analysis of the compiled graph, if the stage is compiled (`compiled_saved_tensors.py`).
    """

    trace: Trace
    program: Program
    stage: Stage
    inputs: Mapping[str, Any]
    input_buffers: Mapping[str, str]
    input_bytes: Mapping[str, tuple[fx.Node, int]]
    held: Mapping[str, ParameterGather] = field(default_factory=dict)
    """The parameters that the runtime keeps unsharded during a step (ZeRO 1 and 2)."""
    values: dict[fx.Node, Any] = field(default_factory=dict)
    keeps: dict[fx.Node, list[MemoryBuffer]] = field(default_factory=dict)
    others: dict[fx.Node, int] = field(default_factory=dict)
    takes: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)
    outputs: tuple[Any, ...] = ()
    compiled: Liveness | None = None
    in_place: Set[fx.Node] = frozenset()
    """The operators that overwrite an input that no later operator uses, as fused kernels do."""

    @property
    def in_memory(self) -> Liveness:
        """Analysis of the graph that the runtime executes: the compiled graph if there is one."""
        return self.compiled or self

    def run(self) -> None:
        received, attributes = iter(self.stage.receives), dict[str, LocalValue]()
        for node in self.stage.graph.graph.nodes:
            if node.op == "placeholder":
                stage_input = self.inputs.get(str(node.target))
                self.values[node] = stage_input if stage_input is not None else _received(next(received), node)
            elif node.op == "get_attr":
                attribute = attributes.setdefault(str(node.target), self._read(node))
                self.values[node] = attribute
            elif node.op == "output":
                self.outputs = tuple(node.args[0])
            elif node.target is operator.getitem:
                self.values[node] = self.values[node.args[0]][node.args[1]]
            else:
                self.values[node] = self._call(node)

    def _read(self, node: fx.Node) -> LocalValue:
        """Return the value of a parameter or buffer that a node reads.

        A parameter that stays unsharded for a step has its full shape.
        """
        attribute = _attribute(self.trace, node)
        if str(node.target) not in self.held:
            return attribute
        way = self.held[str(node.target)]
        shape = (*attribute.form.shape[: way.dim], way.size, *attribute.form.shape[way.dim + 1 :])
        form = TensorSpec.contiguous(shape, way.dtype or attribute.form.dtype, attribute.form.needs_grad)
        return LocalValue(form, MemoryBuffer(form.size_bytes, True, node))

    def gathers_unsharded(self, node: fx.Node) -> bool:
        """Return True if a node gathers a parameter that is already unsharded for the step.

        No collective runs for such a node.
        """
        source = node.args[0] if node.args else None
        return isinstance(source, fx.Node) and source.op == "get_attr" and str(source.target) in self.held

    def _call(self, node: fx.Node) -> Any:
        name = operator_name(node).removeprefix("autopart::")
        if name == "axis_index":
            return 0
        if self.gathers_unsharded(node):
            return self.values[node.args[0]]
        if name in DIRECTIONS:
            result = self._convert(node, DIRECTIONS[name][0])
            if name in DISPATCH_CONVERSIONS and result.form.needs_grad:
                self.others[node] = self.values[node.args[2]].form.size_bytes  # the saved sort order of the tokens
            self.takes[node] = self._conversion_bytes(node, result.form, self.values[node.args[0]].form)
            return result
        if name in ROTATING:
            return self._rotate(node)
        result = call(node, self.values, self.keeps, self.others, self.takes)
        if is_cast(node):
            result.memory.again = True
        return result

    def _rotate(self, node: fx.Node) -> LocalValue:
        """Return the output of ring attention, and record its saved tensors and workspace.

        Ring attention saves its operands, its output and one log-sum-exp per query. Its workspace holds the keys and
        values of two ranks, and in backward their gradients.
        """
        traced = value(node)
        sides: list[LocalValue] = [self.values[used] for used in tensor_inputs(node)]
        form = TensorSpec.contiguous(traced.shape, traced.dtype, any(side.form.needs_grad for side in sides))
        output = LocalValue(form, MemoryBuffer(form.size_bytes, False, node))
        totals = form.size_bytes // traced.shape[-1]
        if form.needs_grad:
            self.keeps[node] = [*(side.memory for side in sides), output.memory]
            self.others[node] = totals
        moving = sum(side.form.size_bytes for side in sides[1:3])
        self.takes[node] = (form.size_bytes + totals + moving, 4 * moving + 2 * sides[0].form.size_bytes)
        return output

    def _conversion_bytes(self, node: fx.Node, result: TensorSpec, source: TensorSpec) -> tuple[int, int]:
        """Return (forward, backward) peak bytes of new memory of a layout conversion and its dtype casts."""
        name = operator_name(node).removeprefix("autopart::")
        in_order = len(node.args) < 4 or (node.args[2] == 0 and len(node.args) == 4)
        numbers = [form.size_bytes // form.dtype.itemsize for form in (result, source)]
        sent = result.dtype, node.kwargs.get("grad_dtype") or result.dtype
        forward, backward = (
            _moving_bytes(kind, max(numbers) * dtype.itemsize, min(numbers) * dtype.itemsize, in_order)
            for kind, dtype in zip(DIRECTIONS[name], sent, strict=True)
        )
        forward += numbers[1] * sent[0].itemsize * (source.dtype != sent[0])
        backward += numbers[0] * sent[1].itemsize * (result.dtype != sent[1])
        return forward, backward + source.size_bytes * (source.dtype != sent[1])

    def _convert(self, node: fx.Node, primitive: str) -> Any:
        """Return the output of a layout conversion: a collective, or a local operation such as a slice.

        Shapes and buffers are those of `runtime.comm.collectives`.
        """
        source: LocalValue = self.values[node.args[0]]
        parts = self.program.mesh.size(node.args[1])
        form, owner = source.form, source.memory
        form = form._replace(dtype=node.kwargs.get("dtype") or form.dtype)
        if primitive == "identity":
            return source
        shape, in_order = list(form.shape), False
        if primitive in ("slice", "reduce_scatter", "all_gather", "pad"):
            dim, size, *rest = node.args[2:]
            cut = DimSharding(dim, size, tuple(rest[0]) if rest else (), parts)
            shape[dim] = size if primitive in ("all_gather", "pad") else cut.longest
            in_order = primitive == "slice" and len(cut.spans(0)) == 1
        elif primitive == "all_to_all" and operator_name(node).removeprefix("autopart::") not in OPERATORS:
            shape = list(value(node).shape)  # the number of dispatched tokens is the expected one
        elif primitive == "all_to_all":
            cut_before, cut_after = node.args[2:4]
            shape[cut_before] *= parts
            shape[cut_after] = shard_sizes(shape[cut_after], parts)[0]
        result_form = TensorSpec.contiguous(
            shape, form.dtype, form.needs_grad and node.target.__name__ != "all_reduce_max"
        )
        if (
            in_order and TensorSpec(result_form.shape, form.stride, form.dtype).is_contiguous
        ):  # a view of the first elements
            return LocalValue(result_form, owner)
        stores = self.program.mesh.stores(node.args[1])
        again = primitive == "all_gather" and stores and stored_source(node) is not None
        return LocalValue(result_form, MemoryBuffer(result_form.size_bytes, False, node, again))

    def reached(self) -> set[fx.Node]:
        """Return the nodes through which a gradient of the stage's outputs flows."""
        alive: set[fx.Node] = set()
        todo = [node for node in self.outputs if isinstance(node, fx.Node)]
        while todo:
            node = todo.pop()
            if node not in alive and needs_grad(self.values[node]):
                alive.add(node)
                todo.extend(node.all_input_nodes)
        return alive

    def regions(self, alive: Set[fx.Node]) -> dict[int, list[fx.Node]]:
        """Return {index of a recomputed region (`Facts.region`): its operators}.

        Args:
            alive: nodes that a gradient flows through. Regions without such a node are left out.
        """
        by_region: dict[int, list[fx.Node]] = {}
        for node in self.values:
            if "region" in facts(node) and node.op == "call_function":
                by_region.setdefault(facts(node)["region"], []).append(node)
        return {region: nodes for region, nodes in by_region.items() if any(node in alive for node in nodes)}

    def towards(self, node: fx.Node) -> list[fx.Node]:
        """Return the inputs of a node that need a gradient."""
        return [used for used in node.all_input_nodes if needs_grad(self.values[used])]

    def read_by(self, nodes: Sequence[fx.Node]) -> list[MemoryBuffer]:
        """Return the buffers that a group of operators reads from outside, without persistent buffers."""
        inside = set(nodes)
        read = [used for node in nodes for used in node.all_input_nodes if used not in inside]
        return [memory for used in dict.fromkeys(read) for memory in memories(self.values[used])]

    def of_weights(self, alive: Set[fx.Node]) -> set[fx.Node]:
        """Return the nodes in `alive` whose backward computes only gradients of weights."""
        weights: set[fx.Node] = set()
        for node in self.values:
            if node not in alive:
                continue
            grads = self.towards(node)
            if node.op == "get_attr" or (grads and all(used in weights for used in grads)):
                weights.add(node)
        return weights


def _moving_bytes(primitive: str, whole: int, part: int, in_order: bool) -> int:
    """Return the peak bytes of new memory of a layout conversion in `runtime.comm.collectives`.

    Shards that are not contiguous are copied into one buffer before they are sent, or concatenated after they are
    received.

    Args:
        primitive: name of the collective or local operation.
        whole: bytes of the full array.
        part: bytes of a shard.
        in_order: True if shards are contiguous in the full array.
    """
    copied = 0 if in_order else whole
    taken = {"all_reduce": whole, "all_gather": whole + copied, "reduce_scatter": part + copied}
    return taken.get(primitive, 3 * whole if primitive == "all_to_all" else 0)


def call(
    node: fx.Node, values: Mapping[fx.Node, Any], keeps: dict[fx.Node, list[MemoryBuffer]], others: dict[fx.Node, int],
    takes: dict[fx.Node, tuple[int, int]],
) -> Any:  # fmt: skip
    """Return the outputs of an operator call, and record its saved tensors and workspace.

    Args:
        keeps, others: dicts to which the saved tensors of `node` are added: buffers of inputs and outputs in `keeps`,
            bytes of all other saved tensors in `others`.
        takes: dict to which the peak workspace of `node` is added, as (bytes in forward, bytes in backward).
    """
    assert callable(node.target)
    inputs = [values[used] for used in tensor_inputs(node)]
    read = [v for v in inputs if isinstance(v, LocalValue)]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _form(values[n]))
    try:
        effect = EFFECT_CACHE.effect(node.target, args, kwargs)
    except (
        RuntimeError,
        NotImplementedError,
        TypeError,
    ):  # fake tensors are not enough: assume that all inputs and outputs are saved
        effect = _unknown(node, read)
    pieces = [MemoryBuffer(size, False, node) for size in effect.pieces]
    owners = [read[index].memory if index >= 0 else pieces[-1 - index] for index in effect.memory]
    keeps[node] = [read[i].memory for i in effect.kept.inputs] + [owners[i] for i in effect.kept.outputs]
    takes[node] = effect.forward_bytes, effect.backward_bytes
    if effect.kept.other_bytes:
        others[node] = effect.kept.other_bytes
    tensors = [LocalValue(form, owner) for form, owner in zip(effect.forms, owners, strict=True)]
    return map_tuple(effect.made, lambda leaf: tensors[leaf.number] if isinstance(leaf, TensorIndex) else leaf)


def map_tuple(nested: Any, function: Any) -> Any:
    if not isinstance(nested, tuple):
        return function(nested)
    return tuple(map_tuple(item, function) for item in nested)


def _form(result: Any) -> Any:
    return result.form if isinstance(result, LocalValue) else result


def _unknown(node: fx.Node, read: Sequence[LocalValue]) -> Effect:
    traced = value(node)
    if traced is None:
        return Effect(None, (), (), (), SavedTensors((), (), 0))
    tensors = [t for t in (traced if isinstance(traced, (tuple, list)) else [traced]) if isinstance(t, torch.Tensor)]
    grad = any(v.form.needs_grad for v in read)
    forms = tuple(TensorSpec.contiguous(tuple(t.shape), t.dtype, grad) for t in tensors)
    memory = tuple(-1 - i for i in range(len(forms)))
    shown = tuple(TensorIndex(i) for i in range(len(forms))) if isinstance(traced, (tuple, list)) else TensorIndex(0)
    kept = SavedTensors(tuple(range(len(read))) if grad else (), tuple(range(len(forms))) if grad else (), 0)
    return Effect(shown, forms, memory, tuple(f.size_bytes for f in forms), kept)


def needs_grad(result: Any) -> bool:
    if isinstance(result, tuple):
        return any(map(needs_grad, result))
    return isinstance(result, LocalValue) and result.form.needs_grad


def _received(boundary: Boundary, node: fx.Node) -> LocalValue:
    form = TensorSpec.contiguous(boundary.shape, boundary.dtype, needs_grad=True)
    return LocalValue(form, MemoryBuffer(form.size_bytes, True, node))


def _attribute(trace: Trace, node: fx.Node) -> LocalValue:
    parameter = trace.parameters.get(str(node.target))
    traced = value(node)
    form = TensorSpec.contiguous(tuple(traced.shape), traced.dtype, parameter is not None and parameter.requires_grad)
    return LocalValue(form, MemoryBuffer(form.size_bytes, True, node))


def _stage_inputs(
    trace: Trace, program: Program, stage: Stage
) -> tuple[dict[str, Any], dict[str, str], dict[str, tuple[fx.Node, int]]]:  # fmt: skip
    """Return the stage inputs that the prologue computes (such as masks), for a microbatch on one rank.

    Returns ({stage input: its value}, {stage input: name of its buffer}, {name of a buffer: (node that allocates it,
    its bytes for all microbatches)}).
    """
    values: dict[fx.Node, Any] = {}
    forms = [TensorSpec.of(t, t.requires_grad) for t in trace.call.tensors]
    if program.input_names[-1:] == (SEEDS,):
        forms.append(TensorSpec.contiguous((program.data_parallel_size * program.microbatches,), torch.int64))
    call_forms = iter(forms)
    outputs: tuple[Any, ...] = ()
    for node in stage.prologue.graph.nodes:
        if node.op == "placeholder":
            form = next(call_forms)
            values[node] = LocalValue(form, MemoryBuffer(form.size_bytes, True, node))
        elif node.op == "get_attr":
            values[node] = _attribute(trace, node)
        elif node.op == "output":
            outputs = tuple(map_aggregate(node.args[0], lambda a: values[a] if isinstance(a, fx.Node) else a))
        elif node.target is operator.getitem:
            values[node] = values[node.args[0]][node.args[1]]
        else:
            values[node] = call(node, values, {}, {}, {})
    inputs: dict[str, Any] = {}
    names, sizes = dict[MemoryBuffer, str](), dict[str, tuple[fx.Node, int]]()
    buffers: dict[str, str] = {}
    read = {str(node.target): node for node in stage.graph.graph.find_nodes(op="placeholder")}
    for stage_input, whole in zip(stage.inputs, outputs, strict=False):
        if not isinstance(whole, LocalValue):
            inputs[stage_input.name] = whole
            continue
        rows, memory = _microbatch_samples(program, program.runs_of(stage), stage_input.batch_dim, whole)
        is_copied = memory is not whole.memory  # each microbatch has a copy
        number = program.runs_of(stage) * times(read[stage_input.name]) if is_copied else times(memory.made_by)
        if not memory.lives:
            name = buffers[stage_input.name] = names.setdefault(memory, stage_input.name)
            sizes[name] = memory.made_by, memory.size_bytes * number
        inputs[stage_input.name] = LocalValue(rows, MemoryBuffer(rows.size_bytes, True, memory.made_by))
    return inputs, buffers, sizes


def _microbatch_samples(
    program: Program, num_runs: int, dim: int | None, whole: LocalValue
) -> tuple[TensorSpec, MemoryBuffer]:
    """Return the spec and the buffer of the samples that a rank has in one microbatch.

    If the batch is dim 0, the samples are a view of the global batch. Otherwise they are copied.

    Args:
        num_runs: number of microbatches; 1 for the tail, which runs once for all microbatches.
        dim: the batch dim; None if the value has no batch dim.
        whole: the value for the global batch.
    """
    blocks = program.data_parallel_size * num_runs
    form = whole.form
    if dim is None or blocks == 1:
        return form, whole.memory
    shape = [*form.shape]
    shape[dim] = shard_sizes(shard_sizes(shape[dim], program.data_parallel_size)[0], num_runs)[0]
    if dim == 0:
        return TensorSpec(tuple(shape), form.stride, form.dtype, form.needs_grad), whole.memory
    rows = TensorSpec.contiguous(shape, form.dtype, form.needs_grad)
    return rows, MemoryBuffer(rows.size_bytes, False, whole.memory.made_by)
