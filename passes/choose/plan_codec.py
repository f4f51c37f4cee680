"""Conversion between decisions (objects) and plan entries (text), by `encode` and `decode`.

`decode(encode(decisions)) == decisions`, so a plan from a file gives the identical program, and nothing is solved. A
plan also applies to calls of the model with other input shapes: `decode` then adapts the decisions to these shapes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, TypeVar

from torch import fx

from autopart.cost.hardware.profile import Hardware
from autopart.errors import PlanError, StageError
from autopart.ir.blocks.deduplication import DeduplicatedBlocks, names_of
from autopart.ir.decisions import Decisions, Strategy, with_placements
from autopart.ir.facts import PARAMETER, WEIGHT, facts
from autopart.ir.graph import (
    CAST,
    active_operators,
    describe,
    on_parameters,
    operator_name,
    operators,
    pattern_of,
    tensor_inputs,
)
from autopart.ir.layout import R_GRAD_P, Layout, P, Placement, R, cannot_store, cannot_store_sharded, shard
from autopart.ir.mesh import Mesh
from autopart.ir.run.sync_option import parse_sync
from autopart.ir.trace import Trace
from autopart.passes.choose.decide import stages_from_boundaries
from autopart.passes.choose.explain.node_notes import decision_notes
from autopart.passes.choose.recompute_regions import check_recompute
from autopart.passes.choose.solve.batch_axis import batch_strategies, fit_batch
from autopart.passes.choose.solve.expert_axes import mixtures, mixtures_on_axis
from autopart.passes.choose.solve.layout_pins import FREE, AxisConstraints
from autopart.passes.choose.solve.shard_axis import fit_around
from autopart.passes.choose.stages.stage_partition import boundary_bytes
from autopart.passes.choose.storage.parameter_storage import storable_placements
from autopart.passes.facts.mask_facts import set_zigzag
from autopart.passes.facts.sequence_dims import follow_sequences
from autopart.passes.facts.strategies import strategies
from autopart.passes.pass_pipeline import driven
from autopart.passes.rules.registered_rules import REGISTERED, as_data, call_text, from_data
from autopart.plans.plan import Plan

T = TypeVar("T")

OnAxes = Mapping[str, str]
"""{axis: strategy of an operator, as text of a plan}"""


def encode(trace: Trace, decisions: Decisions) -> dict[str, Any]:
    """Return the plan entries that represent these decisions.

    The entries are `parameters`, `operators`, `cuts`, `rules`, `recompute`, `zero`, `prefetch`, `scatter_sends`,
    `dp_sync` and `balance`.
    """
    entries = {name: (pattern_of(name), _stored_entry(decisions, name)) for name in trace.parameters}
    parameters = {name: dict(entry) for name, entry in _by_pattern(entries, trace.folds).items()}
    chosen = decisions.features
    nodes = {facts(node)["key"]: node for node in operators(trace.graph) if any(node in on for on in chosen.values())}
    texts = {key: {axis: str(on[node]) for axis, on in chosen.items()} for key, node in nodes.items()}
    grouped = {key: (facts(node)["group"], tuple(texts[key].items())) for key, node in nodes.items()}
    written = _by_pattern(grouped, trace.folds)
    replicated = {key: str(strategies(node, 1, frozenset())[0]) for key, node in nodes.items()}
    fixed_keys = {key for key, node in nodes.items()
            if not all(fits_weights(node, decisions, axis, on) for axis, on in chosen.items())}  # fmt: skip
    replicated_keys = {key for key in nodes if all(text == replicated[key] for text in texts[key].values())}
    listed_groups = {
        facts(node)["group"] for key, node in nodes.items() if key not in replicated_keys or key in fixed_keys
    }
    default_groups = {
        facts(node)["group"] for node in nodes.values()
    } - listed_groups  # replicated on all axes, which is the default
    keep = {name for key in fixed_keys for name in (*names_of(trace.folds, key), facts(nodes[key])["group"])}
    operators_: dict[str, dict[str, Any]] = {
        name: {**dict(on_axes), **({"keep": True} if name in keep else {})}
        for name, on_axes in written.items() if name not in default_groups
    }  # fmt: skip
    names = sorted({operator_name(node) for node in operators(trace.graph)} & REGISTERED.keys())
    rules = {name: as_data(REGISTERED[name]) for name in names}
    cuts, recompute = _starts(trace, decisions), decisions.recompute
    return {
        "parameters": parameters,
        "operators": operators_,
        "cuts": cuts,
        "rules": rules,
        "recompute": recompute,
        "zero": decisions.zero,
        "prefetch": decisions.prefetch,
        "scatter_sends": decisions.scatter_sends,
        "dp_sync": decisions.dp_sync.as_data(),
        "balance": decisions.balance,
    }


def _stored_entry(decisions: Decisions, name: str) -> tuple[tuple[str, str], ...]:
    """Return the layout of a parameter as `(axis, placement)` pairs, for the plan.

    `R` on batch axes and on axes over which ZeRO stores parameters is left out, because it is the default there.
    """
    features = decisions.mesh.chosen
    joined = (axis for axis in decisions.stored.get(name, {}) if decisions.mesh.stores(axis))
    axes = dict.fromkeys((*decisions.mesh.along("rows"), *joined, *features))
    places = {axis: str(decisions.place(name, axis)) for axis in axes}
    return tuple((axis, place) for axis, place in places.items() if axis in features or place != str(R))


def _by_pattern(entries: Mapping[str, tuple[str, T]], folds: DeduplicatedBlocks) -> dict[str, T]:
    """Merge the entries of repeated blocks: `{name: (pattern, text)}` becomes `{pattern or name: text}`.

    A pattern such as `layers.*.weight` gets the text that most of its names have. Names with another text get their own
    entry.
    """
    groups: dict[str, dict[str, T]] = defaultdict(dict)
    for name, (pattern, text) in entries.items():
        groups[pattern][name] = text
    written: dict[str, T] = {}
    for pattern, texts in groups.items():
        if len(set(texts.values())) == 1:
            written[pattern] = next(iter(texts.values()))
            continue
        every = {name: text for one, text in texts.items() for name in names_of(folds, one)}
        common = Counter(every.values()).most_common(1)[0][0]
        written[pattern] = common
        written |= {name: text for name, text in every.items() if text != common}
    return written


def _starts(trace: Trace, decisions: Decisions) -> tuple[str, ...]:
    starts, stage = [], 0
    for node in active_operators(trace.graph):
        if node not in decisions.tail and decisions.stage_of[node] > stage:
            stage = decisions.stage_of[node]
            starts.append(facts(node)["key"])
    return tuple(starts)


def _follow_positions(trace: Trace, plan: Plan, mesh: Mesh) -> None:
    """Write the plan's sequence dims on the trace, and whether the plan shards them in zigzag."""
    if mesh.along("positions"):
        texts = (text for entry in plan.operators.values() for text in entry.values() if isinstance(text, str))
        set_zigzag(trace, any("zigzag" in text for text in texts))
    follow_sequences(trace, plan.sequence_dims or {})


