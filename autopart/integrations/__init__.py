"""Training libraries that train partitioned models: accelerate, transformers, TRL, PEFT and Lightning.

Importing a module of this package patches its library, so that the library accepts partitioned models. `parallelize`
does so for the libraries that the program has already imported. `import autopart.integrations.transformers` does so
explicitly.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

LIBRARIES = {
    "accelerate": "accelerate.accelerator", "transformers": "transformers.trainer", "peft": "peft.peft_model",
}  # fmt: skip
"""{module of this package: module of the library that the program must have imported}."""


def connect_imported_libraries() -> None:
    """Import the integrations of the libraries that the program has imported.

    If the version of a library is not supported, its integration is skipped. Importing that module of this package
    explicitly raises ImportError.
    """
    for name, library in LIBRARIES.items():
        if library in sys.modules and LIBRARIES["accelerate"] in sys.modules:  # transformers' Trainer uses accelerate
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{__name__}.{name}")
