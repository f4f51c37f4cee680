"""Output of commands as text or one JSON object. Errors are printed as text, by one rank."""

from __future__ import annotations

import json
import os
import textwrap
import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import click

from autopart.common import progress
from autopart.errors import AutopartError

Command = Callable[..., Any]

WIDTH = 80
"""Width of help and of errors, in columns."""

LABELS = ("  why    ", "  where  ", "  try    ", "  full   ", "  note   ")
"""Labels at the start of lines of errors and reports, such as `why`.

Continued lines are aligned with the text after the label.
"""

MISTAKE = 2
"""Exit code for invalid input of the user."""

OTHER_RANKS_WAIT_S = 10.0
"""Seconds that other ranks wait before they print an error: the first rank usually prints it too."""

JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object, and all other output on standard error."
)


def tell(as_json: bool, data: Mapping[str, Any], text: str, ok: bool = True) -> None:
    """Print the result of a command on standard output, as one JSON object or as text.

    Exits with status 1 if the result is not `ok`.
    """
    click.echo(json.dumps(data) if as_json else text)
    if not ok:
        raise click.exceptions.Exit(1)


def note(text: str) -> None:
    """Print text on standard error, separate from the result, on the first rank only."""
    if rank() == 0:
        click.echo(wrapped(text), err=True)


def rank() -> int:
    """Return the rank of this process from the environment variables of torchrun or another launcher."""
    return int(os.environ.get("RANK", "0"))


def wrapped(text: str, width: int = WIDTH) -> str:
    """Wrap text to `width` columns; continued lines are aligned with the text of their label.

    >>> print(wrapped("a mesh\\n  why    it has 3 devices, and 4 are needed", 30))
    a mesh
      why    it has 3 devices, and
             4 are needed
    """
    return "\n".join(line if len(line) <= width else _wrapped_line(line, width) for line in text.splitlines())


def _wrapped_line(line: str, width: int) -> str:
    spaces = len(line) - len(line.lstrip())
    is_labelled = line.startswith(LABELS)
    indent = " " * (9 if is_labelled else spaces + 2)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def reports_errors(command: Command) -> Command:
    """Decorate a command: show the progress of long work, and print errors as text, with exit code 2.

    With several ranks, only rank 0 prints an error at once, because the other ranks usually have the same error.
    Each other rank waits some seconds, and prints its error if the launcher has not stopped it by then.
    """

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with progress.shown(note):
                return command(*args, **kwargs)
        except AutopartError as error:
            _tell_error(error, bool(kwargs.get("as_json")))
            raise click.exceptions.Exit(MISTAKE) from None

    return run


def _tell_error(error: AutopartError, as_json: bool) -> None:
    number = rank()
    if number != 0:
        time.sleep(OTHER_RANKS_WAIT_S)  # torchrun ends this process as soon as the first rank has ended
    elif as_json:
        click.echo(json.dumps({"error": str(error), "kind": type(error).__name__}))
    click.echo(wrapped(str(error) if number == 0 else f"rank {number}: {error}"), err=True)