@driven(notes=decision_notes)
def decode(trace: Trace, plan: Plan, mesh: Mesh, decided: Mapping[str, OnAxes] | None = None) -> Decisions:
    """Return the decisions of a plan, applied to this trace.

    The plan may come from another call or mode of the model (other shapes, without the loss, with dropout). This
    function then applies the entries that fit the trace. For operators that the plan does not list, the solver chooses
    strategies that fit the listed operators and the stored weights. The batch is sharded over `dp` if `dp` divides its
    size.

    Args:
        decided: `{operator: {axis: strategy}}` from `decided_by` of an earlier trace. The function reuses these
            strategies.

    Raises PlanError with the line of the plan that does not fit, and the reason.
    """
    _check_rules(plan)
    _follow_positions(trace, plan, mesh)
    same_trace = not decided and is_plan_of(
        plan, trace
    )  # later traces can lack operators: other values, other branches
    if same_trace:
        check_recompute(trace.graph, plan.recompute, plan.where("recompute"))
    num_stages = mesh.size("pp") * plan.schedule.virtual_stages
    stored: dict[str, Layout] = {}
    chosen: dict[str, Mapping[fx.Node, Strategy]] = {}
    of_experts = mixtures(trace)
    for axis in mesh.solving_order:
        kind = mesh.axis(axis).cuts
        constraints = replace(FREE, axis=axis, cuts=kind).with_solved_axes(chosen, stored, mesh)
        places = _read_stored(trace, plan, mesh, axis, stored)
        by_expert = {name for name, place in places.items() if place == shard(0)}
        constraints = replace(constraints, stacks=mixtures_on_axis(of_experts, kind, by_expert))
        _check_cut_again(plan, constraints, places, stored)
        stored = with_placements(stored, axis, places)
        read = _read_strategies if same_trace else _fit_strategies
        known = {key: on.get(axis, "") for key, on in (decided or {}).items()}
        chosen[axis] = read(trace, plan, mesh, axis, stored, known, constraints)
    if same_trace:
        rows = batch_strategies(trace, mesh, plan.schedule)
    else:
        rows = fit_batch(trace, mesh, plan.schedule)
    cuts = _read_cuts(trace, plan, num_stages, same_trace, list(decided or {}), rows.tail)
    for axis in dict.fromkeys(axis for entry in plan.parameters.values() for axis in entry if mesh.stores(axis)):
        if mesh.size(axis) > 1:
            parts = _read_stored(trace, plan, mesh, axis, stored)
            stored = with_placements(stored, axis, {name: place for name, place in parts.items() if place.is_shard})
    strategies = {**rows.on_axes(mesh), **chosen}
    decisions = Decisions(
        mesh,
        rows.microbatches,
        strategies,
        stored,
        stages_from_boundaries(trace, cuts, num_stages, rows.tail),
        num_stages,
        plan.recompute,
        plan.zero,
        plan.prefetch,
        plan.scatter_sends,
        parse_sync(plan.dp_sync),
        plan.balance,
        rows.tail,
    )
    decisions.dp_sync.check_storage(trace, decisions)
    return decisions


