"""Command line, also `python -m autopart`.

A model is named `--model package.module:callable` or `--hf-config gpt2`. Exit codes: 0 done; 1 a difference was found
(`verify`, `diff`), or something is missing or refused (`doctor`); 2 invalid input, reported without a traceback. Each
command imports what it needs: help, and commands that only read plans, do not load torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from autopart import __version__
from autopart.cli.checkpoint_commands import checkpoint
from autopart.cli.console import JSON, WIDTH, rank, reports_errors, tell
from autopart.cli.option_groups import GroupedCommands
from autopart.cli.plan_commands import compare, export
from autopart.cli.shared_options import MESH, META, MODEL, PLAN, TRAINING, CommandOptions, facts, shared, training_of
from autopart.common.extras import load_extra
from autopart.common.files import check_writable
from autopart.common.progress import phase
from autopart.common.text import indented
from autopart.errors import OptionError, PlanError
from autopart.options import OPTIONS, TOLERANCE, PlanOptions, RunOptions, SearchOptions, VerifyOptions
from autopart.plans.headlines import headlines
from autopart.plans.plan import WRITABLE, Plan, schema
from autopart.show.nodes import node_lines


@click.group(cls=GroupedCommands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH})
@click.version_option(__version__, prog_name="autopart")
def main() -> None:
    """Partition an unmodified PyTorch model over a device mesh.

    \b
    Example:
      autopart plan --hf-config gpt2 --mesh pp2,tp2 -o plan.json
      autopart explain plan.json
    """


def _print_schema(context: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked:
        click.echo(json.dumps(schema(), indent=2))
        context.exit()


@main.command()
@MODEL
@META
@MESH
@shared(PlanOptions)
@click.option("--alternatives", is_flag=True, help="Store the costs of rejected layouts, for autopart why and report.")
@click.option("--output", "-o", metavar="PATH", help="File to write the plan to.  [default: standard output]")
@click.option(
    "--schema", is_flag=True, is_eager=True, expose_value=False, callback=_print_schema,
    help="Print the JSON Schema of plans.",
)  # fmt: skip
@JSON
@reports_errors
def plan(output: str | None, alternatives: bool, as_json: bool, **options: Any) -> None:
    """Choose the placement of a model on a mesh; needs no devices and no process group.

    \b
    Example:
      autopart plan --hf-config llama-8b --mesh pp4,tp8 -o plan.json
    """
    if output is not None:
        check_writable(Path(output), PlanError, WRITABLE)
    new_plan = CommandOptions(options).plan()
    if alternatives:
        phase("comparing rejected layouts")
        new_plan = new_plan.with_alternatives()
    if output is None:
        click.echo(new_plan.to_json(), nl=False)
        return
    new_plan.save(output)
    wrote = f"wrote {output}: {new_plan.model['class']} on {new_plan.mesh_object()}; autopart explain {output}"
    tell(
        as_json,
        {"wrote": output, **facts(new_plan)},
        "\n".join([wrote, *headlines(new_plan), *indented(node_lines(new_plan))]),
    )


@main.command()
@click.argument("path", required=False, metavar="[PLAN.JSON]")
@MODEL
@META
@MESH
@shared(PlanOptions)
@JSON
@reports_errors
def explain(path: str | None, as_json: bool, **options: Any) -> None:
    """Print a plan as one table, then its balance and cost.

    \b
    Example:
      autopart explain plan.json
      autopart explain --hf-config gpt2 --mesh tp2
    """
    if path is not None and (options["model"] or options["hf_config"]):
        raise OptionError("explain takes a plan or a model, not both", hint=f"autopart explain {path}")
    shown_plan = Plan.load(path) if path is not None else CommandOptions(options).plan()
    tell(as_json, facts(shown_plan), shown_plan.explain().rstrip("\n"))


@main.command()
@MODEL
@META
@click.option("--devices", type=click.IntRange(1), required=True, help="Number of devices (ranks).")
@click.option("--mesh", metavar="AXES", help="Axes with a fixed size, such as tp2 or pp=1,tp=8.  [default: none]")
@shared(SearchOptions)
@click.option("--count", type=click.IntRange(1), default=3, show_default=True, help="Number of plans to make.")
@click.option("--dp-sync", multiple=True, metavar="METHOD", help="A dp_sync method to try, such as "
              "powersgd:4 or local:16. Repeat the option for several.")  # fmt: skip
@click.option("--output", "-o", metavar="PATH", help="File to write the best plan to.")
@JSON
@reports_errors
def search(
    devices: int, count: int, dp_sync: tuple[str, ...], mesh: str | None, output: str | None, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Find the best mesh, schedule, microbatches, recomputation and ZeRO level for a number of devices.

    \b
    Example:
      autopart search --hf-config llama-8b --batch 512 --devices 64 -o plan.json
      autopart search --hf-config gpt2 --devices 8 --mesh pp=1,tp=2
    """
    if output is not None:
        check_writable(Path(output), PlanError, WRITABLE)
    given = CommandOptions(options)
    planning = given.planning(SearchOptions)
    source = given.source(meta=options["model"] is None)
    from autopart.tuning.search import search as search_plans

    plans = search_plans(
        source.model, devices, example_kwargs=source.example, count=count, dp_sync=dp_sync, mesh=mesh, **planning
    )
    lines = [plan.notes[-1].removeprefix("found by search: ") for plan in plans]
    lines += ["", *(f"  {note}" for note in plans[0].notes[:-1])]
    if output is not None:
        plans[0].save(output)
        lines += [f"wrote {output}; autopart explain {output}", *headlines(plans[0])]
    data = {"plans": [facts(plan) for plan in plans], "wrote": output}
    tell(as_json, data, "\n".join(lines))


