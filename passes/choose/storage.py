"""How parameters are stored: which are cut over `dp` too, and what every rank holds.

With `zero=3` (ZeRO stage 3: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3; FSDP: Zhao et al. 2023,
arXiv:2304.11277) a rank holds one part in `dp` of a weight. That is a layout as any other, `S(d)` on `dp`: where the
weight is read it is converted to `R(grad P)`, which gathers it and scatters the sum of its gradient. A dim is cut by
one axis alone, so that a part is one block of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autopart.errors import LayoutError, OptionError
from autopart.ir.graph import pattern_of
from autopart.ir.layout import R_GRAD_P, Placement, R, cannot_store_over_dp, shard
from autopart.ir.mesh import Mesh
from autopart.ir.program import StoredTensor
from autopart.passes.choose.pins import cannot_hold, pinned_over_dp, smallest_conflict
from autopart.plans.pins import LayoutPin, Pins
from autopart.tracing.trace import Trace

if TYPE_CHECKING:
    from autopart.passes.facts.decisions import Decisions

MIN_DIMS = 2
"""Vectors (norms, biases) stay whole: a thousandth of a model, for as many collectives as its matrices."""


@dataclass(frozen=True)
class Storage:
    """How parameters are stored over `dp` ranks, `stride` apart in rank numbers, by where they lie on `tp`."""

    dp: int = 1
    stride: int = 1
    zero: int = 0
    pinned: Mapping[str, Sequence[LayoutPin]] = field(default_factory=dict)

    @staticmethod
    def of(trace: Trace, mesh: Mesh, zero: int, pins: Pins) -> Storage:
        return Storage(mesh.size("dp"), mesh.stride("dp"), zero, pinned_over_dp(trace, mesh, pins))

    def place(self, name: str, sizes: Sequence[int], tensor: Placement) -> Placement | None:
        """How a parameter that is `tensor` on `tp` is cut over `dp`; None: whole on every rank."""
        if self.dp == 1:
            return None
        if name in self.pinned:
            place = Placement.parse(self.pinned[name][0].text)
            return place if place.is_shard else None
        return _cut(sizes, self.dp, tensor) if self.zero == 3 else None


def choose_over_dp(
    trace: Trace, mesh: Mesh, zero: int, stored: Mapping[str, Placement], pins: Pins
) -> dict[str, Placement]:
    """`{parameter: S(d)}` of those cut over `dp`: what is pinned so, and with `zero=3` every matrix that divides.

    Args:
        stored: where the parameters lie on `tp`.
    Raises OptionError or LayoutError where that is nothing, or cannot be.
    """
    dp = mesh.size("dp")
    if zero and dp == 1:
        why, hint = f"the mesh {mesh} has no axis dp", f"mesh='{Mesh.parse({**mesh.sizes, 'dp': 2})}', or leave it out"
        raise OptionError(f"zero={zero} needs an axis to cut parameters over", why=why, hint=hint)
    storage = Storage.of(trace, mesh, zero, pins)
    chosen: dict[str, Placement] = {}
    for name, parameter in trace.parameters.items():
        sizes, tensor = tuple(parameter.shape), stored.get(name, R)
        if name in storage.pinned:
            _check(name, sizes, dp, tensor, storage.pinned[name], pins)
        place = storage.place(name, sizes, tensor)
        if place is not None:
            chosen[name] = place
    if zero and not chosen:
        raise LayoutError(
            f"zero={zero} finds nothing to cut over dp={dp}",
            why="no parameter with two dims or more has one that divides over it and that tp does not cut",
            hint="another size of dp, or zero=0",
        )  # fmt: skip
    return chosen


def _cut(sizes: Sequence[int], dp: int, tensor: Placement) -> Placement | None:
    """The first dim that divides and that `tp` does not cut; None where there is none."""
    if len(sizes) < MIN_DIMS:
        return None
    return next(
        (shard(dim) for dim, size in enumerate(sizes)
         if size and size % dp == 0 and not (tensor.is_shard and tensor.dim == dim)), None,
    )  # fmt: skip


def _check(name: str, sizes: Sequence[int], dp: int, tensor: Placement, found: Sequence[LayoutPin], pins: Pins) -> None:
    """Raises LayoutError where a parameter cannot be stored as its pins say."""
    if not _agree(found):
        clash = smallest_conflict(found, _agree)
        raise LayoutError(
            cannot_hold(clash), why=f"{name} can have only one layout",
            where=", ".join(filter(None, map(pins.where, clash))), hint="leave one of them out",
        )  # fmt: skip
    place = Placement.parse(found[0].text)
    why = cannot_store_over_dp(place, sizes, dp, tensor)
    if why:
        raise LayoutError(
            f"cannot pin {found[0]}", why=f"{name}: {why}", where=pins.where(found[0]),
            hint=fitting_over_dp(sizes, dp, tensor),
        )  # fmt: skip


def _agree(pins: Sequence[LayoutPin]) -> bool:
    places = [Placement.parse(pin.text) for pin in pins]
    return len({place if place.is_shard else R for place in places}) <= 1


def fitting_over_dp(sizes: Sequence[int], dp: int, tensor: Placement) -> str:
    """`S(0), S(1) or R`: what a parameter can be on `dp`, for errors."""
    fits = [f"S({dim})" for dim in range(len(sizes)) if not cannot_store_over_dp(shard(dim), sizes, dp, tensor)]
    return f"{', '.join(fits)} or R" if fits else "R"


def storage_notes(trace: Trace, decisions: Decisions, zero: int) -> tuple[str, ...]:
    """A line for every matrix that stays whole on `dp` although it was asked to be cut; repeated blocks share one."""
    dp = decisions.mesh.size("dp")
    kept = [
        f"{pattern_of(name)}: {list(parameter.shape)} stays whole on dp={dp}: no dim divides that tp does not cut"
        for name, parameter in trace.parameters.items()
        if zero == 3 and parameter.dim() >= MIN_DIMS
        and _cut(tuple(parameter.shape), dp, decisions.stored.get(name, R)) is None
        and name not in decisions.stored_over_dp
    ]  # fmt: skip
    return tuple(dict.fromkeys(kept))


def stored_tensors(
    trace: Trace, decisions: Decisions, readers: Mapping[str, set[int]], sizes: Mapping[str, int]
) -> dict[str, StoredTensor]:
    """How every parameter of the model is stored: the same for all programs of one plan.

    Args:
        readers: the stages that read each parameter.
        sizes: of the mesh axes that have more than one rank.
    """
    stored = {}
    for name, parameter in trace.parameters.items():
        place = decisions.stored.get(name, R)
        layout, axes = {}, []
        if name in decisions.stored_over_dp:
            layout["dp"] = decisions.stored_over_dp[name]
        elif "dp" in sizes:
            axes.append("dp")
        if "tp" in sizes:
            layout["tp"] = R if place == R_GRAD_P else place
        if place == R_GRAD_P:
            axes.append("tp")
        stored[name] = StoredTensor(
            name, tuple(parameter.shape), layout, tuple(sorted(readers.get(name, {0}))),
            tuple(axes) if parameter.requires_grad else (), trace.aliases.get(name, ()),
        )  # fmt: skip
    return stored