def is_plan_of(plan: Plan, trace: Trace) -> bool:
    """Return True if the plan comes from a trace like this one.

    Inputs, shapes, mode (train or eval) and autocast must be equal.
    """
    shapes = {name: list(t.shape) for name, t in zip(trace.call.names, trace.call.tensors, strict=True)}
    planned = {name: list(entry["shape"]) for name, entry in plan.inputs.items()}
    same = plan.model.get("mode") == trace.mode and plan.autocast == trace.autocast
    return same and shapes == planned


def decided_by(trace: Trace, decisions: Decisions) -> dict[str, OnAxes]:
    """Return the chosen strategies as `{operator: {axis: strategy}}`, in graph order.

    `decode` can reuse them for other traces of the model.
    """
    nodes, chosen = on_parameters(trace.graph), decisions.features
    return {facts(n)["key"]: {axis: str(on[n]) for axis, on in chosen.items() if n in on} for n in nodes}


def _check_rules(plan: Plan) -> None:
    for name, data in plan.rules.items():
        rule = from_data(data)
        if REGISTERED.get(name) != rule:
            other = f"it has {call_text(name, REGISTERED[name])}" if name in REGISTERED else "it has no rule for it"
            raise PlanError(
                f"the plan needs a sharding rule for {name} that this process does not have", why=other,
                where=plan.where("rules", name), hint=f"{call_text(name, rule)} before parallelize, or a new plan",
            )  # fmt: skip


def _read_stored(trace: Trace, plan: Plan, mesh: Mesh, axis: str, others: Mapping[str, Layout]) -> dict[str, Placement]:
    """Read from the plan {parameter: its placement on `axis`}.

    Args:
        others: {parameter: its layout on the mesh axes that were read from the plan before `axis`}.
    """
    known = {*trace.parameters, *map(pattern_of, trace.parameters)}
    for name in plan.parameters:
        if name not in known:
            raise PlanError(
                f"the plan has a layout for '{name}', which is not a parameter of the model",
                where=plan.where("parameters", name),
                hint=f"the parameters are {', '.join(list(dict.fromkeys(map(pattern_of, trace.parameters)))[:8])}, ...",
            )
    stored = {name: Placement.parse(plan.placement_text(name, axis)) for name in trace.parameters}
    for name, place in stored.items():
        sizes = tuple(trace.parameters[name].shape)
        key = name if name in plan.parameters else pattern_of(name)
        where = plan.where("parameters", key)
        hint = f"S({len(sizes) - 1}) or R" if place.is_shard and place.dim >= len(sizes) else "R"
        hint = "R or S(0)" if place == P else hint
        if axis in mesh.chosen:
            why = cannot_store(place, sizes, axis, mesh.size(axis))
        else:
            layout = others.get(name, {})
            why = cannot_store_sharded(place, sizes, axis, mesh.size(axis), layout)
            hint = storable_placements(sizes, axis, mesh.size(axis), layout)
        if why:
            over = "" if len(mesh.chosen) == 1 and axis in mesh.chosen else f" on {axis}"
            raise PlanError(
                f"the plan's layout {place} of '{name}'{over} is not possible", why=why, where=where, hint=hint
            )
    return stored


def _check_cut_again(
    plan: Plan, constraints: AxisConstraints, places: Mapping[str, Placement], stored: Mapping[str, Layout]
) -> None:
    """Raise PlanError if the plan shards a dim of a parameter over several axes.

    Exception: several axes may shard the expert dim of stacked weights, if there are enough experts.
    """
    for name, place in places.items():
        others = [axis for axis, other in stored.get(name, {}).items() if other.is_shard and other.dim == place.dim]
        if place.is_shard and others and not constraints.can_shard_again(name, place):
            key = name if name in plan.parameters else pattern_of(name)
            raise PlanError(
                f"the plan's layout {place} of '{name}' on {constraints.axis} is not possible",
                why=f"{' and '.join(others)} shards dim {place.dim} already; several axes can only shard the dim "
                "of experts, and only if there are enough experts", where=plan.where("parameters", key), hint="R",
            )  # fmt: skip


