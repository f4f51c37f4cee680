"""`Plan.cost`: predicted seconds and bytes of a plan, and sympy formulas for them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from autopart.common.text import quantity
from autopart.errors import LayoutError, OptionError, PlanError, StageError
from autopart.ir.mesh import Mesh, check_balance
from autopart.ir.run.report_terms import MEMORY_KINDS
from autopart.ir.run.schedules import Schedule, can_run, check_schedule, versions_of
from autopart.ir.run.sync_option import parse_sync
from autopart.plans.figure_errors import reading_figures

if TYPE_CHECKING:
    import sympy

    from autopart.cost.formula.step_formula import Formula
    from autopart.cost.hardware.profile import Hardware
    from autopart.cost.predict.run_setting import RunSetting
    from autopart.cost.predict.simulate import Simulation
    from autopart.cost.predict.table import Table
    from autopart.cost.systems.system import System
    from autopart.plans.plan import Plan

OF_OLD_PLANS = ("formula", "values")
"""Entries of `Plan.cost` in plans of older versions, which did not simulate the step time."""


def _simulated(plan: Plan) -> Any:
    from autopart.cost.predict.simulate import simulate  # this imports torch, which is not needed to print a plan

    return simulate(plan)


@dataclass(frozen=True)
class Figures:
    """Predicted seconds and bytes of a step, in total and by kind. `float()` returns the seconds.

    Args:
        step_time_s: seconds of a step.
        memory_bytes: peak bytes of the fullest rank.
        parts_s: {kind of work: seconds}.
        memory_parts: {kind of memory: bytes}.
        notes: reasons why a new plan, made for these sizes, might have other layouts.
    """

    step_time_s: float
    memory_bytes: float
    parts_s: Mapping[str, float]
    memory_parts: Mapping[str, float]
    notes: tuple[str, ...] = ()

    def __float__(self) -> float:
        return self.step_time_s


class Cost(dict[str, Any]):
    """Cost of a plan: a mapping with the plan's figures, and formulas in sympy.

    `expression` is the seconds of a step, and `parts` are the seconds by kind. `memory` is the bytes of a rank, and
    `memory_parts` are the bytes by kind.

    The closed formula is simpler than `autopart.simulate`, which predicts the plan's step time. The formula ignores
    unequal stages, waiting for sends, the order of a schedule's actions, partly filled gradient buckets, and blocks
    whose weights are gathered too late to overlap. The symbol `r` corrects for these effects. `expression` is the
    closed formula times `1 + r`, and `parts["left out"]` is the closed formula times `r`. The other parts are those of
    the closed formula. `left_out` is the value of `r` at the plan's own sizes. `subs` uses this value unless you pass
    another value: `plan.cost.subs(r=0)` is the closed formula without correction. `str(plan.cost)` prints the
    formula's error.

    Symbols are those of `autopart.cost.formula.step_formula`: `b` samples of a microbatch on a rank, `s` tokens per
    sample, `tp`, `dp`, `pp`, `m` microbatches, `v` stages per rank, and symbols of the hardware.

    Example:
        >>> plan.cost.parts["matmul"], plan.cost.at(tp=8, pp=4).step_time_s    # doctest: +SKIP
    """

    plan: Plan | None = None

    @staticmethod
    def of(plan: Plan) -> Cost:
        """Return the cost of a plan.

        Plans of older versions have step times that were not simulated. Their steps are simulated here.
        """
        cost = Cost(plan.cost)
        cost.plan = plan
        if plan.timing and "step_time_s" in cost and any(name in cost for name in OF_OLD_PLANS):
            for name in OF_OLD_PLANS:
                cost.pop(name, None)
            cost |= _simulated(plan).figures()
        return cost

    @cached_property
    def scale(self) -> float:
        """Step time by simulation, divided by the step time of the closed formula, at the plan's own sizes.

        It is 1 if the plan has no step time.
        """
        simulated_s = self.get("step_time_s") or (_simulated(self.plan).step_time_s if self.plan is not None else 0.0)
        return simulated_s / self.formula_s if simulated_s and self.formula_s else 1.0

    @cached_property
    def formula_s(self) -> float:
        """Seconds of a step by the closed formula, without the correction `r`, at the plan's own sizes."""
        from autopart.cost.formula.step_formula import compiled

        sizes = [*self._formula_values({}).values()][len(self.formula.constants) :]
        return float(compiled([self.formula])(*sizes)[0])

    @property
    def left_out(self) -> float:
        """Value of `r` at the plan's own sizes: simulated step time divided by the closed formula's, minus 1."""
        return self.scale - 1

    @cached_property
    def table(self) -> Table:
        """The FLOPs and bytes of the plan's operators. Raises PlanError for a plan without a cost table."""
        from autopart.cost.predict.table_data import from_data

        data = self.plan.timing.get("table") if self.plan is not None else None
        if data is None or "divided" not in data:  # plans of older versions lack this entry
            raise PlanError(
                "the plan has no formulas",
                why="they are computed from the entry 'timing' of a plan, which this plan lacks or has in an "
                "older form", hint="make the plan again with autopart.plan(...), or keep this entry in the file",
            )  # fmt: skip
        with reading_figures(self._plan):
            return from_data(data)

    @cached_property
    def formula(self) -> Formula:
        """Closed formulas of step time and memory. Raises PlanError for a plan without a cost table."""
        from autopart.cost.formula.step_formula import Formula
        from autopart.cost.hardware.profile import Hardware
        from autopart.cost.predict.dp_sync_costs import shares

        table, plan = self.table, self._plan
        hardware = Hardware.load(plan.hardware)
        zero = 3 if table.gathers else plan.zero
        axis = (*plan.mesh_object().along("rows"), plan.mesh_object().data_axis)[0]
        return Formula(
            table.totals, hardware, zero, scatter_sends=plan.scatter_sends, axes=plan.axes,
            methods=shares(table, parse_sync(plan.dp_sync)), over=(axis, plan.mesh_object().size(axis)),
            versions=versions_of(plan.schedule.name),
        )  # fmt: skip

    @property
    def _plan(self) -> Plan:
        assert self.plan is not None
        return self.plan

    @property
    def expression(self) -> sympy.Expr:
        """Seconds of a step: the closed formula times `1 + r`.

        At the plan's own sizes, this equals the step time of `autopart.simulate`.
        """
        from autopart.cost.formula.step_formula import r

        return (1 + r) * self.formula.step_time_s

    @property
    def parts(self) -> Mapping[str, sympy.Expr]:
        """{kind of work or collective: seconds of a step}, including sends, bubble and optimizer.

        The entry `left out` is the closed formula's step time times `r`.
        """
        from autopart.cost.formula.step_formula import r

        return {**self.formula.parts_s, "left out": r * self.formula.step_time_s}

    @property
    def memory(self) -> sympy.Expr:
        """Peak bytes of a rank."""
        return self.formula.memory_bytes

    @property
    def memory_parts(self) -> Mapping[str, sympy.Expr]:
        """{kind of memory: bytes of a rank}.

        With one microbatch, their sum exceeds `memory`, because gradients and activations do not peak at the same time.
        """
        return self.formula.memory_parts

    @property
    def forward_flops(self) -> sympy.Expr:
        """Matrix FLOPs of one microbatch's forward over all stages, on one rank per stage."""
        import sympy

        works = self.formula.totals.works.items()
        return sympy.Add(*(n * self.formula.of(work.flops) for (part, work), n in works if part == "forward"))

    @property
    def free_symbols(self) -> set[sympy.Basic]:
        """Symbols of `expression`, the seconds of a step."""
        return self.expression.free_symbols

    def subs(self, *values: Any, **named: Any) -> sympy.Expr:
        """Return the seconds of a step, with values in place of some symbols.

        Pass symbols by name, or as arguments of `sympy.Expr.subs`. Unless you pass `r`, its value is `left_out`. Raises
        OptionError for an unknown symbol.

        >>> plan.cost.subs(tp=8), plan.cost.subs({"tp": 8}), plan.cost.subs("tp", 8)    # doctest: +SKIP
        """
        from sympy import sympify

        from autopart.cost.formula.step_formula import in_node_of, r

        pairs = [values] if len(values) == 2 else list(dict(*values).items())
        inside = (in_node_of(axis.name) for axis in self._plan.axes)
        symbols = {str(symbol): symbol for symbol in (*self.formula.sizes, *inside, *self.formula.constants, r)}
        asked = {"r": self.left_out} | {str(name): value for name, value in (*pairs, *named.items())}
        unknown = [name for name in asked if name not in symbols]
        if unknown:
            raise OptionError(f"the plan's cost has no symbol {unknown[0]}", hint=", ".join(sorted(symbols)))
        # `Expr.subs` is slow: it compares long terms for each symbol. `xreplace` does not.
        return self.expression.xreplace({symbols[name]: sympify(value) for name, value in asked.items()})

    def at(self, **sizes: float) -> Figures:
        """Predict the step and the memory if some of `b, s, tp, ep, cp, dp, dpr, pp, m, v` have other values.

        The step is predicted from the plan's operators, as in `autopart.simulate`. Stages are balanced again if their
        number or the tokens per sample change. Memory is counted from the same operators, as in `Plan.memory`.

        Layouts stay those of the plan. `Figures.notes` has a note if a plan for these sizes may have other layouts.

        Raises OptionError for other names, for sizes that are not above zero, and for fewer expert ranks than
        `balance` (the plan's load of the busiest expert rank, relative to the mean). Raises LayoutError if the layouts
        have fewer shards than an axis has ranks. Raises StageError if there are too few stage boundaries, or no
        schedule can run the stages and microbatches.
        """
        names = ("b", "s", *(axis.name for axis in reversed(self._plan.axes)), "m", "v")
        for name, size in sizes.items():
            if name not in names or not size > 0:
                raise OptionError(
                    f"cost.at({name}={size!r}) is not possible", hint=f"numbers above zero for {', '.join(names)}"
                )
        mesh = self._mesh(sizes)
        if self._plan.balance > 1:
            check_balance(mesh, self._plan.balance, {*mesh.along("experts"), *self._plan.axes_by_expert})
        self._check_divides(mesh)
        return replace(self._figures(self._predicted(sizes)), notes=self._notes(mesh, sizes))

    def variant(
        self, mesh: Mesh, schedule: Schedule, zero: int, rows: float | None = None, system: System | None = None
    ) -> Figures:
        """Predict step and memory for another mesh, schedule and ZeRO stage.

        Args:
            rows: samples of the global batch. None: those of the plan.
            system: the system that runs the plan. None: autopart's runtime.

        Raises the errors of `at`. A change to or from ZeRO-3 is not possible, because ZeRO-3's gathers are operators of
        the plan.
        """
        setting = self._setting({})
        stages = mesh.size("pp") * schedule.virtual_stages
        if schedule.name is not None:
            check_schedule(schedule.name, stages, mesh.size("pp"), schedule.microbatches)
        self._check_divides(mesh)
        cuts = setting.cuts if stages == len(self._plan.cuts) + 1 else None
        rows = setting.rows if rows is None else rows
        changed = replace(setting, mesh=mesh, schedule=schedule, zero=zero, cuts=cuts, rows=rows).run_by(system)
        return replace(self._figures(self._predict(changed)), notes=self._notes(mesh, {"b": changed.b}))

    def _check_divides(self, mesh: Mesh) -> None:
        """Raise LayoutError if a rank of this mesh would have no shard of some matrix product."""
        from autopart.cost.predict.operator_work import CHOSEN, chosen_ranks

        for name, ranks in chosen_ranks(mesh).items():
            counts = self.table.divided.get(name, {})
            if counts and min(counts) < ranks:
                fewest, axis = min(counts), mesh.innermost(CHOSEN[name])
                raise LayoutError(
                    f"cost.at({axis}={ranks}): the plan's layouts have only {fewest} shards over {axis}",
                    why=f"some of {ranks} ranks would have no shard; a plan for {axis}={ranks} has other layouts",
                    where=counts[fewest], hint=f"{axis}={fewest} or less, or a plan for {axis}={ranks}",
                )  # fmt: skip

    def _notes(self, mesh: Mesh, sizes: Mapping[str, float]) -> tuple[str, ...]:
        """Return a note if a new plan for this mesh and these sizes might have other layouts."""
        plan, plan_mesh = self._plan, self._plan.mesh_object()
        plan_sizes = {"b": self.table.b, "s": self.table.s, "m": plan.schedule.microbatches}
        ranks = {
            axis: mesh.size(axis)
            for axis in (*plan_mesh.chosen, *mesh.chosen)
            if mesh.size(axis) != plan_mesh.size(axis)
        }
        others = {name: sizes[name] for name in plan_sizes if sizes.get(name, plan_sizes[name]) != plan_sizes[name]}
        if not ranks and not (others and mesh.chosen):
            return ()
        changed = ", ".join(f"{name}={size:g}" for name, size in (ranks | others).items())
        return (f"layouts are those of the plan on {plan_mesh}; a plan made for {changed} may have other layouts",)

    def on(self, hardware: Hardware) -> Figures:
        """Predict the step and the memory of the plan on other hardware."""
        return self._figures(self._predicted({}, hardware))

    def run_by(self, system: System) -> Simulation:
        """Simulate a step of the plan that another system runs."""
        return self._predict(self._setting({}).run_by(system))

    def _figures(self, simulation: Simulation) -> Figures:
        memory = max(simulation.memory, key=lambda row: row["total"])
        kinds = {kind: memory[kind] for kind in MEMORY_KINDS}
        return Figures(simulation.step_time_s, memory["total"], simulation.parts, kinds)

    def _predicted(self, sizes: Mapping[str, float], hardware: Hardware | None = None) -> Simulation:
        return self._predict(self._setting(sizes), hardware)

    def _predict(self, setting: RunSetting, hardware: Hardware | None = None) -> Simulation:
        from autopart.cost.hardware.profile import Hardware
        from autopart.cost.predict.table import predict

        return predict(self.table, setting, hardware or Hardware.load(self._plan.hardware))

    def _setting(self, sizes: Mapping[str, float]) -> RunSetting:
        """Return the mesh, schedule and options of the plan, with some sizes changed.

        The plan's stages stay if their number and the tokens per sample are unchanged, or if the user pinned them.
        """
        from autopart.cost.predict.table_data import plan_setting

        plan, mesh = self._plan, self._mesh(sizes)
        was = plan.schedule
        m, v = int(sizes.get("m", was.microbatches)), int(sizes.get("v", was.virtual_stages))
        schedule = _schedule(was, mesh.size("pp"), m, v)
        table = self.table
        rows = sizes.get("b", table.b) * mesh.data_parallel_size * schedule.microbatches
        counted = plan_setting(
            table,
            plan.mesh_object(),
            was,
            plan.zero,
            plan.prefetch,
            plan.scatter_sends,
            parse_sync(plan.dp_sync),
            plan.compile,
        )
        stages = mesh.size("pp") * schedule.virtual_stages
        are_own = stages == len(plan.cuts) + 1 and ("stages" in plan.pins or sizes.get("s", table.s) == table.s)
        cuts = table.cuts[stages] if are_own else None
        return replace(counted, mesh=mesh, schedule=schedule, rows=rows, tokens=sizes.get("s"), cuts=cuts)

    def _mesh(self, sizes: Mapping[str, float]) -> Mesh:
        """Return the plan's mesh with some axis sizes changed."""
        plan_mesh = self._plan.mesh_object()
        every = {axis.name: int(sizes.get(axis.name, plan_mesh.size(axis.name))) for axis in plan_mesh.axes}
        return Mesh({axis: size for axis, size in every.items() if size > 1}, plan_mesh.axes)

    def _values(self, sizes: Mapping[str, float]) -> dict[sympy.Symbol, Any]:
        from autopart.cost.formula.step_formula import r

        return {**self._formula_values(sizes), r: self.left_out}

    def _formula_values(self, sizes: Mapping[str, float]) -> dict[sympy.Symbol, Any]:
        """Return {symbol: value} of the closed formula's symbols, with some of the plan's sizes changed."""
        mesh, schedule, at = self._mesh(sizes), self._plan.schedule, self.formula.totals.at
        m, v = int(sizes.get("m", schedule.microbatches)), int(sizes.get("v", schedule.virtual_stages))
        rows = sizes.get("b", at.b) * mesh.data_parallel_size * m
        return self.formula.values(mesh, Schedule(schedule.name, m, v), rows, sizes.get("s", at.s))

    def latex(self) -> str:
        """Return the formula of the seconds of a step in LaTeX."""
        import sympy

        return str(sympy.latex(self.expression))

    def __str__(self) -> str:
        error = (1 / self.scale - 1) * 100
        seconds = [quantity(seconds, "s") for seconds in (self.formula_s, self.formula_s * self.scale)]
        return (
            f"{self.expression}\n"
            f"r = {self.left_out:.4g}: the closed formula alone gives {seconds[0]} per step, {error:+.1f} % from the "
            f"simulated {seconds[1]}"
        )


