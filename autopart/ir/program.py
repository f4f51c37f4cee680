"""The partitioned program: the data that the runtime executes, with one graph per pipeline stage.

A `Program` contains no process group, no rank and no weights. Its graphs are SPMD: every rank of a stage runs the same
graph. Ranks differ only through two kinds of node:

- `torch.ops.autopart.<conversion>(x, axis, ...)`: the collectives of `autopart.ir.layout.CONVERSIONS`;
- `torch.ops.autopart.axis_index(axis)`: this rank's coordinate, an int.

Layouts treat microbatches as one more axis, `MICROBATCH_AXIS`, next to `dp`. A value that is `S(0)` on it contains the
samples of one microbatch. For a value that is `P` on it, the runtime adds the values of all microbatches. No collective
runs over this axis.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import fx

from autopart.compat.torch_internals import LazyGraphModule, TreeSpec
from autopart.ir.facts import facts
from autopart.ir.graph import draws_random_numbers
from autopart.ir.layout import Layout, Sections, format_layout, mesh_axes_of
from autopart.ir.mesh import Mesh
from autopart.ir.run.sync_option import ALL_REDUCE, SyncMethod, SyncOption
from autopart.ir.run.weight_updates import WeightUpdates
from autopart.ir.sharding import DimSharding

MICROBATCH_AXIS = "mb"
SEEDS = "seeds"
"""Last input of a program that draws random numbers with `rng="fast"`: int64 [dp * microbatches].

It has one random seed per microbatch, equal on each dp rank."""

Rng = Literal["fast", "exact"]
"""Source of random numbers.