def _fit_strategies(
    trace: Trace, plan: Plan, mesh: Mesh, axis: str, stored: Mapping[str, Layout], decided: Mapping[str, str],
    constraints: AxisConstraints,
) -> Mapping[fx.Node, Strategy]:  # fmt: skip
    """Return {operator: strategy on `axis`}: the plan's strategy if it fits this trace, else a solved one.

    Args:
        constraints: layouts fixed by the user, and shardings over the mesh axes already read from the plan.
    """
    fixed: dict[fx.Node, Strategy] = {}
    on_axis = {name: layout.get(axis, R) for name, layout in stored.items()}
    nodes = on_parameters(trace.graph)
    for node in nodes:
        allowed = constraints.strategies(node, constraints.strategies_on_axis(node, mesh.size(axis)))
        options = {str(option): option for option in allowed if not _contradicts_storage(node, option, on_axis)}
        strategy = options.get(decided.get(facts(node)["key"], ""))
        if strategy is None:
            _, entry = plan.operator_entry(facts(node)["key"], facts(node)["group"]) or ("", {})
            strategy = options.get(entry.get(axis, ""))
            follows = strategy is None or entry.get("keep", False) or _fits_weights(node, strategy, on_axis, fixed)
            strategy = strategy if follows else None
        if strategy is not None:
            fixed[node] = strategy
    if len(fixed) == len(nodes):
        return fixed
    return fit_around(trace.graph, mesh.size(axis), Hardware.load(), on_axis, fixed, constraints)


def _read_strategies(
    trace: Trace, plan: Plan, mesh: Mesh, axis: str, stored: Mapping[str, Layout], decided: Mapping[str, str],
    constraints: AxisConstraints,
) -> dict[fx.Node, Strategy]:  # fmt: skip
    """Read the strategies of the operators on one axis from the plan.

    The trace must be the one that the plan was made for. Raises PlanError for an unknown operator, or for a strategy
    that the operator's sharding rule does not allow.
    """
    chosen: dict[fx.Node, Strategy] = {}
    used: set[str] = set()
    on_axis = {name: layout.get(axis, R) for name, layout in stored.items()}
    for node in on_parameters(trace.graph):
        options = constraints.strategies(node, constraints.strategies_on_axis(node, mesh.size(axis)))
        named_entry = plan.operator_entry(facts(node)["key"], facts(node)["group"])
        strategy = options[0]
        if named_entry is not None:
            used.add(named_entry[0])
            strategy = _option(options, named_entry[1].get(axis), node, plan, named_entry[0])
        keep = named_entry is not None and named_entry[1].get("keep", False)
        chosen[node] = strategy if keep else _follow_weights(node, strategy, options, on_axis, chosen)
    unknown = [name for name in plan.operators if name not in used and not _is_cast(name)]
    if unknown:
        raise PlanError(
            f"the plan names '{unknown[0]}', which is not an operator of the model",
            where=plan.where("operators", unknown[0]),
        )
    return chosen


def _is_cast(name: str) -> bool:
    """Return True if an operator of this name is a cast.

    A plan may name casts that the trace lacks, because the precision option adds and removes casts.
    """
    return name.rpartition("/")[2].partition("#")[0] in (CAST, "to", "_to_copy")


def _option(options: Sequence[Strategy], text: str | None, node: fx.Node, plan: Plan, name: str) -> Strategy:
    if text is None:
        return options[0]
    for option in options:
        if str(option) == text:
            return option
    if _is_cast(name):
        return options[0]
    raise PlanError(
        f"the plan runs {name} with the strategy '{text}', which its sharding rule does not allow", why=describe(node),
        where=plan.where("operators", name), hint="one of: " + " | ".join(map(str, options[:8])),
    )  # fmt: skip


def _follow_weights(
    node: fx.Node,
    strategy: Strategy,
    options: Sequence[Strategy],
    stored: Mapping[str, Placement],
    chosen: Mapping[fx.Node, Strategy],
) -> Strategy:
    """Return the strategy if it fits the stored weights, else the most similar option that fits them.

    A strategy may not fit because a user has edited the layouts of weights in the plan. The most similar strategy
    changes the fewest placements.
    """
    if _fits_weights(node, strategy, stored, chosen):
        return strategy
    fitting = [s for s in options if _fits_weights(node, s, stored, chosen)]
    return min(fitting, key=lambda s: _distance(s, strategy), default=strategy)


