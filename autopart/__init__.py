"""autopart partitions an unmodified PyTorch model over many devices.

`parallelize(model, mesh)` traces the model with `torch.export`, shards its operators, inserts collectives, cuts it into
pipeline stages and runs it with `torch.distributed`. `plan` does all but run; `simulate` predicts a training step,
`calibrate` measures the machine for that, `search` finds the best mesh; `verify` proves the result on one CPU.

Names are imported when they are first used: `import autopart` alone loads neither torch nor anything else.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopart.api import parallelize, plan
    from autopart.block_search import BlockSearch, search_blocks
    from autopart.calibrate import Calibration, calibrate
    from autopart.cost.simulate import Simulation, simulate
    from autopart.cost.symbolic import crossover
    from autopart.errors import AutopartError
    from autopart.formats import pins_from
    from autopart.mesh import Mesh
    from autopart.plan import Plan
    from autopart.rules import RuleCheck, check_rule, rule
    from autopart.runtime.module import ParallelModule
    from autopart.runtime.scaler import GradScaler
    from autopart.search import search
    from autopart.verify import Verification, verify

__all__ = [
    "AutopartError", "BlockSearch", "Calibration", "GradScaler", "Mesh", "ParallelModule", "Plan", "RuleCheck",
    "Simulation", "Verification", "calibrate", "check_rule", "crossover", "parallelize", "pins_from", "plan", "rule",
    "search", "search_blocks", "simulate", "verify",
]  # fmt: skip
__version__ = "0.1.0"

_MODULE_OF = {
    "AutopartError": "errors", "BlockSearch": "block_search", "Calibration": "calibrate",
    "GradScaler": "runtime.scaler", "Mesh": "mesh", "ParallelModule": "runtime.module", "Plan": "plan",
    "RuleCheck": "rules", "Simulation": "cost.simulate", "Verification": "verify", "calibrate": "calibrate",
    "check_rule": "rules", "crossover": "cost.symbolic", "parallelize": "api", "pins_from": "formats", "plan": "api",
    "rule": "rules", "search": "search", "search_blocks": "block_search", "simulate": "cost.simulate",
    "verify": "verify",
}  # fmt: skip
"""The module, below autopart, that each public name is defined in."""


def _imported(name: str) -> Any:
    """A public name, or a module of autopart, imported when it is first asked for (PEP 562)."""
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # for type checkers the names above are all there are
    __getattr__ = _imported


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """autopart itself. Four functions have the name of the module that holds them (`plan`, `search`, `verify`,
    `calibrate`): as attributes of the package these names are the functions, whichever is imported first."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
