"""The command line: `autopart plan | explain | simulate | diff | verify | run | calibrate`, also `python -m autopart`.

A model is named `--model package.module:callable` or `--hf-config config.json`. Exit codes: 0 done, 1 a
difference was found (`verify`, `diff`), 2 a mistake in what was asked, told without a traceback.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import wraps
from typing import Any, get_args

import click
import torch
from torch import Tensor, nn

from autopart.api import parallelize
from autopart.api import plan as make_plan
from autopart.calibrate import calibrate as calibrate_machine
from autopart.compat import tree_map
from autopart.cost.hardware import DEFAULT
from autopart.cost.simulate import simulate as simulate_plan
from autopart.errors import AutopartError, InputError, OptionError
from autopart.mesh import Mesh
from autopart.model_source import DTYPES, ModelSource, SourceOptions, from_callable, from_hf_config
from autopart.plan import Plan, schema
from autopart.program import Rng
from autopart.schedules import SCHEDULES
from autopart.search import search as search_plans
from autopart.verify import TOLERANCE
from autopart.verify import verify as verify_model

Command = Callable[..., Any]


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several click options as one decorator, in the order that the help lists them."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_MODEL = _options(
    click.option(
        "--model", metavar="MODULE:CALLABLE", help="A callable that returns a model, or (model, example kwargs)."
    ),
    click.option("--hf-config", metavar="PATH", help="A transformers config.json; random weights, random tokens."),
    click.option("--batch", type=click.IntRange(1), help="Rows of the global batch, for --hf-config.  [default: 8]"),
    click.option(
        "--sequence", type=click.IntRange(1), help="Tokens of a row, for --hf-config.  [default: 128 or fewer]"
    ),
    click.option(
        "--dtype", type=click.Choice(list(DTYPES)), help="Of the weights.  [default: float32; on meta the config's]"
    ),
    click.option("--seed", default=0, show_default=True, help="Of random weights and tokens."),
)
_META = click.option(
    "--meta/--no-meta", default=None, help="Weights without memory.  [default: --meta for --hf-config]"
)
_MESH = click.option("--mesh", help="Axes and their sizes, for example pp2,dp2,tp2.")
_SCHEDULE = _options(
    click.option("--schedule", type=click.Choice(SCHEDULES), help="Of the pipeline.  [default: chosen]"),
    click.option(
        "--microbatches", type=click.IntRange(1), help="Parts that a step cuts a rank's rows into.  [default: chosen]"
    ),
    click.option("--virtual-stages", type=click.IntRange(1), help="Stages per pipeline rank.  [default: chosen]"),
    click.option(
        "--sequence-parallel/--no-sequence-parallel",
        default=None,
        help="Cut what lies between matrix products along the sequence, over tp.  [default: no]",
    ),
    click.option("--hardware", metavar="NAME|PATH", help="The profile that prices choices, for example a100-80gb-sxm."),
    click.option("--pins", metavar="PATH", help="A JSON file of layouts and cuts that are fixed."),
    click.option("--zero", type=int, help="3: parameters are cut over dp, and gathered where read.  [default: 0]"),
    click.option(
        "--memory", metavar="SIZE", help="What a rank has, for example 80GB: a plan is chosen to fit, or refused."
    ),
    click.option(
        "--recompute",
        metavar="none|selective|full|PATTERN=WORD,...",
        help="What the backward computes again: the core of attention, all of a block; of the blocks that match first.",
    ),
    click.option("--compile/--no-compile", default=None, help="Run stages through torch.compile.  [default: no]"),
)
_PLAN = click.option("--plan", "plan_path", metavar="PATH", help="A plan to follow; then nothing is chosen.")


def _rng(default: Rng, text: str) -> Callable[[Command], Command]:
    return click.option("--rng", type=click.Choice(get_args(Rng)), default=default, show_default=True, help=text)


@dataclass(frozen=True)
class _Asked:
    """What the options of a command say, as click gives them."""

    values: Mapping[str, Any]

    def source(self, meta: bool) -> ModelSource:
        """The model and its example. `meta`: weights without memory where that is not said."""
        v = self.values
        if (v["model"] is None) == (v["hf_config"] is None):
            raise OptionError(
                "name one model", hint="--model package.module:callable, or --hf-config path/to/config.json"
            )
        wanted = v.get("meta")
        options = SourceOptions(meta if wanted is None else wanted, v["dtype"], v["batch"], v["sequence"], v["seed"])
        source = from_callable(v["model"], options) if v["model"] else from_hf_config(v["hf_config"], options)
        if source.example is None:
            raise InputError(
                f"--model {v['model']} gives no example call", why="the model is traced on one",
                hint="let the callable return (model, {'input_ids': ids, 'labels': labels})",
            )  # fmt: skip
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
        for name, value in self.schedule().items():
            if value is not None:
                option = f"--{name.replace('_', '-')}"
                raise OptionError(
                    f"{option} with --plan", why="the plan says it", hint=f"leave {option} out, or edit {path}"
                )
        return Plan.load(path)

    def schedule(self) -> dict[str, Any]:
        """The options that `plan` and `parallelize` share."""
        shared = (
            "schedule",
            "microbatches",
            "virtual_stages",
            "sequence_parallel",
            "hardware",
            "pins",
            "zero",
            "memory",
            "recompute",
            "compile",
        )
        return {name: self.values[name] for name in shared}

    def plan(self) -> Plan:
        """A new plan for the model and mesh asked for."""
        mesh = self.mesh()
        source = self.source(meta=self.values["model"] is None)
        return make_plan(source.model, mesh, example_kwargs=source.example, **self.schedule())


def _told(command: Command) -> Command:
    """Errors of the user's are printed as their text, and the exit code is 2."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except AutopartError as error:
            click.echo(str(error), err=True)
            raise click.exceptions.Exit(2) from None

    return run


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="autopart", prog_name="autopart")
def main() -> None:
    """Partition an unmodified PyTorch model over a device mesh."""