def fits_weights(node: fx.Node, decisions: Decisions, axis: str, chosen: Mapping[fx.Node, Strategy]) -> bool:
    """Return True if a node's strategy on an axis fits the placements in which its weights are stored."""
    names = {str(source.target) for source in tensor_inputs(node) if facts(source)["role"] == PARAMETER}
    return _fits_weights(node, chosen[node], {name: decisions.place(name, axis) for name in names}, chosen)


def _fits_weights(
    node: fx.Node, strategy: Strategy, stored: Mapping[str, Placement], chosen: Mapping[fx.Node, Strategy]
) -> bool:
    for source, used in zip(tensor_inputs(node), strategy.inputs, strict=True):
        if facts(source)["role"] == PARAMETER and not _matches(used, stored[source.target]):
            return False
        if facts(source)["role"] == WEIGHT and source in chosen and not _matches(used, chosen[source].outputs[0]):
            return False
    return True


def _contradicts_storage(node: fx.Node, strategy: Strategy, stored: Mapping[str, Placement]) -> bool:
    """Return True if the strategy shards a weight along another dim than its stored placement does.

    Then the plan's entry of this name belongs to a different operator.
    """
    weights = [(s.target, used) for s, used in zip(tensor_inputs(node), strategy.inputs, strict=True)
               if facts(s)["role"] == PARAMETER]  # fmt: skip
    return any(used.is_shard and stored[name].is_shard and used != stored[name] for name, used in weights)


def _matches(used: Placement, stored: Placement) -> bool:
    return used == stored or (not stored.is_shard and used in (R, R_GRAD_P))


def _distance(a: Strategy, b: Strategy) -> tuple[int, int]:
    pairs = zip(a.places, b.places, strict=True)
    return sum(x != y for x, y in pairs), sum(p.kind == "P" for p in a.inputs)


def _read_cuts(
    trace: Trace, plan: Plan, num_stages: int, same_trace: bool, order: Sequence[str], tail: Set[fx.Node]
) -> tuple[int, ...]:
    """Return the indices of the first operators of stages 1, 2, ...

    Indices count only operators that depend on parameters.

    Args:
        same_trace: True if the plan was made for this very trace.
        order: operator keys of an earlier trace. If this trace lacks the first operator of a stage, the stage begins at
            the next operator of `order` that this trace has.
    """
    if len(plan.cuts) != num_stages - 1:
        raise PlanError(
            f"the plan has {len(plan.cuts)} stage boundaries ('cuts')",
            why=f"{num_stages} stages need {num_stages - 1}", where=plan.where("cuts"),
        )  # fmt: skip
    nodes = active_operators(trace.graph)
    position = {facts(node)["key"]: i for i, node in enumerate(nodes)}
    cuts: list[int] = []
    for stage, cut in enumerate(plan.cuts, 1):
        where = plan.where("cuts", cut)
        at = position.get(cut)
        if at is None and cut in order:
            at = next((position[key] for key in order[order.index(cut) :] if key in position), None)
        if at is None and (not same_trace or _is_cast(cut)) and len(plan.stages) == num_stages:
            # The plan is for another mode or precision: begin the stage after the last operator of the previous stage.
            at = position.get(plan.stages[stage - 1]["last"], -2) + 1
        if at is None or at < 0:
            near = [k for k in position if k.rsplit("/", 1)[0] == cut.rsplit("/", 1)[0]] or list(position)
            raise PlanError(
                f"the plan begins a stage at '{cut}', which is not an operator of the model", where=where,
                hint=", ".join(near[:6]),
            )  # fmt: skip
        if at == 0 or (cuts and at <= cuts[-1]):
            raise PlanError(
                f"the plan cannot begin a stage at '{cut}'",
                why="a stage would be empty: 'cuts' must be in the order of the operators", where=where,
            )  # fmt: skip
        cuts.append(at)
    _check_crossing(nodes, plan, cuts, tail)
    return tuple(cuts)


def _check_crossing(nodes: list[fx.Node], plan: Plan, cuts: list[int], tail: Set[fx.Node]) -> None:
    crossing = boundary_bytes(nodes, tail)
    for cut, name in zip(cuts, plan.cuts, strict=True):
        if crossing[cut] == float("inf"):
            raise StageError(
                f"the plan cannot begin a stage at '{name}'",
                why="a value without gradient would have to be sent to the next stage", where=plan.where("cuts", name),
                hint="begin the stage a few operators earlier or later",
            )  # fmt: skip
