"""Mesh, schedule and options for which a training step is predicted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopart.cost.memory_kinds import OPTIMIZER_VALUES
from autopart.cost.systems.system import AUTOPART, System
from autopart.ir.mesh import Mesh
from autopart.ir.run.buckets import BUCKET_BYTES
from autopart.ir.run.schedules import Schedule
from autopart.ir.run.sync_option import ALL_REDUCE, SyncOption


@dataclass(frozen=True)
class RunSetting:
    """The mesh, schedule and options for which a training step is predicted from a cost table.

    Args:
        rows: samples of the global batch.
        zero: ZeRO stage, as in `autopart.plan`.
        state_bytes: bytes of gradients and optimizer state per byte of a trained parameter (AdamW in the parameter's
            dtype: 3).
        hidden_sums: share of the gradient reduction that overlaps with the last backward. None: as in the runtime, on
            this hardware.
        scatter_sends: True if ranks of `tp` with replicated values each send one shard to the next stage, which
            all-gathers the shards (Narayanan et al. 2021, section 4.1). None: choose the cheaper option.
        overlap_sends: True if sends between stages overlap with compute. None: as in the runtime, where sends overlap
            in schedules with several stages per rank.
        fused_sums: True if gradients of weights are accumulated by the products that compute them (Megatron-LM's
            gradient accumulation fusion).
        receives_held: number of microbatches for which a stage has receive buffers at a time. None: all, as in torch's
            pipelining.
        cuts: stage boundaries: the index of the first operator of each stage after the first. None: balanced stages.
        tokens: tokens per sample. None: the tokens for which the table was counted.
        prefetch: number of blocks that ZeRO-3 gathers ahead of their use.
        dp_sync: how data-parallel ranks synchronize gradients or models.
        compiled: True if stages are compiled (`compile=True`).
        system: the system that runs the plan.
    """

    mesh: Mesh
    schedule: Schedule
    rows: float
    zero: int = 0
    state_bytes: float = 1.0 + OPTIMIZER_VALUES
    hidden_sums: float | None = None
    scatter_sends: bool | None = None
    overlap_sends: bool | None = None
    fused_sums: bool = False
    receives_held: int | None = None
    cuts: tuple[int, ...] | None = field(default=None)
    tokens: float | None = None
    prefetch: int = 1
    dp_sync: SyncOption = ALL_REDUCE
    compiled: bool = False
    system: System = AUTOPART

    def run_by(self, system: System | None) -> RunSetting:
        """Return the setting for a run of the plan by another system; unchanged if `system` is None."""
        if system is None:
            return self
        hidden = None if system.overlap_gradients is None else float(system.overlap_gradients)
        scatters = self.scatter_sends if system.scatter_sends is None else system.scatter_sends
        return replace(self, system=system, hidden_sums=hidden, fused_sums=system.fused_sums, scatter_sends=scatters,
                       overlap_sends=system.overlap_sends,
                       receives_held=None if system.allocates_receives else 1)  # fmt: skip

    @property
    def b(self) -> float:
        """Samples of a microbatch on a rank."""
        return self.rows / (self.mesh.data_parallel_size * self.schedule.microbatches)

    @property
    def bucket_bytes(self) -> float:
        """Bytes of a bucket of gradients or parameters that one collective reduces or gathers."""
        return BUCKET_BYTES if self.system.bucket_bytes is None else self.system.bucket_bytes

    @property
    def gathers_again(self) -> str:
        """Axis whose all-gathers the backward repeats, instead of saving their results; "" if it saves them."""
        return self.mesh.tensor_axis if self.system.recompute_gathers else ""

    def shown_share(self, axis: str, kind: str) -> float:
        """Return the share of a collective's seconds that does not overlap with compute.

        Args:
            axis: mesh axis of the collective.
            kind: name of the collective, such as "all_gather".
        """
        is_tensor = axis == self.mesh.tensor_axis and kind in ("all_gather", "reduce_scatter")
        return 1 - self.system.overlap_tensor if is_tensor else 1.0
