"""`Plan.cost`: figures as a mapping, and the formulas behind them (`cost.formula`) with the plan's own values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from autopart.errors import OptionError, PlanError
from autopart.ir.mesh import Mesh
from autopart.plans.plan import Plan, Schedule

if TYPE_CHECKING:
    import sympy

    from .formula import Formula

OF_OLD_PLANS = ("formula", "values")
"""What plans had beside a time that was not the simulated one."""

_NAMES = ("b", "s", "tp", "dp", "pp", "m", "v")
"""Of `cost.formula.SIZES`. sympy and the formulas are imported where they are asked for: a plan is shown without."""


def _simulated(plan: Plan) -> Any:
    from .simulate import simulate  # loads torch, which a plan that is only shown does not need

    return simulate(plan)


@dataclass(frozen=True)
class Figures:
    """A step's numbers: seconds and bytes, and both by kind. `float()` of it is the seconds."""

    step_time_s: float
    memory_bytes: float
    parts_s: Mapping[str, float]
    memory_parts: Mapping[str, float]

    def __float__(self) -> float:
        return self.step_time_s


class Cost(dict[str, Any]):
    """What a plan costs. As a mapping: its figures. `expression`: seconds of a step in sympy, `parts`: the same by
    kind, `memory` and `memory_parts`: bytes of a rank. The formulas are those of equal stages, times `scale`.

    Symbols are those of `autopart.cost.formula`: `b` rows of a microbatch on a rank, `s` tokens of a row, `tp`, `dp`,
    `pp`, `m` microbatches, `v` stages a rank, and the hardware's.

    Example:
        >>> plan.cost.parts["matmul"], plan.cost.at(tp=8, pp=4).step_time_s    # doctest: +SKIP
    """

    plan: Plan | None = None

    @staticmethod
    def of(plan: Plan) -> Cost:
        """A plan's. One of an older version says a time of other formulas: the step is simulated in its place."""
        found = Cost(plan.cost)
        found.plan = plan
        if plan.timing and "step_time_s" in found and any(name in found for name in OF_OLD_PLANS):
            for name in OF_OLD_PLANS:
                found.pop(name, None)
            found |= _simulated(plan).figures()
        return found

    @cached_property
    def scale(self) -> float:
        """What the formulas are multiplied by, so that at the plan's own sizes they say what `autopart.simulate` does.

        The simulated step over theirs: stages that weigh unlike, waiting in a pipeline, odd buckets of gradients. 1
        where the plan has no step.
        """
        simulated_s = self.get("step_time_s") or (_simulated(self.plan).step_time_s if self.plan is not None else 0.0)
        formula_s = math.fsum(map(float, islice(self._numbers({}), len(self.formula.parts_s))))
        return simulated_s / formula_s if simulated_s and formula_s else 1.0

    @cached_property
    def formula(self) -> Formula:
        """Raises PlanError for a plan without them."""
        from .formula import Formula, Totals
        from .hardware import Hardware

        totals = self.plan.timing.get("totals") if self.plan is not None else None
        if self.plan is None or totals is None:
            raise PlanError(
                "the plan has no formulas", why="they are part of the 'timing' of a plan that autopart has made",
                hint="autopart.plan(...), or leave the entry in the file",
            )  # fmt: skip
        over_dp = any("dp" in entry for entry in self.plan.parameters.values())
        return Formula(Totals.from_data(totals), Hardware.load(self.plan.hardware), 3 if over_dp else 0)

    @property
    def expression(self) -> sympy.Expr:
        """Seconds of a step: at the plan's own sizes those of `autopart.simulate`, at others the formula's estimate."""
        return self.scale * self.formula.step_time_s

    @property
    def parts(self) -> Mapping[str, sympy.Expr]:
        """Seconds of a step by kind of work, of each collective, `sends`, `bubble`, `gradient sums`, `optimizer`."""
        return {kind: self.scale * seconds for kind, seconds in self.formula.parts_s.items()}

    @property
    def memory(self) -> sympy.Expr:
        """Bytes of a rank."""
        return self.formula.memory_bytes

    @property
    def memory_parts(self) -> Mapping[str, sympy.Expr]:
        """Bytes of a rank by kind; with one microbatch gradients and activations are not all there at a time."""
        return self.formula.memory_parts

    @property
    def forward_flops(self) -> sympy.Expr:
        """Matrix work of the forward of one microbatch, of all stages, on one rank of `tp`."""
        import sympy

        works = self.formula.totals.works.items()
        return sympy.Add(*(n * self.formula.of(work.flops) for (part, work), n in works if part == "forward"))

    @property
    def free_symbols(self) -> set[sympy.Basic]:
        """Of the seconds of a step."""
        return self.expression.free_symbols

    def subs(self, *values: Any, **named: Any) -> sympy.Expr:
        """The seconds of a step with values for some symbols, given by name or as `sympy.Expr.subs` takes them.

        >>> plan.cost.subs(tp=8), plan.cost.subs({"tp": 8}), plan.cost.subs("tp", 8)    # doctest: +SKIP
        """
        from .formula import IN_NODE, SIZES

        pairs = [values] if len(values) == 2 else list(dict(*values).items())
        symbols = {str(symbol): symbol for symbol in (*SIZES, *IN_NODE.values(), *self.formula.constants)}
        given = {str(name): value for name, value in (*pairs, *named.items())}
        unknown = [name for name in given if name not in symbols]
        if unknown:
            raise OptionError(f"the cost has no symbol {unknown[0]}", hint=", ".join(sorted(symbols)))
        return self.expression.subs({symbols[name]: value for name, value in given.items()})

    def at(self, **sizes: float) -> Figures:
        """The figures with some of `b, s, tp, dp, pp, m, v` changed, all else being the plan's.

        With nothing changed the seconds are those of `autopart.simulate`; at other sizes they are the formulas', as
        many times more or less (`scale`) as they are here.

        Raises OptionError for other names and for sizes that are not above zero.
        """
        for name, size in sizes.items():
            if name not in _NAMES or not size > 0:
                raise OptionError(f"cost.at({name}={size!r})", hint=f"numbers above zero for {', '.join(_NAMES)}")
        numbers, kinds = self._numbers(sizes), self.formula.parts_s
        parts = {kind: self.scale * float(n) for kind, n in zip(kinds, islice(numbers, len(kinds)), strict=True)}
        memory = {kind: float(next(numbers)) for kind in self.memory_parts}
        return Figures(math.fsum(parts.values()), float(next(numbers)), parts, memory)

    def _numbers(self, sizes: Mapping[str, float]) -> Iterator[float]:
        """What `_compiled` gives, at these sizes."""
        return iter(self._compiled(*self._values(sizes).values()))

    @cached_property
    def _compiled(self) -> Callable[..., list[float]]:
        """All parts of the time, then of the memory, and its whole, as a function of what `_values` lists."""
        import sympy

        from .formula import IN_NODE, SIZES

        symbols = (*self.formula.constants, *SIZES, *IN_NODE.values())
        found = [*self.formula.parts_s.values(), *self.memory_parts.values(), self.memory]
        return sympy.lambdify(symbols, found, modules="numpy")

    def _values(self, sizes: Mapping[str, float]) -> dict[sympy.Symbol, Any]:
        assert self.plan is not None
        own, schedule, at = self.plan.mesh_object(), self.plan.schedule, self.formula.totals.at
        mesh = Mesh({axis: int(sizes.get(axis, own.size(axis))) for axis in ("pp", "dp", "tp")})
        m, v = int(sizes.get("m", schedule.microbatches)), int(sizes.get("v", schedule.virtual_stages))
        rows = sizes.get("b", at.b) * mesh.size("dp") * m
        return self.formula.values(mesh, Schedule(schedule.name, m, v), rows, sizes.get("s", at.s))

    def latex(self) -> str:
        """The seconds of a step in LaTeX."""
        import sympy

        return str(sympy.latex(self.expression))

    def __str__(self) -> str:
        return str(self.expression)


def crossover(a: Plan, b: Plan, over: str = "s", low: float = 1.0, high: float = 2.0**20) -> float | None:
    """Where the steps of two plans take equally long: the first value of a symbol between `low` and `high` at which the
    one that was slower becomes the faster; None where one is always faster.

    Args:
        over: one of `b, s, tp, dp, pp, m, v`; all else is as each plan has it.

    Example:
        >>> autopart.crossover(with_recompute, without, over="s")    # doctest: +SKIP
    """
    from scipy.optimize import brentq

    first, second = (plan.cost if isinstance(plan.cost, Cost) else Cost.of(plan) for plan in (a, b))

    def difference(at: float) -> float:
        return float(first.at(**{over: at})) - float(second.at(**{over: at}))

    points = [low * (high / low) ** (i / _POINTS) for i in range(_POINTS + 1)]
    before = difference(points[0])
    for start, end in pairwise(points):
        after = difference(end)
        if before * after < 0:
            return float(brentq(difference, start, end, rtol=1e-6))
        before = after or before
    return None


_POINTS = 40
