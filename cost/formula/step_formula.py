"""The cost of a step as closed formulas (sympy) in batch, sequence, axis sizes, microbatches and hardware constants.

Every operator is counted from its rule as a product of factors (`cost.work`), those that do the same once with how many
there are. Symbols: `b` rows of a microbatch on a rank, `s` tokens of a row, the axes of the mesh (`tp`, `dp`, `pp`),
`m` microbatches, `v` stages a rank. Hardware: `X_<dtype>` peak FLOP/s, `eff(FLOPs)` the share that a product reaches,
`H` the depth of a product at which that is half, `M` memory bytes/s, `L` seconds to launch a kernel, and those of
`cost.collectives`; `g_tp`, `g_dp`, `g_pp`: the ranks of a group that are in one node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import sympy
from sympy.utilities.lambdify import implemented_function

from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict import collective_costs
from autopart.cost.predict.collective_costs import levels
from autopart.cost.predict.dp_sync_costs import Carried, exchanges, passes, remembered_bytes
from autopart.cost.predict.operator_work import CHOSEN, COPY_TRAFFIC, OPTIMIZER_TRAFFIC, Size, Sizes, Work
from autopart.ir.layout import parts_of
from autopart.ir.mesh import AXES, Axis, Mesh
from autopart.ir.run.buckets import BUCKET_BYTES
from autopart.ir.run.schedules import Schedule


def ranks_of(axis: str) -> sympy.Expr:
    """The symbol of an axis; of several joined in one, their product."""
    return sympy.Mul(*(sympy.Symbol(part, positive=True) for part in parts_of(axis)))


def in_node_of(axis: str) -> sympy.Expr:
    """The symbol of the ranks of a group along an axis that are in one node; of several joined in one, their
    product."""
    return sympy.Mul(*(sympy.Symbol(f"g_{part}", positive=True) for part in parts_of(axis)))


b, s, m, v, M, L, H = sympy.symbols("b s m v M L H", positive=True)
pp = ranks_of("pp")
SIZES = (b, s, *(ranks_of(axis.name) for axis in reversed(AXES)), m, v)
"""`b, s, tp, ep, cp, dp, dpr, pp, m, v`: of a mesh without axes of its own."""
BACKWARD_SHARE = sympy.Rational(2, 3)
"""Of a step's work: it does twice what the forward does."""

_LINKS = (collective_costs.B, collective_costs.alpha, collective_costs.B_node, collective_costs.alpha_node)


class CutBytes(NamedTuple):
    """Parameters that ZeRO cuts over the same axes: their bytes, how many they are, and the bytes that casting them and
    their gradients moves in a microbatch where they are whole."""

    size: Size
    number: int
    cast: Size


@dataclass(frozen=True)
class Totals:
    """What one microbatch of the whole model does on the ranks of one pipeline, and what they hold.

    `works`: {(part of a step, work): how often}. `stored`: bytes of parameters, of which `trained` get a gradient, and
    ZeRO cuts `cut`, {the axes joined over which it does: which}; `gathers`: what that moves is among the works. `cast`:
    bytes that casting the other parameters and their gradients moves in a microbatch; `read`, `summed`: as in
    `cost.rows.Parameter`, of all. `kept`: of activations, by all operators. `temporary`: beyond it at the largest.
    `sent`: between two stages. `buffers`: of the model and of the inputs. `summed_over`: {axis: bytes of the parameters
    whose gradients are summed over it, by the axes that ZeRO cuts them over}. `hidden`: the share of gradients that are
    complete before the last. `at`: the sizes that all were counted at.
    """

    works: Mapping[tuple[str, Work], int]
    stored: Size
    trained: Size
    cut: Mapping[tuple[str, ...], CutBytes]
    gathers: bool
    cast: Size
    read: float
    summed: float
    kept: Size
    temporary: Size
    sent: Size
    buffers: float
    summed_over: Mapping[str, Mapping[tuple[str, ...], Size]]
    hidden: float
    at: Sizes