def _label(path: str, paths: tuple[str, ...]) -> str:
    """Return the file's name without its ending, or the path if files in other folders have that name."""
    stems = [Path(other).stem for other in paths]
    return Path(path).stem if stems.count(Path(path).stem) == 1 else path


@main.command()
@click.argument("paths", metavar="PLAN.JSON...", nargs=-1, required=True)
@click.option(
    "--output", "-o", metavar="PATH", default="plan.html", show_default=True, help="File to write the page to."
)
@JSON
@reports_errors
def report(paths: tuple[str, ...], output: str, as_json: bool) -> None:
    """Write plans as one HTML page: time, timeline, memory, placements, and changes with predicted gains.

    Several plans are compared side by side, and each has a tab.

    \b
    Example:
      autopart report plan.json -o plan.html
      autopart report tp8.json pp8.json -o both.html
    """
    from autopart.show.report.page import write

    write({_label(path, paths): Plan.load(path) for path in paths}, output, {})
    tell(as_json, {"wrote": output}, f"wrote {output}")


@main.command()
@click.argument("path", metavar="PLAN.JSON")
@click.option("--trace", metavar="PATH", help="File to write the step to, for ui.perfetto.dev.  [default: none]")
@click.option("--measured", metavar="PATH", help="With --trace: a trace of pm.profile to show in the same file.")
@click.option("--system", metavar="NAME", help="Another training system that runs the plan, such as megatron, or the "
              "path of a JSON file that describes it.  [default: autopart]")  # fmt: skip
@JSON
@reports_errors
def simulate(path: str, trace: str | None, measured: str | None, system: str | None, as_json: bool) -> None:
    """Predict a training step of a plan on its hardware: time, bubble, memory, collectives.

    \b
    Example:
      autopart simulate plan.json --trace step.json
      autopart simulate plan.json --trace both.json --measured measured.json
    """
    if measured is not None and trace is None:
        raise OptionError("--measured needs --trace", hint="--trace both.json --measured measured.json")
    plan = Plan.load(path)
    from autopart.cost.predict.simulate import simulate as simulate_plan

    simulation = simulate_plan(plan, system=system)
    if trace is not None:
        simulation.save_trace(trace, measured)
    tell(as_json, simulation.as_data(), str(simulation))


@main.command()
@click.argument("path", metavar="PLAN.JSON")
@click.argument("name")
@JSON
@reports_errors
def why(path: str, name: str, as_json: bool) -> None:
    """Explain a choice of a plan by the predicted cost of each alternative.

    NAME is mesh, schedule, microbatches, zero, recompute or loss; or a parameter, module or operator, if the plan was
    written with autopart plan --alternatives.

    \b
    Example:
      autopart why plan.json schedule
      autopart why plan.json transformer.h.0.mlp.c_fc
    """
    answer = Plan.load(path).why(name)
    tell(as_json, asdict(answer), str(answer))


