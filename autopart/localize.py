"""Finding the first value of a partitioned program that differs from the model's, by comparing all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from autopart.compiler import find_loss
from autopart.graph import module_path, source_line, source_of
from autopart.layout import Placement
from autopart.program import MICROBATCH_AXIS, Program
from autopart.runtime.pieces import Cut

if TYPE_CHECKING:
    from autopart.verify import Tamper, VerificationRun

FLOOR = 1e-3
"""Values smaller than this are compared absolutely: a sum that cancels to nothing leaves rounding alone."""

BROKEN = (RuntimeError, ValueError, IndexError, KeyError, StopIteration)
"""What a fault in a program can raise when it is run."""


@dataclass(frozen=True)
class Mismatch:
    """The first value that differs: `name` in the traced graph, `kind` "value" or "gradient", where it is made."""

    name: str
    kind: str
    error: float
    operator: str
    module: str
    source: str
    stage: int
    layout: str

    def __str__(self) -> str:
        return (
            f"{self.kind} of {self.name} differs by {self.error:.3g}\n"
            f"  operator {self.operator}, stage {self.stage}, layout {self.layout}\n"
            f"  module   {self.module or '(the model itself)'}\n"
            f"  source   {self.source or 'unknown'}"
        )


class MismatchSearch:
    """Compares the lockstep run with the traced graph value by value, then gradient by gradient."""

    def __init__(self, run: VerificationRun, program: Program, placement: str, tolerance: float, tamper: Tamper | None):
        self.run, self.program, self.tolerance, self.tamper = run, program, tolerance, tamper
        self.placement, self.mesh = placement, run.mesh
        self.origins = {node.name: node for node in run.traced.graph.nodes}
        self.made: dict[fx.Node, tuple[int, dict[int, dict[int, Tensor]]]] = {}

    def first(self, failure: Exception | None, gradients: bool = True) -> Mismatch | None:
        """The first wrong value, else (with `gradients`) the first wrong gradient; `failure`: what the run raised."""
        reference = self._reference_values()
        parameters = self.run.parameters(self.program, self.tamper)
        try:
            results = self.run.lockstep(self.program, parameters, self.placement, self._keep)
        except BROKEN as error:
            failure = error
        wrong = self._first_value(reference)
        if wrong is not None or failure is not None:
            return wrong or self._broken(failure)
        if not gradients:
            return None
        torch.autograd.backward(self.run.seeds(self.program, results))
        return self._first_gradient(reference)

    def _keep(self, stage: int, microbatch: int, node: fx.Node, value: dict[int, Any]) -> None:
        if "origin" not in node.meta or not all(isinstance(v, Tensor) for v in value.values()):
            return
        for v in value.values():
            if v.requires_grad and not v.is_leaf:
                v.retain_grad()
        self.made.setdefault(node, (stage, {}))[1][microbatch] = value

    def _reference_values(self) -> dict[str, Tensor]:
        """Every value of the traced graph on the global batch, with its gradient."""
        run, graph = self.run, self.run.traced.graph
        values = run.values(lambda value: value.retain_grad())
        flat = [values[o] if isinstance(o, fx.Node) else o for o in graph.output_node().args[0]]
        run.seed(flat, find_loss(run.traced) is not None, run.traced).backward()
        return {node.name: v for node, v in values.items() if isinstance(v, Tensor)}

    def _first_value(self, reference: Mapping[str, Tensor]) -> Mismatch | None:
        for node, (stage, microbatches) in self.made.items():
            origin, layout = node.meta["origin"], node.meta["layout"]
            error = self._error({m: v for m, v in microbatches.items()}, layout, reference[origin], node)
            if error > self.tolerance:
                return self._mismatch(node, "value", error, stage)
        return None

    def _first_gradient(self, reference: Mapping[str, Tensor]) -> Mismatch | None:
        """The first in the order of the backward: the last values of the forward first. Copies in other layouts carry a
        part of the gradient only and are passed over."""
        scale = max(
            (float(v.grad.abs().max()) for v in reference.values() if v.requires_grad and v.grad is not None),
            default=1.0,
        )
        seen: set[str] = set()
        first_made: dict[str, fx.Node] = {}
        for node in self.made:
            first_made.setdefault(node.meta["origin"], node)
        for node in reversed(list(first_made.values())):
            stage, microbatches = self.made[node]
            origin, layout = node.meta["origin"], node.meta["layout"]
            whole = reference[origin]
            source = source_of(self.origins[origin])[0]
            if origin in seen or source.meta["role"] != "active" or not whole.requires_grad or whole.grad is None:
                continue
            grads = {m: {r: v.grad for r, v in value.items()} for m, value in microbatches.items()}
            if any(g is None for value in grads.values() for g in value.values()):
                continue
            places = {axis: _of_gradient(place) for axis, place in layout.items()}
            joined = self._join(grads, places, tuple(whole.shape))
            error = float((joined - whole.grad).abs().max()) / (scale or 1.0)
            if error > self.tolerance:
                return self._mismatch(node, "gradient", error, stage)
        return None

    def _error(self, microbatches: dict, layout: Mapping[str, Placement], whole: Tensor, node: fx.Node) -> float:
        try:
            return relative(self._join(microbatches, layout, tuple(whole.shape), equal=True), whole)
        except _RanksDiffer as differ:
            return differ.error
        except RuntimeError:
            return float("inf")

    def _join(
        self, microbatches: Any, layout: Mapping[str, Placement], shape: tuple[int, ...], equal: bool = False
    ) -> Tensor:
        """The global value from every microbatch's and rank's part."""
        current = list(shape)
        cuts = []
        for axis, place in layout.items():  # dp, mb, tp: the outer axis cuts first
            size = self.program.microbatches if axis == MICROBATCH_AXIS else self.mesh.size(axis)
            cut = None
            if place.is_shard:
                others = [
                    p for a, p in layout.items() if a != axis and p.is_shard and p.dim == place.dim and not p.sections
                ]
                plain = 1
                for a, p in layout.items():
                    if p in others:
                        plain *= self.program.microbatches if a == MICROBATCH_AXIS else self.mesh.size(a)
                sections = (place.sections[0] // plain,) if len(place.sections) == 1 else place.sections
                cut = Cut(place.dim, current[place.dim], sections if place.sections else (), size)
                current[place.dim] = cut.length(0)
            cuts.append((axis, place, size, cut))
        parts = {
            tuple(m if axis == MICROBATCH_AXIS else self.mesh.coordinates(r).get(axis, 0) for axis, *_ in cuts): v
            for m, value in microbatches.items() for r, v in value.items()
        }  # fmt: skip
        for _, place, _, cut in reversed(cuts):
            outer: dict[tuple, list[Tensor]] = {}
            for key in sorted(parts):
                outer.setdefault(key[:-1], []).append(parts[key].detach())
            parts = {key: _combine(group, place, cut, equal) for key, group in outer.items()}
        return parts[()]

    def parameter(self, name: str, error: float) -> Mismatch:
        """A parameter whose gradient is wrong although every value's gradient is right: its sum over ranks is."""
        node = next(n for n in self.run.traced.graph.nodes if n.op == "get_attr" and n.target == name)
        source = next((source_line(u) for u in node.users if source_line(u)), "")
        stored = self.program.parameters[name]
        layout = ", ".join(f"{axis}: {place}" for axis, place in stored.layout.items()) or "whole"
        made = "the sum of gradients over ranks"
        return Mismatch(name, "gradient", error, made, name.rpartition(".")[0], source, stored.stages[0], layout)

    def _mismatch(self, node: fx.Node, kind: str, error: float, stage: int) -> Mismatch:
        origin = self.origins[node.meta["origin"]]
        name = str(origin.target) if origin.op == "get_attr" else origin.name
        module = str(origin.target).rpartition(".")[0] if origin.op == "get_attr" else module_path(origin)
        source = source_line(origin) or next((source_line(u) for u in origin.users if source_line(u)), "")
        layout = ", ".join(f"{axis}: {place}" for axis, place in node.meta["layout"].items()) or "whole"
        return Mismatch(name, kind, error, str(node.target), module, source, stage, layout)

    def _broken(self, failure: Exception | None) -> Mismatch:
        last = list(self.made)[-1] if self.made else None
        node = last.next if last is not None else None
        if node is None or "origin" not in node.meta:
            node = last
        assert node is not None, f"the run broke before its first value: {failure}"
        stage = self.made[last][0] if last is not None else 0
        return self._mismatch(node, "value", float("inf"), stage)


