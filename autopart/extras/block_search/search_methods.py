"""Methods that solve a `BlockProblem`: two are exact, and two sample and evaluate choices.

| name | method | unit of `budget` | unit of `evaluations` |
|---|---|---|---|
| `dynamic_programming` | over blocks and stages; memory is rounded to limit / `budget` | memory units | knapsacks |
| `integer_programming` | HiGHS; variables: number of blocks of each kind in each stage | nodes | nodes |
| `evolution_strategies` | zeroth-order (Salimans et al. 2017, arXiv:1703.03864) | choices | choices |
| `reinforcement_learning` | REINFORCE (Williams 1992; Mirhoseini et al. 2017, arXiv:1706.04972) | choices | choices |

Equal seeds give equal results. The exact methods ignore the seed. A method raises MemoryLimitError if it finds no
choice that fits into memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from autopart.common.text import quantity
from autopart.errors import MemoryLimitError, OptionError
from autopart.extras.block_search.block_problem import BlockChoice, BlockProblem
from autopart.extras.block_search.exact_methods import dynamic_programming, integer_programming
from autopart.extras.block_search.sampling_methods import evolution_strategies, reinforcement_learning

Method = Literal["dynamic_programming", "integer_programming", "evolution_strategies", "reinforcement_learning"]


@dataclass(frozen=True)
class BlockSearchResult:
    """Result of a search method.

    Args:
        method: name of the method.
        choice: the best choice that it found.
        step_time_s: seconds of a step under the choice.
        evaluations: number of evaluations; the table at the top of this file gives the unit.
        seconds: duration of the search.
        lower_bound_s: proven lower bound of the step in seconds; 0.0 if there is none.
    """

    method: Method
    choice: BlockChoice
    step_time_s: float
    evaluations: int
    seconds: float
    lower_bound_s: float = 0.0

    def gap(self, best_s: float) -> float:
        """Return the relative difference from the fastest known step: 0.1 if this step is 10 % slower."""
        return self.step_time_s / best_s - 1


_METHODS: dict[Method, tuple[Callable[[BlockProblem, int, int], tuple[BlockChoice | None, int, float]], int]] = {
    "dynamic_programming": (dynamic_programming, 2000),
    "integer_programming": (integer_programming, 100_000),
    "evolution_strategies": (evolution_strategies, 40_000),
    "reinforcement_learning": (reinforcement_learning, 20_000),
}


def solve(
    problem: BlockProblem, method: Method = "dynamic_programming", seed: int = 0, budget: int | None = None
) -> BlockSearchResult:
    """Search a problem with a method, and return its best choice.

    Raises OptionError for an unknown method, MemoryLimitError if the method finds nothing that fits.
    """
    if method not in get_args(Method):
        raise OptionError(f"unknown method={method!r}", hint=", ".join(get_args(Method)))
    search, usual = _METHODS[method]
    start_s = time.perf_counter()
    choice, evaluations, bound_s = search(problem, seed, budget or usual)
    seconds = time.perf_counter() - start_s
    if choice is None:
        raise MemoryLimitError(
            f"{method} finds no options of blocks that fit into {quantity(problem.memory_bytes, 'B')}",
            hint="more stages or devices, smaller microbatches, or zero=3 for parameters outside blocks",
        )
    assert problem.fits(choice), method
    return BlockSearchResult(method, choice, problem.step_time_s(choice), evaluations, seconds, bound_s)
