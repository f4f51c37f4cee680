"""Closed formulas (sympy) of the seconds of a step and of the bytes of a rank.

Variables are batch, sequence, axis sizes, microbatches and hardware constants.

The FLOPs and bytes of every operator are products of dims from its sharding rule (`cost.predict.operator_work`).
Identical operators are one term, multiplied by their number.

Symbols: `b` samples of a microbatch on a rank, `s` tokens per sample, the mesh axes (`tp`, `dp`, `pp`), `m`
microbatches, `v` stages per rank. Hardware: `X_<dtype>` peak FLOP/s, `eff(FLOPs)` the share of the peak that a product
reaches, `H` the inner dim of a product at which its rate is half, `M` memory bytes/s, `L` seconds to launch a kernel,
and the symbols of `cost.predict.collective_costs`. `g_tp`, `g_dp`, `g_pp`: ranks of a group that are in one node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import sympy
from sympy.utilities.lambdify import implemented_function

from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict import collective_costs
from autopart.cost.predict.collective_costs import levels
from autopart.cost.predict.dp_sync_costs import exchanges
from autopart.cost.predict.operator_work import CHOSEN, COPY_TRAFFIC, Size, Sizes, Work
from autopart.cost.predict.table_rows import FullTotals, Totals
from autopart.cost.update_cost import EXCHANGES, newton_schulz_s
from autopart.cost.update_rules import ADAMW, UPDATES
from autopart.ir.layout import mesh_axes_of
from autopart.ir.mesh import AXES, Axis, Mesh
from autopart.ir.run.buckets import BUCKET_BYTES
from autopart.ir.run.schedules import Schedule
from autopart.ir.run.sync_option import MethodParameters


def ranks_of(axis: str) -> sympy.Expr:
    """Return the symbol of an axis size, or the product of the symbols for flattened axes (`dp_ep`)."""
    return sympy.Mul(*(sympy.Symbol(part, positive=True) for part in mesh_axes_of(axis)))


def in_node_of(axis: str) -> sympy.Expr:
    """Return the symbol `g_<axis>`: ranks of an axis in one node. For flattened axes, return the product."""
    return sympy.Mul(*(sympy.Symbol(f"g_{part}", positive=True) for part in mesh_axes_of(axis)))


b, s, m, v, M, L, H = sympy.symbols("b s m v M L H", positive=True)
r = sympy.Symbol("r", real=True)
"""Correction of the closed formula: simulated step time / formula's step time - 1 (`plan_cost.Cost`)."""
pp = ranks_of("pp")
SIZES = (b, s, *(ranks_of(axis.name) for axis in reversed(AXES)), m, v)
"""`b, s, tp, ep, cp, dp, dpr, pp, m, v`: the symbols of a mesh without custom axes."""
BACKWARD_SHARE = sympy.Rational(2, 3)
"""Share of the backward in a step's work. The backward does twice the work of the forward."""

_LINKS = (collective_costs.B, collective_costs.alpha, collective_costs.B_node, collective_costs.alpha_node)


