"""Commands on saves of `pm.save`: list, show, verify and convert them. Only `convert` loads torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from autopart.cli.console import JSON, reports_errors, tell
from autopart.common.progress import phase
from autopart.common.text import quantity
from autopart.errors import CheckpointError
from autopart.runtime.saves.checkpoint_index import (
    INDEX_FILE,
    CheckpointIndex,
    digest_problems,
    printable,
    read_index,
    size_problems,
)
from autopart.runtime.saves.step_folders import complete_in, step_folders


@click.group()
def checkpoint() -> None:
    """List, show, verify and convert saves of training runs (pm.save).

    \b
    Example:
      autopart checkpoint ls run
    """


@checkpoint.command("ls")
@click.argument("folder", metavar="FOLDER")
@JSON
@reports_errors
def list_saves(folder: str, as_json: bool) -> None:
    """List the saves in a folder, the oldest first; exit code 1 if one is incomplete or damaged.

    \b
    Example:
      autopart checkpoint ls run
    """
    parent = Path(folder)
    if not parent.is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    rows, lines = [], []
    for one in step_folders(parent):
        name, index = one.path.name, one.index
        if index is None:
            rows.append({"name": name, "complete": False, "problem": one.problem})
            lines.append(f"{name}  {printable(one.problem)}")
        else:
            rows.append({"name": name, "complete": True, **_facts(index)})
            lines.append(f"{name}  {_headline(index)}")
    ok = all(row["complete"] for row in rows)
    tell(as_json, {"saves": rows}, "\n".join(lines) or f"{folder} has no saves", ok)


@checkpoint.command()
@click.argument("path", metavar="SAVE")
@click.option("--tensors", is_flag=True, help="Also list every tensor.")
@JSON
@reports_errors
def show(path: str, tensors: bool, as_json: bool) -> None:
    """Show what a save contains. Of a folder of saves, it shows the last complete one.

    \b
    Example:
      autopart checkpoint show run/step-00000300 --tensors
    """
    folder = _save_at(path)
    index = read_index(folder)
    lines = [f"{folder}: {_headline(index)}"]
    lines += [f"  {name:<10} {printable(str(value))}" for name, value in _facts(index).items()]
    if tensors:
        for name, entry in index.entries.items():
            size = f"{entry.dtype}{list(entry.shape)}"
            lines.append(f"  {printable(name)}  {size}  {len(entry.chunks)} chunk{'s' * (len(entry.chunks) != 1)}")
        lines += [f"  {printable(name)}  is {printable(target)}" for name, target in index.aliases.items()]
    described = {name: {"dtype": e.dtype, "shape": list(e.shape)} for name, e in index.entries.items()}
    tell(as_json, {**_facts(index), **({"tensors": described} if tensors else {})}, "\n".join(lines))


@checkpoint.command()
@click.argument("path", metavar="SAVE")
@JSON
@reports_errors
def verify(path: str, as_json: bool) -> None:
    """Read all bytes of a save and compare checksums; exit code 1 if any differ.

    \b
    Example:
      autopart checkpoint verify run/step-00000300
    """
    folder = _save_at(path)
    index = read_index(folder)
    phase(f"reading {quantity(index.size_bytes, 'B')}")
    problems = size_problems(folder, index) or list(digest_problems(folder, index))
    good = f"{folder} is complete: {len(index.entries)} tensors, {quantity(index.size_bytes, 'B')}, all checksums equal"
    bad = "\n".join([f"{folder} is damaged", *(f"  {problem}" for problem in problems)])
    tell(as_json, {"ok": not problems, "problems": problems}, bad if problems else good, not problems)


@checkpoint.command()
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@JSON
@reports_errors
def convert(source: str, target: str, as_json: bool) -> None:
    """Convert a save to a folder of safetensors files, or weights to a save.

    FROM is a save, a folder of safetensors files, or a file of torch.save with a state dict of weights. Of a save,
    weights and the config are converted. A save that is made from weights has no optimizer.

    \b
    Example:
      autopart checkpoint convert run/step-00000300 tuned
      autopart checkpoint convert model.pt run
    """
    from autopart.runtime.saves.convert_save import to_safetensors, to_save

    path, is_save = Path(source), True
    try:
        folder = _save_at(source)
    except CheckpointError:
        is_save = False
    if is_save:
        wrote, num_tensors = Path(target), to_safetensors(folder, Path(target))
    else:
        wrote, num_tensors = to_save(path, Path(target))
    tell(as_json, {"wrote": str(wrote), "tensors": num_tensors}, f"wrote {wrote}: {num_tensors} tensors")


def _save_at(path: str) -> Path:
    """Return the folder of a save: `path`, or the last complete save in it."""
    folder = Path(path)
    if (folder / INDEX_FILE).is_file():
        return folder
    complete = complete_in(folder)
    if not complete:
        read_index(folder)  # raises the error
    return complete[-1].path


def _facts(index: CheckpointIndex) -> dict[str, Any]:
    names = ("step", "samples", "model", "mesh", "optimizers", "schedulers", "torch", "autopart")
    facts = {name: getattr(index, name) for name in names}
    facts |= {name: ", ".join(facts[name]) or "none" for name in ("optimizers", "schedulers")}
    return {**facts, "tensors": len(index.entries), "size_bytes": index.size_bytes}


def _headline(index: CheckpointIndex) -> str:
    return (
        f"step {index.step}, {printable(index.model)} saved on {printable(index.mesh) or 'one rank'}, "
        f"{quantity(index.size_bytes, 'B')}"
    )
