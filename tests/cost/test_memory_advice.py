"""Advice on memory: changes of one option, and of several together."""

import re

from autopart.cost.memory_advice import does_not_fit
from autopart.cost.memory_kinds import RankMemory
from autopart.ir.mesh import Mesh
from autopart.ir.run.report_terms import MEMORY_KINDS
from autopart.ir.run.schedules import Schedule


def test_advice_combines_changes_if_no_single_change_fits():
    saved = {"recompute": {"selective": 10, "full": 30}, "microbatches": {2: 20, 4: 35}}

    def estimate(mesh, options):
        less = sum(saved[name][value] for name, value in options.items()) if mesh == asked else 5
        sizes = dict.fromkeys(MEMORY_KINDS, 0) | {"activations": 100 - less, "total": 100 - less}
        return [RankMemory(stages=(0,), in_flight={0: 1}, **sizes)]

    asked = Mesh.parse("tp2")
    options = {"recompute": None, "sequence_parallel": True}
    error = does_not_fit(estimate(asked, {})[0], {}, 40, asked, Schedule(None, 1, 1), 4, estimate, options)
    assert re.search(r"try    (microbatches=4, recompute='full'): 35 B, 65 B less\n", str(error))
    error = does_not_fit(estimate(asked, {})[0], {}, 70, asked, Schedule(None, 1, 1), 4, estimate, options)
    assert ", recompute" not in str(error)
