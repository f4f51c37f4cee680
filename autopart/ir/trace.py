"""A traced model: its graph, the call that was traced, its parameters, buffers and constants."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import fx, nn

from autopart.common.empty_tensors import without_values
from autopart.compat.torch_internals import TreeSpec
from autopart.ir.blocks.deduplication import DeduplicatedBlocks, original
from autopart.ir.facts import facts
from autopart.ir.graph import shape
from autopart.ir.run.mixed_precision import Precision
from autopart.ir.run.value_guards import ValueCall, ValueGuards, ValueProgram
from autopart.ir.run.weight_updates import WeightUpdates

T = TypeVar("T")
_LIST_INDEX = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Call:
    """One call of the model: tensor arguments, and all other arguments (`options`), which a trace fixes.

    A trace is valid only for these shapes, dtypes and `requires_grad` flags. `gradients`: `requires_grad` of each
    tensor before the call, because a forward can set `requires_grad` on an input.
    """

    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    options: Mapping[str, Any]
    gradients: tuple[bool, ...]

    @property
    def with_gradient(self) -> tuple[str, ...]:
        """Names of the tensor arguments that require gradients."""
        return tuple(name for name, gradient in zip(self.names, self.gradients, strict=True) if gradient)


@dataclass(frozen=True)
class Trace:
    """A traced model.

    Attributes:
        graph: the graph. Its placeholders are the tensor inputs in the order of `call.names`. The first argument of its
            output node is the list of flat outputs, the second is `buffer_updates`.
        parameters: {name: parameter of the model}, in the model's order.
        aliases: other names of tied parameters.
        constants: tensors that the trace captured.
        notes: remarks for the user on how the model was traced.
        checkpointed: paths of the modules that the model runs under `torch.utils.checkpoint`: "" for the model itself,
            None for a function without modules.
        autocast: dtype of the `torch.autocast` region around the call, "" without one.
        written: names of frozen parameters that the forward writes. The trace treats them as buffers.
        weight_updates: changes, such as `max_norm`, that the forward makes to trained parameters before the graph runs.
        precision: mixed precision of the graph, which casts parameters where it uses them. `parameters` are not cast.
        has_random_branches: True if random numbers or values decide which branches run.
        value_guards: values of inputs that Python read. The trace serves calls with equal values.
        attribute_updates: {attribute of a module: its new value} for numbers and flags that the forward changes.
        size_conditions: conditions on sizes that the model's Python evaluated (`tracing/python/size_conditions.py`).
        folds: deduplicated blocks, each of which represents several blocks of the model (`ir/blocks/`).
        whole: the trace before deduplication, with all blocks; None if no block was deduplicated.
        hidden_matrices: names of the matrices that Muon updates (`ir/run/full_tensors.py`).
    """

    graph: fx.Graph
    call: Call
    parameters: Mapping[str, torch.Tensor]
    aliases: Mapping[str, tuple[str, ...]]
    buffers: Mapping[str, torch.Tensor]
    constants: Mapping[str, torch.Tensor]
    output_spec: TreeSpec
    notes: tuple[str, ...]
    mode: str
    checkpointed: tuple[str | None, ...] = ()
    autocast: str = ""
    written: frozenset[str] = frozenset()
    weight_updates: WeightUpdates = field(default_factory=dict)
    precision: Precision | None = None
    has_random_branches: bool = False
    value_guards: ValueGuards = field(default_factory=ValueGuards)
    attribute_updates: Mapping[str, Any] = field(default_factory=dict)
    size_conditions: tuple[Any, ...] = ()
    folds: DeduplicatedBlocks = ()
    whole: Trace | None = None
    hidden_matrices: frozenset[str] = frozenset()

    def without_values(self) -> Trace:
        """Return a copy of the trace whose parameters are on the meta device, so that they need no memory."""
        return replace(self, parameters={name: without_values(p) for name, p in self.parameters.items()})

    def attributes_after(
        self, tensors: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> Mapping[str, Any]:
        """Return {module attribute that the forward changes: its value after a call with these tensors}."""
        if not self.attribute_updates:
            return {}
        recorded = {name: value for name, value in self.attribute_updates.items() if isinstance(value, ValueCall)}
        values = ValueProgram([*recorded.values()]).run(tensors, buffers)
        return {**self.attribute_updates, **dict(zip(recorded, values, strict=True))}

    @property
    def all_parameters(self) -> Mapping[str, torch.Tensor]:
        """Parameters of all blocks of the model, including those that deduplication removed from the graph."""
        return self.parameters if self.whole is None else self.whole.parameters

    @cached_property
    def originals(self) -> Mapping[str, str]:
        """{parameter of the model: the parameter in the graph that represents it}."""
        return {name: original(self.folds, name) for name in self.all_parameters}

    def expand_to_all(self, known: Mapping[str, T]) -> Mapping[str, T]:
        """Expand {parameter in the graph: value} to all model parameters that the graph parameters represent."""
        if not self.folds:
            return known
        return {name: known[stands] for name, stands in self.originals.items() if stands in known}

    def multiplicity_of(self, name: str) -> int:
        """Return how many parameters of the model this parameter of the graph represents."""
        return next((fold.times for fold in self.folds if fold.holds(name)), 1)

    @property
    def buffer_updates(self) -> Mapping[str, fx.Node]:
        """{buffer: node with its value after the forward}, for buffers that the model writes."""
        rest = self.graph.output_node().args[1:]
        return rest[0] if rest else {}

    def values(self, inputs: Iterable[torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> dict[fx.Node, Any]:
        """Run the graph on these inputs and return {node: its value}.

        Args:
            inputs: one tensor for each placeholder.
            tensors: {name: tensor} of the parameters, buffers and constants.
        """
        run = _NamedTensorInterpreter(nn.Module(), garbage_collect_values=False, graph=self.graph)
        run.tensors, run.extra_traceback = tensors, False
        try:
            run.run(*inputs)
        except (RuntimeError, NotImplementedError) as error:
            if type(error) not in (RuntimeError, NotImplementedError):  # such as a lack of memory
                raise
            node = next(node for node in self.graph.nodes if node not in run.env)
            raise OperatorError(node, str(error)) from error
        return run.env


class OperatorError(RuntimeError):
    """An operator of a graph that raised an error. `node`: its node."""

    def __init__(self, node: fx.Node, text: str):
        super().__init__(text)
        self.node = node


class _NamedTensorInterpreter(fx.Interpreter):
    tensors: Mapping[str, torch.Tensor]

    def fetch_attr(self, target: str) -> torch.Tensor:
        return self.tensors[target]


def device_of_weights(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter, or the CPU for a model without parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def batch_size(trace: Trace) -> int:
    """Return the number of samples of the global batch: the most common first dim of the model's inputs.

    A list with one tensor per sample, such as the boxes of each image, has no batch dim. Its tensors do not count, if
    the model has other inputs. If the model has no tensor inputs, the inputs of the loss function are used. Without
    any, the number is 1.
    """
    inputs = [n for n in trace.graph.find_nodes(op="placeholder") if shape(n)]
    of_model = [n for n in inputs if not facts(n).get("loss")] or inputs
    lists: dict[str, list[int]] = {}
    single = []
    for node in of_model:
        name = str(facts(node).get("input_name", node.name))
        in_list = _LIST_INDEX.sub("", name, count=1)
        lists.setdefault(in_list, []).append(shape(node)[0]) if in_list != name else single.append(shape(node)[0])
    sizes = list(single)
    for entries in lists.values():
        one_per_sample = len(entries) in single and entries[0] not in single
        if len(set(entries)) == 1 and not one_per_sample:
            sizes += entries
    sizes = sizes or [shape(n)[0] for n in of_model]
    return max(sizes, key=sizes.count) if sizes else 1
