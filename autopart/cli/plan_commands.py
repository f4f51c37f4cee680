"""Commands that use a plan together with something else: a model (export), or a trace (compare)."""

from __future__ import annotations

from typing import Any

import click

from autopart.cli.console import JSON, reports_errors, tell
from autopart.cli.shared_options import MODEL, CommandOptions
from autopart.plans.plan import Plan


@click.command()
@click.argument("path", metavar="PLAN.JSON")
@MODEL
@click.option("--output", "-o", metavar="FOLDER", required=True, help="New or empty folder for the package.")
@JSON
@reports_errors
def export(path: str, output: str, as_json: bool, **options: Any) -> None:
    """Write the program of a plan as a Python package that runs without autopart.

    The package has plain tensors and torch.distributed calls, the weights of every rank, and the model's example batch.
    Plan.export converts plans to the formats of other tools.

    \b
    Example:
      autopart export plan.json --model my_models:small_gpt -o package
      torchrun --nproc-per-node 2 package/run.py
    """
    plan = Plan.load(path)
    source = CommandOptions(options).source(meta=False, short=True)
    folder = plan.export_code(output, source.model, example_kwargs=source.example)
    num_ranks = plan.mesh_object().num_ranks
    run = f"torchrun --nproc-per-node {num_ranks} {folder}/run.py"
    tell(as_json, {"wrote": str(folder), "num_ranks": num_ranks, "run": run}, f"wrote {folder}: {run}")


@click.command()
@click.argument("path", metavar="PLAN.JSON")
@click.argument("trace", metavar="TRACE.JSON")
@click.option("--steps", type=click.IntRange(1), help="Training steps in the trace.  [default: as the trace marks]")
@JSON
@reports_errors
def compare(path: str, trace: str, steps: int | None, as_json: bool) -> None:
    """Compare the predicted step of a plan with a measured one, the largest differences first.

    TRACE.JSON is a trace of pm.profile or torch.profiler (export_chrome_trace).

    \b
    Example:
      autopart compare plan.json trace.json
    """
    from autopart.show.compare_trace import compare as compare_trace

    comparison = compare_trace(path, trace, steps=steps)
    tell(as_json, comparison.as_data(), str(comparison))