class _RanksDiffer(Exception):
    """Ranks that should hold the same value do not."""

    def __init__(self, error: float):
        super().__init__(error)
        self.error = error


def _combine(parts: list[Tensor], place: Placement, cut: Cut | None, equal: bool) -> Tensor:
    if cut is not None:
        return cut.join(parts)
    if place.kind == "P":
        return torch.stack(parts).sum(0)
    if equal and any(
        p.shape != parts[0].shape or not torch.allclose(p, parts[0], rtol=1e-9, atol=1e-12, equal_nan=True)
        for p in parts
    ):
        raise _RanksDiffer(max(relative(p, parts[0]) for p in parts))
    return parts[0]


def _of_gradient(place: Placement) -> Placement:
    """Where the gradient of a value in this placement lies."""
    return {"R(grad P)": Placement("P"), "P": Placement("R")}.get(place.kind, place)


def weights_like(output: Tensor) -> Tensor:
    """Fixed weights between 0.5 and 1.5, different for every entry."""
    return torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).reshape(output.shape)


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest entry (at least `FLOOR`); infinite where shapes differ."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point():
        return float((found != expected).any())
    scale = max(float(expected.detach().abs().max()), FLOOR) if expected.numel() else FLOOR
    difference = (
        (found.detach() - expected.detach())
        .abs()
        .nan_to_num(nan=0.0 if found.isnan().equal(expected.isnan()) else 1e300)
    )
    return float(difference.max()) / scale if expected.numel() else 0.0