def _print_schema(context: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked:
        click.echo(json.dumps(schema(), indent=2))
        context.exit()


@main.command()
@_MODEL
@_META
@_MESH
@_SCHEDULE
@click.option("--output", "-o", metavar="PATH", help="Where to write the plan.  [default: standard output]")
@click.option(
    "--schema", is_flag=True, is_eager=True, expose_value=False, callback=_print_schema,
    help="Print the JSON Schema of plans.",
)  # fmt: skip
@_told
def plan(output: str | None, **options: Any) -> None:
    """Choose how a model lies on a mesh: no devices and no process group are needed.

    \b
    Example:
      autopart plan --hf-config llama-7b/config.json --mesh pp4,tp8 -o plan.json
    """
    made = _Asked(options).plan()
    if output is None:
        click.echo(made.to_json(), nl=False)
        return
    try:
        made.save(output)
    except OSError as error:
        raise OptionError(f"cannot write {output}", why=error.strerror or str(error)) from None
    click.echo(f"wrote {output}: {made.model['class']} on {made.mesh_object()}; autopart explain {output}")


@main.command()
@click.argument("path", required=False, metavar="[PLAN.JSON]")
@_MODEL
@_META
@_MESH
@_SCHEDULE
@_told
def explain(path: str | None, **options: Any) -> None:
    """Print a plan as one table: stages, blocks, layouts, FLOPs, collectives, bytes; then balance and cost.

    \b
    Example:
      autopart explain plan.json
      autopart explain --hf-config gpt2/config.json --mesh tp2
    """
    if path is not None and (options["model"] or options["hf_config"]):
        raise OptionError("name a plan or a model, not both", hint=f"autopart explain {path}")
    made = Plan.load(path) if path is not None else _Asked(options).plan()
    click.echo(made.explain(), nl=False)


@main.command()
@_MODEL
@_META
@click.option("--devices", type=click.IntRange(1), required=True, help="How many there are.")
@click.option("--hardware", metavar="NAME|PATH", help="Their profile.  [default: a100-80gb-sxm]")
@click.option("--memory", metavar="SIZE", help="What a rank has, for example 80GB.  [default: the hardware's]")
@click.option("--count", type=click.IntRange(1), default=3, show_default=True, help="How many plans to make.")
@click.option("--output", "-o", metavar="PATH", help="Where to write the best plan.")
@_told
def search(
    devices: int, hardware: str | None, memory: str | None, count: int, output: str | None, **options: Any
) -> None:
    """Find the best mesh, schedule, microbatches, recomputation and storage for a number of devices.

    \b
    Example:
      autopart search --hf-config llama-7b/config.json --batch 512 --sequence 2048 --devices 64 -o plan.json
    """
    source = _Asked(options).source(meta=options["model"] is None)
    found = search_plans(
        source.model, devices, hardware=hardware or DEFAULT, memory=memory, example_kwargs=source.example, count=count
    )
    for plan in found:
        click.echo(plan.notes[-1].removeprefix("found by search: "))
    click.echo("\n".join(["", *(f"  {note}" for note in found[0].notes[:-1])]))
    if output is not None:
        found[0].save(output)
        click.echo(f"wrote {output}; autopart explain {output}")


@main.command()
@click.argument("path", metavar="PLAN.JSON")
@click.option("--output", "-o", metavar="PATH", default="plan.html", show_default=True, help="Where to write it.")
@_told
def report(path: str, output: str) -> None:
    """Write a plan as one page of HTML: the predicted step, its timeline and memory, layouts, notes.

    \b
    Example:
      autopart report plan.json -o plan.html
    """
    Plan.load(path).report(output)
    click.echo(f"wrote {output}")


@main.command()
@click.argument("path", metavar="PLAN.JSON")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object in place of the table.")
@_told
def simulate(path: str, as_json: bool) -> None:
    """Predict a training step of a plan on its hardware: time, bubble, memory, collectives.

    \b
    Example:
      autopart simulate plan.json
    """
    found = simulate_plan(Plan.load(path))
    click.echo(json.dumps(found.as_data()) if as_json else str(found))


@main.command()
@click.argument("first", metavar="A.JSON")
@click.argument("second", metavar="B.JSON")
@_told
def diff(first: str, second: str) -> None:
    """Compare what two plans mean: mesh, schedule, layouts, cuts, collectives, cost; exit code 1 if they differ.

    \b
    Example:
      autopart diff yesterday.json today.json
    """
    found = Plan.load(first).diff(Plan.load(second))
    click.echo(found.table(first, second), nl=False)
    if found:
        raise click.exceptions.Exit(1)


@main.command()
@_MODEL
@_MESH
@_SCHEDULE
@_PLAN
@click.option(
    "--tolerance", default=TOLERANCE, show_default=True, help="The largest relative error that counts as equal."
)
@click.option(
    "--meta/--no-meta", default=None, help="Weights without memory, random in the scaled copy.  [default: --no-meta]"
)
@click.option(
    "--scaled/--no-scaled",
    default=None,
    help="Verify a copy with two of every run of equal blocks.  [default: where the model does not fit]",
)
@click.option("--shrink", is_flag=True, help="Where they differ, also find the smallest part that is wrong alone.")
@_rng("exact", "fast: without dropout, for models whose random numbers cannot be repeated.")
@_told
def verify(tolerance: float, shrink: bool, scaled: bool | None, rng: Rng, **options: Any) -> None:
    """Run all ranks of the partitioned model in this process and compare with the model; exit code 1 if they differ.

    \b
    Example:
      autopart verify --model my_models:small_gpt --mesh dp2,pp2,tp2
    """
    asked = _Asked(options)
    chosen = asked.given_plan()
    mesh = asked.mesh(chosen)
    source = asked.source(meta=False)
    if chosen is None:
        chosen = make_plan(source.model, mesh, example_kwargs=source.example, **asked.schedule())
    result = verify_model(
        source.model,
        mesh,
        example_kwargs=source.example,
        plan=chosen,
        tolerance=tolerance,
        shrink=shrink,
        scaled="auto" if scaled is None else scaled,
        rng=rng,
    )
    click.echo(str(result))
    if not result.ok:
        raise click.exceptions.Exit(1)


@main.command()
@_MODEL
@_MESH
@_SCHEDULE
@_PLAN
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Training steps, all on one batch.")
@click.option("--learning-rate", default=1e-3, show_default=True, help="Of AdamW.")
@click.option("--compare", is_flag=True, help="Also train the plain model; both in eval mode, so without dropout.")
@_rng("fast", "exact: dropout and the like draw the numbers that one device draws.")
@_told
def run(steps: int, learning_rate: float, compare: bool, rng: Rng, **options: Any) -> None:
    """Partition a model and train it for some steps; rank 0 prints the loss of each.

    Start it with torchrun, one process per rank of the mesh; a mesh of one rank runs by itself.

    \b
    Example:
      torchrun --nproc-per-node 4 -m autopart run --hf-config gpt2/config.json --mesh pp2,tp2 --compare
    """
    asked = _Asked(options)
    chosen = asked.given_plan()
    mesh = asked.mesh(chosen)
    source = asked.source(meta=False)
    if compare:
        source.model.eval()
    try:
        _train(source, mesh, chosen, {**asked.schedule(), "rng": rng}, steps, learning_rate, compare)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _train(
    source: ModelSource,
    mesh: Mesh,
    chosen: Plan | None,
    options: Mapping[str, Any],
    steps: int,
    rate: float,
    compare: bool,
) -> None:
    assert source.example is not None
    parallel = parallelize(source.model, mesh, example_kwargs=source.example, plan=chosen, **options)
    parallel.train(source.model.training)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=rate)
    first = os.environ.get("RANK", "0") == "0"
    plain = _Plain(deepcopy(source.model).to(parallel.device), source.example, rate) if compare and first else None
    if first:
        schedule_name = f", {parallel.plan.schedule.name}" if parallel.plan.schedule.name else ""
        click.echo(f"{type(source.model).__name__} on {mesh}{schedule_name}, {parallel.device.type}")
    for step in range(1, steps + 1):
        start_s = time.perf_counter()
        optimizer.zero_grad()
        loss = float(parallel.step(**source.example))
        optimizer.step()
        line = f"step {step:<4} loss {loss:.6f}   {time.perf_counter() - start_s:.3f} s"
        if plain is not None:
            expected = plain.step()
            line += f"   plain model {expected:.6f}   difference {abs(loss - expected):.1e}"
        if first:
            click.echo(line)


