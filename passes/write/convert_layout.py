"""Conversions of values between layouts (with collectives), and of parameters to the compute dtype.

A layout is {mesh axis: placement}, such as `{"dp": S(0), "tp": R}`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autopart.errors import LayoutError
from autopart.ir.atoms import selections_in
from autopart.ir.decisions import Decisions
from autopart.ir.facts import facts
from autopart.ir.graph import describe, shape, value
from autopart.ir.layout import (
    R_GRAD_P,
    Layout,
    P,
    Placement,
    R,
    conversion,
    is_direct,
    mesh_axes_of,
    relative_placement,
)
from autopart.ir.program import MICROBATCH_AXIS
from autopart.ir.run.scatter_gather_sends import scatter_layout
from autopart.ir.trace import Trace
from autopart.ops.operators import autopart_ops
from autopart.passes.write.stage_draft import Key, StageDraft


class Converter:
    """Writer of the nodes that convert values between layouts, for all stages.

    Args:
        trace: the traced model.
        decisions: the decisions of the plan.
        sizes: {axis: number of ranks}, including the microbatch axis and flattened axes that store parameters.
        emitter: `emitter(stage, node)` returns a function that adds nodes to the stage's graph for a traced node.
        mark: records on a generated node which traced value it computes, and in which layout.
    """

    def __init__(
        self, trace: Trace, decisions: Decisions, sizes: Mapping[str, int],
        emitter: Callable[[StageDraft, fx.Node], Any], mark: Callable[..., None],
    ):  # fmt: skip
        self.trace, self.decisions, self.sizes, self.emitter, self.mark = trace, decisions, sizes, emitter, mark

    def convert(self, written: fx.Node, node: fx.Node, source: Key, target: Key, stage: StageDraft) -> fx.Node:
        """Convert a value from layout `source` to layout `target`, axis by axis. Return the last node.

        Args:
            written: the generated node of the value.
            node: the traced node of the value.
        """
        current = dict(source)
        for axis, place in self._steps(node, source, target):
            written = self._step(written, node, current, axis, place, stage, stage.made)
            current[axis] = place
        return written

    def _step(
        self, written: fx.Node, node: fx.Node, current: Layout, axis: str, place: Placement, stage: StageDraft,
        made: dict[tuple[fx.Node, Key], fx.Node], options: Mapping[str, Any] = MappingProxyType({}),
        dtype: torch.dtype | None = None,
    ) -> fx.Node:  # fmt: skip
        """Return the node of a value with another placement on one axis. Reuse the node in `made`, or emit it.

        Args:
            written: the generated node of the value, in layout `current`.
            node: the traced node of the value.
            place: the new placement on `axis`.
            made: {(traced node, layout): generated node}. A new node is added.
        """
        layout = tuple({**current, axis: place}.items())
        if (node, layout) not in made:
            made[node, layout] = self._convert_axis(written, node, current, axis, place, stage, options)
            self.mark(made[node, layout], node, layout, dtype)
        return made[node, layout]

    def _steps(self, node: fx.Node, source: Key, target: Key) -> Iterator[tuple[str, Placement]]:
        """Yield the steps that convert one layout to another, in order, as (axis, new placement).

        A parameter can be stored sharded over flattened axes (`dp_cp`), which the target layout does not have. The
        first step gathers it over these axes.
        """
        current = dict(source)
        whole = R_GRAD_P if facts(node)["needs_grad"] else R
        named = dict(target)
        target = (*((axis, whole) for axis in current if axis not in named), *target)
        for axis, place in (*_gathers_first(dict(source), dict(target), whole), *target):
            if current[axis] != place:
                current[axis] = place
                yield axis, place

    def _convert_axis(
        self,
        written: fx.Node,
        node: fx.Node,
        current: Mapping[str, Placement],
        axis: str,
        target: Placement,
        stage: StageDraft,
        options: Mapping[str, Any],
    ) -> fx.Node:
        """Emit the operators that convert a value to another placement on one axis. Return the last node.

        Args:
            options: further arguments of the operator, such as the dtypes of a parameter.
        """
        source = current[axis]
        if axis == MICROBATCH_AXIS and target == P:  # every microbatch contributes an equal share
            return self.emitter(stage, node)(torch.ops.aten.mul.Tensor, written, 1.0 / self.sizes[axis])
        step = conversion(source, target)
        others = [(cut, self.sizes[other]) for other, cut in current.items() if other != axis]
        source, place = relative_placement(source, others), relative_placement(target, others)
        if step is None or not is_direct(source, place, shape(node), self.sizes[axis]):
            between = R_GRAD_P if facts(node)["needs_grad"] else R
            whole = self._convert_axis(written, node, current, axis, between, stage, options)
            return self._convert_axis(whole, node, {**current, axis: between}, axis, target, stage, options)
        operation = getattr(autopart_ops, step.operator).default
        emit = self.emitter(stage, node)
        if step.operator == "all_to_all":
            return emit(operation, written, axis, source.dim, place.dim, *_section_arguments(source, place), **options)
        cut = source if source.is_shard else place
        if not cut.is_shard:
            return emit(operation, written, axis, **options)
        assert not selections_in(facts(node)["atoms"][cut.dim]), f"{node.name} has another size on every rank"
        return emit(
            operation,
            written,
            axis,
            cut.dim,
            self._size_without_axis(node, current, axis, cut),
            list(cut.sections),
            **options,
        )

    def _size_without_axis(self, node: fx.Node, current: Mapping[str, Placement], axis: str, cut: Placement) -> int:
        """Return the local size that a sharded dim would have if `axis` did not shard it.

        Args:
            cut: the placement that shards the dim.
        """
        beside = [a for a, p in current.items() if a != axis and p.is_shard and p.dim == cut.dim]
        others, full = math.prod(self.sizes[a] for a in beside), shape(node)[cut.dim]
        in_one_piece = not any(p.sections for p in (cut, *(current[a] for a in beside)))
        if beside and in_one_piece and full % (others * self.sizes[axis]):
            raise _uneven_experts_error(node, cut.dim, axis, beside)
        return full // others

    def sent(self, node: fx.Node, produced: Key) -> Key:
        """Return the layout in which a value is sent between stages.

        With the option `scatter_sends`, each rank sends only one shard of a value that all `tp` ranks have in full.
        """
        parts = scatter_layout(node, dict(produced), self.decisions.mesh) if self.decisions.scatter_sends else None
        return produced if parts is None else tuple(parts.items())

    def gather(self, received: fx.Node, node: fx.Node, produced: Key, stage: StageDraft) -> None:
        """Gather a value on the stage that received it, if each rank sent one shard (`scatter_sends`)."""
        sent = self.sent(node, produced)
        if sent != produced:
            facts(self.convert(received, node, sent, produced, stage))["received"] = True

    def stored_dtype(self, node: fx.Node) -> torch.dtype | None:
        """Return the dtype in which a parameter is stored, if it must be cast for the computation; else None.

        No cast is needed if computation and gradient reduction use the stored dtype.
        """
        precision, stored = self.trace.precision, self.trace.parameters[node.target].dtype
        if precision is None or not stored.is_floating_point:
            return None
        return None if stored == precision.compute == precision.reduce else stored

    def read(self, node: fx.Node, produced: Key, layout: Key, stage: StageDraft) -> fx.Node:
        """Return a parameter in `layout` and in the compute dtype.

        The first conversion that gathers the parameter also casts it, so that the smaller dtype is communicated.
        Earlier conversions change only the placement of the gradient, which has the stored dtype at that point. Gather
        and cast are one operator, because between two operators autograd would round the reduced gradient to the
        compute dtype.

        Args:
            produced: the layout in which the parameter is stored.
        """
        computed, precision = value(node).dtype, self.trace.precision
        stored = dtype = self.stored_dtype(node)
        assert precision is not None and stored is not None
        if (node, produced) not in stage.stored:
            stage.stored[node, produced] = stage.parameter(node)
            self.mark(stage.stored[node, produced], node, produced, stored)
        written, current = stage.stored[node, produced], dict(produced)
        for axis, place in _gradient_first(current, self._steps(node, produced, layout)):
            gathers = current[axis].is_shard
            options: dict[str, Any] = {"dtype": computed} if gathers and dtype != computed else {}
            if precision.reduce != (computed if gathers else dtype):
                options["grad_dtype"] = precision.reduce
            dtype = computed if gathers else dtype
            made = stage.made if dtype == computed else stage.stored
            written = self._step(written, node, current, axis, place, stage, made, options, dtype)
            current[axis] = place
        return written if dtype == computed else self.emitter(stage, node)(autopart_ops.cast.default, written, computed)


def _uneven_experts_error(node: fx.Node, dim: int, axis: str, beside: list[str]) -> LayoutError:
    """Return the error for a conversion over one axis of a dim of experts that other axes shard unevenly."""
    name = node.target if node.op == "get_attr" else describe(node)
    return LayoutError(
        f"{axis} cannot shard or gather dim {dim} of {name}",
        why=f"its {shape(node)[dim]} experts are sharded unevenly over {' and '.join(beside)}, and an "
        "operator other than the experts' matrix products reads this dim",
        hint=f"remove the pins that shard them over {axis}, or use axis sizes whose product divides their number",
    )


def _section_arguments(source: Placement, target: Placement) -> tuple[list[int], ...]:
    """Return the sections of the placements `source` and `target`, as arguments of an all-to-all.

    The result is empty unless one of the placements is zigzag.
    """
    return (list(source.sections), list(target.sections)) if source.is_zigzag or target.is_zigzag else ()


def _gradient_first(
    source: Layout, steps: Iterator[tuple[str, Placement]]
) -> list[tuple[str, Placement]]:  # fmt: skip
    """Reorder the steps of a layout conversion: steps that convert only the gradient come first.

    These steps convert one replicated placement to another, such as `R` to `R(grad P)`. Exception: if ZeRO stores a
    parameter over a flattened axis (`dp_cp`), the parameter must be gathered over this axis before any step on `dp` or
    `cp`. So these steps are not moved.
    """
    all_steps, joined = list(steps), {part for axis in source for part in mesh_axes_of(axis) if part != axis}
    of_gradient = [(axis, place) for axis, place in all_steps
                   if axis not in joined and source[axis].is_replicated and place.is_replicated]  # fmt: skip
    return [*of_gradient, *(step for step in all_steps if step not in of_gradient)]


def _gathers_first(current: Layout, target: Layout, whole: Placement) -> Iterator[tuple[str, Placement]]:
    """Yield the gathers that must precede all other steps of a conversion, as (axis, new placement).

    The gathers keep the shards of a dim in order:

    - If several axes shard a dim, or another axis will shard it, the dim is gathered first, innermost axis first.
    - If an outer axis changes how it shards a dim, the dim is gathered over an inner axis too, even if the inner axis
      keeps its placement. The inner axis shards the dim again at the end.
    """
    axes = list(current)
    for axis in reversed(axes):
        place = current[axis]
        changing = [a for a in axes[: axes.index(axis)] if current[a] != target[a]]
        if place.is_shard and target[axis] == place:
            around = [p.in_order for a in changing for p in (current[a], target[a])]
            if axis != MICROBATCH_AXIS and place.in_order in around:
                yield axis, whole
        if not place.is_shard or target[axis] == place:
            continue
        outside = [current[a] for a in changing]
        arriving = [p for a, p in target.items() if a != axis and current[a] != p]
        if any(p.is_shard and p.dim == place.dim for p in (*outside, *arriving)):
            yield axis, target[axis] if target[axis].is_replicated else whole
