"""Check that a traced graph and the model give gradients to the same parameters and inputs.

The model's own Python runs once more outside of the trace, on meta tensors (`meta_run`). Its autograd graph shows
which parameters the outputs and the loss depend on. The traced graph is analyzed in the same way. If the dependencies
differ, the model and the graph are differentiated, and the tensors that get a gradient must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointFunction

from autopart.common.empty_tensors import without_values
from autopart.common.scoped import no_autocast
from autopart.compat.torch_internals import tree_flatten
from autopart.errors import Refusal, TraceError
from autopart.ir.blocks.deduplication import NotDeduplicable, names_of
from autopart.ir.facts import facts
from autopart.ir.graph import is_floating, operator_name, source_text, value
from autopart.ir.trace import Trace, device_of_weights
from autopart.tracing.autograd.meta_run import meta_run
from autopart.tracing.call_signature import PREFIX, ExportEntry
from autopart.tracing.python.concrete_constants import ConcreteConstants
from autopart.tracing.python.eager_semantics import traceable
from autopart.tracing.trace_model import flatten_call
from autopart.tracing.with_loss import users_model

_CUTS = "aten::detach", "aten::detach_copy"


@dataclass(frozen=True)
class _GradientRun:
    """Result of a run of the model or its traced graph: flat outputs, and tensors that can get gradients."""

    outputs: Sequence[Any]
    leaves: Mapping[int, str]
    tensors: Mapping[str, Tensor]

    def reached(self, outputs: Sequence[Any]) -> set[str]:
        """Return the names of parameters and inputs from which autograd's graph leads to these outputs."""
        names = {self.leaves[id(o)] for o in outputs if isinstance(o, Tensor) and id(o) in self.leaves}
        todo = [o.grad_fn for o in outputs if isinstance(o, Tensor)]
        seen = set(todo)
        while todo:
            node = todo.pop()
            if node is None:
                continue
            name = self.leaves.get(id(getattr(node, "variable", None)))
            if name is not None:
                names.add(name)
            for after, _ in node.next_functions:
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        return names

    def with_gradient(self, outputs: Sequence[Any], names: set[str]) -> set[str]:
        """Differentiate these outputs, and return the names of parameters and inputs that get a gradient."""
        differentiable = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
        if not differentiable or not names:
            return set()
        ordered = sorted(names)
        seeds = [torch.empty_like(o) for o in differentiable]
        leaves = [self.tensors[name] for name in ordered]
        grads = torch.autograd.grad(differentiable, leaves, seeds, retain_graph=True, allow_unused=True)
        return {name for name, grad in zip(ordered, grads, strict=True) if grad is not None}


