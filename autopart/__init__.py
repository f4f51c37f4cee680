"""autopart partitions an unmodified PyTorch model over many devices.

`parallelize(model, mesh)` traces the model with `torch.export`, shards its operators, inserts collectives, splits it
into pipeline stages and runs it with `torch.distributed`. `plan` returns the partition without running the model.
`simulate` predicts a training step, and `calibrate` measures the machine for this prediction. `search` finds the best
mesh. `verify` proves on one CPU that the partitioned model computes the results of the original model.

Public names are imported on first use: `import autopart` alone does not load torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopart.api import from_pretrained, parallelize, plan, verify_loop
    from autopart.cli.doctor import Diagnosis, doctor
    from autopart.cost.formula.plan_cost import crossover
    from autopart.cost.predict.simulate import Simulation, simulate
    from autopart.errors import AutopartError
    from autopart.extras.block_search import BlockSearch, search_blocks
    from autopart.extras.calibrate import Calibration, calibrate
    from autopart.extras.interop import pins_from
    from autopart.ir.mesh import Mesh
    from autopart.plans.plan import Plan
    from autopart.proof.rules.user_rules import RuleCheck, check_rule, rule
    from autopart.proof.steps.verify_resume import ResumeVerification, verify_resume
    from autopart.proof.training_loop.verify_loop import LoopVerification
    from autopart.proof.verify import Verification, verify
    from autopart.runtime.module import ParallelModule
    from autopart.runtime.training.grad_scaler import GradScaler
    from autopart.show.compare_trace import TraceComparison, compare
    from autopart.tracing.dynamic.host_functions import host_function
    from autopart.tuning.search import search

__all__ = [
    "AutopartError", "BlockSearch", "Calibration", "Diagnosis", "GradScaler", "LoopVerification", "Mesh",
    "ParallelModule", "Plan", "ResumeVerification", "RuleCheck", "Simulation", "TraceComparison", "Verification",
    "calibrate", "check_rule", "compare", "crossover", "doctor", "from_pretrained", "host_function", "parallelize",
    "pins_from", "plan", "rule", "search", "search_blocks", "simulate", "verify", "verify_loop", "verify_resume",
]  # fmt: skip
__version__ = "0.1.0"

_MODULE_OF = {
    "AutopartError": "errors", "BlockSearch": "extras.block_search", "Calibration": "extras.calibrate",
    "Diagnosis": "cli.doctor", "GradScaler": "runtime.training.grad_scaler", "Mesh": "ir.mesh",
    "LoopVerification": "proof.training_loop.verify_loop",
    "ParallelModule": "runtime.module", "Plan": "plans.plan", "RuleCheck": "proof.rules.user_rules",
    "Simulation": "cost.predict.simulate", "Verification": "proof.verify",
    "calibrate": "extras.calibrate", "compare": "show.compare_trace", "TraceComparison": "show.compare_trace",
    "check_rule": "proof.rules.user_rules", "crossover": "cost.formula.plan_cost",
        "doctor": "cli.doctor",
    "from_pretrained": "api", "host_function": "tracing.dynamic.host_functions", "parallelize": "api",
    "pins_from": "extras.interop", "plan": "api", "rule": "proof.rules.user_rules", "search": "tuning.search",
    "search_blocks": "extras.block_search", "simulate": "cost.predict.simulate", "verify": "proof.verify",
    "ResumeVerification": "proof.steps.verify_resume", "verify_loop": "api",
    "verify_resume": "proof.steps.verify_resume",
}  # fmt: skip
"""{public name: the module below autopart that defines it}."""


def _imported(name: str) -> Any:
    """Import a public name, or a module of autopart, when it is first used (PEP 562)."""
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # type checkers read only the names above
    __getattr__ = _imported


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
