"""Localization of a fault: the first value of the partitioned program that differs from the model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor, fx

from autopart.ir.collective_nodes import autopart_operator, axis_of
from autopart.ir.facts import ACTIVE, facts
from autopart.ir.graph import format_value, module_path, source_line, source_of
from autopart.ir.layout import P, Placement, R, flattened_shards, format_layout, mesh_axes_of
from autopart.ir.program import MICROBATCH_AXIS, Program
from autopart.ir.sharding import DimSharding
from autopart.proof.comparison import GRAD_FLOOR, Arrangement, GraphUnderTest, Shards, largest, relative, scale_of
from autopart.runtime.gradients.step_reduction import sync_gradients_lockstep
from autopart.runtime.lockstep import PerRank

BROKEN = (RuntimeError, ValueError, IndexError, KeyError, StopIteration, TypeError)
"""Exceptions that a faulty program can raise."""


@dataclass(frozen=True)
class GroupShard:
    """One shard of a value, with the ranks and microbatches from which it was collected.

    If the placement is `P`, `value` is the sum of the partial sums of these ranks. `entries`: for each dim, the indices
    of the shard's entries in the full value.
    """

    ranks: tuple[int, ...]
    microbatches: tuple[int, ...]
    entries: tuple[Tensor, ...]
    value: Tensor

    def of(self, whole: Tensor) -> Tensor:
        """Return the entries of a full value that belong to this shard."""
        for dim, entries in enumerate(self.entries):
            if len(entries) < whole.shape[dim]:
                whole = whole.index_select(dim, entries.to(whole.device))
        return whole

    def __str__(self) -> str:
        return "[" + ", ".join(map(_ranges, self.entries)) + "]"


@dataclass(frozen=True)
class WrongShard:
    """Shard with the largest error among the shards of one value.

    `worst` describes the entry with the largest error and its expected value. Of the `num_parts` shards of the value,
    `num_wrong` are wrong. `coordinates` lists the mesh coordinates that all ranks of the shard have in common.
    """

    part: GroupShard
    error: float
    worst: str
    num_wrong: int
    num_parts: int
    coordinates: str

    def __str__(self) -> str:
        ranks = f"rank{'s' * (len(self.part.ranks) > 1)} {', '.join(map(str, self.part.ranks))}"
        partial = ", added," if len(self.part.ranks) > 1 else ""
        where = f" ({self.coordinates})" if self.coordinates else ""
        return f"{ranks}{where}{partial} entries {self.part}: {self.worst}; {self.num_wrong} of {self.num_parts} wrong"


@dataclass(frozen=True)
class Mismatch:
    """The first value of a program that differs from the model's.

    Args:
        name: name of the value in the traced graph, or of the parameter.
        kind: "value" or "gradient".
        operator: the operator that computed the value. For a gradient: the operators that use the value, because their
            backward computes its gradient.
        keys: names of these operators in plans.
        part: the shard of the value with the largest error; None if the run raised an exception.
    """

    name: str
    kind: str
    error: float
    operator: str
    module: str
    source: str
    stage: int
    layout: str
    keys: tuple[str, ...]
    part: WrongShard | None
    node: fx.Node = field(repr=False, compare=False)

    def __str__(self) -> str:
        what = (
            f"{self.kind} of {self.name} differs by {self.error:.3g}"
            if self.part
            else f"the run raises an error: {self.name}"
        )
        lines = [what, f"  operator {self.operator}, stage {self.stage}", f"  layout   {self.layout}"]
        lines += [f"  shard    {self.part}"] if self.part else []
        lines += [f"  module   {self.module or '(the model itself)'}", f"  source   {self.source or 'unknown'}"]
        return "\n".join(lines)


def first_mismatch(
    subject: GraphUnderTest,
    arrangement: Arrangement,
    tolerance: float,
    errors: Mapping[str, float],
) -> Mismatch | None:
    """Return the first wrong value or gradient of a partitioned program; None if nothing is wrong.

    It compares the values and gradients of a training step first, then the values of a forward call, then the gradients
    of parameters. If several parameter gradients are wrong, it returns the one with the largest error.
    """
    step = _MismatchSearch(subject, subject.step(arrangement.decisions), arrangement, tolerance)
    first = step.first()
    if first is None and subject.loss is not None:
        call = _MismatchSearch(subject, subject.called(arrangement.decisions), arrangement, tolerance)
        first = call.first(gradients=False)
    wrong = {name: error for name, error in errors.items() if name in subject.weights and error > tolerance}
    if first is None and wrong:
        first = step.parameter(max(wrong, key=lambda name: wrong[name]))
    return first


class _MismatchSearch:
    """Search for the first value or gradient of a program that differs from the unpartitioned graph."""

    def __init__(self, subject: GraphUnderTest, program: Program, arrangement: Arrangement, tolerance: float):
        self.subject, self.program, self.arrangement = subject, program, arrangement
        self.tolerance, self.mesh = tolerance, program.mesh
        self.origins = {node.name: node for node in subject.traced.graph.nodes}
        self.made: dict[fx.Node, tuple[int, dict[int, PerRank]]] = {}
        self.shards: Shards = {}
        self.whole, self.whole_grads = _reference(subject)
        self.grad_scale = max([GRAD_FLOOR, *map(largest, self.whole_grads.values())])

    def first(self, gradients: bool = True) -> Mismatch | None:
        """Run the program and return the first wrong value or gradient; None if all are right.

        If the run raises an exception and all values before it are right, the mismatch names the operator that raised.

        Args:
            gradients: True to also compare gradients.
        """
        self.shards = self.subject.shards(self.program, self.arrangement)
        failure: Exception | None = None
        try:
            results = self.subject.lockstep(self.program, self.shards, self.arrangement.stage_style, self._keep)
        except BROKEN as error:
            failure = error
        for node, (stage, shard_values) in self.made.items():
            wrong = self._wrong(shard_values, facts(node)["layout"], self.whole[facts(node)["origin"]])
            if wrong is not None:
                return self._mismatch(node, "value", stage, wrong)
        if failure is not None:
            return self._raised(failure)
        if not gradients:
            return None
        seeds = self.subject.seeds(self.program, results)
        if seeds:
            torch.autograd.backward(seeds)
        return self._first_gradient()

    def _keep(self, stage: int, microbatch: int, node: fx.Node, value: PerRank) -> None:
        if "origin" not in facts(node) or not all(isinstance(v, Tensor) for v in value.values()):
            return
        # Skip dispatched tokens: only another value has their experts, and so their order.
        if any(place.is_dispatched for place in facts(node)["layout"].values()):
            return
        for v in value.values():
            if v.requires_grad and not v.is_leaf:
                v.retain_grad()
        self.made.setdefault(node, (stage, {}))[1][microbatch] = value

    def _first_gradient(self) -> Mismatch | None:
        """Return the first wrong gradient in the order of the backward.

        A value can occur in several layouts, because collectives convert it. Only the value in its first layout is
        compared. It receives the full gradient, but a converted copy receives the gradient of only some uses.
        """
        scale = self.grad_scale
        first_made: dict[str, fx.Node] = {}
        for node in self.made:
            first_made.setdefault(facts(node)["origin"], node)
        for name, node in reversed(first_made.items()):
            source, _ = source_of(self.origins[name])
            if facts(source)["role"] != ACTIVE or name not in self.whole_grads:
                continue
            stage, shard_values = self.made[node]
            grads = {m: {r: v.grad for r, v in values.items()} for m, values in shard_values.items()}
            if any(grad is None for values in grads.values() for grad in values.values()):
                continue
            places = {axis: _of_gradient(place) for axis, place in facts(node)["layout"].items()}
            wrong = self._wrong(grads, places, self.whole_grads[name], scale)
            if wrong is not None:
                return self._mismatch(node, "gradient", stage, wrong)
        return None

    def parameter(self, name: str) -> Mismatch:
        """Return the mismatch of a parameter's gradient, when the gradients of all other values are right.

        The fault is then in the backward of the operator that uses the parameter, or in the reduction over ranks.
        """
        sync_gradients_lockstep(self.shards, self.program, stage_style=self.arrangement.stage_style)
        stored = self.program.parameters[name]
        node = next(n for n in self.subject.traced.graph.nodes if n.op == "get_attr" and n.target == name)
        zero = torch.zeros_like(self.subject.weights[name])
        shard_values = {rank: local[name].grad for rank, local in self.shards.items() if name in local}
        grads = {0: {r: torch.zeros(()) if grad is None else grad for r, grad in shard_values.items()}}
        scale = self.grad_scale
        wrong = self._wrong(grads, stored.layout, self.whole_grads.get(node.name, zero), scale)
        keys = _readers(node)
        return Mismatch(
            name, "gradient", wrong.error if wrong else float("inf"),
            f"the backward of {', '.join(keys[:3])}, or the reduction over "
            "ranks", name.rpartition(".")[0], _source(node),
            stored.stages[0], format_value(node, format_layout(stored.layout)), keys, wrong, node,
        )  # fmt: skip

    def _wrong(
        self,
        shard_values: Mapping[int, PerRank],
        layout: Mapping[str, Placement],
        whole: Tensor,
        scale: float | None = None,
    ) -> WrongShard | None:
        """Return the shard of a value with the largest error; None if all shards are right."""
        parts = list(self._shards_of(shard_values, layout, whole.shape))
        scale = scale or scale_of(whole)
        errors = [relative(part.value, part.of(whole), scale) for part in parts]
        wrong = [i for i, error in enumerate(errors) if error > self.tolerance]
        if not wrong:
            return None
        worst = max(wrong, key=lambda i: errors[i])
        return WrongShard(
            parts[worst], errors[worst], _worst_entry(parts[worst], whole), len(wrong), len(parts),
            self._coordinates(parts[worst]),
        )  # fmt: skip

    def _shards_of(
        self, shard_values: Mapping[int, PerRank], layout: Mapping[str, Placement], shape: Sequence[int]
    ) -> Iterator[GroupShard]:
        """Yield the shards of a value, over ranks and microbatches.

        If the placement on an axis is `P`, the partial sums over that axis are added.
        """
        sizes = {**self.mesh.sizes, MICROBATCH_AXIS: self.program.microbatches}
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for microbatch, values in shard_values.items():
            for rank in values:
                at = {**self.mesh.coordinates(rank), MICROBATCH_AXIS: microbatch}
                key = tuple(index for axis, index in at.items() if layout.get(axis, R) != P)
                groups.setdefault(key, []).append((rank, microbatch))
        for members in groups.values():
            rank, microbatch = members[0]
            at = {**self.mesh.coordinates(rank), MICROBATCH_AXIS: microbatch}
            tensors = [shard_values[m][r].detach() for r, m in members]
            same = all(v.shape == tensors[0].shape for v in tensors)
            yield GroupShard(
                tuple(dict.fromkeys(r for r, _ in members)), tuple(dict.fromkeys(m for _, m in members)),
                entries_of(shape, layout, at, sizes),
                torch.stack(tensors).sum(0) if same and len(tensors) > 1 else tensors[0],
            )  # fmt: skip

    def _coordinates(self, part: GroupShard) -> str:
        """Format the mesh coordinates that all ranks of a shard have in common: `dp 1, tp 0, microbatch 2`."""
        each = [self.mesh.coordinates(rank) for rank in part.ranks]
        shared = [f"{axis} {at}" for axis, at in each[0].items() if all(other[axis] == at for other in each)]
        if self.program.microbatches > 1 and len(part.microbatches) == 1:
            shared.append(f"microbatch {part.microbatches[0]}")
        return ", ".join(shared)

    def _mismatch(self, node: fx.Node, kind: str, stage: int, wrong: WrongShard) -> Mismatch:
        origin = self.origins[facts(node)["origin"]]
        stored = origin.op == "get_attr"
        name = str(origin.target) if stored else origin.name
        module = name.rpartition(".")[0] if stored else module_path(origin)
        origin_keys = (facts(origin)["key"],) if "key" in facts(origin) else ()
        keys = (origin_keys or _readers(origin)) if kind == "value" else (_readers(origin) or origin_keys)
        backward = f"the backward of {', '.join(_readers(origin)[:3]) or 'its path to the output'}"
        maker = _maker(node) if kind == "value" else backward
        layout = format_value(origin, format_layout(facts(node)["layout"]))
        return Mismatch(name, kind, wrong.error, maker, module, _source(origin), stage, layout, keys, wrong, origin)

    def _raised(self, failure: Exception) -> Mismatch:
        """Return a mismatch that names the operator that raised: the operator after the last computed node."""
        assert self.made, f"the run broke before its first value: {failure}"
        last, (stage, _) = list(self.made.items())[-1]
        node = last.next
        while "origin" not in facts(node) and node.op != "output":
            node = node.next
        node = node if "origin" in facts(node) else last
        origin = self.origins[facts(node)["origin"]]
        layout = format_value(origin, format_layout(facts(node)["layout"]))
        text = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure).strip() else ''}"
        return Mismatch(
            origin.name, "value", float("inf"), f"{_maker(node)}: {text}", module_path(origin), _source(origin), stage,
            layout, (facts(origin)["key"],) if "key" in facts(origin) else _readers(origin), None, origin,
        )  # fmt: skip


def _reference(subject: GraphUnderTest) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run the unpartitioned graph. Return {node name: value} and {node name: gradient of the value}."""
    values = subject.values(retain_grads=True)
    tensors = {node.name: value for node, value in values.items() if isinstance(value, Tensor)}
    subject.seed(subject.flat_outputs(values)).backward()
    grads = {name: value.grad for name, value in tensors.items() if value.requires_grad and value.grad is not None}
    for weight in subject.weights.values():
        weight.grad = None
    return {name: value.detach() for name, value in tensors.items()}, grads