@dataclass(frozen=True)
class Formula:
    """Formulas of the seconds of a step and of the bytes of a rank, for the layouts of one plan.

    Example:
        >>> formula.parts_s["matmul"], formula.step_time_s, formula.memory_bytes    # doctest: +SKIP
    """

    totals: Totals
    hardware: Hardware = field(repr=False)
    zero: int = 0
    state_bytes: float = 3.0
    receives_held: int | None = None
    scatter_sends: bool = False
    """True if values whose bytes do not shrink with `tp` are sent to the next stage as shards.

    `state_bytes` and `receives_held` are fields of `RunSetting`: bytes of gradients and optimizer state per byte of a
    trained parameter, and the number of microbatches with receive buffers (None: all).
    """

    axes: tuple[Axis, ...] = AXES
    """The axes that a mesh of the plan may have."""

    methods: tuple[MethodParameters, ...] = ()
    """The `dp_sync` methods that replace the all-reduce of gradients over `dp`.

    Their sizes are per byte of trained parameters.
    """

    versions: int = 1
    """Number of versions of the weights: two if batches follow each other without a pipeline flush."""

    over: tuple[str, int] = ("dp", 1)
    """The axis over which `dp_sync` methods communicate, and its number of ranks in the plan.

    Some methods let a rank communicate with few neighbours, whose number depends on the number of ranks.
    """

    known: dict[Work, sympy.Expr] = field(default_factory=dict, repr=False, compare=False)
    """Cache {kernel or collective: its seconds}. Formulas with equal reference sizes may share it."""

    @property
    def sizes(self) -> tuple[sympy.Symbol, ...]:
        """Symbols of batch, sequence, axis sizes, microbatches and stages per rank."""
        return (b, s, *map(ranks_of, self._names), m, v)

    @property
    def _names(self) -> list[str]:
        return [axis.name for axis in reversed(self.axes)]

    @cached_property
    def _mesh(self) -> Mesh:
        return Mesh({}, self.axes)

    def of(self, size: Size) -> sympy.Expr:
        """Convert a `Size` (a polynomial in batch, sequence and axis sizes) to a sympy expression."""
        return sympy.Add(*(_exact(value) * self._times.scale(powers) for powers, value in size.terms))

    @cached_property
    def _times(self) -> Sizes:
        """Each size divided by the reference size at which operators were counted."""
        counted_at = self.totals.at
        ranks = {
            name: ranks_of(self._mesh.innermost(cuts)) / getattr(counted_at, name) for name, cuts in CHOSEN.items()
        }
        return Sizes(b / counted_at.b, s / counted_at.s, **ranks)

    def seconds(self, work: Work) -> sympy.Expr:
        """Return the seconds of one kernel or collective as a sympy expression."""
        if work not in self.known:
            self.known[work] = self._seconds(work)
        return self.known[work]

    def _seconds(self, work: Work) -> sympy.Expr:
        size = self.of(work.size)
        if work.axis:
            once_s = self._collective(work.kind, work.axis, size)
        elif work.flops.terms:
            flops = self.of(work.flops)
            if work.causal.terms:
                queries = self.of(work.causal)
                share = (queries + _exact(self.hardware.causal_block)) / (2 * queries)
                flops *= sympy.Min(1, share, evaluate=False)
            shallow: Any = 1
            dtype = self.hardware.known_dtype(work.dtype)
            slowness = _exact(self.hardware.slowness(dtype))
            if work.depth.terms and self.hardware.half_depth(work.kind):
                half = H if work.kind != "attention" else _exact(self.hardware.attention_half_width)
                shallow += half / slowness / self.of(work.depth)
            if work.unaligned:
                shallow /= _exact(self.hardware.aligned_share(work.unaligned))
            peak = sympy.Symbol(f"X_{dtype}", positive=True)
            work_s = flops * shallow / (peak * self._eff(flops * slowness))
            traffic_s = self._traffic_s(size, in_order=True)
            once_s = sympy.Max(work_s, traffic_s, evaluate=False) + L  # sympy's evaluation of Max is slow
        else:
            once_s = (size / M if work.in_place else self._traffic_s(size, work.in_order)) + L
        return once_s * _exact(work.times)

    def _collective(self, kind: str, axis: str, size: sympy.Expr) -> sympy.Expr:
        """Return the seconds of a collective as a sympy expression.

        Link rates are symbols, or numbers if the profile has separate rates for this kind of collective.
        """
        inside = in_node_of(axis)
        values = {collective_costs.S: size, collective_costs.k: ranks_of(axis) / inside, collective_costs.g: inside}
        time_s = collective_costs.TIME[kind].subs(values, simultaneous=True)
        has_own_links = kind in self.hardware.collectives
        return time_s.subs(dict(zip(_LINKS, self.hardware.links(kind), strict=True))) if has_own_links else time_s

    @cached_property
    def _eff(self) -> Any:
        sustained = self.hardware.matmul_sustained
        return _curve("eff", tuple((flops, share * sustained) for flops, share in self.hardware.matmul_efficiency))

    def _traffic_s(self, size: sympy.Expr, in_order: bool) -> sympy.Expr:
        curved = any(share != 1 for _, share in self.hardware.memory_points(in_order))
        return size / (M * self._memory_shares[in_order](size)) if curved else size / M

    @cached_property
    def _memory_shares(self) -> list[Any]:
        """Two sympy functions that map bytes to the share of memory bandwidth that an operator reaches.

        The first is for all operators, the second for pointwise operators on contiguous tensors (`Work.in_order`).
        """
        usual, in_order = map(self.hardware.memory_points, (False, True))
        return [_curve("share", usual), _curve("share" if in_order == usual else "share_in_order", in_order)]

    @cached_property
    def kinds_s(self) -> dict[str, sympy.Expr]:
        """{kind of work: seconds} of one microbatch of the full model."""
        terms_by_kind: dict[str, list[sympy.Expr]] = defaultdict(list)
        for (part, work), count in self.totals.works.items():
            often: Any = count * (m - 1) / m if part == "accumulate" else count
            terms_by_kind[work.name].append(often * self.seconds(work))
        casts = self.of(self.totals.cast) + sympy.Add(
            *(self.of(cut.cast) / (_joined(over) if self.zero == 3 else 1) for over, cut in self.totals.cut.items())
        )
        if casts != 0:
            terms_by_kind["other"].append(casts / M)
        return {kind: sympy.Add(*terms) for kind, terms in terms_by_kind.items()}

    @cached_property
    def parts_s(self) -> dict[str, sympy.Expr]:
        """{kind: seconds} of a step of equal stages, with sends, bubble, gradient reduction and optimizer.

        The bubble is (p - 1) / (v m) times the work (Narayanan et al. 2021, section 2.2). Asynchronous schedules with
        two versions of the weights have no bubble.
        """
        work = {kind: m * seconds / pp for kind, seconds in self.kinds_s.items()}
        several = sympy.Piecewise((0, sympy.Eq(pp, 1)), (1, True))
        return {
            **work, "sends": several * (2 * m + 2 * (pp - 1)) * self._send_s(),
            "bubble": (pp - 1) / (v * m) * sympy.Add(*work.values()) if self.versions == 1 else sympy.Integer(0),
            **self._reduction_s(), **self._methods(),
            "optimizer": (
                self._updated_values() / _exact(self.hardware.optimizer_efficiency)
                + COPY_TRAFFIC * (self.versions - 1) * self._rank_bytes(self.totals.stored)
            ) / pp / M + self._products_s() / pp,
            **self._exchanges(),
        }  # fmt: skip

    @property
    def _full_shards(self) -> list[tuple[tuple[str, ...], FullTotals, sympy.Expr]]:
        """(axes of ZeRO, totals, bytes of a rank's shards) of parameters whose update needs the full tensor."""
        full = self.totals.full.items()
        return [(over, of, self.of(of.size) / (_joined(over) if self.zero else 1)) for over, of in full]

    def _updated_values(self) -> sympy.Expr:
        """Return the bytes that the updates of a rank's parameters read and write."""
        rule, adamw = UPDATES[self.totals.optimizer], UPDATES[ADAMW]
        shards = sympy.Add(*(size for _, _, size in self._full_shards))
        rest = _exact((rule if rule.full == "none" else adamw).traffic_values)
        return rest * (self._rank_bytes(self.totals.trained) - shards) + _exact(rule.traffic_values) * shards

    def _products_s(self) -> sympy.Expr:
        """Return the seconds of the matrix products of all updates on a rank, for equally loaded owners."""
        steps = UPDATES[self.totals.optimizer].newton_schulz_steps
        terms = list[sympy.Expr]()
        for _, of, size in self._full_shards:
            all_s = sum(n * newton_schulz_s(matrix, steps, self.hardware) for matrix, n in of.matrices.items())
            terms.append(size * _exact(all_s / of.full_bytes))
        return sympy.Add(*terms)

    def _exchanges(self) -> dict[str, sympy.Expr]:
        """Return {"owner exchange": seconds per step} of full tensors; {} without full tensors."""
        terms = list[sympy.Expr]()
        for over, of, size in self._full_shards:
            axes = [self._mesh.innermost(CHOSEN[name]) for name in of.size.tensor_axes]
            for axis in [*axes, *(["_".join(over)] if over and self.zero else [])]:
                array = size * ranks_of(axis)
                terms.append(EXCHANGES * self._collective("all_to_all", axis, array))
        return {"owner exchange": sympy.Add(*terms) / pp} if terms else {}

    def _sent_bytes(self) -> tuple[sympy.Expr, sympy.Expr]:
        """Return two sizes per microbatch: bytes that a rank sends, and bytes that the receivers all-gather."""
        sent = self.totals.sent
        if not self.scatter_sends:
            return self.of(sent), sympy.Integer(0)
        alike = self.of(Size(tuple(term for term in sent.terms if not term[0].tp)))
        return self.of(sent) - alike + alike / ranks_of(self._mesh.tensor_axis), alike

    def _send_s(self) -> sympy.Expr:
        sent, gathered = self._sent_bytes()
        axis = self._mesh.tensor_axis
        return self._collective("send", "pp", sent) + (
            self._collective("all_gather", axis, gathered) if gathered else 0
        )

    def _reduction_s(self) -> dict[str, sympy.Expr]:
        """Return {name: seconds per step} of gradient reduction and of ZeRO's collectives.

        Seconds that overlap with compute are not included. Gradients are all-reduced in buckets over each axis that
        shards the batch. ZeRO 1 all-gathers and reduce-scatters once a step. ZeRO 2 all-gathers once a step and
        reduce-scatters in every microbatch. ZeRO 3 reduce-scatters once and all-gathers twice in every microbatch.
        ZeRO's collectives are named after the data axis, even if they run over several flattened axes.
        """
        whole = self.of(self.totals.trained) - self._unsharded_bytes
        work = sympy.Add(*self.kinds_s.values()) / pp
        sums = []
        over = {axis.name: whole for axis in self.axes if axis.cuts == "rows"}
        for axis, sizes in self.totals.summed_over.items():
            left = [self.of(size) * self._reduced_share(axis, cut) for cut, size in sizes.items()]
            over.setdefault(axis, sympy.Add(*left))
        axis, _ = self.over
        over[axis] = over.get(axis, sympy.Integer(0)) * (1 - _exact(self._methods_share))
        for axis, summed in over.items():
            several = sympy.Piecewise((0, sympy.Eq(ranks_of(axis), 1)), (1, True))
            one = self._collective("all_reduce", axis, sympy.Integer(BUCKET_BYTES))
            sums.append(several * summed / pp * one / BUCKET_BYTES)
        parts = {"gradient sums": self._exposed_s(sympy.Add(*sums) * _exact(self.totals.summed), work * BACKWARD_SHARE)}
        if self.zero and self.totals.cut and not self.totals.gathers:
            gathers, scatters = {1: (1, 1), 2: (1, m), 3: (2 * m, m)}[self.zero]
            beside = work * (m if self.zero == 3 else BACKWARD_SHARE * scatters)
            moved = {"all_gather": (gathers, self.totals.read), "reduce_scatter": (scatters, self.totals.summed)}
            if self.zero == 1:  # methods receive unsharded gradients
                moved["reduce_scatter"] = 1, self.totals.summed * (1 - self._methods_share)
            for kind, (times, share) in moved.items():
                seconds = [
                    cut.number * self._collective(kind, "_".join(axes), self.of(cut.size) / cut.number * _exact(share))
                    for axes, cut in self.totals.cut.items()
                ]
                parts[f"{self._mesh.data_axis} {kind}"] = self._exposed_s(times / pp * sympy.Add(*seconds), beside / 2)
        return parts

    @property
    def _methods_share(self) -> float:
        """Bytes of the parameters that `dp_sync` methods synchronize, as a share of all trained parameters."""
        return float(sum(one.size_bytes for one in self.methods))

    def _methods(self) -> dict[str, sympy.Expr]:
        """Return {"dp_sync": seconds per step} of the methods that replace the all-reduce; {} without one."""
        axis, several = self.over
        ranks, trained, terms = ranks_of(axis), self.of(self.totals.trained) / pp, list[sympy.Expr]()
        for one in self.methods:
            size, sent, factors = (_exact(float(share)) * trained for share in one[1:])
            here = MethodParameters(one.method, size, sent, factors)
            moved = [each.often * self._collective(each.kind, axis, each.size_bytes)
                     for each in exchanges(here, ranks, several)]  # fmt: skip
            terms += [*moved, _exact(one.method.passes(several)) * size / M]
        return {"dp_sync": sympy.Piecewise((0, sympy.Eq(ranks, 1)), (sympy.Add(*terms), True))} if terms else {}

    def _reduced_share(self, axis: str, cut: tuple[str, ...]) -> sympy.Expr:
        """Return the share of a parameter's gradient that each rank reduces once a step over an axis.

        Args:
            axis: the axis of the reduction.
            cut: the axes over which ZeRO shards the parameter.
        """
        if not self.zero or not cut:
            return sympy.Integer(1)
        left = sympy.Integer(0) if axis in cut else 1 / _joined(cut)
        share = _exact(self._methods_share if self.zero == 1 else 0)  # share that methods get unsharded
        return left * (1 - share) + share

    def _exposed_s(self, moved: sympy.Expr, work: sympy.Expr) -> sympy.Expr:
        """Return the seconds of communication that do not overlap with compute.

        The last bucket of gradients cannot overlap.

        Args:
            moved: seconds of communication.
            work: seconds of compute with which it may overlap.
        """
        hidden = self.totals.hidden * self.hardware.overlap
        return moved - _minimum(hidden * moved, work) if hidden else moved

    def _rank_bytes(self, size: Size) -> sympy.Expr:
        """Return the bytes of parameters on a rank with ZeRO sharding.

        Args:
            size: bytes of the parameters on a rank without ZeRO sharding.
        """
        return self.of(size) - self._unsharded_bytes + self._shard_bytes

    @property
    def _unsharded_bytes(self) -> sympy.Expr:
        """Bytes of the parameters that ZeRO shards, before sharding."""
        return sympy.Add(*(self.of(cut.size) for cut in self.totals.cut.values())) if self.zero else sympy.Integer(0)

    @property
    def _shard_bytes(self) -> sympy.Expr:
        """Bytes of a rank's shards of the parameters that ZeRO shards."""
        sizes = (self.of(cut.size) / _joined(over) for over, cut in self.totals.cut.items())
        return sympy.Add(*sizes) if self.zero else sympy.Integer(0)

    @cached_property
    def step_time_s(self) -> sympy.Expr:
        return sympy.Add(*self.parts_s.values())

    @cached_property
    def memory_parts(self) -> dict[str, sympy.Expr]:
        """{kind of memory: bytes} of a rank, for equal stages.

        Activations count once per microbatch in flight under 1F1B: `p` microbatches, or `m` if that is less.
        Interleaved schedules have `1 + (p-1)/pv` times as many in flight (Korthikanti et al. 2022, section 4.2.3).
        """
        stored, trained = self._rank_bytes(self.totals.stored) / pp, self._rank_bytes(self.totals.trained) / pp
        more = sympy.Piecewise((1, sympy.Eq(v, 1)), (1 + (pp - 1) / (pp * v), True))
        held = m if self.receives_held is None else self.receives_held
        flight, sent = sympy.Min(m, pp * more) / pp, self._sent_bytes()[0]
        return {
            "parameters": self.versions * stored, "gradients": trained,
            "optimizer": self._state_bytes(trained),
            "activations": self.of(self.totals.kept) * flight, "temporary": self.of(self.totals.temporary),
            "buffers": sympy.Float(self.totals.buffers), "gathered": self._gathered() / pp,
            "communication": sympy.Piecewise((0, sympy.Eq(pp, 1)), (2 * self.versions * held * sent, True))
            + self.of(self.totals.trained) / pp * self._method_state_share,
        }  # fmt: skip

    def _state_bytes(self, trained: sympy.Expr) -> sympy.Expr:
        """Return the bytes of optimizer state on a rank, for equally loaded owners of full tensors."""
        rule = UPDATES[self.totals.optimizer]
        if rule.full == "none":
            return _exact(self.state_bytes - 1 if rule == UPDATES[ADAMW] else rule.state_values) * trained
        shards = sympy.Add(*(size for _, _, size in self._full_shards)) / pp
        return _exact(self.state_bytes - 1) * (trained - shards) + _exact(rule.state_values) * shards

    @property
    def _method_state_share(self) -> sympy.Expr:
        """Bytes of state that `dp_sync` methods keep, per byte of trained parameters."""
        return _exact(sum(float(one.method.state_bytes(one, self.over[1])) for one in self.methods))

    def _gathered(self) -> sympy.Expr:
        """Return the bytes of unsharded parameters that ZeRO 1 and 2 keep in memory for a step.

        With ZeRO 1, the bytes of unsharded gradients are included.
        """
        cut = self._unsharded_bytes if self.zero in (1, 2) else sympy.Integer(0)
        grads = cut * _exact(self.totals.summed) - self._shard_bytes if self.zero == 1 else 0
        return cut * _exact(self.totals.read) + grads

    @cached_property
    def memory_bytes(self) -> sympy.Expr:
        """Peak bytes of a rank: the sum of `memory_parts`.

        With one microbatch, the backward frees activations while it allocates gradients. Only the larger of the two
        counts.
        """
        parts = self.memory_parts
        less = _minimum(parts["gradients"], parts["activations"])
        return sympy.Add(*parts.values()) - sympy.Piecewise((less, sympy.Eq(m, 1)), (0, True))

    # Numbers

    @cached_property
    def constants(self) -> dict[sympy.Symbol, float]:
        """{hardware symbol: value}."""
        hardware = self.hardware
        links = (hardware.link_bytes_per_s, hardware.link_latency_s, hardware.node_link_bytes_per_s,
                 hardware.node_link_latency_s)  # fmt: skip
        peaks = {sympy.Symbol(f"X_{dtype}", positive=True): peak for dtype, peak in hardware.flops_per_s.items()}
        return {M: hardware.memory_bytes_per_s, L: hardware.launch_s, H: hardware.matmul_half_depth, **peaks,
                **dict(zip(_LINKS, links, strict=True))}  # fmt: skip

    def values(self, mesh: Mesh, schedule: Schedule, rows: int, tokens: int | None = None) -> dict[sympy.Symbol, Any]:
        """Return {symbol: value} of all symbols for a mesh and schedule.

        Args:
            rows: samples of the global batch.
            tokens: tokens per sample; None: the reference size, at which the operators were counted.
        """
        per_node = self.hardware.devices_per_node
        inside = {in_node_of(axis): levels(mesh.size(axis), per_node, mesh.stride(axis))[0] for axis in self._names}
        sizes = (rows / (mesh.data_parallel_size * schedule.microbatches), tokens or self.totals.at.s,
                 *map(mesh.size, self._names), schedule.microbatches, schedule.virtual_stages)  # fmt: skip
        return {**self.constants, **dict(zip(self.sizes, sizes, strict=True)), **inside}


