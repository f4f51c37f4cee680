"""How a model is run: what a prediction is made for."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopart.cost.memory_kinds import OPTIMIZER_VALUES
from autopart.ir.mesh import Mesh
from autopart.ir.run.dp_sync import ALL_REDUCE, DpSync
from autopart.ir.run.schedules import Schedule


@dataclass(frozen=True)
class Setting:
    """How a table is run: `rows` of the global batch, on a mesh, with a schedule; `zero` as in `plan`.

    `state_bytes`: of gradients and optimizer for each byte of a trained parameter (AdamW in the parameter's dtype: 3).
    `hidden_sums`: the share of the gradients' sums that run beside the last backward; None: as the runtime has it, on
    this hardware. `prefetch`: with ZeRO-3, of how many blocks ahead weights are gathered. `scatter_sends`: ranks of
    `tp` that have the same value each send a part to the next stage, which gathers it (Narayanan et al. 2021, section
    4.1); None: where it pays. `overlap_sends`: whether values travel between stages while ranks compute; None: as the
    runtime has it, whose schedules with several stages a rank overlap them. `fused_sums`: gradients of weights are
    added to those of earlier microbatches by the products that make them (Megatron-LM's gradient accumulation fusion).
    `receives_held`: microbatches that a stage has memory to receive at a time (pipelining of torch: all). `cuts`: where
    stages begin, if not where they are balanced. `tokens`: of a row, if not those that were counted.
    `dp_sync`: what data-parallel ranks send each other.
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
    dp_sync: DpSync = ALL_REDUCE

    @property
    def b(self) -> float:
        """Rows of a microbatch on a rank."""
        return self.rows / (self.mesh.row_ranks * self.schedule.microbatches)