@main.command()
@click.argument("first", metavar="A.JSON")
@click.argument("second", metavar="B.JSON")
@JSON
@reports_errors
def diff(first: str, second: str, as_json: bool) -> None:
    """Compare two plans: mesh, schedule, layouts, stages, collectives, cost; exit code 1 if they differ.

    \b
    Example:
      autopart diff yesterday.json today.json
    """
    difference = Plan.load(first).diff(Plan.load(second))
    rows = [asdict(row) for row in difference.rows]
    table = difference.table(first, second).rstrip("\n")
    tell(as_json, {"same": not difference, "differences": rows}, table, ok=not difference)


@main.command()
@MODEL
@MESH
@shared(VerifyOptions)
@PLAN
@click.option("--tolerance", default=TOLERANCE, show_default=True, help="Largest relative error that counts as equal.")
@click.option(
    "--meta/--no-meta",
    default=None,
    help="Create the weights on the meta device; a scaled copy gets random weights.  "
    "[default: if the model does not fit in memory]",
)
@click.option(
    "--scaled/--no-scaled",
    default=None,
    help="Verify a smaller copy of the model: two of every run of equal blocks, and smaller sizes if needed.  "
    "[default: if the model does not fit in memory]",
)
@TRAINING
@click.option(
    "--lengths",
    metavar="N,N,...",
    help="Additional sequence lengths to verify. Programs of some lengths are derived from other lengths.",
)
@click.option(
    "--shrink",
    is_flag=True,
    help="If results differ, also find the smallest part of the graph that is wrong by itself.",
)
@click.option(
    "--rng", metavar=OPTIONS["rng"].form, default="exact", show_default=True,
    help="fast: turn dropout off (eval mode), for models whose random numbers cannot be reproduced.",
)  # fmt: skip
@JSON
@reports_errors
def verify(
    tolerance: float, lengths: str | None, shrink: bool, scaled: bool | None, rng: Any, as_json: bool, **options: Any
) -> None:  # fmt: skip
    """Run all ranks of the partitioned model in this process and compare them with the model.

    Exit code 1 if they differ. --steps adds whole training steps: norm, clipping, optimizer and scaler. A model that
    does not fit into free memory is reduced first, and the command says so.

    \b
    Example:
      autopart verify --model my_models:small_gpt --mesh dp2,pp2,tp2
      autopart verify --hf-config llama-8b --mesh tp2 --steps 3 --max-norm 1.0
    """
    training = training_of(options)
    given = CommandOptions({**options, "dtype": options["dtype"] or "float32"})
    chosen, planning = given.given_plan(), given.planning()
    mesh = given.mesh(chosen)
    is_config = options["model"] is None
    source = given.source(meta=is_config, short=True)
    from autopart.api import plan as make_plan
    from autopart.proof.verify import can_verify_at_full_size
    from autopart.proof.verify import verify as verify_model

    if chosen is None:
        phase("planning")
        chosen = make_plan(source.model, mesh, example_kwargs=source.example, **planning)
    if is_config and options["meta"] is None and not scaled and can_verify_at_full_size(source, mesh, training, scaled):
        source = given.source(meta=False, short=True, note_printed=True)
    result = verify_model(
        source.model,
        mesh,
        example_kwargs=source.example,
        plan=chosen,
        tolerance=tolerance,
        shrink=shrink,
        scaled="auto" if scaled is None else scaled,
        rng=rng,
        lengths=lengths,
        **training,
    )
    first = str(result.first_mismatch) if result.first_mismatch else None
    data = {"ok": result.ok, "mesh": result.mesh, "max_error": result.max_error, "errors": dict(result.errors),
            "first_mismatch": first, "notes": list(result.notes), "steps": [asdict(step) for step in result.steps],
            "lengths": [{"length": one.length, "origin": one.origin, "ok": one.ok} for one in result.lengths],
            "not_finite": str(result.not_finite) if result.not_finite else None}  # fmt: skip
    tell(as_json, data, str(result), result.ok)