`"exact"`: torch's default generator, with the numbers of a single-device run, including dropout masks. `"fast"`: seeds
that every rank has. Each rank then draws only the dropout masks that it needs.
"""


class StageGraph(LazyGraphModule):
    """Graph of one stage. Its code is generated when it first runs.

    `print_readable` shows every value's local shape and its layout.
    """

    def print_readable(self, print_output: bool = True, **options: Any) -> str:
        """Return the generated code with typed values (`f32[4, 12, 64]{tp:P}`) and the user's source lines.

        Options are those of `torch.fx.GraphModule.print_readable`.
        """
        layouts = {n.name: format_layout(facts(n).get("layout") or {}) for n in self.graph.nodes}

        def with_layout(match: re.Match) -> str:
            layout = layouts.get(match[1], "")
            return f'{match[1]}: "{match[2]}{layout if layout != "{}" else ""}"'

        text = super().print_readable(print_output=False, **options)
        text = re.sub(r'\b(\w+): "(\w+\[[^"]*\])"', with_layout, text)
        text = re.sub(r"\n *# No stacktrace found for following nodes", "", text)
        if print_output:
            sys.stdout.write(text + "\n")
        return text


@dataclass(frozen=True)
class StageInput:
    """One keyword argument of a stage graph. `Stage.prologue` computes it from the model's inputs.

    Args:
        batch_dim: the dim that contains the batch. It is split over `dp` into contiguous blocks of samples, and each
            block over microbatches. None: every rank and microbatch gets the full value.
        sections: sizes of the concatenated sections of that dim. Each section is split separately.
    """

    name: str
    batch_dim: int | None
    sections: Sections = ()


@dataclass(frozen=True)
class Boundary:
    """A value that one stage sends to the next. `shape` is its local shape for one microbatch on one rank.

    `uneven`: (axis, split of a dim over the axis) for each axis with unequal shards. `shape` then has the size of the
    longest shard.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    uneven: tuple[tuple[str, DimSharding], ...] = ()

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def shape_at(self, mesh: Mesh, coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """Return the local shape on the rank at these coordinates."""
        local = list(self.shape)
        for axis, cut in self.uneven:
            local[cut.dim] = cut.length(coordinates[axis])
        return tuple(local)


@dataclass(frozen=True)
class BufferUpdate:
    """New value of a buffer after a forward. All ranks of the stage that computes it have the full value.

    If `from_inputs` is True, the prologue (`Stage.prologue`) computes the value. The outputs of the prologue are the
    stage inputs, then these values. Otherwise the stage graph computes the value. The outputs of the graph are the
    values that the stage sends, then these values. In this case, `layout` on `MICROBATCH_AXIS` defines how the values
    of the microbatches are combined.
    """

    name: str
    from_inputs: bool
    layout: Layout


@dataclass(frozen=True)
class Stage:
    """One pipeline stage.

    `prologue(*model_inputs) -> tuple` runs once per call, on the global batch. It returns one value per entry of
    `inputs`. It executes all random operators of the model in the model's order, even those that only other stages use.
    So all stages draw equal numbers and leave the generator in the same state.

    `graph(*received, **inputs) -> tuple` runs once per microbatch. Its positional placeholders are the values that the
    previous stage sends. Its outputs are the values that this stage sends, or, in the last stage, the tensor outputs of
    the program. Parameters and buffers are `get_attr` nodes with their original dotted names.

    If `is_tail` is True, the graph runs once per call, after all microbatches of the stage before it, on the ranks of
    that stage. Its operators combine samples of the batch. The runtime merges the received values of all microbatches.
    """

    index: int
    prologue: fx.GraphModule
    inputs: tuple[StageInput, ...]
    graph: fx.GraphModule
    receives: tuple[Boundary, ...]
    sends: tuple[Boundary, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    updates: tuple[BufferUpdate, ...] = ()
    is_tail: bool = False

    @property
    def graph_updates(self) -> tuple[BufferUpdate, ...]:
        """Buffer updates that the stage graph computes."""
        return tuple(update for update in self.updates if not update.from_inputs)

    @property
    def prologue_updates(self) -> tuple[BufferUpdate, ...]:
        """Buffer updates that the prologue computes, once per call on the full batch."""
        return tuple(update for update in self.updates if update.from_inputs)


@dataclass(frozen=True)
class StoredTensor:
    """A parameter as ranks store it: global shape, layout over the mesh axes, and the stages that use it.

    Attributes:
        grad_axes: the axes (dp, tp, ...) on which its gradient is a partial sum, which is reduced once a step.
        aliases: other names of the same parameter in the model (tied weights).
        compute_dtype: the dtype to which it is cast before each use; None: no cast.
        method: the `dp_sync` method that replaces the gradient reduction over the outermost data-parallel axis.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout
    stages: tuple[int, ...]
    grad_axes: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    compute_dtype: torch.dtype | None = None
    method: SyncMethod | None = None

    def reduced_over(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes of several ranks over which the gradient is reduced once a step.

        The axis on which a `dp_sync` method replaces the reduction is left out.
        """
        method_axes = () if self.method is None else mesh.along("rows")[:1]
        return tuple(axis for axis in self.grad_axes if mesh.size(axis) > 1 and axis not in method_axes)

    def unsharded_to_sync(self, mesh: Mesh) -> StoredTensor | None:
        """Return a copy without ZeRO sharding, for a `dp_sync` method that needs the full gradient.

        Returns None if the parameter has no method, or if ZeRO does not shard it over the axis of the method.
        """
        zero_axis = mesh.stored_over(self.layout)
        if self.method is None or zero_axis is None or mesh.along("rows")[0] not in mesh_axes_of(zero_axis):
            return None
        layout = {axis: placement for axis, placement in self.layout.items() if axis != zero_axis}
        partial = {*self.grad_axes, *mesh_axes_of(zero_axis)}
        return replace(self, layout=layout, grad_axes=tuple(axis for axis in mesh.sizes if axis in partial))

    def differs_over(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes on which replicas of the parameter can differ.

        They differ between two synchronizations of a `dp_sync` method that averages models.
        """
        return mesh.along("rows")[:1] if self.method is not None and self.method.changes == "models" else ()


@dataclass(frozen=True)
class Output:
    """One flat output of the model: output `position` of the last stage's graph, or a constant.

    Attributes:
        layout: layout of the tensor.
        made_of: names of the model inputs on which the output depends; empty unless every rank passes only its local
            batch.
        is_number: True if the model returns a Python number, such as `loss.item()`.
    """

    position: int | None
    layout: Layout
    constant: Any = None
    made_of: frozenset[str] = frozenset()
    is_number: bool = False

    def of(self, values: Sequence[Any]) -> Any:
        """Return the value of this output, given the full tensor outputs of the last stage's graph."""
        if self.position is None:
            return self.constant
        return values[self.position].item() if self.is_number else values[self.position]


@dataclass(frozen=True)
class LabelCount:
    """Input of a stage graph that has the number of labels by which a mean loss is divided.

    `stage` is the index of the pipeline stage, `name` the name of the input.
    """

    stage: int
    name: str


@dataclass(frozen=True, eq=False)
class Program:
    """The partitioned model: all stages, stored parameters, and the outputs that the caller gets.

    Programs compare by identity, so a program can be a dictionary key.

    `copied` is True if every data-parallel rank computes all samples, because the number of ranks does not divide the
    batch.
    """

    mesh: Mesh
    microbatches: int
    input_names: tuple[str, ...]
    stages: tuple[Stage, ...]
    parameters: Mapping[str, StoredTensor]
    outputs: tuple[Output, ...]
    output_spec: TreeSpec
    copied: bool = False
    draws: Rng | None = None
    """Source of the random numbers in the prologues; None if the prologues draw no random numbers."""
    label_count: LabelCount | str | None = None
    """Input with the number of labels by which the loss is divided; or, as text, why the loss is not a mean."""
    row_inputs: frozenset[str] | None = None
    """Inputs with a batch dim, if `local_batch=True`: every rank passes its samples and gets its outputs.

    Prologues still run on the global batch. None: every rank passes the global batch.
    """
    weight_updates: WeightUpdates = field(default_factory=dict)
    """{parameter: change that its ranks apply to their shard before the stages run}."""
    zero: int = 0
    """ZeRO stage, which determines how long a sharded parameter and its gradient exist unsharded.

    With 1, both exist for a full step. With 2, the parameter exists for a step, and the gradient for a microbatch.
    Otherwise, both exist only while they are used.
    """
    prefetch: int = 1
    """Number of blocks whose parameters are gathered ahead of their use (ZeRO-3)."""
    reduce_dtype: torch.dtype | None = None
    """Dtype in which ranks reduce gradients of parameters; None: the dtype of the gradient."""
    dp_sync: SyncOption = ALL_REDUCE
    """Method by which data-parallel ranks synchronize gradients or models."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes that the graphs have as inputs, such as the sequence length. They are the last inputs of each prologue."""
    shared_graphs: object = None
    """Object that is shared by programs with equal graphs, which differ only in `sizes`. None: not shared."""

    @property
    def tail(self) -> Stage | None:
        """The graph that runs once for all microbatches of the last pipeline stage; None if there is no tail."""
        return self.stages[-1] if self.stages[-1].is_tail else None

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages. The tail, which runs once for all microbatches, does not count."""
        return len(self.stages) - self.stages[-1].is_tail

    def runs_of(self, stage: Stage) -> int:
        """Return how many times a call runs the graph of a stage: once per microbatch, or once for the tail."""
        return 1 if stage.is_tail else self.microbatches

    @cached_property
    def drawn(self) -> tuple[fx.Node, ...]:
        """Random operators of the model, as nodes of the first stage's prologue (`Stage.prologue`).

        The prologue of every stage contains all random operators.
        """
        nodes = self.stages[0].prologue.graph.nodes if self.draws else ()
        return tuple(node for node in nodes if draws_random_numbers(node))

    @property
    def stored_names(self) -> dict[str, str]:
        """{name or alias of a parameter: the name under which it is stored}."""
        return {alias: name for name, stored in self.parameters.items() for alias in (name, *stored.aliases)}

    def without_methods(self) -> Program:
        """Return a copy of the program that all-reduces every gradient, without `dp_sync` methods."""
        if self.dp_sync.is_default:
            return self
        exact = {name: replace(stored, method=None) for name, stored in self.parameters.items()}
        return replace(self, parameters=exact, dp_sync=ALL_REDUCE)

    @property
    def data_ranks(self) -> int:
        """Number of ranks over which a `dp_sync` method communicates."""
        return self.mesh.size((*self.mesh.along("rows"), self.mesh.data_axis)[0])

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks over which the batch is sharded."""
        return 1 if self.copied else self.mesh.data_parallel_size
