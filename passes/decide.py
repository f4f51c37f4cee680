"""Between decisions and plans: `decide` makes the choices, `encode` writes them as plan entries, `decode` reads them.

`decode(encode(decisions)) == decisions`, so a plan from a file runs the identical program without choosing anything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from torch import fx

from autopart.cost.hardware import Hardware
from autopart.errors import LayoutError, PlanError, StageError
from autopart.graph import describe, operators, pattern_of, shape, tensor_inputs
from autopart.layout import R_GRAD_P, Placement, R, section_sizes
from autopart.mesh import Mesh
from autopart.plan import Plan
from autopart.trace import Trace

from .analyze import ACTIVE, FEATURE, PARAMETER, WEIGHT, batch_size
from .batch import check_microbatches, choose_batch
from .lower import Decisions
from .partition import active_operators, check_batch, partition
from .shard import choose_sharding
from .strategies import Strategy, strategies

FEATURES = frozenset({FEATURE})


def decide(trace: Trace, mesh: Mesh, microbatches: int, num_stages: int, hardware: Hardware) -> Decisions:
    """Choose layouts and cuts for an annotated trace."""
    if not active_operators(trace.graph):
        raise LayoutError(
            "the model has nothing to partition",
            why="none of its operators depends on a parameter",
            hint="run it as it is",
        )
    tp = mesh.size("tp")
    tensor: Mapping[fx.Node, Strategy] = {}
    stored: Mapping[str, Placement] = {}
    if tp > 1:
        sharding = choose_sharding(trace.graph, tp, hardware)
        tensor, stored = sharding.strategies, sharding.parameters
        check_divides(trace, tensor, tp)
    found = partition(trace.graph, num_stages)
    return Decisions(
        mesh, microbatches, batch_strategies(trace, mesh, microbatches), tensor, stored,
        stages_from_cuts(trace, found.cuts), num_stages,
    )  # fmt: skip


def batch_strategies(trace: Trace, mesh: Mesh, microbatches: int) -> Mapping[fx.Node, Strategy]:
    """What every operator does with the rows of the batch; follows from the rules, nothing is chosen."""
    check_batch(batch_size(trace), mesh, microbatches)
    shards = mesh.size("dp") * microbatches
    if shards == 1:
        return {}
    chosen = choose_batch(trace.graph, shards)
    check_microbatches(trace.graph, chosen, microbatches)
    return chosen


def stages_from_cuts(trace: Trace, cuts: tuple[int, ...]) -> dict[fx.Node, int]:
    """The stage of every active operator, from the positions where stages begin."""
    return {node: sum(cut <= i for cut in cuts) for i, node in enumerate(active_operators(trace.graph))}


def check_divides(trace: Trace, tensor: Mapping[fx.Node, Strategy], tp: int) -> None:
    """Raises LayoutError where `tp` divides no matrix product of the model."""
    products = [n for n in active_operators(trace.graph) if n.meta["pattern"] is not None and n.meta["pattern"].flops]
    if not products:
        raise LayoutError(
            f"tp={tp} has nothing to split", why="the model has no matrix product with a parameter",
            hint="leave tp out of the mesh; dp works for any model",
        )  # fmt: skip
    even = [n for n in products if tensor[n].factor and n.meta["pattern"].sizes[tensor[n].factor] % tp == 0]
    if even:
        return
    sizes = sorted(
        {
            s
            for n in products
            for source in tensor_inputs(n)
            if source.meta["role"] in (PARAMETER, WEIGHT)
            for s in shape(source)
        }
    )
    fits = [t for t in range(2, max(sizes, default=1) + 1) if sum(s % t == 0 for s in sizes) * 2 > len(sizes)]
    raise LayoutError(
        f"tp={tp} divides no weight of the model",
        why=f"the weights of its matrix products have dims {', '.join(map(str, sizes))}",
        where=describe(products[0]), hint=f"tp={', '.join(map(str, fits[:6]))}" if fits else "leave tp out of the mesh",
    )  # fmt: skip


# Plans


def encode(trace: Trace, decisions: Decisions) -> dict[str, Any]:
    """The plan entries `parameters`, `operators` and `cuts` that hold these decisions."""
    parameters: dict[str, dict[str, str]] = {}
    stored = {name: str(decisions.stored.get(name, R)) for name in trace.parameters}
    has_tp = decisions.mesh.size("tp") > 1
    for name, text in _by_pattern({n: (pattern_of(n), t) for n, t in stored.items()}).items():
        parameters[name] = {"tp": text} if has_tp else {}
    nodes = {node.meta["key"]: node for node in operators(trace.graph) if node in decisions.tensor}
    texts = {key: str(decisions.tensor[node]) for key, node in nodes.items()}
    written = _by_pattern({key: (node.meta["group"], texts[key]) for key, node in nodes.items()})
    replicated = {key: str(strategies(node, 1, frozenset())[0]) for key, node in nodes.items()}
    spoken = {node.meta["group"] for key, node in nodes.items() if texts[key] != replicated[key]}
    silent = {node.meta["group"] for node in nodes.values()} - spoken  # replicated throughout: need not be said
    operators_ = {name: {"tp": text} for name, text in written.items() if name not in silent}
    return {"parameters": parameters, "operators": operators_, "cuts": _starts(trace, decisions)}


def _by_pattern(entries: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """`{name: (pattern, text)}` to `{pattern or name: text}`: the pattern holds the most frequent text of its names,
    names that differ are listed on their own."""
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for name, (pattern, text) in entries.items():
        groups[pattern][name] = text
    written: dict[str, str] = {}
    for pattern, names in groups.items():
        common = Counter(names.values()).most_common(1)[0][0]
        written[pattern] = common
        written |= {name: text for name, text in names.items() if text != common}
    return written


def _starts(trace: Trace, decisions: Decisions) -> tuple[str, ...]:
    starts, stage = [], 0
    for node in active_operators(trace.graph):
        if decisions.stage_of[node] > stage:
            stage = decisions.stage_of[node]
            starts.append(node.meta["key"])
    return tuple(starts)


def decode(trace: Trace, plan: Plan, mesh: Mesh, strict: bool = True) -> Decisions:
    """The decisions a plan holds for this trace.

    `strict`: the plan is for this very trace. Else it was made in another mode of the model (with dropout, or without
    the loss), and operators are chosen around the placements of its weights and its cuts.
    Raises PlanError with the line that does not fit, and why.
    """
    microbatches = plan.schedule.microbatches
    tensor: Mapping[fx.Node, Strategy] = {}
    stored: dict[str, Placement] = {}
    if mesh.size("tp") > 1:
        stored = {name: Placement.parse(plan.placement_text(name, "tp")) for name in trace.parameters}
        _check_stored(trace, plan, stored, mesh.size("tp"))
        tensor = (
            _read_strategies(trace, plan, stored, mesh.size("tp"))
            if strict
            else choose_sharding(trace.graph, mesh.size("tp"), Hardware.load(), stored).strategies
        )
    num_stages = mesh.size("pp") * plan.schedule.virtual_stages
    return Decisions(
        mesh, microbatches, batch_strategies(trace, mesh, microbatches), tensor, stored,
        stages_from_cuts(trace, _read_cuts(trace, plan, num_stages)), num_stages,
    )  # fmt: skip


def _check_stored(trace: Trace, plan: Plan, stored: Mapping[str, Placement], tp: int) -> None:
    known = {*trace.parameters, *map(pattern_of, trace.parameters)}
    for name in plan.parameters:
        if name not in known:
            raise PlanError(
                f"the plan places '{name}', which is no parameter of the model", where=plan.where("parameters", name),
                hint=f"the parameters are {', '.join(list(dict.fromkeys(map(pattern_of, trace.parameters)))[:8])}, ...",
            )  # fmt: skip
    for name, place in stored.items():
        sizes = tuple(trace.parameters[name].shape)
        key = name if name in plan.parameters else pattern_of(name)
        where = plan.where("parameters", key)
        if place.kind == "P":
            raise PlanError(
                f"the plan stores '{name}' as P", why="a weight is not a partial sum", where=where, hint="R or S(0)"
            )
        if place.is_shard and place.dim >= len(sizes):
            raise PlanError(
                f"the plan stores '{name}' as {place}", why=f"its shape is {list(sizes)}, it has no dim {place.dim}",
                where=where,
                hint=f"S({len(sizes) - 1}) or R",
            )  # fmt: skip
        if place.is_shard:
            parts = section_sizes(sizes[place.dim], place.sections)
            uneven = any(part % tp for part in parts) and (place.sections or -(-parts[0] // tp) * (tp - 1) >= parts[0])
            if uneven or sum(parts) != sizes[place.dim]:
                raise PlanError(
                    f"the plan stores '{name}' as {place}",
                    why=f"dim {place.dim} has size {sizes[place.dim]}, which does not cut so over tp={tp}",
                    where=where, hint="R",
                )  # fmt: skip


def _read_strategies(trace: Trace, plan: Plan, stored: Mapping[str, Placement], tp: int) -> dict[fx.Node, Strategy]:
    chosen: dict[fx.Node, Strategy] = {}
    used: set[str] = set()
    for node in operators(trace.graph):
        if node.meta["role"] not in (ACTIVE, WEIGHT):
            continue
        options = strategies(node, tp, FEATURES)
        found = plan.operator_entry(node.meta["key"], node.meta["group"])
        strategy = options[0]
        if found is not None:
            used.add(found[0])
            strategy = _option(options, found[1].get("tp"), node, plan, found[0])
        keep = found is not None and found[1].get("keep", False)
        chosen[node] = strategy if keep else _follow_weights(node, strategy, options, stored, chosen)
    unknown = [name for name in plan.operators if name not in used and not _is_cast(name)]
    if unknown:
        raise PlanError(
            f"the plan names '{unknown[0]}', which is no operator of the model",
            where=plan.where("operators", unknown[0]),
        )
    return chosen


def _is_cast(name: str) -> bool:
    """Casts come and go with the dtype a model is run in, so a plan may name some that are not there."""
    return name.rpartition("/")[2].partition("#")[0] in ("to", "_to_copy")


def _option(options: list[Strategy], text: str | None, node: fx.Node, plan: Plan, name: str) -> Strategy:
    if text is None:
        return options[0]
    for option in options:
        if str(option) == text:
            return option
    raise PlanError(
        f"the plan runs {name} as '{text}', which its rule does not allow", why=describe(node),
        where=plan.where("operators", name), hint=" | ".join(map(str, options[:8])),
    )  # fmt: skip


def _follow_weights(
    node: fx.Node,
    strategy: Strategy,
    options: list[Strategy],
    stored: Mapping[str, Placement],
    chosen: Mapping[fx.Node, Strategy],
) -> Strategy:
    """Let an operator follow the layout its weights are stored in, where that was edited in the plan."""
    wanted: dict[int, Placement] = {}
    for i, source in enumerate(tensor_inputs(node)):
        if source.meta["role"] == PARAMETER:
            wanted[i] = stored[source.target]
        elif source.meta["role"] == WEIGHT:
            wanted[i] = chosen[source].outputs[0]
    if all(_matches(strategy.inputs[i], place) for i, place in wanted.items()):
        return strategy
    fitting = [s for s in options if all(_matches(s.inputs[i], place) for i, place in wanted.items())]
    return min(fitting, key=lambda s: _distance(s, strategy), default=strategy)


def _matches(used: Placement, stored: Placement) -> bool:
    return used == stored or (not stored.is_shard and used in (R, R_GRAD_P))


def _distance(a: Strategy, b: Strategy) -> tuple[int, int]:
    pairs = zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True)
    return sum(x != y for x, y in pairs), sum(p.kind == "P" for p in a.inputs)


def _read_cuts(trace: Trace, plan: Plan, num_stages: int) -> tuple[int, ...]:
    if len(plan.cuts) != num_stages - 1:
        raise PlanError(
            f"the plan has {len(plan.cuts)} cuts",
            why=f"{num_stages} stages need {num_stages - 1}",
            where=plan.where("cuts"),
        )
    nodes = active_operators(trace.graph)
    position = {node.meta["key"]: i for i, node in enumerate(nodes)}
    cuts: list[int] = []
    for cut in plan.cuts:
        where = plan.where("cuts", cut)
        if cut not in position:
            near = [k for k in position if k.rsplit("/", 1)[0] == cut.rsplit("/", 1)[0]] or list(position)
            raise PlanError(f"the plan cuts before '{cut}', which is no operator of the model", where=where,
                            hint=", ".join(near[:6]))  # fmt: skip
        if position[cut] == 0 or (cuts and position[cut] <= cuts[-1]):
            raise PlanError(
                f"the plan cuts before '{cut}'",
                why="a stage would be empty: cuts follow the order of the operators",
                where=where,
            )
        cuts.append(position[cut])
    _check_crossing(nodes, plan, cuts)
    return tuple(cuts)


def _check_crossing(nodes: list[fx.Node], plan: Plan, cuts: list[int]) -> None:
    from .partition import crossing_bytes

    crossing = crossing_bytes(nodes)
    for cut, name in zip(cuts, plan.cuts, strict=True):
        if crossing[cut] == float("inf"):
            raise StageError(
                f"the plan cuts before '{name}'", why="a value without gradient would have to travel to the next stage",
                where=plan.where("cuts", name), hint="a cut a few operators earlier or later",
            )  # fmt: skip