def with_gradients_checked(
    model: nn.Module, arguments: Mapping[str, Any], traced: Trace, loss: fx.Node | None,
    buffers: Mapping[str, Tensor] = MappingProxyType({}),
) -> Trace:  # fmt: skip
    """Check that a trace and its model give gradients to the same parameters. Return the trace.

    Also records the modules that the model's code checkpoints, because a trace that runs equal blocks only once can
    miss some. Adds a note if the model does not run on meta tensors, so that nothing was compared. Raises TraceError
    if the trace loses or adds a gradient.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained and not traced.call.with_gradient:
        return traced
    if traced.has_random_branches:
        return traced  # a run of the model takes only one side of each branch
    device = device_of_weights(model)
    entry = ExportEntry(model, arguments, flatten_call(arguments).names, device, buffers)
    leaves = {id(p): name for name, p in traced.all_parameters.items() if p.requires_grad}
    try:
        stands_for = {id(p): without_values(p) for p in (*model.parameters(), *model.buffers())}
        inputs = [without_values(t) for t in traced.call.tensors]
        known = ConcreteConstants()
        if traced.value_guards:
            known.bind(inputs, entry.real)
            known.buffers = entry.semantics.known.buffers
            held = {
                name: stands_for.get(id(buffer)) for name, buffer in traced.buffers.items() if name in known.buffers
            }
            known.hold({name: buffer for name, buffer in held.items() if buffer is not None})
        with no_autocast(), meta_run(device, known):
            flat = tree_flatten(_call(entry, stands_for, inputs))[0]
    except Exception as error:  # the model's code may raise anything for tensors without values
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"
        return replace(traced, notes=(*traced.notes, f"its gradients were not compared with the model's ({reason})"))
    tensors = {name: stands_for[id(p)] for name, p in traced.all_parameters.items() if p.requires_grad}
    wanted = traced.call.with_gradient
    tensors |= {f"input {n}": t for n, t in zip(traced.call.names, inputs, strict=True) if n in wanted}
    leaves |= {id(t): name for name, t in tensors.items()}
    eager = _GradientRun(flat, leaves, tensors)
    _compare(type(users_model(model)).__name__, eager, traced, device, inputs, loss)
    return replace(traced, checkpointed=entry.checkpoints.found or traced.checkpointed)


def _call(entry: ExportEntry, stands_for: Mapping[int, Tensor], inputs: Sequence[Tensor]) -> Any:
    """Run the model's own Python on the traced call, and return the result."""
    weights = {f"{PREFIX}{name}": stands_for[id(t)] for name, t in _own_tensors(entry.model)}

    def apply(apply: Callable[..., Any], function: type, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function is CheckpointFunction:
            return entry.checkpoints.apply(apply, function, args, kwargs)
        return apply(function, *args, **kwargs)

    with traceable(entry, apply):
        inputs_by_name = dict(zip(entry.tensor_names, inputs, strict=True))
        # `weights` lists tied tensors under all names.
        return functional_call(entry, weights, (), inputs_by_name, tie_weights=False)


def _own_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all parameters and buffers. A tied tensor is yielded under every name."""
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}".lstrip("."), tensor


def _compare(
    name: str, eager: _GradientRun, traced: Trace, device: torch.device, inputs: Sequence[Tensor], loss: fx.Node | None
) -> None:
    """Raise TraceError if a parameter gets a gradient in the model and not in the trace, or vice versa."""
    outputs = list(traced.graph.output_node().args[0])
    reached = _static(traced)
    graph: _GradientRun | None = None
    for of in ([loss] if loss is not None else []) + [None]:
        places = range(len(outputs)) if of is None else [outputs.index(of)]
        of_model = [eager.outputs[i] for i in places]
        expected = eager.reached(of_model)
        actual = set().union(*(reached.get(outputs[i], set()) for i in places if isinstance(outputs[i], fx.Node)))
        if expected == actual:
            continue
        if traced.folds:
            raise NotDeduplicable("gradients can be compared only in the full trace")
        graph = graph or _graph_run(traced, eager, device, inputs)
        without_elements = {name for name, tensor in eager.tensors.items() if not tensor.numel()}
        lost = eager.with_gradient(of_model, expected - actual - without_elements)
        made_up = graph.with_gradient([graph.outputs[i] for i in places], actual - expected)
        if lost or made_up:
            raise _difference(name, traced, lost, made_up)


def _static(traced: Trace) -> dict[fx.Node, set[str]]:
    """Return {node: names of the trained parameters and inputs that the node's gradient flows to}."""
    reached: dict[fx.Node, set[str]] = {}
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            parameter = traced.parameters.get(node.target)
            trained = parameter is not None and parameter.requires_grad
            reached[node] = set(names_of(traced.folds, node.target)) if trained else set()
        elif node.op == "placeholder":
            reached[node] = {f"input {facts(node)['input_name']}"} if facts(node).get("input_grad") else set()
        elif node.op == "call_function":
            several = isinstance(value(node), (tuple, list))
            carries = (several or is_floating(node)) and operator_name(node) not in _CUTS
            sets = [reached[source] for source in node.all_input_nodes if reached[source]] if carries else []
            reached[node] = sets[0] if len(sets) == 1 else set().union(*sets)
    return reached


def _graph_run(traced: Trace, eager: _GradientRun, device: torch.device, inputs: Sequence[Tensor]) -> _GradientRun:
    """Run the traced graph on the meta tensors of the eager run, which are cast to the graph's dtypes."""
    others = {**traced.buffers, **traced.constants, **traced.parameters}
    dtypes = {n.target: value(n).dtype for n in traced.graph.find_nodes(op="get_attr")}
    with no_autocast(), meta_run(device, ConcreteConstants()):
        tensors = {name: without_values(t) for name, t in others.items() if name not in eager.tensors}
        tensors = {name: t.to(dtypes.get(name, t.dtype)) for name, t in (tensors | dict(eager.tensors)).items()}
        nodes = traced.graph.find_nodes(op="placeholder")
        cast_inputs = [t.to(value(n).dtype) for t, n in zip(inputs, nodes, strict=True)]
        values = traced.values(cast_inputs, tensors)
    outputs = traced.graph.output_node().args[0]
    flat = [values[o] if isinstance(o, fx.Node) else o for o in outputs]
    return _GradientRun(flat, eager.leaves, eager.tensors)


def _difference(name: str, traced: Trace, lost: set[str], made_up: set[str]) -> TraceError:
    ordered = [n for n in (*traced.parameters, *(f"input {n}" for n in traced.call.names)) if n in (lost or made_up)]
    names = ", ".join(f"'{n}'" for n in ordered[:3]) + ", ..." * (len(ordered) > 3)
    readers = [n for n in traced.graph.nodes if any(source.target == ordered[0] for source in n.all_input_nodes)]
    return TraceError(
        f"the trace of {name} {'loses the gradient of' if lost else 'gives a gradient to'} {names}",
        refusal=Refusal.GRADIENT,
        why="the model gives them a gradient, and the trace does not" if lost else "the model gives them no gradient",
        where=source_text(readers[0]) if readers else "",
        hint="the same computation in plain torch operations, which torch.export records",
    )
