"""`Plan.cost`: figures as a mapping, and the formulas behind them (`cost.formula`) with the plan's own values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

import sympy
from scipy.optimize import brentq

from autopart.errors import OptionError, PlanError
from autopart.mesh import Mesh
from autopart.plan import COSTS, Plan, Schedule

from .formula import IN_NODE, SIZES, Formula, Totals
from .hardware import Hardware

_NAMES = tuple(str(symbol) for symbol in SIZES)


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
    kind, `memory` and `memory_parts`: bytes of a rank. The formulas are those of equal stages: `autopart.simulate`
    knows the plan's own.

    Symbols are those of `autopart.cost.formula`: `b` rows of a microbatch on a rank, `s` tokens of a row, `tp`, `dp`,
    `pp`, `m` microbatches, `v` stages a rank, and the hardware's.

    Example:
        >>> plan.cost.parts["matmul"], plan.cost.at(tp=8, pp=4).step_time_s    # doctest: +SKIP
    """

    plan: Plan | None = None

    @staticmethod
    def of(plan: Plan) -> Cost:
        """A plan's."""
        found = Cost(plan.cost)
        found.plan = plan
        return found

    @cached_property
    def formula(self) -> Formula:
        """Raises PlanError for a plan without them."""
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
        """Seconds of a step."""
        return self.formula.step_time_s

    @property
    def parts(self) -> Mapping[str, sympy.Expr]:
        """Seconds of a step by kind of work, of each collective, `sends`, `bubble`, `gradient sums`, `optimizer`."""
        return self.formula.parts_s

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
        pairs = [values] if len(values) == 2 else list(dict(*values).items())
        symbols = {str(symbol): symbol for symbol in (*SIZES, *IN_NODE.values(), *self.formula.constants)}
        given = {str(name): value for name, value in (*pairs, *named.items())}
        unknown = [name for name in given if name not in symbols]
        if unknown:
            raise OptionError(f"the cost has no symbol {unknown[0]}", hint=", ".join(sorted(symbols)))
        return self.expression.subs({symbols[name]: value for name, value in given.items()})

    def at(self, **sizes: float) -> Figures:
        """The figures with some of `b, s, tp, dp, pp, m, v` changed, all else being the plan's.

        Raises OptionError for other names and for sizes that are not above zero.
        """
        for name, size in sizes.items():
            if name not in _NAMES or not size > 0:
                raise OptionError(f"cost.at({name}={size!r})", hint=f"numbers above zero for {', '.join(_NAMES)}")
        numbers = iter(self._compiled(*self._values(sizes).values()))
        parts = {kind: float(number) for kind, number in zip(self.parts, islice(numbers, len(self.parts)), strict=True)}
        memory = {kind: float(next(numbers)) for kind in self.memory_parts}
        return Figures(math.fsum(parts.values()), float(next(numbers)), parts, memory)

    @cached_property
    def _compiled(self) -> Callable[..., list[float]]:
        """All parts of the time, then of the memory, and its whole, as a function of what `_values` lists."""
        symbols = (*self.formula.constants, *SIZES, *IN_NODE.values())
        found = [*self.parts.values(), *self.memory_parts.values(), self.memory]
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
        return sympy.latex(self.expression)

    def __str__(self) -> str:
        return str(self.expression)


COSTS[:] = [Cost.of]


def crossover(a: Plan, b: Plan, over: str = "s", low: float = 1.0, high: float = 2.0**20) -> float | None:
    """Where the steps of two plans take equally long: the first value of a symbol between `low` and `high` at which the
    one that was slower becomes the faster; None where one is always faster.

    Args:
        over: one of `b, s, tp, dp, pp, m, v`; all else is as each plan has it.

    Example:
        >>> autopart.crossover(with_recompute, without, over="s")    # doctest: +SKIP
    """
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
