"""Import of the optional packages of autopart."""

from __future__ import annotations

import importlib
from typing import Any

from autopart.errors import OptionError

EXTRAS = ("block_search", "calibrate", "code_export", "dp_sync", "generation", "interop", "pipedream_2bw")
"""Packages below `autopart.extras`, each with a README."""


def load_extra(name: str) -> Any:
    """Import a package of `autopart.extras` and return it.

    Raises OptionError if the package is not installed.
    """
    assert name in EXTRAS, name
    package = f"autopart.extras.{name}"
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise OptionError(
            f"this installation of autopart has no '{name}'", why=f"the package {package} is not installed",
            hint="reinstall autopart with all of its packages",
        ) from None  # fmt: skip
