"""Run all ranks of a program in one process, in lockstep. `autopart.verify` uses it.

The stage graphs are interpreted node by node. Each value is a list of local tensors, one for each rank of the stage. A
collective is a function of the local tensors of all ranks of a group, with the same arithmetic as on process groups.
Its autograd function takes and returns the tensors of all ranks. One `torch.autograd.backward` over the losses of all
ranks therefore computes the gradients of every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx

from autopart.compat.torch_internals import LazyGraphModule
from autopart.ir.collective_nodes import MOVES, autopart_operator, axis_of
from autopart.ir.facts import facts
from autopart.ir.layout import DISPATCH_CONVERSIONS, Conversion
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program, Stage
from autopart.ops.expert_dispatch import DispatchPlan
from autopart.ops.mask_key_ranges import MaskStructure
from autopart.ops.stage_masks import differ_by_rank, with_mask_structure
from autopart.runtime.batch.batch_split import Arguments, merge_for_tail, stage_arguments
from autopart.runtime.batch.buffer_updates import NewBuffers, buffer_updates_of
from autopart.runtime.comm.call_random import one_stream
from autopart.runtime.comm.collectives import Dtypes, attribute, bind, conversion_cuts, in_dtype, on_device
from autopart.runtime.comm.list_collectives import LIST_OPERATORS, LIST_PRIMITIVES, Primitives
from autopart.runtime.comm.stage_ranks import groups_along, stage_ranks
from autopart.runtime.graphs.apply_weight_updates import update_weights
from autopart.runtime.graphs.mask_kernels import StageMasks
from autopart.runtime.graphs.recompute_calls import run_again

PerRank = dict[int, Any]
"""A value of a stage: {rank: the rank's local value}, over the ranks that run the stage."""

OnValue = Callable[[int, int, fx.Node, PerRank], None]
"""Function that is called after every node, as on_value(stage index, microbatch, node, {rank: value})."""

OnNode = Callable[[fx.Node, PerRank], None]


def run_lockstep(
    program: Program,
    parameters: Mapping[int, Mapping[str, Tensor]],
    buffers: Mapping[str, Tensor],
    inputs: Sequence[Any],
    on_value: OnValue | None = None,
    *,
    stage_style: str = "loop",
    primitives: Primitives | None = None,
    new_buffers: dict[int, dict[str, Tensor]] | None = None,
) -> dict[int, list[tuple[Any, ...]]]:
    """Run every rank, stage and microbatch of `program` on the global `inputs`.

    The outputs are differentiable. In `torch.no_grad()`, each value is freed after its last use.

    Args:
        parameters: {rank: {name: local tensor}}, as `shard_state.shard_parameters` returns. If the model updates a
            parameter in its forward, the local tensors are changed in place.
        buffers: {name: tensor}, equal on every rank. They are not changed.
        inputs: inputs of the global batch, in the order of `program.input_names`.
        on_value: function that is called after every node.
        stage_style: assignment of stages to ranks, "loop" or "V".
        primitives: collectives on lists, instead of `LIST_PRIMITIVES`.
        new_buffers: dict that receives {rank: {buffer: new value}}.

    Returns:
        {rank: one tuple of outputs per microbatch} for the ranks of the last stage.

    Example: `torch.autograd.backward([out[0] for mbs in run_lockstep(...).values() for out in mbs])` computes every
    rank's gradients of a program whose only output is the loss.
    """
    device = _device_of(inputs, parameters)
    inputs = [value.to(device) if isinstance(value, Tensor) else value for value in inputs]
    update_weights(program, parameters, inputs, partial(_sum_along, program.mesh))
    runs = []
    with one_stream(program, inputs, device) as rewind:
        for stage in program.stages:
            rewind()
            values = _prologue_values(stage, device, buffers, [*inputs, *program.sizes.values()])
            ranks = stage_ranks(program, stage.index, stage_style)
            count = len(stage.inputs)
            keywords = {rank: _rank_arguments(program, stage, values[:count], rank) for rank in ranks}
            updates = values[count:]
            runs.append(_StageRun(stage, program, keywords, parameters, buffers, device, primitives, updates))

    outputs: dict[int, list[tuple[Any, ...]]] = {rank: [] for rank in runs[-1].ranks}
    for microbatch in range(program.microbatches):
        sent: list[PerRank] = []
        for run in runs[: program.num_stages]:
            # The ranks of two stages differ only in their `pp` coordinate, so they correspond in order.
            received = [dict(zip(run.ranks, value.values(), strict=True)) for value in sent]
            sent = run(received, microbatch, on_value)
        for rank, per_microbatch in outputs.items():
            per_microbatch.append(tuple(value[rank] for value in sent))
    if program.tail is not None:
        outputs = _run_tail(program, runs[-1], outputs, on_value)
    if new_buffers is not None:
        for run in runs:
            for rank in run.ranks:
                new_buffers.setdefault(rank, {}).update(run.new_buffers(program, rank))
    return outputs


def _prologue_values(
    stage: Stage, device: torch.device, buffers: Mapping[str, Tensor], inputs: Sequence[Any]
) -> tuple[Any, ...]:
    """Run a stage's prologue (the part that runs on the global batch) with an fx interpreter.

    A prologue runs only once here, so interpreting it takes less time than generating code.
    """
    run = fx.Interpreter(bind(stage.prologue, {}, {}, device, buffers, module_type=LazyGraphModule))
    run.extra_traceback = False
    values: tuple[Any, ...] = run.run(*inputs)
    return values


def _run_tail(
    program: Program, run: _StageRun, sent: Mapping[int, list[tuple[Any, ...]]], on_value: OnValue | None
) -> dict[int, list[tuple[Any, ...]]]:
    """Merge the microbatches of the values that the last stage sends, and run the tail once on them.

    The tail is the part of a model that needs all microbatches, such as a contrastive loss.

    Args:
        sent: {rank: the values that the last stage sends, for each microbatch}.
    """
    merged = {rank: merge_for_tail(program, per_microbatch) for rank, per_microbatch in sent.items()}
    received = [dict(zip(merged, values, strict=True)) for values in zip(*merged.values(), strict=True)]
    outputs = run(received, 0, on_value)
    return {rank: [tuple(value[rank] for value in outputs)] for rank in sent}


def _rank_arguments(program: Program, stage: Stage, values: Sequence[Any], rank: int) -> list[Arguments]:
    """Return the keyword arguments of a stage graph on a rank: one mapping for each run of the graph.

    Args:
        values: inputs of the stage graph for the global batch, which the stage's prologue has computed.
    """
    at, copies = program.mesh.coordinates(rank), _rank_copies(values)
    return stage_arguments(program, stage.inputs, copies, at, program.runs_of(stage))


def _device_of(inputs: Sequence[Any], parameters: Mapping[int, Mapping[str, Tensor]]) -> torch.device:
    """Return the device of the parameters, or of the inputs if there are no parameters."""
    tensors = [t for local in parameters.values() for t in local.values()]
    tensors += [t for t in inputs if isinstance(t, Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")


def _rank_copies(values: Sequence[Any]) -> list[Any]:
    """Copy the values that require a gradient, so that each rank gets separate gradients."""
    return [v.clone() if isinstance(v, Tensor) and v.requires_grad else v for v in values]


class _StageRun:
    """Runs a stage graph in lockstep on all ranks that have this stage: one call per microbatch."""

    def __init__(
        self,
        stage: Stage,
        program: Program,
        keywords: Mapping[int, list[dict[str, Any]]],
        parameters: Mapping[int, Mapping[str, Tensor]],
        buffers: Mapping[str, Tensor],
        device: torch.device,
        primitives: Primitives | None,
        prologue_updates: Sequence[Tensor],
    ):
        self.stage, self.keywords, self.primitives = stage, keywords, primitives
        self.prologue_updates = prologue_updates
        self.graph_updates: list[list[PerRank]] = []
        self.parameters, self.buffers, self.device = parameters, buffers, device
        self.mesh, self.ranks = program.mesh, list(keywords)
        self.coordinates = {rank: self.mesh.coordinates(rank) for rank in self.ranks}
        mask_structures = self._common_mask_structures(program.sizes)
        self.graph = with_mask_structure(stage, mask_structures, sizes=program.sizes).graph.graph
        self.last_uses = _last_uses(self.graph)

    def _common_mask_structures(self, sizes: Mapping[str, int]) -> dict[str, MaskStructure]:
        """Return {mask: structure (such as causal)} of masks with one structure on all ranks and microbatches."""
        tensors: dict[str, Any] = {"device": self.device, "tensors": self.buffers}
        masks = StageMasks(self.stage, lambda graph: bind(graph, {}, {}, **tensors), differ_by_rank(self.stage), sizes)
        mask_structures = [
            mask_structures
            for microbatches in self.keywords.values()
            for mask_structures in masks.mask_structures(microbatches)
        ]
        return dict(set(mask_structures[0]).intersection(*mask_structures))

    def __call__(self, received: list[PerRank], microbatch: int, on_value: OnValue | None) -> list[PerRank]:
        values: dict[fx.Node, PerRank] = {}
        positional = iter(received)
        names = {stage_input.name for stage_input in self.stage.inputs}
        on_node = partial(on_value, self.stage.index, microbatch) if on_value is not None else _ignore
        for region, members in groupby(self.graph.nodes, lambda node: facts(node).get("region")):
            nodes = list(members)
            if region is not None:
                values.update(self._region(nodes, values, on_node))
            for node in nodes:
                if node.op == "output":
                    outputs = [{rank: values[a][rank] if isinstance(a, fx.Node) else a for rank in self.ranks}
                               for a in node.args[0]]  # fmt: skip
                    count = len(self.stage.sends)
                    self.graph_updates.append(outputs[count:])
                    return outputs[:count]
                if region is None:
                    values[node] = self._value(node, values, positional, names, microbatch)
                    on_node(node, values[node])
                for used in self.last_uses.get(node, ()):
                    values.pop(used, None)
        raise AssertionError("the graph has no output node")

    def _value(
        self, node: fx.Node, values: Mapping[fx.Node, PerRank], received: Iterator[PerRank], names: set[str],
        microbatch: int,
    ) -> PerRank:  # fmt: skip
        if node.op != "placeholder":
            return self._evaluate(node, values)
        if node.target in names:
            return {rank: self.keywords[rank][microbatch][node.target] for rank in self.ranks}
        return next(received)

    def _region(
        self, nodes: list[fx.Node], values: Mapping[fx.Node, PerRank], on_node: OnNode
    ) -> dict[fx.Node, PerRank]:
        """Run a recompute region on all ranks and return its outputs.

        `on_node` is called after each node in the forward. It is not called when the backward recomputes the region.
        """
        members = set(nodes)
        region_inputs = {used: values[used] for node in nodes for used in node.all_input_nodes if used not in members}
        runs = iter([on_node])

        def run() -> dict[fx.Node, PerRank]:
            local, show = dict(region_inputs), next(runs, _ignore)
            for node in nodes:
                local[node] = self._evaluate(node, local)
                show(node, local[node])
            return {node: local[node] for node in nodes if not members.issuperset(node.users)}

        return run_again(run)

    def new_buffers(self, program: Program, rank: int) -> NewBuffers:
        """Return {buffer: new value} that this stage has computed on a rank."""
        graph = [[value[rank].detach() for value in microbatch] for microbatch in self.graph_updates]
        return buffer_updates_of(self.stage, program, self.prologue_updates, graph)

    def _evaluate(self, node: fx.Node, values: Mapping[fx.Node, PerRank]) -> PerRank:
        name, axis = autopart_operator(node), axis_of(node)
        if node.op == "get_attr":
            return {rank: self._attribute(rank, str(node.target)) for rank in self.ranks}
        if name is not None and axis is not None:
            if name == "axis_index":
                return {rank: self.coordinates[rank].get(axis, 0) for rank in self.ranks}
            return self._convert(name, node, axis, values)
        assert callable(node.target), f"{node.op} {node.target}"
        result = {}
        arguments = on_device(node, (node.args, node.kwargs), self.device)
        for rank in self.ranks:
            args, kwargs = fx.map_arg(arguments, lambda used, rank=rank: values[used][rank])
            result[rank] = node.target(*args, **kwargs)
        return result

    def _attribute(self, rank: int, name: str) -> Any:
        local = self.parameters[rank]
        return local[name] if name in local else attribute(self.stage.graph, name, self.buffers, self.device)

    def _convert(self, name: str, node: fx.Node, axis: str, values: Mapping[fx.Node, PerRank]) -> PerRank:
        dtypes = node.kwargs.get("dtype"), node.kwargs.get("grad_dtype")
        result: PerRank = {}
        for group in groups_along(self.mesh, self.ranks, axis):
            x, _, *arguments = (_of_group(argument, values, group) for argument in node.args)
            converted = convert_list(name, x, *arguments, primitives=self.primitives, dtypes=dtypes)
            result.update(zip(group, converted, strict=True))
        return {rank: result[rank] for rank in self.ranks}


def _of_group(argument: Any, values: Mapping[fx.Node, PerRank], group: Sequence[int]) -> Any:
    """Return an argument of a collective for a group of ranks: a list of the ranks' tensors, or a number."""
    if isinstance(argument, fx.Node) and isinstance(values[argument][group[0]], Tensor):
        return [values[argument][rank] for rank in group]
    return fx.map_arg(argument, lambda node: values[node][group[0]])


def _sum_along(mesh: Mesh, axis: str, values: dict[int, Tensor]) -> dict[int, Tensor]:
    """Sum values along a mesh axis. Return {rank: sum over the ranks that differ on this axis only}."""
    groups = groups_along(mesh, list(values), axis)
    return {rank: torch.stack([values[peer] for peer in group]).sum(0) for group in groups for rank in group}


def _ignore(node: fx.Node, value: PerRank) -> None: ...


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return {node: values that can be freed after the node, because no later node uses them}."""
    used_later: set[fx.Node] = set()
    uses: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for used in (*node.all_input_nodes, node):
            if used not in used_later:
                used_later.add(used)
                uses.setdefault(node, []).append(used)
    return uses


# --- Conversions on the list of all local tensors of one group, in the order of its ranks.


def convert_list(
    operator: str, values: Sequence[Tensor], *arguments: Any, primitives: Primitives | None = None,
    dtypes: Dtypes = (None, None),
) -> tuple[Tensor, ...]:  # fmt: skip
    """Apply a collective operator to the local tensors of all ranks of one group. Return their results.

    The operator is `torch.ops.autopart.<operator>(x, axis, *arguments, dtype=, grad_dtype=)`. `values` has the `x` of
    each rank. A tensor in `arguments` is also passed as a list over the ranks.

    >>> convert_list("all_reduce", [torch.tensor(1.0), torch.tensor(2.0)])
    (tensor(3.), tensor(3.))
    """
    if operator in LIST_OPERATORS:
        return tuple(LIST_OPERATORS[operator](values, *arguments))
    if operator in DISPATCH_CONVERSIONS:
        experts, counts, *rest = arguments
        args: tuple[Any, ...] = (
            [DispatchPlan.of(*rank_args, *rest) for rank_args in zip(experts, counts, strict=True)],
        )
    else:
        args = conversion_cuts(operator, values[0], len(values), arguments)
    return _ConvertList.apply(MOVES[operator], args, primitives or LIST_PRIMITIVES, dtypes, *values)


class _ConvertList(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, conversion: Conversion, args: tuple[Any, ...], primitives: Primitives, dtypes: Dtypes, *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.conversion, ctx.args, ctx.primitives = conversion, args, primitives
        ctx.dtypes = (values[0].dtype, dtypes[1])
        return tuple(primitives[conversion.forward]([in_dtype(value, dtypes[0]) for value in values], *args))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        stored, reduce_dtype = ctx.dtypes
        if torch.is_grad_enabled():  # create_graph=True: the gradient must be differentiable
            args, back = tuple(reversed(ctx.args)), ctx.conversion.transposed
            differentiable = _ConvertList.apply(back, args, ctx.primitives, (reduce_dtype, None), *grads)
            return None, None, None, None, *(grad.to(stored) for grad in differentiable)
        converted = ctx.primitives[ctx.conversion.backward](
            [in_dtype(grad, reduce_dtype) for grad in grads], *reversed(ctx.args)
        )
        return None, None, None, None, *(grad.to(stored) for grad in converted)
