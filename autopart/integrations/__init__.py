"""Training libraries that train partitioned models: accelerate, transformers, TRL, PEFT and Lightning.

Each module of this package imports its library and connects it. `parallelize` imports the modules of the libraries that
the program has imported before. `import autopart.integrations.transformers` connects a library explicitly.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

LIBRARIES = {
    "accelerate": "accelerate.accelerator", "transformers": "transformers.trainer", "peft": "peft.peft_model",
}  # fmt: skip
"""{module of this package: module of the library}."""


def connect_imported_libraries() -> None:
    """Connect the libraries that the program has imported.

    A version of a library that cannot be connected is left as it is. An explicit import of its module here raises
    ImportError.
    """
    for name, library in LIBRARIES.items():
        if library in sys.modules and LIBRARIES["accelerate"] in sys.modules:  # transformers' Trainer uses accelerate
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{__name__}.{name}")
