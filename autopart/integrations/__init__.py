"""Training libraries that train partitioned models: accelerate and transformers.

Each module of this package imports its library and connects it. `parallelize` imports the modules of the libraries that
the program has imported before. `import autopart.integrations.transformers` connects a library explicitly.
"""

from __future__ import annotations

import importlib
import sys

LIBRARIES = {"accelerate": "accelerate.accelerator", "transformers": "transformers.trainer"}
"""{module of this package: module of the library}."""


def connect_imported_libraries() -> None:
    """Connect the libraries that the program has imported."""
    for name, library in LIBRARIES.items():
        if library in sys.modules:
            importlib.import_module(f"{__name__}.{name}")