@dataclass(frozen=True)
class Formula:
    """The formulas of a model under one kind of layouts.

    Example:
        >>> formula.parts_s["matmul"], formula.step_time_s, formula.memory_bytes    # doctest: +SKIP
    """

    totals: Totals
    hardware: Hardware = field(repr=False)
    zero: int = 0
    state_bytes: float = 3.0
    receives_held: int | None = None
    scatter_sends: bool = False
    """These three as in `cost.table.Setting`; scattered is what does not get smaller with `tp`."""

    axes: tuple[Axis, ...] = AXES
    """Those that the mesh may have."""

    methods: tuple[Carried, ...] = ()
    """What data-parallel ranks send each other in place of gradients, for each byte of trained parameters."""

    versions: int = 1
    """Of the weights: with two, batches follow each other without a flush."""

    over: tuple[str, int] = ("dp", 1)
    """The axis that these are for, and its ranks in the plan, by which neighbours are counted."""

    known: dict[Work, sympy.Expr] = field(default_factory=dict, repr=False, compare=False)
    """Seconds of works, which formulas counted at the same sizes may share."""

    @property
    def sizes(self) -> tuple[sympy.Symbol, ...]:
        """The symbols that are not the hardware's, but for the ranks in a node."""
        return (b, s, *map(ranks_of, self._names), m, v)

    @property
    def _names(self) -> list[str]:
        return [axis.name for axis in reversed(self.axes)]

    @cached_property
    def _mesh(self) -> Mesh:
        return Mesh({}, self.axes)

    def of(self, size: Size) -> sympy.Expr:
        """A Size in the symbols."""
        return sympy.Add(*(_exact(value) * self._times.scale(powers) for powers, value in size.terms))

    @cached_property
    def _times(self) -> Sizes:
        """How many times the sizes that all was counted at."""
        counted_at = self.totals.at
        ranks = {
            name: ranks_of(self._mesh.innermost(cuts)) / getattr(counted_at, name) for name, cuts in CHOSEN.items()
        }
        return Sizes(b / counted_at.b, s / counted_at.s, **ranks)

    def seconds(self, work: Work) -> sympy.Expr:
        """Of one work."""
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
            once_s = sympy.Max(work_s, traffic_s, evaluate=False) + L  # it looks long for which is larger
        else:
            once_s = (size / M if work.in_place else self._traffic_s(size, work.in_order)) + L
        return once_s * _exact(work.times)

    def _collective(self, kind: str, axis: str, size: sympy.Expr) -> sympy.Expr:
        """Seconds of one over an array of this size, on links of its own where it has any."""
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
        """By whether an operator goes through memory in its order."""
        usual, in_order = map(self.hardware.memory_points, (False, True))
        return [_curve("share", usual), _curve("share" if in_order == usual else "share_in_order", in_order)]

    @cached_property
    def kinds_s(self) -> dict[str, sympy.Expr]:
        """Seconds of one microbatch of the whole model by kind of work."""
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
        """Seconds of a step of equal stages by kind: work, `"sends"`, `"bubble"` ((p - 1) / v m of the work: Narayanan
        et al. 2021, section 2.2; none with two versions of the weights), `"gradient sums"` and `"optimizer"`."""
        work = {kind: m * seconds / pp for kind, seconds in self.kinds_s.items()}
        several = sympy.Piecewise((0, sympy.Eq(pp, 1)), (1, True))
        return {
            **work, "sends": several * (2 * m + 2 * (pp - 1)) * self._send_s(),
            "bubble": (pp - 1) / (v * m) * sympy.Add(*work.values()) if self.versions == 1 else sympy.Integer(0),
            **self._sums(), **self._methods(),
            "optimizer": (
                OPTIMIZER_TRAFFIC / _exact(self.hardware.optimizer_efficiency) * self._held(self.totals.trained)
                + COPY_TRAFFIC * (self.versions - 1) * self._held(self.totals.stored)
            ) / pp / M,
        }  # fmt: skip

    def _sent(self) -> tuple[sympy.Expr, sympy.Expr]:
        """Bytes that a rank sends to the next stage in a microbatch, and that ranks gather of what they receive."""
        sent = self.totals.sent
        if not self.scatter_sends:
            return self.of(sent), sympy.Integer(0)
        alike = self.of(Size(tuple(term for term in sent.terms if not term[0].tp)))
        return self.of(sent) - alike + alike / ranks_of(self._mesh.tensor_axis), alike

    def _send_s(self) -> sympy.Expr:
        sent, gathered = self._sent()
        axis = self._mesh.tensor_axis
        return self._collective("send", "pp", sent) + (
            self._collective("all_gather", axis, gathered) if gathered else 0
        )

    def _sums(self) -> dict[str, sympy.Expr]:
        """All-reduces in buckets over each axis that cuts rows, but for what runs beside a backward; of what ZeRO cuts,
        gathers and reduce-scatters (named after the data axis, over whatever is joined to it): once a step with 1, a
        reduce-scatter a microbatch with 2 and two gathers more with 3, but for what runs beside the work."""
        whole = self.of(self.totals.trained) - self._cut
        work = sympy.Add(*self.kinds_s.values()) / pp
        sums = []
        over = {axis.name: whole for axis in self.axes if axis.cuts == "rows"}
        for axis, sizes in self.totals.summed_over.items():
            left = [self.of(size) * self._left(axis, cut) for cut, size in sizes.items()]
            over.setdefault(axis, sympy.Add(*left))
        axis, _ = self.over
        over[axis] = over.get(axis, sympy.Integer(0)) * (1 - _exact(self._methods_share))
        for axis, summed in over.items():
            several = sympy.Piecewise((0, sympy.Eq(ranks_of(axis), 1)), (1, True))
            one = self._collective("all_reduce", axis, sympy.Integer(BUCKET_BYTES))
            sums.append(several * summed / pp * one / BUCKET_BYTES)
        parts = {"gradient sums": self._beside(sympy.Add(*sums) * _exact(self.totals.summed), work * BACKWARD_SHARE)}
        if self.zero and self.totals.cut and not self.totals.gathers:
            gathers, scatters = {1: (1, 1), 2: (1, m), 3: (2 * m, m)}[self.zero]
            beside = work * (m if self.zero == 3 else BACKWARD_SHARE * scatters)
            moved = {"all_gather": (gathers, self.totals.read), "reduce_scatter": (scatters, self.totals.summed)}
            if self.zero == 1:  # methods are given what they bring together whole
                moved["reduce_scatter"] = 1, self.totals.summed * (1 - self._methods_share)
            for kind, (times, share) in moved.items():
                seconds = [
                    cut.number * self._collective(kind, "_".join(axes), self.of(cut.size) / cut.number * _exact(share))
                    for axes, cut in self.totals.cut.items()
                ]
                parts[f"{self._mesh.data_axis} {kind}"] = self._beside(times / pp * sympy.Add(*seconds), beside / 2)
        return parts

    @property
    def _methods_share(self) -> float:
        """Of the bytes of trained parameters, the share that methods bring together."""
        return float(sum(one.size_bytes for one in self.methods))

    def _methods(self) -> dict[str, sympy.Expr]:
        """What methods of data parallelism take, once a step."""
        axis, several = self.over
        ranks, trained, terms = ranks_of(axis), self.of(self.totals.trained) / pp, list[sympy.Expr]()
        for one in self.methods:
            size, sent, factors = (_exact(float(share)) * trained for share in one[1:])
            here = Carried(one.method, size, sent, factors)
            moved = [each.often * self._collective(each.kind, axis, each.size_bytes)
                     for each in exchanges(here, ranks, several)]  # fmt: skip
            terms += [*moved, _exact(passes(one.method, several)) * size / M]
        return {"dp_sync": sympy.Piecewise((0, sympy.Eq(ranks, 1)), (sympy.Add(*terms), True))} if terms else {}

    def _left(self, axis: str, cut: tuple[str, ...]) -> sympy.Expr:
        """Of a gradient, the share that is summed over an axis once a step, where ZeRO cuts the parameter so."""
        if not self.zero or not cut:
            return sympy.Integer(1)
        left = sympy.Integer(0) if axis in cut else 1 / _joined(cut)
        share = _exact(self._methods_share if self.zero == 1 else 0)  # of what is summed whole for a method
        return left * (1 - share) + share

    def _beside(self, moved: sympy.Expr, work: sympy.Expr) -> sympy.Expr:
        """What is left of seconds of communication of which all but the last bucket runs beside so many of work."""
        hidden = self.totals.hidden * self.hardware.overlap
        return moved - _least(hidden * moved, work) if hidden else moved

    def _held(self, size: Size) -> sympy.Expr:
        """Of parameters, what a rank has of them."""
        return self.of(size) - self._cut + self._parts

    @property
    def _cut(self) -> sympy.Expr:
        """Bytes of what ZeRO cuts."""
        return sympy.Add(*(self.of(cut.size) for cut in self.totals.cut.values())) if self.zero else sympy.Integer(0)

    @property
    def _parts(self) -> sympy.Expr:
        """Of that, what a rank has."""
        sizes = (self.of(cut.size) / _joined(over) for over, cut in self.totals.cut.items())
        return sympy.Add(*sizes) if self.zero else sympy.Integer(0)

    @cached_property
    def step_time_s(self) -> sympy.Expr:
        return sympy.Add(*self.parts_s.values())

    @cached_property
    def memory_parts(self) -> dict[str, sympy.Expr]:
        """Bytes of a rank of equal stages by kind. Activations are those of the microbatches in flight under 1F1B
        (`p`, or `m` where fewer; interleaved `1 + (p-1)/pv` times as many: Korthikanti et al. 2022, section 4.2.3)."""
        stored, trained = self._held(self.totals.stored) / pp, self._held(self.totals.trained) / pp
        more = sympy.Piecewise((1, sympy.Eq(v, 1)), (1 + (pp - 1) / (pp * v), True))
        held = m if self.receives_held is None else self.receives_held
        flight = sympy.Min(m, pp * more) / pp
        return {
            "parameters": self.versions * stored, "gradients": trained,
            "optimizer": _exact(self.state_bytes - 1) * trained,
            "activations": self.of(self.totals.kept) * flight, "temporary": self.of(self.totals.temporary),
            "buffers": sympy.Float(self.totals.buffers), "gathered": self._gathered() / pp,
            "communication": sympy.Piecewise((0, sympy.Eq(pp, 1)), (2 * self.versions * held * self._sent()[0], True))
            + self.of(self.totals.trained) / pp * self._remembered,
        }  # fmt: skip

    @property
    def _remembered(self) -> sympy.Expr:
        """What methods keep for each byte of trained parameters, which they are given whole."""
        return _exact(sum(float(remembered_bytes(one, self.over[1])) for one in self.methods))

    def _gathered(self) -> sympy.Expr:
        """The wholes of parameters that live for a step, and with ZeRO 1 those of their gradients, beyond the parts."""
        cut = self._cut if self.zero in (1, 2) else sympy.Integer(0)
        grads = cut * _exact(self.totals.summed) - self._parts if self.zero == 1 else 0
        return cut * _exact(self.totals.read) + grads

    @cached_property
    def memory_bytes(self) -> sympy.Expr:
        """The most at a time: with one microbatch gradients come while activations go."""
        parts = self.memory_parts
        less = _least(parts["gradients"], parts["activations"])
        return sympy.Add(*parts.values()) - sympy.Piecewise((less, sympy.Eq(m, 1)), (0, True))

    # Numbers

    @cached_property
    def constants(self) -> dict[sympy.Symbol, float]:
        """The hardware's."""
        hardware = self.hardware
        links = (hardware.link_bytes_per_s, hardware.link_latency_s, hardware.node_link_bytes_per_s,
                 hardware.node_link_latency_s)  # fmt: skip
        peaks = {sympy.Symbol(f"X_{dtype}", positive=True): peak for dtype, peak in hardware.flops_per_s.items()}
        return {M: hardware.memory_bytes_per_s, L: hardware.launch_s, H: hardware.matmul_half_depth, **peaks,
                **dict(zip(_LINKS, links, strict=True))}  # fmt: skip

    def values(self, mesh: Mesh, schedule: Schedule, rows: int, tokens: int | None = None) -> dict[sympy.Symbol, Any]:
        """What the symbols are for a mesh and schedule, with `rows` of the global batch."""
        per_node = self.hardware.devices_per_node
        inside = {in_node_of(axis): levels(mesh.size(axis), per_node, mesh.stride(axis))[0] for axis in self._names}
        sizes = (rows / (mesh.row_ranks * schedule.microbatches), tokens or self.totals.at.s,
                 *map(mesh.size, self._names), schedule.microbatches, schedule.virtual_stages)  # fmt: skip
        return {**self.constants, **dict(zip(self.sizes, sizes, strict=True)), **inside}


