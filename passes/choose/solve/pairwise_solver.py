"""Exact solver for discrete variables with a cost of each option and of each pair of options.

This is a partitioned boolean quadratic problem, as in register allocation (Scholz and Eckstein 2002; Hames and Scholz
2006). A variable with one or two neighbours is eliminated: for each combination of the neighbours' options, the cost of
its best option is added to the costs of the neighbours. So chains of pointwise operators disappear. An option that is
never better than another option is dropped. These steps are exact. The remaining variables are solved as a
mixed-integer linear program (HiGHS), with one column per pair of options.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopart.common.integer_program import ProgramRow, integer_program

_LARGEST = 1_000_000
"""Maximum number of pair costs that eliminating a variable may create. Variables with more are left to HiGHS."""


class NoSolution(Exception):
    """Error: every combination of options has infinite cost."""


@dataclass(frozen=True)
class Solution:
    """The optimum of a problem.

    Args:
        chosen: index of the chosen option, by variable.
        cost: total cost.
        gap: distance from the proven lower bound to the cost, relative to the cost.
    """

    chosen: list[int]
    cost: float
    gap: float


@dataclass(frozen=True)
class _EliminatedVariable:
    """An eliminated variable, with its costs at the time of elimination.

    After the remaining variables are solved, these costs determine the variable's option.

    Args:
        costs: cost of each option that was not dropped before.
        options: indices of these options.
        around: {neighbour: (array [options, options of the neighbour] of pair costs, indices of the neighbour's
            options)}.
    """

    variable: int
    costs: np.ndarray
    options: np.ndarray
    around: Mapping[int, tuple[np.ndarray, np.ndarray]]

    def option(self, chosen: Mapping[int, int]) -> int:
        """Return the index of the best option, given the neighbours' chosen options."""
        cost = self.costs
        for neighbour, (table, options) in self.around.items():
            cost = cost + table[:, int(np.searchsorted(options, chosen[neighbour]))]
        return int(self.options[int(np.argmin(cost))])


@dataclass
class PairwiseProblem:
    """Builder and solver of a minimization problem. `solve` can be called only once.

    >>> pairs = PairwiseProblem()
    >>> a, b = pairs.variable([0.0, 5.0]), pairs.variable([0.0, 0.0])
    >>> pairs.add(a, b, np.array([[9.0, 7.0], [1.0, 3.0]]))
    >>> pairs.solve()
    Solution(chosen=[1, 0], cost=6.0, gap=0.0)
    """

    costs: list[np.ndarray] = field(default_factory=list)
    tables: list[dict[int, np.ndarray]] = field(default_factory=list)

    def variable(self, costs: Sequence[float] | np.ndarray) -> int:
        """Add a variable with the cost of each of its options. Return its index."""
        self.costs.append(np.array(costs, dtype=float))
        self.tables.append({})
        return len(self.costs) - 1

    def add(self, a: int, b: int, costs: np.ndarray) -> None:
        """Add the costs of pairs of options: an array of shape [options of `a`, options of `b`].

        An infinite cost forbids a pair.
        """
        if a == b:
            self.costs[a] = self.costs[a] + np.diagonal(costs)
            return
        table = self.tables[a].get(b, 0.0) + costs
        finite = bool(np.isfinite(table).all())
        apart = table - table[:, :1] - table[:1] + table[0, 0] if finite else table
        if finite and np.abs(apart).max() <= 1e-13 * np.abs(table).max():  # cost of `a` + cost of `b`
            self.costs[a] = self.costs[a] + table[:, 0]
            self.costs[b] = self.costs[b] + table[0] - table[0, 0]
            self._separate(a, b)
            return
        self.tables[a][b], self.tables[b][a] = table, table.T

    def solve(self, collapse: bool = True) -> Solution:
        """Return the exact optimum. Raises NoSolution.

        Args:
            collapse: eliminate variables first. False passes the full problem to HiGHS, as a check.
        """
        original = self.costs.copy(), [dict(tables) for tables in self.tables]
        kept = [np.arange(len(cost)) for cost in self.costs]  # the remaining options of each variable
        decided: list[_EliminatedVariable] = []
        left = set(range(len(self.costs)))
        waiting = sorted(left) if collapse else []
        while waiting:
            for v in waiting:
                if v in left and self._is_simple(v):
                    around = {w: (table, kept[w]) for w, table in self.tables[v].items()}
                    decided.append(_EliminatedVariable(v, self.costs[v], kept[v], around))
                    waiting.extend(around)  # the neighbours now have one neighbour less
                    self._decide(v)
                    left.remove(v)
            waiting = [w for v in sorted(left) if self._drop_options(v, kept) for w in (v, *self.tables[v])]
        solved, gap = _milp(self.costs, self.tables, sorted(left)) if left else ({}, 0.0)
        chosen = {v: int(kept[v][k]) for v, k in solved.items()}
        for step in reversed(decided):
            chosen[step.variable] = step.option(chosen)
        options = [chosen[v] for v in range(len(self.costs))]
        total = _total(*original, options)
        if not np.isfinite(total):
            raise NoSolution
        return Solution(options, total, gap)

    def _is_simple(self, v: int) -> bool:
        around = self.tables[v]
        size = math.prod(len(self.costs[w]) for w in (v, *around))
        return len(around) < 2 or (len(around) == 2 and size <= _LARGEST)

    def _decide(self, v: int) -> None:
        """Eliminate a variable.

        For each combination of the neighbours' options, the variable's least cost is added to the neighbours' costs.
        """
        around = list(self.tables[v].items())
        for w, _ in around:
            self._separate(v, w)
        if len(around) == 1:
            ((w, table),) = around
            self.costs[w] = self.costs[w] + (self.costs[v][:, None] + table).min(0)
        elif len(around) == 2:
            (w, first), (x, second) = around
            self.add(w, x, (self.costs[v][:, None, None] + first[:, :, None] + second[:, None, :]).min(0))

    def _separate(self, a: int, b: int) -> None:
        self.tables[a].pop(b, None)
        self.tables[b].pop(a, None)

    def _drop_options(self, v: int, kept: list[np.ndarray]) -> bool:
        """Drop options that are never better than another option. Return True if an option was dropped."""
        cost = self.costs[v]
        if not np.isfinite(cost).any():
            raise NoSolution
        with np.errstate(invalid="ignore"):  # neither of two impossible options beats the other
            worse = cost[:, None] - cost[None, :]  # how much more option i costs than option j, at most
            for table in self.tables[v].values():
                more = table[:, None, :] - table[None, :, :]
                worse = worse + np.where(np.isposinf(table)[None, :, :], -np.inf, more).max(-1)
        beats = worse <= 0  # option i beats option j
        beats &= ~(
            beats.T & (np.arange(len(cost))[:, None] >= np.arange(len(cost))[None, :])
        )  # the first of equal options wins
        stay = np.flatnonzero(~beats.any(0) & np.isfinite(cost))
        if len(stay) == len(cost):
            return False
        self.costs[v], kept[v] = cost[stay], kept[v][stay]
        for w, table in list(self.tables[v].items()):
            self._separate(v, w)
            self.add(v, w, table[stay])
        return True


