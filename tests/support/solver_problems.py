"""Random problems of the solver and of stage balance, with brute force."""

import itertools
import math
import random
import statistics

import numpy as np
from hypothesis import strategies as st
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from autopart.passes.choose.solve.pairwise_solver import PairwiseProblem


@st.composite
def problems(draw):
    """Costs of single options and tables of pairs, some of them impossible."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    number = st.integers(0, 9).map(float)
    costs = [draw(st.lists(number, min_size=n, max_size=n)) for n in sizes]
    edges = draw(st.lists(st.tuples(*[st.integers(0, len(sizes) - 1)] * 2), max_size=12))
    tables = []
    for a, b in edges:
        entry = number if min(sizes[a], sizes[b]) == 1 else st.one_of(number, number, number, st.just(np.inf))
        table = np.array(draw(st.lists(entry, min_size=sizes[a] * sizes[b], max_size=sizes[a] * sizes[b])))
        table = table.reshape(sizes[a], sizes[b])
        table[0, 0] = draw(number)  # the first options go together
        tables.append((a, b, table))
    return costs, tables


def cost_of(costs, tables, chosen):
    total = sum(cost[k] for cost, k in zip(costs, chosen, strict=True))
    return total + sum(table[chosen[a], chosen[b]] for a, b, table in tables)


def least_cost(costs, tables):
    return min(cost_of(costs, tables, c) for c in itertools.product(*(range(len(cost)) for cost in costs)))


def pairs_of(costs, tables):
    pairs = PairwiseProblem()
    for cost in costs:
        pairs.variable(cost)
    for table in tables:
        pairs.add(*table)
    return pairs


def flat_cost(programme):
    """The optimum by one flat mixed-integer programme: a binary per option, and for every value a variable per pair of
    placements (made, wanted) that is paid once however many consumers want it."""
    costs, rows, first = [], [], {}
    for choice in programme.choices.values():
        first[id(choice)] = len(costs)
        costs += choice.costs
        rows.append(({first[id(choice)] + k: 1.0 for k in range(len(choice.options))}, 1.0, 1.0))
    binaries = len(costs)
    for value in programme.values:
        uses = list(value.uses.values())
        targets = sorted({place for use in uses for wanted in use.wanted() for place in wanted})
        table = programme.conversion_costs(value, targets)
        ways = {}
        for t, target in enumerate(targets):
            ways[target] = range(len(costs), len(costs) + len(table))
            costs += [c if np.isfinite(c) else 0.0 for c in table[:, t]]
            for k, (y, cost) in enumerate(zip(ways[target], table[:, t], strict=True)):
                made = {first[id(value.producer)] + k: -1.0} if np.isfinite(cost) else {}
                rows.append(({y: 1.0, **made}, -np.inf, 0.0))
        for use in uses:
            for target in targets:
                takes = {first[id(use.choice)] + k: -1.0 for k, w in enumerate(use.wanted()) if target in w}
                rows.append(({**dict.fromkeys(ways[target], 1.0), **takes}, 0.0, np.inf))
    cells = [(r, c, v) for r, (row, _, _) in enumerate(rows) for c, v in row.items()]
    r, c, v = zip(*cells, strict=True)
    scale = max(costs) / 1e7
    result = milp(
        np.array(costs) / scale, integrality=np.arange(len(costs)) < binaries, bounds=Bounds(0, 1),
        constraints=LinearConstraint(
            sparse.csr_array((v, (r, c)), shape=(len(rows), len(costs))), [x[1] for x in rows], [x[2] for x in rows]
        ), options={"mip_rel_gap": 0.0},
    )  # fmt: skip
    return result.fun * scale


def every_partition(weights, crossing, num_stages):
    """cuts, (heaviest stage, what it costs to be uneven and to send), of all partitions."""
    places = [i for i in range(1, len(weights)) if math.isfinite(crossing[i])]
    often = statistics.median(crossing[i] for i in places) if places else 1.0
    mean = sum(weights) / num_stages or 1.0
    for cuts in itertools.combinations(places, num_stages - 1):
        loads = [sum(weights[a:b]) for a, b in itertools.pairwise((0, *cuts, len(weights)))]
        yield (
            cuts,
            (max(loads), sum((load / mean) ** 2 for load in loads) / 2 + sum(crossing[c] for c in cuts) / (often or 1)),
        )


def random_problem(seed):
    rng = random.Random(seed)
    count = rng.randint(1, 11)
    scale = rng.choice([1, 10, 1e12])
    weights = [rng.choice([0.0, 1.0, rng.random(), 50 * rng.random()]) * scale for _ in range(count)]
    crossing = [0.0, *(math.inf if rng.random() < 0.2 else float(rng.randint(0, 9)) for _ in range(count - 1))]
    return weights, crossing, rng.randint(1, 5)
