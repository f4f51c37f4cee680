"""numba looks for a package called `coverage`: it must not find the benchmark of that name."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def import_numba() -> None:
    """Import numba if it is installed."""
    if "numba" in sys.modules or find_spec("numba") is None:
        return
    benchmark = sys.modules.pop("coverage", None)
    sys.modules["coverage"] = None  # type: ignore[assignment]
    import numba  # noqa: F401

    del sys.modules["coverage"]
    if benchmark is not None:
        sys.modules["coverage"] = benchmark
