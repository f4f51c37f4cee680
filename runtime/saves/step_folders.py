"""Folders of saves, one per step: written under a temporary name, and renamed when complete."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autopart.errors import CheckpointError
from autopart.runtime.saves.checkpoint_index import HINT, CheckpointIndex, read_index

NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
PART = re.compile(r"\.step-\d{8,}(?:\.\d+)?\.[0-9a-f]{16}\.part")


@dataclass(frozen=True)
class StepFolder:
    """A folder that looks like a save.

    Attributes:
        index: index of the save; None if the save is incomplete or damaged.
        problem: reason why the save has no index.
    """

    path: Path
    index: CheckpointIndex | None
    problem: str = ""


def step_folders(parent: Path) -> list[StepFolder]:
    """Return the saves in a folder: complete saves in the order of writing, then incomplete ones."""
    found = []
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        if not path.is_dir() or not (NAME.fullmatch(path.name) or PART.fullmatch(path.name)):
            continue
        if PART.fullmatch(path.name):
            found.append(StepFolder(path, None, "its save was interrupted"))
            continue
        try:
            found.append(StepFolder(path, read_index(path)))
        except CheckpointError as error:
            found.append(StepFolder(path, None, error.why))
    return sorted(found, key=lambda one: (one.index is None, one.index.number if one.index else 0))


def complete_in(parent: Path) -> list[StepFolder]:
    """Return the complete saves in a folder, in the order in which they were written."""
    return [one for one in step_folders(parent) if one.index is not None]


def new_names(parent: Path, step: int) -> tuple[str, str]:
    """Return an unused name for a new save, and the temporary name under which it is written."""
    name, count = f"step-{step:08d}", 0
    while (parent / name).exists():
        count += 1
        name = f"step-{step:08d}.{count}"
    return name, f".{name}.{secrets.token_hex(8)}.part"


def resolve(folder: Path, name: str | None, tell: Callable[[str], None]) -> Path | None:
    """Return the folder of the save to load; None if `name` is "latest" and there is no complete save.

    Args:
        name: "latest", the name of a save in `folder`, or None if `folder` is the save.
        tell: called with a text about each incomplete save that "latest" skips.
    """
    if name is None:
        return folder
    if name != "latest":
        if Path(name).name != name:
            raise CheckpointError(
                f"{name!r} is no name of a save", hint="pm.load(folder, 'latest'), or 'step-00000100'"
            )
        return folder / name
    found = step_folders(folder)
    for one in found:
        if one.index is None:
            tell(f"skipped the save {one.path}: {one.problem}")
    complete = [one for one in found if one.index is not None]
    return complete[-1].path if complete else None


def none_complete(folder: Path) -> CheckpointError:
    """Return the error for a folder without a complete save."""
    why = "the folder does not exist" if not folder.is_dir() else "it has no folder step-... with an index.json"
    return CheckpointError(
        f"{folder} has no complete save", why=why, hint=f"{HINT}; missing_ok=True starts without one"
    )


def commit(part: Path, final: Path, keep: int | None) -> None:
    """Give a complete save its final name, then delete older saves.

    Deleted are all interrupted saves and, unless `keep` is None, all complete saves but the last `keep`.
    """
    _sync_folder(part)
    part.rename(final)
    _sync_folder(final.parent)
    for one in step_folders(final.parent):
        if PART.fullmatch(one.path.name):
            shutil.rmtree(one.path, ignore_errors=True)
    for one in complete_in(final.parent)[:-keep] if keep else ():
        if one.path != final:
            remove(one.path)


def remove(path: Path) -> None:
    """Delete a save. A crash in the middle leaves no save that looks complete."""
    doomed = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
