"""autopart partitions an unmodified PyTorch model over many devices.

`parallelize(model, mesh)` traces the model with `torch.export`, shards its operators, inserts collectives, cuts it into
pipeline stages and runs it with `torch.distributed`. `plan` does all but run; `simulate` predicts a training step,
`calibrate` measures the machine for that, `search` finds the best mesh; `verify` proves the result on one CPU.
"""

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
from autopart.search import search
from autopart.verify import Verification, verify

__all__ = [
    "AutopartError", "BlockSearch", "Calibration", "Mesh", "ParallelModule", "Plan", "RuleCheck", "Simulation",
    "Verification", "calibrate", "check_rule", "crossover", "parallelize", "pins_from", "plan", "rule", "search",
    "search_blocks", "simulate", "verify",
]  # fmt: skip
__version__ = "0.1.0"