def _least(*of: sympy.Expr) -> sympy.Expr:
    """The least, as it stands: to find out which of two long sums is less takes sympy longer than all else."""
    return sympy.Min(*of, evaluate=False)


def _joined(axes: tuple[str, ...]) -> sympy.Expr:
    """The ranks of axes joined in one."""
    return sympy.Mul(*map(ranks_of, axes))


def compiled(formulas: Sequence[Formula]) -> Any:
    """(step_time_s, memory_bytes) of each formula as one numpy function of its `sizes`, then of `g_tp`, `g_dp`, ...:
    numbers or arrays of them. The formulas are of one kind of hardware, for the same axes."""
    constants, sizes = formulas[0].constants, formulas[0].sizes
    expressions = [expression for f in formulas for expression in (f.step_time_s, f.memory_bytes)]
    inside = (in_node_of(str(axis)) for axis in sizes[2:-2])
    function = sympy.lambdify((*constants, *sizes, *inside), expressions, modules="numpy", cse=True)
    return partial(function, *constants.values())


@lru_cache(maxsize=64)
def _curve(name: str, points: tuple[tuple[float, float], ...]) -> Any:
    """A curve of a profile as a function in formulas."""
    return implemented_function(name, partial(_straight, np.array(points)))


def _straight(points: np.ndarray, amount: Any) -> Any:
    """A curve that goes straight in the logarithm from point to point."""
    return np.interp(np.log(np.asarray(amount, dtype=float)), np.log(points[:, 0]), points[:, 1])


def _exact(value: float) -> sympy.Expr:
    return sympy.Integer(int(value)) if value == int(value) else sympy.Float(value)