@main.command()
@click.option("--out", "-o", metavar="PATH", help="Where to write the profile, a .json file.  [default: nowhere]")
@click.option("--name", help="The profile's.  [default: the file's, or the device's]")
@click.option("--base", metavar="NAME|PATH", help="A profile that has what cannot be measured here.  [default: chosen]")
@click.option("--quick", is_flag=True, help="Few sizes, once: seconds, and less exact.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object in place of the table.")
@_told
def calibrate(out: str | None, name: str | None, base: str | None, quick: bool, as_json: bool) -> None:
    """Measure this machine as a hardware profile; predicted against measured.

    Started with torchrun it measures on every process at once, and collectives between them; rank 0 writes and prints.

    \b
    Example:
      autopart calibrate --out here.json
      torchrun --nproc-per-node 2 -m autopart calibrate --out here.json
      autopart plan --hardware here.json ...
    """
    try:
        found = calibrate_machine(out, name=name, base=base, quick=quick, progress=True)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        click.echo(json.dumps(found.as_data()))
        return
    click.echo(str(found))
    if out is not None:
        click.echo(f"wrote {out}: autopart plan --hardware {out} ...")


class _Plain:
    """The unpartitioned model, trained on one device as the reference."""

    def __init__(self, model: nn.Module, example: Mapping[str, Any], rate: float):
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.model = model
        self.example = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, dict(example))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def step(self) -> float:
        self.optimizer.zero_grad()
        output = self.model(**self.example)
        loss = output if isinstance(output, Tensor) else output["loss"] if isinstance(output, Mapping) else output[0]
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())
