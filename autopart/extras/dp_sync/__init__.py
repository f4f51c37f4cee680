"""Communication-efficient data parallelism: gradient compression and model averaging (`dp_sync=`).

autopart imports this package only if the option is used (`autopart.ir.run.sync_option`). It then calls `parse` and
`make_sync`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopart.extras.dp_sync.sync_options import DpSync

if TYPE_CHECKING:
    from autopart.extras.dp_sync.data_sync import DataSync
    from autopart.runtime.comm.process_mesh import Process

__all__ = ["make_sync", "parse"]


def parse(value: Any) -> DpSync:
    """Parse a value of `dp_sync=`, given as text or as a mapping. Raises OptionError for an invalid value."""
    return DpSync.parse(value)


def make_sync(process: Process) -> DataSync:
    """Create the object that synchronises gradients or replicas of one module on this rank."""
    from autopart.extras.dp_sync.data_sync import DataSync  # imported late, because a plan does not need it

    return DataSync(process)
