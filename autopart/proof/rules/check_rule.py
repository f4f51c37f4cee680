"""Check of a sharding rule by execution: run the operator under every sharding that the rule allows."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopart.compat.torch_internals import tree_flatten, tree_map
from autopart.ir.decisions import Decisions, Strategy
from autopart.ir.facts import DATA, facts
from autopart.ir.graph import operators
from autopart.ir.mesh import Mesh
from autopart.ir.trace import Call, Trace
from autopart.passes.facts.analyze import annotate
from autopart.passes.facts.strategies import ANY_KIND, strategies
from autopart.passes.normalize import AS_TRACED, NORMALIZE
from autopart.passes.pass_pipeline import PassError, run_passes
from autopart.passes.write.lower import lower
from autopart.proof.comparison import relative, weights_like
from autopart.runtime.comm.list_collectives import LIST_PRIMITIVES
from autopart.runtime.gradients.step_reduction import sync_gradients_lockstep
from autopart.runtime.lockstep import run_lockstep

TOLERANCE = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 1e-6}


def trace_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Trace, dict[str, nn.Parameter]]:
    """Trace an operator call, with its tensors as parameters.

    Returns the analyzed trace and {name: parameter}. A tensor that is passed twice becomes one parameter. The entry
    `val` in `node.meta` is the computed value of the node, not a fake tensor.
    """
    graph = fx.Graph()
    weights: dict[str, nn.Parameter] = {}
    node_of: dict[int, fx.Node] = {}

    def read(argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        if id(argument) not in node_of:
            node_of[id(argument)] = parameter(argument)
        return node_of[id(argument)]

    def parameter(argument: Tensor) -> fx.Node:
        name = f"p{len(weights)}"
        weights[name] = nn.Parameter(argument.detach().clone(), requires_grad=argument.requires_grad)
        node = graph.get_attr(name)
        node.meta |= {"val": weights[name], "parameter": True}
        return node

    node = graph.call_function(target, *tree_map(read, (tuple(args), dict(kwargs))))
    arguments = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    node.meta["val"] = target(*arguments[0], **arguments[1])
    outputs = _output_nodes(graph, node)
    graph.output(tuple(outputs))
    run_passes(graph, (*AS_TRACED, *NORMALIZE))
    _append_section_splits(graph)
    _, spec = tree_flatten(tuple(outputs))
    trace = Trace(graph, Call((), (), {}, ()), weights, {}, {}, {}, spec, (), "train")
    annotate(trace)
    graph.eliminate_dead_code()  # remove the splits, which only the analysis needs
    return trace, weights


def _output_nodes(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """Return the outputs of a node: the node itself, or a `getitem` node for each entry of its tuple."""
    values = node.meta["val"]
    if isinstance(values, Tensor):
        return [node]
    parts = [graph.call_function(operator.getitem, (node, i)) for i in range(len(values))]
    for part, value in zip(parts, values, strict=True):
        part.meta["val"] = value
    return parts


def _append_section_splits(graph: fx.Graph) -> None:
    """Append nodes that split each output dim into sections, as after a fused q/k/v projection.

    With these nodes, the analysis also offers placements in which each rank has a part of every section.
    """
    (outputs,) = graph.output_node().args
    with graph.inserting_before(graph.output_node()):
        for node in outputs:
            for dim, size in enumerate(node.meta["val"].shape):
                for sizes in {4: ([2, 2],), 6: ([4, 2],), 12: ([8, 4], [6, 6], [4, 4, 4])}.get(size, ()):
                    split = graph.call_function(torch.ops.aten.split_with_sizes.default, (node, list(sizes), dim))
                    split.meta["val"] = node.meta["val"].split(sizes, dim)


@dataclass
class Proof:
    """A traced operator call with its results on unsharded inputs, to compare sharded runs with them."""

    trace: Trace
    weights: dict[str, nn.Parameter]
    nodes: list[fx.Node]
    outputs: list[Tensor]
    grads: dict[str, Tensor]

    @staticmethod
    def of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Proof:
        trace, weights = trace_call(target, args, kwargs)
        outputs = fx.GraphModule(weights, trace.graph)()
        backward(outputs)
        grads = {name: w.grad for name, w in weights.items() if w.grad is not None}
        nodes = [node for node in operators(trace.graph) if facts(node)["role"] != DATA]  # without random operators
        return Proof(trace, weights, nodes, [o.detach() for o in outputs], grads)

    def decisions(self, mesh: Mesh, chosen: Mapping[str, Mapping[fx.Node, Strategy]]) -> Decisions:
        """Return sharding decisions: the strategies in `chosen`, and replication for all other operators.

        Args:
            chosen: {mesh axis: {operator: input and output placements}}.
        """
        whole = {node: strategies(node, 2, ANY_KIND)[0] for node in self.nodes}
        on_axes = {axis: {**whole, **chosen.get(axis, {})} for axis in (*mesh.along("rows"), *mesh.chosen)}
        return Decisions(mesh, 1, on_axes, {}, dict.fromkeys(whole, 0), 1)

    def error(self, mesh: Mesh, chosen: Mapping[str, Mapping[fx.Node, Strategy]]) -> str:
        """Run the call on all ranks with these strategies.

        Return a text that lists wrong outputs and gradients, or "" if all are right.
        """
        outputs = list(self.trace.graph.output_node().args[0])
        try:
            program = lower(self.trace, self.decisions(mesh, chosen), outputs, whole_outputs=True)
            local = {
                rank: {n: nn.Parameter(w.detach().clone(), w.requires_grad) for n, w in self.weights.items()}
                for rank in range(mesh.num_ranks)
            }
            seeds = [
                torch.zeros(mesh.data_parallel_size, dtype=torch.int64) for _ in program.input_names
            ]  # dropout seeds
            ran = run_lockstep(program, local, {}, seeds, primitives=UNEVEN_SUMS)
            by_rank = {rank: values for rank, (values,) in ran.items()}
            backward([value for values in by_rank.values() for value in values])
            sync_gradients_lockstep(local, program)
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError, AssertionError) as error:
            cause = error.__cause__ if isinstance(error, PassError) and error.__cause__ is not None else error
            return f"{type(cause).__name__}: {str(cause).splitlines()[0][:160]}"
        wrong = []
        tolerance = max(TOLERANCE.get(o.dtype, 0.0) for o in self.outputs)
        for rank, values in by_rank.items():
            for i, (value, expected) in enumerate(zip(values, self.outputs, strict=True)):
                wrong += [f"output {i} on rank {rank} by {e:.2g}" for e in [relative(value, expected)] if e > tolerance]
            for name, grad in self.grads.items():
                mine = local[rank][name].grad
                difference = relative(torch.zeros_like(grad) if mine is None else mine, grad)
                wrong += [f"gradient of {name} on rank {rank} by {difference:.2g}"] * (difference > tolerance)
        return ", ".join(wrong[:3])


def _uneven_sums(values: list[Tensor]) -> list[Tensor]:
    """Split a replicated value into partial sums that are non-zero on every rank.

    The usual split (the full value on the first rank, zeros on the others) would hide that an operator such as `tanh`
    is not linear.
    """
    if not values[0].is_floating_point():
        return LIST_PRIMITIVES["own"](values)
    rest = [(rank + 1) * 0.3 * weights_like(value).sin() for rank, value in enumerate(values[1:])]
    return [values[0] - sum(rest), *rest]


UNEVEN_SUMS = {**LIST_PRIMITIVES, "own": _uneven_sums}


def backward(values: Sequence[Tensor]) -> None:
    """Differentiate a weighted sum of all values. Weights are constant, and different for every entry."""
    values = [torch.view_as_real(v.resolve_conj()) if v.is_complex() else v for v in values]
    seeds = [(v * weights_like(v)).sum() for v in values if v.requires_grad]
    if seeds:
        torch.autograd.backward(seeds)
