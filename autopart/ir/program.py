"""The partitioned program: data that the runtime executes, on processes or all ranks in one.

A `Program` holds no process group, no rank and no weights. Its graphs are SPMD: every rank of a stage runs the same
graph; what differs is reached through two kinds of node:

- `torch.ops.autopart.<conversion>(x, axis, ...)`: the collectives of `autopart.ir.layout.CONVERSIONS`;
- `torch.ops.autopart.axis_index(axis)`: this rank's coordinate, an int.

Microbatches are a mesh axis in time: `MICROBATCH_AXIS` appears in layouts beside `dp`, a value that is `S(0)` on it is
one microbatch's rows, a `P` is summed over microbatches. No collective may run over it.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import fx

from autopart.compat.torch_internals import LazyGraphModule, TreeSpec
from autopart.ir.facts import facts
from autopart.ir.graph import draws_random_numbers
from autopart.ir.layout import Layout, Sections, format_layout, parts_of
from autopart.ir.mesh import Mesh
from autopart.ir.run.dp_sync import ALL_REDUCE, DpSync, Method
from autopart.ir.run.weight_updates import WeightUpdates
from autopart.ir.sharding import Cut

MICROBATCH_AXIS = "mb"
SEEDS = "seeds"
"""The last input of a program that draws random numbers with `rng="fast"`: int64 [dp * microbatches], one random seed
per microbatch, for each dp rank the same ones."""

Rng = Literal["fast", "exact"]
"""Where random numbers come from. `"exact"`: from torch's default generator, as one device draws them, masks of dropout
included. `"fast"`: from seeds that every rank knows; masks of dropout are drawn where they are needed."""


class StageGraph(LazyGraphModule):
    """A graph of one stage, whose code is written when it first runs.

    `print_readable` shows every value's local shape and its layout.
    """

    def print_readable(self, print_output: bool = True, **options: Any) -> str:
        """The generated code with typed values (`f32[4, 12, 64]{tp:P}`) and the user's source lines.

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
    """One keyword argument of a stage graph, computed from the model's inputs alone by the stage's prologue.

    `batch_dim`: the dim that is cut, first over `dp` (contiguous blocks of rows), then over microbatches;
    None: every rank and microbatch gets the whole value. `sections`: those of the dim, each of which is cut so.
    """

    name: str
    batch_dim: int | None
    sections: Sections = ()


@dataclass(frozen=True)
class Boundary:
    """A value that one stage sends to the next: local shape for one microbatch on one rank.

    `uneven`: (axis, how it cuts) where shards are unequal; `shape` is the longest's.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    uneven: tuple[tuple[str, Cut], ...] = ()

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def shape_at(self, mesh: Mesh, coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """The local shape on the rank at these coordinates."""
        local = list(self.shape)
        for axis, cut in self.uneven:
            local[cut.dim] = cut.length(coordinates[axis])
        return tuple(local)


@dataclass(frozen=True)
class BufferUpdate:
    """The value of a buffer after a forward, whole on every rank of the stage that makes it.

    `from_inputs`: an output of the stage's prologue, behind those for its `inputs`. Else an output of its graph, behind
    its `sends`; `layout` says how those of the microbatches become one, as for a model's outputs.
    """

    name: str
    from_inputs: bool
    layout: Layout


@dataclass(frozen=True)
class Stage:
    """One pipeline stage.

    `prologue(*model_inputs) -> tuple`: runs once per call on the GLOBAL inputs (in `Program.input_names` order),
    returns one value per entry of `inputs`. It makes all draws of the whole model, in the model's order, also those
    that other stages use: so every stage finds the same numbers, and leaves the generator in the same state.
    `graph(*received, **inputs) -> tuple`: runs once per microbatch; its positional placeholders are the previous
    stage's `sends`, its outputs are this stage's `sends` (the last stage: one per tensor output of the program).
    `graph`'s parameters and buffers are `get_attr` nodes on their original dotted names.
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

    @property
    def graph_updates(self) -> tuple[BufferUpdate, ...]:
        """Those made by the graph."""
        return tuple(update for update in self.updates if not update.from_inputs)

    @property
    def prologue_updates(self) -> tuple[BufferUpdate, ...]:
        """Those made by the prologue."""
        return tuple(update for update in self.updates if update.from_inputs)


