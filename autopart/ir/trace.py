"""A traced model: its graph, its call, and the tensors that the graph reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import fx, nn

from autopart.common.empty_tensors import without_values
from autopart.compat.torch_internals import TreeSpec
from autopart.ir.blocks.deduplication import Folds, original
from autopart.ir.graph import shape
from autopart.ir.run.mixed_precision import Precision
from autopart.ir.run.weight_updates import WeightUpdates

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One call of the model, its arguments by name: tensors to feed, and options that the trace fixes.

    Which tensors need gradients is part of what a trace is for, as their shapes and dtypes are: `gradients`, as it is
    before the call. A forward may say of another input that it does, for a gradient that it takes itself.
    """

    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    options: Mapping[str, Any]
    gradients: tuple[bool, ...]

    @property
    def with_gradient(self) -> tuple[str, ...]:
        """The names of the tensors that need gradients."""
        return tuple(name for name, gradient in zip(self.names, self.gradients, strict=True) if gradient)


@dataclass(frozen=True)
class Trace:
    """A traced model.

    `graph`: placeholders are the tensor inputs in `call.names` order (`input_name`; with a true
    `input_grad` where the input needs a gradient); its output node holds the flat outputs and, as
    its second argument, `buffer_updates`.
    `parameters`: `{name: the model's own}` in the model's order; `aliases`: other names of a tied parameter.
    `constants`: tensors written into the trace. `notes`: what a user should know about how it was traced.
    `autocast`: the dtype of the `torch.autocast` that the model was called in, "" outside of one.
    `checkpointed`: paths of the modules that the model runs under `torch.utils.checkpoint`, "" for itself; None: of
    functions that hold no module.
    `written`: those of the buffers that are frozen parameters of the model. `weight_updates`: how trained parameters
    change before the graph runs. `precision`: what the graph was traced in, where its parameters are to be cast to that
    when they are read; `parameters` are as they are stored.
    `by_chance`: whether random numbers decide what the model runs.
    `folds`: the blocks of the graph, and of `parameters`, that stand for others, which it leaves out (`folding.py`);
    `whole`: the same trace with all of them, as it was traced.
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
    by_chance: bool = False
    folds: Folds = ()
    whole: Trace | None = None

    def without_values(self) -> Trace:
        """The same, with parameters that hold no memory."""
        return replace(self, parameters={name: without_values(p) for name, p in self.parameters.items()})

    @property
    def all_parameters(self) -> Mapping[str, torch.Tensor]:
        """Those of all blocks, where some are left out, too."""
        return self.parameters if self.whole is None else self.whole.parameters

    @cached_property
    def originals(self) -> Mapping[str, str]:
        """{parameter of any block: the one in the graph that stands for it}."""
        return {name: original(self.folds, name) for name in self.all_parameters}

    def of_all(self, known: Mapping[str, T]) -> Mapping[str, T]:
        """By the names of all parameters what is known by the names of those in the graph."""
        if not self.folds:
            return known
        return {name: known[stands] for name, stands in self.originals.items() if stands in known}

    def times_of(self, name: str) -> int:
        """How many parameters of the model one in the graph stands for."""
        return next((fold.times for fold in self.folds if fold.holds(name)), 1)

    @property
    def buffer_updates(self) -> Mapping[str, fx.Node]:
        """{buffer: its value after the forward} of the buffers that the model writes."""
        rest = self.graph.output_node().args[1:]
        return rest[0] if rest else {}

    def values(self, inputs: Iterable[torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> dict[fx.Node, Any]:
        """Every value of the graph on these inputs; `tensors`: its parameters, buffers and constants by name."""
        run = _Run(nn.Module(), garbage_collect_values=False, graph=self.graph)
        run.tensors, run.extra_traceback = tensors, False
        run.run(*inputs)
        return run.env


class _Run(fx.Interpreter):
    tensors: Mapping[str, torch.Tensor]

    def fetch_attr(self, target: str) -> torch.Tensor:
        return self.tensors[target]


def device_of_weights(model: nn.Module) -> torch.device:
    """Where a model's parameters are; the host where it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def batch_size(trace: Trace) -> int:
    """Rows of the global batch: the first dim of the first input that has any (1 where none has)."""
    sizes = [shape(n)[0] for n in trace.graph.find_nodes(op="placeholder") if shape(n)]
    return max(sizes, key=sizes.count) if sizes else 1
