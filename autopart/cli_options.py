"""The options that commands share, and what they say: a model, a mesh, a plan.

Nothing here imports torch before a command has been read: `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from autopart.console import note
from autopart.errors import InputError, OptionError
from autopart.ir.mesh import Mesh
from autopart.ir.schedules import SCHEDULES
from autopart.plans.headline import fits, step_size
from autopart.plans.plan import Plan

if TYPE_CHECKING:
    from autopart.tracing.model_source import ModelSource

Command = Callable[..., Any]

DTYPES = ("float32", "bfloat16", "float16", "float64")
TOLERANCE = 1e-10
RNGS = ("fast", "exact")
PLANNING_OPTIONS = (
    "schedule", "microbatches", "virtual_stages", "sequence_parallel", "hardware", "pins", "zero", "memory",
    "recompute", "compile",
)  # fmt: skip
"""Those of a command that `autopart.plan` takes under the same name."""


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several click options as one decorator, in the order that the help lists them."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


MODEL = _options(
    click.option(
        "--model", metavar="MODULE:CALLABLE", help="A callable that returns a model, or (model, example kwargs)."
    ),
    click.option(
        "--hf-config",
        metavar="NAME|PATH",
        help="A transformers config.json, or gpt2, llama-8b, mixtral-8x7b, ...; random weights, random tokens.",
    ),
    click.option("--batch", type=click.IntRange(1), help="Rows of the global batch, for --hf-config.  [default: 8]"),
    click.option(
        "--sequence",
        type=click.IntRange(1),
        help="Tokens of a row, for --hf-config.  [default: the config's own length; verify and run: 128]",
    ),
    click.option(
        "--dtype", type=click.Choice(DTYPES), help="Of the weights.  [default: float32; on meta the config's]"
    ),
    click.option("--seed", default=0, show_default=True, help="Of random weights and tokens."),
)
META = click.option("--meta/--no-meta", default=None, help="Weights without memory.  [default: --meta for --hf-config]")
MESH = click.option("--mesh", help="Axes and their sizes, for example pp2,dp2,tp2.")
SCHEDULE = _options(
    click.option("--schedule", metavar="NAME", help=f"Of the pipeline: {', '.join(SCHEDULES)}.  [default: chosen]"),
    click.option(
        "--microbatches", type=click.IntRange(1), help="Parts that a step cuts a rank's rows into.  [default: chosen]"
    ),
    click.option("--virtual-stages", type=click.IntRange(1), help="Stages per pipeline rank.  [default: chosen]"),
    click.option(
        "--sequence-parallel/--no-sequence-parallel",
        default=None,
        help="Cut what lies between matrix products along the sequence, over tp.  [default: where faster]",
    ),
    click.option("--hardware", metavar="NAME|PATH", help="The profile that prices choices, for example a100-80gb-sxm."),
    click.option("--pins", metavar="PATH", help="A JSON file of layouts and cuts that are fixed."),
    click.option(
        "--zero",
        type=int,
        help="3: parameters are cut over dp, and gathered where read.  [default: 0, or as --memory needs]",
    ),
    click.option(
        "--memory", metavar="SIZE", help="What a rank has, for example 80GB: a plan is chosen to fit, or refused."
    ),
    click.option(
        "--recompute",
        metavar="WORD|PATTERN=WORD,...",
        help="What the backward computes again: none, selective (the core of attention), full (all of a block); of "
        "every block by the pattern that matches it first.",
    ),
    click.option("--compile/--no-compile", default=None, help="Run stages through torch.compile.  [default: no]"),
)
PLAN = click.option("--plan", "plan_path", metavar="PATH", help="A plan to follow; then nothing is chosen.")


OPTIMIZERS = {
    "adam": "Adam",
    "adamw": "AdamW",
    "adagrad": "Adagrad",
    "nadam": "NAdam",
    "rmsprop": "RMSprop",
    "sgd": "SGD",
}
"""{as it is named on the command line: in torch.optim}."""

TRAINING = _options(
    click.option("--steps", type=click.IntRange(1), help="Also run so many training steps of all ranks and compare."),
    click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), help="Of the steps.  [default: adamw]"),
    click.option("--lr", type=float, help="Learning rate of the steps.  [default: 0.001]"),
    click.option("--max-norm", type=float, help="What the steps clip gradients to.  [default: no clipping]"),
    click.option("--scaler", is_flag=True, help="The steps scale their loss as torch.amp.GradScaler does."),
)


def training_of(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `autopart.verify` that `TRAINING` says; they are taken out of `values`."""
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