@dataclass(frozen=True)
class StoredTensor:
    """A parameter as it is stored: global shape, layout over the mesh axes, and the stages that read it.

    `grad_axes`: the axes (dp, tp, ...) over which its gradient ends as a partial sum and is summed once a step.
    `aliases`: other names of the same parameter in the model (tied weights).
    `compute_dtype`: what it is cast to where it is read; None: it is read as it is stored.
    `method`: what data-parallel ranks send each other of it in place of a sum over the outermost axis of rows.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout
    stages: tuple[int, ...]
    grad_axes: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    compute_dtype: torch.dtype | None = None
    method: Method | None = None

    def summed_over(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes of several ranks over which its gradient is summed once a step."""
        apart = () if self.method is None else mesh.along("rows")[:1]
        return tuple(axis for axis in self.grad_axes if mesh.size(axis) > 1 and axis not in apart)

    def whole_to_send(self, mesh: Mesh) -> StoredTensor | None:
        """As it would be stored whole, where a method brings together its whole gradient over an axis that stores it in
        parts (`zero=1`); None: the method is for what a rank stores."""
        over = mesh.stored_over(self.layout)
        if self.method is None or over is None or mesh.along("rows")[0] not in parts_of(over):
            return None
        layout = {axis: place for axis, place in self.layout.items() if axis != over}
        partial = {*self.grad_axes, *parts_of(over)}
        return replace(self, layout=layout, grad_axes=tuple(axis for axis in mesh.sizes if axis in partial))

    def differs_over(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes on whose ranks it is meant to have other values."""
        return mesh.along("rows")[:1] if self.method is not None and self.method.changes == "models" else ()


@dataclass(frozen=True)
class Output:
    """One flat output of the model: a tensor of the last stage's graph (`position`) with its layout, or a constant.

    `made_of`: where every rank gives its own rows, the inputs that the value is made of.
    """

    position: int | None
    layout: Layout
    constant: Any = None
    made_of: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LabelCount:
    """The number of labels that the loss of a training step is the mean of: this input of this stage's graph."""

    stage: int
    name: str


@dataclass(frozen=True, eq=False)
class Program:
    """All stages of the partitioned model, what they store, and how the model's own outputs are put together again.

    Two programs are equal only if they are one: so it can be a key.

    `copied`: the rows of the batch do not divide over `dp`, so every rank of it computes all of them.
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
    """Where the draws in the prologues take their numbers from; None: there are none."""
    label_count: LabelCount | str | None = None
    """Of a training step: what its loss is divided by, or why that is not a number of labels."""
    row_inputs: frozenset[str] | None = None
    """Where every rank gives its own rows of a batch, and is given its own rows of the outputs: the inputs that are
    rows; a prologue is still given the global batch. None: every rank gives the global batch."""
    weight_updates: WeightUpdates = field(default_factory=dict)
    """How ranks change their part of these parameters before the stages run."""
    zero: int = 0
    """How long the whole of a parameter that is stored in parts, and its whole gradient, live: 1, both for a
    step; 2, the parameter for a step and the gradient for a microbatch; else both for as long as they are used."""
    prefetch: int = 1
    """Where the whole lives for as long as it is used: of how many blocks ahead it is gathered."""
    reduce_dtype: torch.dtype | None = None
    """What gradients of parameters are cast to before ranks sum them; None: they are summed as they are."""
    dp_sync: DpSync = ALL_REDUCE
    """What data-parallel ranks send each other."""

    @cached_property
    def drawn(self) -> tuple[fx.Node, ...]:
        """The draws of a prologue: each stage's makes those of the whole model."""
        nodes = self.stages[0].prologue.graph.nodes if self.draws else ()
        return tuple(node for node in nodes if draws_random_numbers(node))

    @property
    def stored_names(self) -> dict[str, str]:
        """{any name of a parameter: the one it is stored under}."""
        return {alias: name for name, stored in self.parameters.items() for alias in (name, *stored.aliases)}

    def without_methods(self) -> Program:
        """The same, with all gradients summed."""
        if self.dp_sync.is_default:
            return self
        exact = {name: replace(stored, method=None) for name, stored in self.parameters.items()}
        return replace(self, parameters=exact, dp_sync=ALL_REDUCE)

    @property
    def data_ranks(self) -> int:
        """How many ranks a method of `dp_sync` is for."""
        return self.mesh.size((*self.mesh.along("rows"), self.mesh.data_axis)[0])

    @property
    def row_ranks(self) -> int:
        """Over how many ranks the rows of the batch are cut."""
        return 1 if self.copied else self.mesh.row_ranks
