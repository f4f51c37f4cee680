"""A partition plan as data: layouts, stages and schedule of a model on a mesh.

A plan is stored as JSON. Parameters and operators are keyed by name patterns in which `*` replaces block numbers
(`model.layers.*.mlp.down_proj.weight`). An entry for a full name overrides the entry for its pattern. An operator's
entry lists the placements of its inputs and outputs on an axis. An operator without an entry is replicated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from autopart.common.extras import load_extra
from autopart.common.files import read_text, write_whole
from autopart.common.json_text import parse_json
from autopart.common.names import pattern_of
from autopart.common.text import ShownAsText, ShownText, terminal_width
from autopart.errors import AutopartError, PlanError
from autopart.ir.layout import EXPERT_PLACEMENTS
from autopart.ir.mesh import AXES, Axis, Mesh
from autopart.ir.run.recompute_spec import Recompute
from autopart.ir.run.report_terms import Collective
from autopart.ir.run.schedules import Schedule
from autopart.ir.run.sync_option import ALL_REDUCE
from autopart.plans.code_package import code_export
from autopart.plans.figure_errors import reading_figures
from autopart.plans.headlines import headlines
from autopart.plans.why import SETTINGS, Why, stored_why

if TYPE_CHECKING:
    from torch import nn

    from autopart.show.diff import Difference

FORMAT = "autopart-plan/1"

WRITABLE = "a file in a folder that exists, that you may write to, on a disk with room"


@lru_cache(maxsize=1)
def schema(axes: tuple[Axis, ...] = AXES) -> dict[str, Any]:
    """Return the JSON Schema of a plan, as `autopart plan --schema` prints it.

    Args:
        axes: the mesh axes that a plan can use.
    """
    text = resources.files("autopart").joinpath("plan_schema.json").read_text()
    for shipped, asked in zip(_alternatives(AXES), _alternatives(axes), strict=True):
        text = text.replace(f"({shipped})", f"({asked})")
    return json.loads(text)


def _alternatives(axes: tuple[Axis, ...]) -> tuple[str, ...]:
    """Return three regular expressions: all axis names, those in parameter and in operator layouts."""
    chosen = [axis.name for axis in axes if axis.is_chosen]
    first, *others = [axis.name for axis in axes if axis.stores]
    joined = first + "".join(f"(_{name})?" for name in others)
    return tuple(map("|".join, ([axis.name for axis in axes], [joined, *chosen], chosen)))


class Explainer(Protocol):
    """Protocol of the object that answers `Plan.why` and `Plan.why_not`."""

    def why(self, name: str) -> Why: ...

    def why_not(self, name: str, layout: Mapping[str, str]) -> Why: ...


@dataclass(frozen=True, repr=False)
class Plan(ShownAsText):
    """Partition of a model over a mesh: layouts, stages, schedule, and their predicted cost.

    Example:
        >>> plan = autopart.plan(model, "pp2,tp2", example_kwargs=batch)    # doctest: +SKIP
        >>> plan.save("plan.json")                                          # doctest: +SKIP
        >>> pm = autopart.parallelize(model, "pp2,tp2", plan="plan.json")   # doctest: +SKIP
    """

    mesh: Mapping[str, int]
    model: Mapping[str, Any]
    inputs: Mapping[str, Mapping[str, Any]]
    schedule: Schedule
    parameters: Mapping[str, Mapping[str, str]]
    operators: Mapping[str, Mapping[str, Any]]
    cuts: tuple[str, ...] = ()
    recompute: Recompute = "none"
    zero: int = 0
    prefetch: int = 1
    scatter_sends: bool = False
    dp_sync: Mapping[str, Any] = field(default_factory=ALL_REDUCE.as_data)
    balance: float = 1.0
    sequence_dims: Mapping[str, int] | None = None
    compile: bool = False
    precision: str | None = None
    reduce_dtype: str | None = None
    stages: tuple[Mapping[str, Any], ...] = ()
    collectives: tuple[Collective, ...] = ()
    unsharded: tuple[Mapping[str, Any], ...] = ()
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cost: Mapping[str, Any] = field(default_factory=dict)
    memory: tuple[Mapping[str, Any], ...] = ()
    timing: Mapping[str, Any] = field(default_factory=dict)
    hardware: str = ""
    notes: tuple[str, ...] = ()
    pins: Mapping[str, Any] = field(default_factory=dict)
    alternatives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    text: str = field(default="", compare=False, repr=False)
    reasons: Explainer | None = field(default=None, compare=False, repr=False)
    axes: tuple[Axis, ...] = field(
        default=AXES, compare=False, repr=False
    )  # kinds of dims that the axes of `mesh` shard

    def __post_init__(self) -> None:
        from autopart.cost.formula.plan_cost import Cost

        object.__setattr__(self, "cost", Cost.of(self))

    def __repr__(self) -> str:
        lines = [f"Plan of {self.model.get('class', 'a model')} on {self.mesh_object()}"]
        try:
            lines += headlines(self)
        except Exception:  # an edited plan may have any figures, and a repr must not fail
            lines.append("  its figures do not fit together")
        return "\n".join([*lines, "  print(plan.explain()) shows it, plan.report('plan.html') draws it"])

    def to_json(self) -> str:
        """Return the plan as JSON text with one entry per line, so that line-based diffs are short."""
        data = {"format": FORMAT, **asdict(replace(self, reasons=None))}
        del data["text"], data["reasons"], data["axes"]
        if not self.alternatives:
            del data["alternatives"]
        return _dumps(data) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file atomically. Raises PlanError if it cannot be written."""
        try:
            write_whole(Path(path), self.to_json())
        except OSError as error:
            raise PlanError(f"cannot write {path}", why=error.strerror or str(error), hint=WRITABLE) from None

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from a JSON file. Raises PlanError, with the line number, for an invalid plan."""
        path = Path(path)
        hint = "autopart plan ... --output plan.json writes one"
        if not path.exists():
            raise PlanError(f"there is no plan at {path}", hint=hint)
        return Plan.from_json(read_text(path, "a plan", PlanError, hint), str(path))

    @staticmethod
    def from_json(text: str, name: str = "the plan", axes: tuple[Axis, ...] = AXES) -> Plan:
        """Parse a plan from JSON text. Raises PlanError, with the line number, for an invalid plan.

        Args:
            axes: the mesh axes that the plan can use.
        """
        import jsonschema

        data = parse_json(text, name, PlanError)
        problem = next(iter(jsonschema.Draft202012Validator(schema(axes)).iter_errors(data)), None)
        if problem is not None:
            path = [str(p) for p in problem.absolute_path]
            if problem.validator == "additionalProperties":
                path += [key for key in problem.instance if f"'{key}'" in problem.message][:1]
            raise PlanError(
                f"{name} is not a valid plan", why=f"{'.'.join(path) or 'the plan'}: {problem.message}",
                where=line_of(text, *path), hint="autopart plan --schema prints the JSON schema of a plan",
            )  # fmt: skip
        fields = {k: v for k, v in data.items() if k != "format"}
        fields["schedule"] = Schedule(**fields["schedule"])
        fields["collectives"] = tuple(Collective(**c) for c in fields.get("collectives", ()))
        for key in ("cuts", "stages", "unsharded", "memory", "notes"):
            fields[key] = tuple(fields.get(key, ()))
        return Plan(**fields, text=text, axes=axes)

    def where(self, *keys: str) -> str:
        """Return the line number of an entry in the plan's file as text; "" if the plan has no file.

        Args:
            keys: the keys that lead to the entry, outermost first.
        """
        return line_of(self.text, *keys) if self.text else ""

    @property
    def autocast(self) -> str:
        """Dtype of the `torch.autocast` region in which the plan was made ("bfloat16"), or ""."""
        return str(self.model.get("autocast", ""))

    def mesh_object(self) -> Mesh:
        return Mesh.parse(self.mesh, self.axes)

    def placement_text(self, parameter: str, axis: str) -> str:
        """Return, as text, the stored placement on an axis of a parameter (or of a name pattern)."""
        entry = self.parameters.get(parameter, self.parameters.get(pattern_of(parameter), {}))
        return entry.get(axis, "R")

    @property
    def axes_in_parts(self) -> tuple[str, ...]:
        """Axes over which ZeRO shards parameters, such as `dp_cp` (flattened).

        The axis with most ranks is first.
        """
        mesh = self.mesh_object()
        places = [at for entry in self.parameters.values() for at in entry.items()]
        axes = {axis for axis, place in places if mesh.stores(axis) and place.startswith("S")}
        return tuple(sorted(axes, key=mesh.size, reverse=True))

    @property
    def axes_by_expert(self) -> tuple[str, ...]:
        """Axes over which tokens are dispatched to the ranks of their experts."""
        ways = [(axis, str(way)) for entry in self.operators.values() for axis, way in entry.items()]
        axes = {axis for axis, way in ways if any(str(place) in way for place in EXPERT_PLACEMENTS)}
        return tuple(axis for axis in self.mesh if axis in axes)

    def operator_entry(self, key: str, group: str) -> tuple[str, Mapping[str, Any]] | None:
        """Return (key, entry) of an operator: the entry for its full name, else the entry for its pattern."""
        for name in (key, group):
            if name in self.operators:
                return name, self.operators[name]
        return None

    def export(self, to: str, model: nn.Module | None = None) -> Any:
        """Convert the plan to the format of another tool.

        Formats are "transformers", "parallelize_module", "pipelining" and "megatron". The first two need the model,
        which can be on the meta device. Raises an error if the format cannot express a layout of the plan.
        """
        return load_extra("interop").export(self, to, model)

    def export_code(
        self, folder: str | Path, model: nn.Module, *, example_args: tuple = (),
        example_kwargs: Mapping[str, Any] | None = None,
    ) -> Path:  # fmt: skip
        """Write the program of the plan as a Python package of plain tensors and `torch.distributed` calls.

        `torchrun folder/run.py` trains it without autopart. Needs no process group: this process writes the code, the
        example batch, and the weights of every rank. Returns the folder.

        Args:
            folder: a new or empty folder, or an exported package to overwrite.
            model: the model of the plan, with its weights.
            example_args, example_kwargs: one call of the model with its global batch.
        Raises PlanError if the program has a part that exported code does not support, such as dropout.
        """
        code_export().export_plan(self, Path(folder), model, example_args, example_kwargs or {})
        return Path(folder)

    def diff(self, other: Plan) -> Difference:
        """Compare with another plan. The result prints as a table, and is false if the plans are equal."""
        from autopart.show.diff import diff

        with reading_figures(self), reading_figures(other):
            return diff(self, other)

    def why(self, name: str) -> Why:
        """Explain a setting of the plan, or the layout of a parameter, module, operator or collective.

        The answer has the cost of each alternative. A plan that was read from a file explains its settings, and its
        layouts if it was saved `with_alternatives()`.

        Args:
            name: `mesh`, `schedule`, `microbatches`, `zero`, `recompute` or `loss`; a name of the model or of `explain`
                (`model.layers.0.self_attn.q_proj`, `model.layers.*.mlp/mul`); a collective of the generated graphs
                (`all_reduce_3`); or `dp_sync` for gradient synchronization.
        Raises OptionError for an unknown name, PlanError for the layouts of a plan from a file without alternatives.

        Example:
            >>> print(plan.why("schedule"))                      # doctest: +SKIP
            >>> print(plan.why("model.layers.0.mlp.up_proj"))    # doctest: +SKIP
        """
        if name in SETTINGS:
            from autopart.show.setting_reasons import why_setting

            with reading_figures(self):
                return why_setting(self, name)
        if self.reasons is None and self.alternatives:
            return stored_why(self.alternatives, name)
        return self._reasons().why(name)

    def with_alternatives(self) -> Plan:
        """Return the plan with the cost of each rejected layout. `save` writes the costs, for `why`.

        It solves for each rejected layout again: this takes about as long as planning.

        Example:
            >>> plan.with_alternatives().save("plan.json")                        # doctest: +SKIP
            >>> print(Plan.load("plan.json").why("model.layers.0.mlp.up_proj"))   # doctest: +SKIP
        """
        reasons, found = self._reasons(), dict[str, dict[str, Any]]()
        for name in (*self.parameters, *self.operators):
            try:
                found[name] = reasons.why(name).as_data()
            except AutopartError:  # an operator that normalization has replaced
                continue
        return replace(self, alternatives=found)

    def why_not(self, name: str, layout: Mapping[str, str]) -> Why:
        """Return the cost of another placement, or the reason why it is impossible.

        The solver optimizes all other choices again for the given placement. Raises the errors of `why`.

        Example:
            >>> print(plan.why_not("model.layers.*.mlp.up_proj.weight", {"tp": "S(1)"}))    # doctest: +SKIP
        """
        return self._reasons().why_not(name, layout)

    def _reasons(self) -> Explainer:
        if self.reasons is None:
            raise PlanError(
                "a plan that was read from a file has no alternatives of layouts", why="only a plan that autopart.plan "
                "has just made has their costs",
                hint="save it with autopart.plan(...).with_alternatives() or autopart plan --alternatives, or ask for "
                f"a setting: {', '.join(SETTINGS)}",
            )  # fmt: skip
        return self.reasons

    def explain(self, width: int | None = None) -> ShownText:
        """Return the plan as text, with a table of stages, blocks, layouts, FLOPs and communicated bytes.

        Print it, or end a notebook cell with it.

        Args:
            width: columns of the table.  [default: those of the terminal; 120 if the output is no terminal]
        """
        from autopart.show.explain import WIDTH, explain

        with reading_figures(self):
            return ShownText(explain(self, width or terminal_width(WIDTH)))

    def report(self, path: str | Path, graphs: Mapping[str, Any] | None = None) -> None:
        """Write the plan as one HTML page with charts, which needs no network.

        It shows the predicted step and where its time goes, the timeline, the memory of every rank, the model's blocks
        with their placements and collectives, and suggested changes with their predicted gains.

        Args:
            graphs: generated graphs (`torch.fx.GraphModule`) to print too, by title.
        Raises OptionError if the file cannot be written, PlanError for a plan without `timing`.

        Example:
            >>> plan.report("plan.html")    # doctest: +SKIP
        """
        from autopart.show.report.page import write

        with reading_figures(self):
            write([self], path, graphs or {})


def line_of(text: str, *keys: str) -> str:
    """Return the line number of an entry in a JSON text, as text: `line 12`.

    Args:
        keys: the keys that lead to the entry, outermost first.
    """
    at = 0
    for key in keys:
        index = text.find(json.dumps(key), at)
        if index < 0 and not key.isdigit():
            index = text.find(key, at)
        at = index if index >= 0 else at
    return f"line {text.count(chr(10), 0, at) + 1}"


def _dumps(data: Any, indent: str = "", width: int = 160) -> str:
    """Format JSON with short values on one line, and long values with one entry per line."""
    text = json.dumps(data)
    if not isinstance(data, (Mapping, list, tuple)) or not data or (indent and len(text) <= width):
        return text
    inner = indent + "  "
    if isinstance(data, Mapping):
        entries = [f"{json.dumps(key)}: {_dumps(value, inner)}" for key, value in data.items()]
        return "{\n" + ",\n".join(inner + entry for entry in entries) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _dumps(value, inner) for value in data) + f"\n{indent}]"
