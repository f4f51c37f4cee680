"""Access to the optional package that writes programs as Python packages."""

from __future__ import annotations

from typing import Any

from autopart.common.extras import load_extra


def code_export() -> Any:
    """Import and return `autopart.extras.code_export`. Raises OptionError if it is not installed."""
    return load_extra("code_export")
