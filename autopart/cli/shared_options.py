"""Options that several commands share: model, mesh, plan, training.

torch is imported only after a command line was parsed, so `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from autopart.cli.console import note
from autopart.errors import InputError, OptionError
from autopart.ir.mesh import Mesh
from autopart.options import OPTIONS, Options, PlanOptions, names_of
from autopart.plans.headlines import fits, step_size
from autopart.plans.plan import Plan
from autopart.show.nodes import node_lines

if TYPE_CHECKING:
    from autopart.recipe.model_source import ModelSource

Command = Callable[..., Any]

DTYPES = ("float32", "bfloat16", "float16", "float64")


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Combine several click options into one decorator; the help lists them in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def shared(kind: Any) -> Callable[[Command], Command]:
    """Return a decorator that adds click options to a command: one for each field of a TypedDict.

    The TypedDict is one of `autopart.options`, such as `PlanOptions`. Every option is None by default.
    """

    def option(name: str) -> Callable[[Command], Command]:
        form, flag = OPTIONS[name].form, f"--{name.replace('_', '-')}"
        if isinstance(form, str):
            return click.option(flag, metavar=form, help=OPTIONS[name].help)
        flags = f"{flag}/--no-{flag[2:]}" if form is bool else flag
        return click.option(flags, type=form, default=None, help=OPTIONS[name].help)

    return _options(*map(option, names_of(kind)))


MODEL = _options(
    click.option(
        "--model", metavar="MODULE:CALLABLE", help="A callable that returns a model, or (model, example kwargs)."
    ),
    click.option(
        "--hf-config",
        metavar="NAME|PATH",
        help="A transformers config.json, its folder, a name on the Hugging Face hub, or gpt2, llama-8b, mixtral-8x7b, "
        "...; random weights, random tokens.",
    ),
    click.option("--batch", type=click.IntRange(1), help="Samples of the global batch, for --hf-config.  [default: 8]"),
    click.option(
        "--sequence",
        type=click.IntRange(1),
        help="Tokens of a sample, for --hf-config.  [default: the config's own length; verify and run: 128]",
    ),
    click.option(
        "--dtype", type=click.Choice(DTYPES), help="Dtype of the weights.  [default: float32; on meta the config's]"
    ),
    click.option("--seed", default=0, show_default=True, help="Seed of random weights and tokens."),
)
META = click.option(
    "--meta/--no-meta",
    default=None,
    help="Create the weights on the meta device.  [default: --meta for --hf-config]",
)
MESH = click.option("--mesh", help="Axes and their sizes, for example pp2,dp2,tp2.")
PLAN = click.option("--plan", "plan_path", metavar="PATH", help="A plan to use instead of choosing one.")


OPTIMIZERS = {name.lower(): name for name in ("Adam", "AdamW", "Adagrad", "NAdam", "RMSprop", "SGD")}
"""{name of an optimizer on the command line: its name in torch.optim}."""

TRAINING = _options(
    click.option(
        "--steps", type=click.IntRange(1), help="Also run this number of training steps on all ranks, and compare them."
    ),
    click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), help="Optimizer of the steps.  [default: adamw]"),
    click.option("--lr", type=float, help="Learning rate of the steps.  [default: 0.001]"),
    click.option("--max-norm", type=float, help="Gradient clipping norm of the steps.  [default: no clipping]"),
    click.option("--scaler", is_flag=True, help="Scale the loss in the steps, as torch.amp.GradScaler does."),
)


def training_of(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the options in `TRAINING` from `values`; return them as arguments of `autopart.verify`."""
    kind, rate = values.pop("optimizer"), values.pop("lr")
    training = {
        "steps": values.pop("steps"),
        "max_norm": values.pop("max_norm"),
        "scaler": values.pop("scaler") or None,
    }
    if kind is None and rate is None:
        return training

    def optimizer(named: list[tuple[str, Any]]) -> Any:
        import torch

        return getattr(torch.optim, OPTIMIZERS[kind or "adamw"])([p for _, p in named], lr=rate or 1e-3)

    return {**training, "optimizer": optimizer}


@dataclass(frozen=True)
class CommandOptions:
    """The command-line options of one command, as click passes them."""

    values: Mapping[str, Any]

    def source(self, meta: bool, short: bool = False, note_printed: bool = False) -> ModelSource:
        """Build the model that the options name. Return it with its example call.

        Args:
            meta: create the weights on the meta device, if the user gave no `--meta` or `--no-meta`.
            short: use short example sequences for `--hf-config`, if the user gave no `--sequence`. For commands that
                run the model.
            note_printed: True if an earlier call has printed the note on the example, so that this call must not.
        """
        from autopart.recipe.model_source import SourceOptions, from_callable, from_hf_config

        v = self.values
        if (v["model"] is None) == (v["hf_config"] is None):
            raise OptionError(
                "exactly one of --model and --hf-config is needed",
                hint="--model package.module:callable, or --hf-config gpt2",
            )
        wanted = v.get("meta")
        options = SourceOptions(
            meta if wanted is None else wanted, v["dtype"], v["batch"], v["sequence"], v["seed"], short
        )
        source = from_callable(v["model"], options) if v["model"] else from_hf_config(v["hf_config"], options)
        if source.example is None:
            raise InputError(
                f"--model {v['model']} returns no example inputs", why="the model is traced with example inputs",
                hint="let the callable return (model, {'input_ids': ids, 'labels': labels})",
            )  # fmt: skip
        if source.note and not note_printed:
            note(source.note)
        return source

    def mesh(self, plan: Plan | None = None) -> Mesh:
        if self.values["mesh"] is not None:
            return Mesh.parse(self.values["mesh"])
        if plan is None:
            raise OptionError("no mesh is named", hint="--mesh pp2,dp2,tp2")
        return plan.mesh_object()

    def given_plan(self) -> Plan | None:
        path = self.values["plan_path"]
        if path is None:
            return None
        for name, value in self.planning().items():
            if value is not None:
                option = f"--{name.replace('_', '-')}"
                raise OptionError(
                    f"{option} cannot be combined with --plan",
                    why="the plan sets it",
                    hint=f"leave {option} out, or edit {path}",
                )
        return Plan.load(path)

    def planning(self, kind: Any = PlanOptions) -> dict[str, Any]:
        """Return the command's values for the fields of a TypedDict of `autopart.options`.

        Raises OptionError for an invalid value.
        """
        options = {name: self.values[name] for name in names_of(kind) if name in self.values}
        Options(**options)
        return options

    def plan(self) -> Plan:
        """Return a new plan for the requested model and mesh."""
        mesh, planning = self.mesh(), self.planning()
        source = self.source(meta=self.values["model"] is None)
        from autopart.api import plan

        return plan(source.model, mesh, example_kwargs=source.example, **planning)


def facts(plan: Plan) -> dict[str, Any]:
    """Return the content of a plan for `--json`, without the layouts of parameters and operators."""
    mesh = plan.mesh_object()
    return {
        "model": dict(plan.model), "inputs": dict(plan.inputs), "mesh": dict(mesh.sizes), "num_ranks": mesh.num_ranks,
        "schedule": asdict(plan.schedule), "recompute": plan.recompute, "compile": plan.compile,
        "hardware": plan.hardware, "cost": dict(plan.cost), "memory": list(plan.memory), "stages": list(plan.stages),
        "collectives": [asdict(row) for row in plan.collectives], "notes": list(plan.notes),
        "step": step_size(plan), "fits": fits(plan), "nodes": node_lines(plan),
    }  # fmt: skip