def _minimum(*of: sympy.Expr) -> sympy.Expr:
    """Return an unevaluated sympy minimum, because simplifying a minimum of long sums is slow."""
    return sympy.Min(*of, evaluate=False)


def _joined(axes: tuple[str, ...]) -> sympy.Expr:
    return sympy.Mul(*map(ranks_of, axes))


def compiled(formulas: Sequence[Formula]) -> Any:
    """Compile the step time and memory of each formula into one numpy function.

    The arguments of the function are the values of `Formula.sizes`, then of `g_tp`, `g_dp`, ..., as numbers or arrays.
    It returns [step_time_s, memory_bytes, ...], two entries per formula. All formulas must have the same hardware and
    axes.
    """
    constants, sizes = formulas[0].constants, formulas[0].sizes
    expressions = [expression for f in formulas for expression in (f.step_time_s, f.memory_bytes)]
    inside = (in_node_of(str(axis)) for axis in sizes[2:-2])
    function = sympy.lambdify((*constants, *sizes, *inside), expressions, modules="numpy", cse=True)
    return partial(function, *constants.values())


@lru_cache(maxsize=64)
def _curve(name: str, points: tuple[tuple[float, float], ...]) -> Any:
    return implemented_function(name, partial(_straight, np.array(points)))


def _straight(points: np.ndarray, amount: Any) -> Any:
    return np.interp(np.log(np.asarray(amount, dtype=float)), np.log(points[:, 0]), points[:, 1])


def _exact(value: float) -> sympy.Expr:
    return sympy.Integer(int(value)) if value == int(value) else sympy.Float(value)
