"""Environment variables of autopart. Every pass reads their current values when it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from autopart.errors import OptionError

DUMP, CHECK = "AUTOPART_DUMP", "AUTOPART_CHECK"
VARIABLES = {
    DUMP: "a folder in which every pass writes what it changed",
    CHECK: "1: the graph is checked after every pass, and programs derived for new sizes are compared with traces",
}
_SWITCH = {"": False, "0": False, "1": True}


class Flags(NamedTuple):
    """Values of autopart's environment variables.

    `dump`: folder in which passes write their graphs, or "". `check`: True to check the graph after every pass, and to
    compare every program that is derived for new input sizes with a traced program.
    """

    dump: str
    check: bool


def flags() -> Flags:
    """Return the current values of the environment variables.

    Raises OptionError if `AUTOPART_CHECK` is not 0 or 1.
    """
    check = os.environ.get(CHECK, "")
    if check not in _SWITCH:
        raise OptionError(
            f"{CHECK}={check!r} is neither 1 nor 0", where="the environment", hint=f"{CHECK}=1 or {CHECK}=0"
        )
    return Flags(os.environ.get(DUMP, ""), _SWITCH[check])


@contextmanager
def environment(dump: str | Path = "", check: bool = False) -> Iterator[None]:
    """Set autopart's environment variables inside a `with` block. Child processes inherit the values.

    Example:
        >>> with environment(dump="dump"):                                   # doctest: +SKIP
        ...     autopart.plan(model, "tp2", example_kwargs=batch)
    """
    before = {name: os.environ.pop(name, None) for name in VARIABLES}
    os.environ |= {name: text for name, text in ((DUMP, str(dump)), (CHECK, str(int(check)))) if text}
    try:
        yield
    finally:
        for name, text in before.items():
            os.environ.pop(name, None)
            if text is not None:
                os.environ[name] = text
