"""Pipeline schedule without a flush between batches (PipeDream-2BW, `schedule="1f1b_2bw"`).

`autopart.ir.run.schedules.schedule_extra` returns this package for that schedule. autopart then calls `check_program`
and `make_batches`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autopart.extras.pipedream_2bw.delayed_gradients import check_delayed as check_program

if TYPE_CHECKING:
    from torch import Tensor

    from autopart.extras.pipedream_2bw.batches_in_flight import InFlight
    from autopart.runtime.comm.process_mesh import Process

__all__ = ["check_program", "make_batches"]


def make_batches(schedule: str, process: Process, parameters: Mapping[str, Tensor]) -> InFlight:
    """Create the object that runs the steps of the schedule. No batch is in flight yet."""
    # Imported late, because a plan does not need it.
    from autopart.extras.pipedream_2bw.batches_in_flight import InFlight

    return InFlight(schedule, process, parameters)
