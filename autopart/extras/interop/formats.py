"""Conversion of plans to and from the formats of other tools.

| format | what it is | content |
|---|---|---|
| `transformers` | `DistributedConfig(tp_plan=...)` of transformers | layouts on `tp` |
| `parallelize_module` | the plan of `torch.distributed.tensor.parallel.parallelize_module` | layouts on `tp` |
| `pipelining` | `split_spec` of `torch.distributed.pipelining.pipeline` | stages |
| `megatron` | `--pipeline-model-parallel-layout` of Megatron-LM | stages |

These formats name modules, not operators, and cannot express every plan. For example, they cannot express a fused q/k/v
weight of which q, k and v are each sharded, a stage boundary inside a module, or unequal shards. Exporting such a plan
raises an error that names the line of the plan.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import nn

from autopart.errors import LayoutError, OptionError, StageError
from autopart.ir.graph import parents, pattern_of
from autopart.ir.layout import Placement, R, shard

if TYPE_CHECKING:
    from autopart.plans.plan import Plan

COLUMN, ROW, WHOLE = "column", "row", "whole"
GATHERED = "gathered"
"""Role of a column-parallel module whose output is gathered."""

_STYLES = {
    (nn.Linear, COLUMN): "colwise", (nn.Linear, GATHERED): "colwise_gather_output", (nn.Linear, ROW): "rowwise",
    (nn.Linear, WHOLE): "replicate", (nn.Embedding, ROW): "embedding_rowwise",
    (nn.Embedding, COLUMN): "embedding_colwise", (nn.Embedding, WHOLE): "replicate",
}  # fmt: skip
"""{(class of a module, its role): style of the module in transformers}."""

_WEIGHTS = {
    "colwise": shard(0), "colwise_gather_output": shard(0), "colwise_rep": shard(0), "rowwise": shard(1),
    "rowwise_split_input": shard(1), "rowwise_rep": shard(1), "embedding_rowwise": shard(0),
    "embedding_colwise": shard(1), "replicate": R,
}  # fmt: skip
"""{style of transformers: placement of the module's weight}."""


def export(plan: Plan, to: str, model: nn.Module | None = None) -> Any:
    """Convert a plan to the format of another tool: a string for "megatron", else a dict.

    The plan must be made by autopart, not edited by hand: its collectives and stages must match its layouts.

    Args:
        to: "transformers", "parallelize_module", "pipelining" or "megatron".
        model: the plan's model, possibly on `meta`. "transformers" and "parallelize_module" need it, because they
            depend on the class of each module.
    Raises OptionError for another format; LayoutError or StageError for a plan that the format cannot express.
    """
    if to not in _FORMATS:
        raise OptionError(f"there is no format {to!r}", hint=", ".join(map(repr, _FORMATS)))
    mesh = plan.mesh_object()
    beyond = (*mesh.along("positions"), *mesh.along("experts"))
    if beyond:
        raise LayoutError(
            f"the format {to!r} cannot express sharding over {' and '.join(beyond)}",
            why="it describes layouts of weights, or stages, but not sequence or expert parallelism",
            hint="the plan's own JSON",
        )
    if to in ("pipelining", "megatron"):
        return _FORMATS[to](plan)
    if model is None:
        why = "it names modules by what they are, and a plan does not know that"
        raise OptionError(f"export({to!r}) needs the model", why=why, hint=f"plan.export({to!r}, model)")
    return _FORMATS[to](plan, model)


# Layouts


def _roles(plan: Plan, model: nn.Module) -> dict[str, str]:
    """Return the role of every linear and embedding module: COLUMN, GATHERED, ROW or WHOLE.

    COLUMN and ROW are column- and row-parallel. GATHERED is column-parallel with a gathered output. WHOLE is
    replicated.
    """
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    roles: dict[str, str] = {}
    for path, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            place = Placement.parse(plan.placement_text(first[id(parameter)], "tp"))
            _check_expressible(plan, f"{path}.{parameter_name}", module, parameter_name, tuple(parameter.shape), place)
            if parameter_name == "weight" and isinstance(module, (nn.Linear, nn.Embedding)):
                row = place.dim == (1 if isinstance(module, nn.Linear) else 0)
                roles[path] = (ROW if row else COLUMN) if place.is_shard else WHOLE
    _check_collectives(plan)
    if plan.axes_in_parts:
        over = plan.axes_in_parts[0]
        warnings.warn(f"the format has no ZeRO sharding over {over}: apply fully_shard yourself", stacklevel=4)
    kept = _with_sharded_output(roles)
    return {path: GATHERED if role == COLUMN and path not in kept else role for path, role in roles.items()}


def _check_expressible(
    plan: Plan, name: str, module: nn.Module, parameter_name: str, sizes: tuple[int, ...], place: Placement
) -> None:
    """Raise LayoutError for a sharded parameter that the formats cannot express.

    They only have equal shards of linear and embedding modules, and do not shard the sections of a fused weight.
    """
    if not place.is_shard:
        return
    size, tp = sizes[place.dim], plan.mesh.get("tp", 1)
    why = ""
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        why = f"it belongs to a {type(module).__name__}, and the format only describes nn.Linear and nn.Embedding"
    elif place.sections:
        why = "the format does not shard the sections of a fused projection separately"
    elif size % tp:
        why = f"{size} is not a multiple of tp={tp}, and the format has no shards of unequal sizes"
    if why:
        raise LayoutError(
            f"the format cannot express the layout {place} of '{pattern_of(name)}'", why=why,
            where=plan.where("parameters", pattern_of(name)),
            hint=f"a plan with pins={{'{pattern_of(name)}': {{'tp': 'R'}}}}",
        )  # fmt: skip


def _check_collectives(plan: Plan) -> None:
    """Raise LayoutError if the plan gathers or exchanges activations.

    The formats of other tools can only express all-reduces: of the outputs of row-parallel modules, and of the input
    gradients of column-parallel modules.
    """
    for row in plan.collectives:
        other = [kind for kind in (row.forward, row.backward) if kind not in ("", "all_reduce")]
        if row.axis == "tp" and row.per == "microbatch" and other:
            raise LayoutError(
                f"the format cannot express the {other[0]} in {row.where}",
                why="it only describes column-parallel modules followed by row-parallel ones",
                where=plan.where("collectives", row.where),
                hint=f"a plan with pins={{'{row.where}': {{'tp': 'R'}}}}, or such pins for the modules before and "
                f"after it",
            )  # fmt: skip


def _with_sharded_output(roles: Mapping[str, str]) -> set[str]:
    """Return the column-parallel modules whose output stays sharded, up to the next row-parallel module.

    Other column-parallel modules (such as k and v after q) can be in between.
    """
    blocks: dict[str, list[str]] = defaultdict(list)
    for path in roles:
        blocks[_block(path)].append(path)
    kept: set[str] = set()
    for paths in blocks.values():
        for i, path in enumerate(paths):
            following = next((roles[other] for other in paths[i + 1 :] if roles[other] != COLUMN), WHOLE)
            if roles[path] == COLUMN and following == ROW:
                kept.add(path)
    return kept


def _block(path: str) -> str:
    """Return the path of the innermost numbered block that contains a module; "" without one.

    For `model.layers.3.mlp.up_proj`, this is `model.layers.3`.
    """
    parts = path.split(".")
    numbers = [i for i, part in enumerate(parts[:-1]) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else ""


def _by_pattern(roles: Mapping[str, str], full_names: bool) -> dict[str, str]:
    """Return {name pattern: role of the modules}.

    A pattern such as `layers.*.mlp.up` covers several modules. If they have different roles, the dict has their full
    names instead of the pattern. Raises LayoutError if the format does not support full names.
    """
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for path, role in roles.items():
        groups[pattern_of(path)][path] = role
    by_pattern: dict[str, str] = {}
    for pattern, members in groups.items():
        if len(set(members.values())) == 1:
            by_pattern[pattern] = next(iter(members.values()))
        elif full_names:
            by_pattern |= members
        else:
            raise LayoutError(
                f"the format cannot express different layouts for modules of {pattern}",
                why=", ".join(f"{path} is {role}" for path, role in members.items()),
                hint="remove the pin of the module that differs, and plan again",
            )  # fmt: skip
    return by_pattern


def _note_gathered(plan: Plan, roles: Mapping[str, str]) -> None:
    gathered = [pattern for pattern, role in roles.items() if role == GATHERED]
    if gathered:
        warnings.warn(
            f"the format gathers the output of {', '.join(gathered)}, which stays sharded in the plan",
            stacklevel=4,
        )


def _to_transformers(plan: Plan, model: nn.Module) -> dict[str, str]:
    modules = _roles(plan, model)
    roles = _by_pattern(modules, full_names=False)
    _note_gathered(plan, roles)
    kinds = {pattern_of(path): type(model.get_submodule(path)) for path in modules}
    kind = {pattern: nn.Linear if issubclass(kinds[pattern], nn.Linear) else nn.Embedding for pattern in roles}
    styles = {pattern: _STYLES[kind[pattern], _format_role(kind[pattern], role)] for pattern, role in roles.items()}
    return styles | {path: "replicated_with_grad_allreduce" for path in _norms_of_shards(plan, model)}


def _format_role(kind: type, role: str) -> str:
    """Return the role to write for a module of class `kind`.

    It is `role`, except that GATHERED becomes COLUMN for an embedding, whose output the formats gather in any case.
    """
    return COLUMN if kind is nn.Embedding and role == GATHERED else role


def _to_parallelize_module(plan: Plan, model: nn.Module) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    modules = _roles(plan, model)
    roles = _by_pattern(modules, full_names=True)
    norms = _norms_of_shards(plan, model)
    if norms:
        raise LayoutError(
            f"the format cannot express {norms[0]} on sharded values with a replicated weight",
            why="the gradient of its weight would be a partial sum on every rank",
            hint="export('transformers'), which has replicated_with_grad_allreduce",
        )  # fmt: skip
    _note_gathered(plan, roles)
    one_of = {pattern_of(path): path for path in modules} | {path: path for path in modules}
    styles: dict[str, Any] = {}
    for pattern, role in roles.items():
        looks_up = isinstance(model.get_submodule(one_of[pattern]), nn.Embedding)
        if role == ROW:
            styles[pattern] = RowwiseParallel(input_layouts=Replicate()) if looks_up else RowwiseParallel()
        elif role in (COLUMN, GATHERED):
            styles[pattern] = ColwiseParallel() if role == COLUMN else ColwiseParallel(output_layouts=Replicate())
    return styles


def _norms_of_shards(plan: Plan, model: nn.Module) -> list[str]:
    """Return name patterns of modules whose parameters are replicated, but whose inputs are sharded.

    An example is the norm of each attention head.
    """
    patterns: dict[str, None] = {}
    for path, module in model.named_modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        linear = isinstance(module, (nn.Linear, nn.Embedding))
        if not names or linear or any("S" in plan.placement_text(f"{path}.{name}", "tp") for name in names):
            continue
        entries = [e for key, e in plan.operators.items() if key.rpartition("/")[0] in (path, pattern_of(path))]
        if any("S(" in entry.get("tp", "") for entry in entries):
            patterns[pattern_of(path)] = None
    return list(patterns)


# Stages


def stage_modules(plan: Plan) -> list[str]:
    """Return the names of the modules with which pipeline stages begin, except the first stage.

    Raises StageError for a stage boundary inside a module.
    """
    if tuple(stage["first"] for stage in plan.stages[1:]) != tuple(plan.cuts):
        raise StageError(
            "the stages of the plan do not match its 'cuts'", why="the cuts were edited", where=plan.where("cuts"),
            hint="a plan with pins={'stages': {'cut_before': [...]}}",
        )  # fmt: skip
    modules = []
    for before, stage in pairwise(plan.stages):
        first, last = map(parents, (stage["first"], before["last"]))
        ran = {path for other in plan.stages[: stage["stage"]] for path in _blocks_of(other)}
        begins = [path for path in first if path not in last and not any(p.startswith(f"{path}.") for p in ran)]
        if not begins:
            layers = pattern_of(
                next((path for path in last if path.rpartition(".")[2].isdigit()), last[-1] if last else "")
            )
            raise StageError(
                f"the format cannot express that stage {stage['stage']} begins with '{stage['first']}'",
                why="it is inside a module, and in this format stages begin with modules",
                where=plan.where("cuts", stage["first"]),
                hint=f"a plan with pins={{'stages': {{'together': [['{layers}']]}}}}",
            )
        modules.append(begins[0])
    return modules


def _blocks_of(stage: Mapping[str, Any]) -> list[str]:
    """Return the repeated blocks with operators in a stage, sorted by layer number."""
    return [
        block["block"].replace("*", str(number), 1)
        for block in stage.get("blocks", ())
        for number in _numbers(block.get("layers", "0"))
    ]


def _to_pipelining(plan: Plan) -> dict[str, Any]:
    from torch.distributed.pipelining import SplitPoint

    return dict.fromkeys(stage_modules(plan), SplitPoint.BEGINNING)


def _to_megatron(plan: Plan) -> str:
    """Return the stages in Megatron's notation, `Et*3|t*4L`.

    E is the embedding, t a layer, L head and loss; `|` separates stages.
    """
    if plan.schedule.name in ("zbv", "dualpipev"):
        raise StageError(
            f"the format cannot express the schedule {plan.schedule.name}",
            why="it places stages in a V over the ranks, the format places them in a loop",
            hint="schedule='interleaved_1f1b'",
        )  # fmt: skip
    stacks, layers = _layers(plan)
    if len(stacks) != 1:
        raise StageError(
            "the format needs exactly one stack of layers", why=f"the model has {', '.join(sorted(stacks)) or 'none'}",
            hint="export('pipelining')",
        )  # fmt: skip
    (stack,) = stacks
    beginnings = []
    for number, module in enumerate(stage_modules(plan), 1):
        pattern, done = pattern_of(module), len({k for stage in plan.stages[:number] for k in layers[stage["stage"]]})
        outside = not pattern.startswith(stack) and done in (0, _num_layers(layers))
        if pattern != stack and not outside:
            raise StageError(
                f"the format cannot express that stage {number} begins with '{module}'",
                why="its stage boundaries are between layers, after the embedding or before the head",
                where=plan.where("cuts"),
                hint=f"a plan with pins={{'stages': {{'together': [['{stack}']]}}}}",
            )
        beginnings.append(done if outside else int(module.rpartition(".")[2]))
    edges = [0, *beginnings, _num_layers(layers)]
    stages = [_times(b - a) for a, b in pairwise(edges)]
    return f"E{'|'.join(stages)}L"


def _times(number: int) -> str:
    return f"t*{number}" if number > 1 else "t" * number


def _layers(plan: Plan) -> tuple[set[str], dict[int, list[int]]]:
    """Return the name patterns of repeated layers, and {stage: its layer numbers}."""
    stacks: set[str] = set()
    layers: dict[int, list[int]] = defaultdict(list)
    for stage in plan.stages:
        for block in stage.get("blocks", ()):
            parts = block["block"].split(".")
            if "*" in parts and "layers" in block:
                stacks.add(".".join(parts[: parts.index("*") + 1]))
                layers[stage["stage"]] += _numbers(block["layers"])
    return stacks, layers


def _num_layers(layers: Mapping[int, list[int]]) -> int:
    return max(number for numbers in layers.values() for number in numbers) + 1


def _numbers(text: str) -> list[int]:
    """Return `[0, 1, 2, 5]` for "0-2,5"."""
    runs = [part.split("-") for part in text.split(",")]
    return [number for run in runs for number in range(int(run[0]), int(run[-1]) + 1)]


_FORMATS: dict[str, Callable[..., Any]] = {
    "transformers": _to_transformers, "parallelize_module": _to_parallelize_module, "pipelining": _to_pipelining,
    "megatron": _to_megatron,
}  # fmt: skip


# Pins


def pins_from(given: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Convert another tool's plan to a value of the option `pins=`, which fixes layouts or stages.

    Args:
        given: `{module or pattern: style}`: transformers' `tp_plan`, the dict for torch's `parallelize_module`, or the
            `split_spec` of torch's `pipeline`.
        model: the model whose modules `given` names; possibly on `meta`.
    Raises OptionError for a style that does more than choose the placement of weights.

    Example:
        >>> pins = autopart.pins_from(model.tp_plan, model)                                # doctest: +SKIP
        >>> plan = autopart.plan(model, "dp2,tp4", example_kwargs=batch, pins=pins)        # doctest: +SKIP
    """
    cuts, pins = [], {}
    for name, style in given.items():
        if type(style).__name__ == "SplitPoint":
            if style.name != "BEGINNING":
                raise OptionError(
                    f"{style} of '{name}' cannot be read as a pin",
                    why="a pin names the operator or module with which a stage begins",
                    hint="SplitPoint.BEGINNING of the module that follows",
                )
            cuts.append(name)
            continue
        place = _WEIGHTS.get(style) if isinstance(style, str) else _place_of_style(name, style, model)
        if place is None:
            known = ", ".join(_WEIGHTS)
            raise OptionError(
                f"the style {style!r} of '{name}' cannot be read as a pin",
                why="it describes more than the layout of a weight", hint=known,
            )  # fmt: skip
        pins[f"{name}.weight"] = {"tp": str(place)}
    return {**pins, **({"stages": {"cut_before": cuts}} if cuts else {})}


def _place_of_style(name: str, style: Any, model: nn.Module) -> Placement | None:
    """Return the placement of a module's weight under a style of `parallelize_module`."""
    kind = type(style).__name__
    module = next((m for path, m in model.named_modules() if name in (path, pattern_of(path))), None)
    if module is None:
        raise OptionError(f"'{name}' is not a module of the model", hint="a name or pattern of model.named_modules()")
    if kind not in ("ColwiseParallel", "RowwiseParallel") or not isinstance(module, (nn.Linear, nn.Embedding)):
        return None
    return shard(int((kind == "RowwiseParallel") == isinstance(module, nn.Linear)))