def _total(costs: list[np.ndarray], tables: list[dict[int, np.ndarray]], chosen: list[int]) -> float:
    single = sum(cost[k] for cost, k in zip(costs, chosen, strict=True))
    pairs = sum(t[chosen[v], chosen[w]] for v, around in enumerate(tables) for w, t in around.items() if v < w)
    return float(single + pairs)


def _milp(
    costs: list[np.ndarray], tables: list[dict[int, np.ndarray]], left: list[int]
) -> tuple[dict[int, int], float]:
    """Solve for the remaining variables with HiGHS: a binary per option, a column per pair of options."""
    first: dict[int, int] = {}
    objective: list[float] = []
    for v in left:
        first[v] = len(objective)
        objective += [cost if np.isfinite(cost) else 0.0 for cost in costs[v]]
    binaries = len(objective)
    upper = [float(np.isfinite(cost)) for v in left for cost in costs[v]]
    rows: list[ProgramRow] = [([(first[v] + k, 1.0) for k in range(len(costs[v]))], 1.0, 1.0) for v in left]
    for v in left:
        for w, table in tables[v].items():
            if v > w:
                continue
            column = np.full(table.shape, -1)
            possible = np.isfinite(table)
            column[possible] = np.arange(possible.sum()) + len(objective)
            objective += table[possible].tolist()
            for a, columns in ((v, column), (w, column.T)):  # pair columns of an option sum to its binary
                for k, pairs in enumerate(columns):
                    used = pairs[pairs >= 0].tolist()
                    rows.append(([*((pair, 1.0) for pair in used), (first[a] + k, -1.0)], 0.0, 0.0))
    is_binary = np.arange(len(objective)) < binaries
    most = np.array(upper + [1.0] * (len(objective) - binaries))
    scaled = np.array(objective) / _scale(objective)
    result = integer_program(scaled, rows, most, is_binary, {"mip_rel_gap": 0.0, "presolve": True})
    if result.status == 2:  # infeasible
        raise NoSolution
    assert result.x is not None, f"the mixed-integer program has no solution: {result.message}"
    chosen = {v: int(np.argmax(result.x[first[v] : first[v] + len(costs[v])])) for v in left}
    return chosen, float(result.mip_gap or 0.0)


def _scale(objective: list[float]) -> float:
    """Return the number that the objective is divided by.

    HiGHS stops at an absolute gap of 1e-6, so costs are scaled to about 1e4.
    """
    return (max(map(abs, objective), default=0.0) or 1.0) / 1e4