@main.command()
@MODEL
@MESH
@shared(RunOptions)
@PLAN
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Training steps, all on one batch.")
@click.option("--learning-rate", default=1e-3, show_default=True, help="Learning rate of AdamW.")
@click.option(
    "--compare",
    is_flag=True,
    help="Also train the plain model and compare losses. Both run in eval mode, so without dropout.",
)
@JSON
@reports_errors
def run(steps: int, learning_rate: float, compare: bool, as_json: bool, **options: Any) -> None:
    """Partition a model and train it for some steps; rank 0 prints the loss of each.

    Start it with torchrun, one process per rank of the mesh; a mesh of one rank runs by itself.

    \b
    Example:
      torchrun --nproc-per-node 4 -m autopart run --hf-config gpt2 \\
        --mesh pp2,tp2 --compare
      torchrun --nproc-per-node 4 -m autopart run --hf-config folder/config.json \\
        --mesh pp2,tp2 --weights folder
    """
    given = CommandOptions(options)
    chosen = given.given_plan()
    mesh = given.mesh(chosen)
    planning = given.planning(RunOptions)
    if compare and options["weights"] is not None:
        raise OptionError(
            "--compare cannot be combined with --weights",
            why="the unpartitioned model would need all weights on one rank", hint="leave one of the two options out",
        )  # fmt: skip
    source = given.source(meta=options["weights"] is not None and options["model"] is None, short=True)
    from autopart.cli.run_command import TrainingRun

    TrainingRun(source, mesh, chosen, planning, steps, learning_rate, compare, as_json).run()


main.add_command(checkpoint)
main.add_command(export)
main.add_command(compare)


@main.command()
@click.option("--out", "-o", metavar="PATH", help="JSON file to write the profile to.  [default: none]")
@click.option("--name", help="Name of the profile.  [default: the name of the file or of the device]")
@click.option(
    "--base",
    metavar="NAME|PATH",
    help="Profile for figures that cannot be measured on this machine.  [default: chosen]",
)
@click.option("--quick", is_flag=True, help="Measure few sizes, once: takes seconds, and is less exact.")
@click.option("--raw", metavar="PATH", help="JSON file to write every measurement to.  [default: none]")
@click.option("--of", metavar="PATH", help="Make the profile from a file of measurements that --raw wrote.")
@JSON
@reports_errors
def calibrate(out: str | None, as_json: bool, **options: Any) -> None:
    """Measure this machine as a hardware profile, and print predicted and measured times.

    Under torchrun all processes measure at once, with collectives between them; rank 0 writes and prints.

    \b
    Example:
      autopart calibrate --out here.json
      torchrun --nproc-per-node 2 -m autopart calibrate --out here.json
      autopart plan --hardware here.json ...
    """
    from autopart.cli.run_command import ending_processes

    with ending_processes():
        calibration = load_extra("calibrate").calibrate(out, progress=True, **options)
    if rank() != 0:
        return
    lines = [str(calibration)]
    if out is not None:
        lines.append(f"wrote {out}: autopart plan --hardware {out} ...")
    tell(as_json, calibration.as_data(), "\n".join(lines))


@main.command()
@click.argument("name", required=False, metavar="[MODULE:CALLABLE]")
@MODEL
@META
@MESH
@JSON
@reports_errors
def doctor(name: str | None, as_json: bool, **options: Any) -> None:
    """Diagnose a model on one page, to paste into an issue; exit code 1 if something is refused.

    The page shows whether the model can be traced. For each mesh (tp2, dp2 and pp2, or the one that --mesh names), it
    lists the sharded operators, the replicated operators with the reason, and what would help. MODULE:CALLABLE is a
    value of --model. Without a model: versions, backends and devices of this machine; exit code 1 if something is
    missing.

    \b
    Example:
      autopart doctor my_models:small_gpt
      autopart doctor
    """
    if name is not None and options["model"]:
        raise OptionError("a model is named twice: as an argument and by --model", hint=f"autopart doctor {name}")
    options["model"] = name or options["model"]
    if options["model"] is None and options["hf_config"] is None:
        from autopart.cli.machine import as_data, findings, table

        all_findings = findings()
        tell(as_json, as_data(all_findings), table(all_findings), all(finding.ok for finding in all_findings))
        return
    given = CommandOptions(options)
    source = given.source(meta=options["model"] is None)
    from autopart.cli.doctor import doctor as diagnose

    page = diagnose(source.model, options["mesh"], example_kwargs=source.example)
    tell(as_json, page.as_data(), str(page), page.ok)