def entries_of(
    shape: Sequence[int], layout: Mapping[str, Placement], at: Mapping[str, int], sizes: Mapping[str, int]
) -> tuple[Tensor, ...]:
    """Return, for each dim of a full value, the indices that a rank stores.

    Args:
        at: {mesh axis: coordinate of the rank}.
        sizes: {mesh axis: number of ranks}.

    >>> entries_of([4], {"dp": Placement.parse("S(0)")}, {"dp": 1}, {"dp": 2})
    (tensor([2, 3]),)
    """
    entries = [torch.arange(size) for size in shape]
    num_shards = [1] * len(entries)  # by dim: shards over outer axes, by which the number of sections is divided
    for axis, place in flattened_shards(layout).items():
        indices, sections = entries[place.dim], place.sections
        if len(sections) == 1:
            sections = (sections[0] // num_shards[place.dim],)
        ranks, index = _joined(axis, at, sizes)
        entries[place.dim] = DimSharding(0, len(indices), sections, ranks).take(indices, index)
        if not place.sections:
            num_shards[place.dim] *= ranks
    return tuple(entries)


def _joined(axis: str, at: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return (size of an axis, index of a rank along it), for a mesh axis or a flattened one like `dp_cp`."""
    ranks, index = 1, 0
    for part in mesh_axes_of(axis):
        ranks, index = ranks * sizes[part], index * sizes[part] + at[part]
    return ranks, index


def _maker(node: fx.Node) -> str:
    """Describe the operator or collective that computes a node, such as `layers.0/mul (aten.mul.Tensor)`."""
    key = facts(node).get("key") or facts(node)["origin"]
    if node.op == "get_attr":
        return "none: a stored weight"
    if node.op == "placeholder":
        return f"none: received, or computed from the inputs: {key}"
    axis = axis_of(node)
    return f"{autopart_operator(node)} over {axis}, of {key}" if axis else f"{key} ({node.target})"


def _readers(node: fx.Node) -> tuple[str, ...]:
    keys: list[str] = []
    for user in node.users:
        keys += [facts(user)["key"]] if "key" in facts(user) else _readers(user)
    return tuple(dict.fromkeys(keys))


def _source(node: fx.Node) -> str:
    return source_line(node) or next((source_line(user) for user in node.users if source_line(user)), "")


def _worst_entry(part: GroupShard, whole: Tensor) -> str:
    """Describe the entry with the largest error, by its indices in the full value.

    For example `entry [3, 40] is 0.52, not 0.51`.
    """
    expected = part.of(whole)
    if part.value.shape != expected.shape:
        return f"shape {list(part.value.shape)}, not {list(expected.shape)}"
    apart = (part.value.double() - expected.double()).abs().nan_to_num(nan=float("inf"))
    flat = int(apart.argmax())
    at = torch.unravel_index(torch.tensor(flat), expected.shape) if expected.dim() else ()
    entry = [int(entries[i]) for entries, i in zip(part.entries, at, strict=True)]
    return f"entry {entry} is {part.value.flatten()[flat].item():.6g}, not {expected.flatten()[flat].item():.6g}"


def _ranges(entries: Tensor) -> str:
    """Format sorted indices as ranges: `0:8+16:24` for the indices 0 to 7 and 16 to 23."""
    numbered = enumerate(entries.tolist())
    runs = [[index for _, index in run] for _, run in groupby(numbered, lambda pair: pair[1] - pair[0])]
    return "+".join(f"{run[0]}:{run[-1] + 1}" for run in runs) or "none"


def _of_gradient(place: Placement) -> Placement:
    return {"R(grad P)": P, "P": R}.get(place.kind, place)