def rng(default: str, text: str) -> Callable[[Command], Command]:
    return click.option("--rng", type=click.Choice(RNGS), default=default, show_default=True, help=text)


@dataclass(frozen=True)
class Asked:
    """What the options of a command say, as click gives them."""

    values: Mapping[str, Any]

    def source(self, meta: bool, short: bool = False, again: bool = False) -> ModelSource:
        """The model and its example. `meta`: weights without memory, where that is not said. `short`: rows of a config
        are short where that is not said, since they are computed. `again`: what is to be said was said before."""
        from autopart.tracing.model_source import SourceOptions, from_callable, from_hf_config

        v = self.values
        if (v["model"] is None) == (v["hf_config"] is None):
            raise OptionError("name one model", hint="--model package.module:callable, or --hf-config gpt2")
        wanted = v.get("meta")
        options = SourceOptions(
            meta if wanted is None else wanted, v["dtype"], v["batch"], v["sequence"], v["seed"], short
        )
        source = from_callable(v["model"], options) if v["model"] else from_hf_config(v["hf_config"], options)
        if source.example is None:
            raise InputError(
                f"--model {v['model']} gives no example call", why="the model is traced on one",
                hint="let the callable return (model, {'input_ids': ids, 'labels': labels})",
            )  # fmt: skip
        if source.note and not again:
            note(source.note)
        return source

    def mesh(self, plan: Plan | None = None) -> Mesh:
        if self.values["mesh"] is not None:
            return Mesh.parse(self.values["mesh"])
        if plan is None:
            raise OptionError("name the mesh", hint="--mesh pp2,dp2,tp2")
        return plan.mesh_object()

    def given_plan(self) -> Plan | None:
        path = self.values["plan_path"]
        if path is None:
            return None
        for name, value in self.planning().items():
            if value is not None:
                option = f"--{name.replace('_', '-')}"
                raise OptionError(
                    f"{option} with --plan", why="the plan says it", hint=f"leave {option} out, or edit {path}"
                )
        return Plan.load(path)

    def planning(self) -> dict[str, Any]:
        """The options that `autopart.plan` and `parallelize` share."""
        return {name: self.values[name] for name in PLANNING_OPTIONS}

    def plan(self) -> Plan:
        """A new plan for the model and mesh asked for."""
        from autopart.api import plan

        mesh = self.mesh()
        source = self.source(meta=self.values["model"] is None)
        return plan(source.model, mesh, example_kwargs=source.example, **self.planning())


def facts(plan: Plan) -> dict[str, Any]:
    """What a plan says, without the layouts of its parameters and operators: for `--json`."""
    mesh = plan.mesh_object()
    return {
        "model": dict(plan.model), "inputs": dict(plan.inputs), "mesh": dict(mesh.sizes), "num_ranks": mesh.num_ranks,
        "schedule": asdict(plan.schedule), "recompute": plan.recompute, "compile": plan.compile,
        "hardware": plan.hardware, "cost": dict(plan.cost), "memory": list(plan.memory), "stages": list(plan.stages),
        "collectives": [asdict(row) for row in plan.collectives], "notes": list(plan.notes),
        "step": step_size(plan), "fits": fits(plan),
    }  # fmt: skip