def _schedule(was: Schedule, pp: int, microbatches: int, virtual_stages: int) -> Schedule:
    """Return the plan's schedule for a number of stages and microbatches.

    If the schedule cannot run them, returns the default schedule for them. Raises StageError if no schedule can.
    """
    if pp == 1:
        return Schedule(None, microbatches, 1)
    stages = pp * virtual_stages
    name = was.name
    if name is None or not can_run(name, stages, pp, microbatches):
        name = "interleaved_1f1b" if virtual_stages > 1 else "1f1b"
        check_schedule(name, stages, pp, microbatches)
    return Schedule(name, microbatches, virtual_stages)


def crossover(a: Plan, b: Plan, over: str = "s", low: float | None = None, high: float | None = None) -> float | None:
    """Return the first value of a size or link rate at which the slower of two plans becomes the faster.

    Returns None, with a warning that explains it, if one plan is always faster between `low` and `high`.

    Args:
        over: one of `b, s, tp, ep, cp, dp, dpr, pp, m, v`, or a link field (`node_link_bytes_per_s`). Each plan keeps
            its other sizes.
        low, high: search range. Default: 1e6 to 1e12 for links, else 1 to 2^20.

    Example:
        >>> autopart.crossover(with_recompute, without, over="s")    # doctest: +SKIP
    """
    from scipy.optimize import brentq

    from autopart.cost.hardware.profile import LINK_NUMBERS, Hardware

    of_links = over in LINK_NUMBERS
    low = low if low is not None else 1e6 if of_links else 1.0
    high = high if high is not None else 1e12 if of_links else 2.0**20
    first, second = (plan.cost if isinstance(plan.cost, Cost) else Cost.of(plan) for plan in (a, b))

    def difference(at: float) -> float:
        if of_links:
            changed: dict[str, Any] = {over: at, "collectives": {}}
            sides = (cost.on(replace(Hardware.load(cost._plan.hardware), **changed)) for cost in (first, second))
            return float(next(sides)) - float(next(sides))
        return float(first.at(**{over: at})) - float(second.at(**{over: at}))

    whole = over not in ("b", "s") and not of_links
    points = [low * (high / low) ** (i / _POINTS) for i in range(_POINTS + 1)]
    if whole:
        points = [2.0**i for i in range(_MOST_POWER + 1) if low <= 2**i <= high]
    before, start, found = 0.0, low, dict[float, float]()
    for end in points:
        try:
            after = difference(end)
        except (StageError, LayoutError):  # too few stage boundaries, no schedule, or fewer shards than ranks
            continue
        found[end] = after
        if before * after < 0:
            return end if whole else float(brentq(difference, start, end, rtol=1e-6))
        before, start = after or before, end
    warnings.warn(f"crossover() found none: {_no_crossover(over, found)}", stacklevel=2)
    return None


def _no_crossover(over: str, found: Mapping[float, float]) -> str:
    """Explain why neither of two plans overtakes the other.

    Args:
        found: {size or link rate: seconds of a step of the first plan, minus those of the second plan}.
    """
    if not found:
        return f"neither plan can be predicted with another value of {over}, as its layouts or schedule do not allow it"
    low, high = (f"{over}={number:.4g}" for number in (min(found), max(found)))
    differences = [found[min(found)], found[max(found)]]
    if not any(found.values()):
        return f"both plans take equal time from {low} to {high}"
    winner = "first" if max(found.values()) <= 0 else "second"
    gaps = [quantity(abs(difference), "s") for difference in differences]
    return f"the {winner} plan is faster from {low} (by {gaps[0]}) to {high} (by {gaps[1]}); low= and high= widen this"


_MOST_POWER = 8
"""Exponent of the largest power of two that searches try as a number of ranks or microbatches."""

_POINTS = 40
