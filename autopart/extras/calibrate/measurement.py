"""What was measured of a device, as data: the runtime measures it, a hardware profile is made of it."""

from __future__ import annotations

from dataclasses import dataclass

LINKS = ("link", "node_link")
"""Between ranks of one node, and between nodes."""

ISSUE = "issue"
"""Of what the host takes, which is ahead of a GPU: no profile predicts it."""


@dataclass(frozen=True)
class Measured:
    """Seconds that one call of something took.

    `kind`: `"matmul"` (a product of `shape` (m, k, n) in `dtype`), `"sustained"` (the same in a row for seconds, as a
    device that grows warm computes it), `"between"` (one of many between operators that compute little), `"attention"`
    and `"attention backward"` (of `shape` (rows x heads, positions, width of a head)), `"memory"` (an operator that
    reads and writes `size_bytes`, into memory that is new each time), `"memory in place"`, `"copy"`, `"norm"`,
    `"optimizer"` (AdamW's update of `size_bytes` of parameters), `"launch"` (the least that an operator takes),
    `"issue"` (what the host takes to issue one to a GPU, with its backward), or a collective as
    `autopart.cost.predict.collective_costs` names it, over an array of `size_bytes`, of `num_ranks` ranks on a
    `link`. `form`: which of several ways, `"causal"` or `"weight gradient"`. `is_held_out`: no profile is fitted to
    it, so that its error says how far what was not measured may be off.
    """

    kind: str
    time_s: float = 0.0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    size_bytes: float = 0.0
    link: str = ""
    num_ranks: int = 1
    form: str = ""
    is_held_out: bool = False

    @property
    def flops(self) -> float:
        """Of a product, a multiplication and an addition counted as two; of attention to all keys, causal or not, with
        the five products of the backward that a fused kernel makes."""
        first, second, third = self.shape or (0, 0, 0)
        if self.kind.startswith("attention"):
            return first * second**2 * third * (10.0 if self.kind == "attention backward" else 4.0)
        return 2.0 * first * second * third

    @property
    def label(self) -> str:
        if self.shape:
            return f"{self.dtype} {' x '.join(map(str, self.shape))}{f', {self.form}' * bool(self.form)}"
        size = f"{self.size_bytes / 1e6:.4g} MB" if self.size_bytes else ""
        where = f"{self.num_ranks} ranks, {self.link.replace('_', ' ')}" if self.link else ""
        return ", ".join(part for part in (size, self.dtype, self.form, where) if part)


@dataclass(frozen=True)
class Device:
    """On what was measured. `local_ranks`: processes of this node that share it; `software`: versions and threads;
    `rank`: of the process that says so."""

    name: str
    kind: str
    software: str
    memory_bytes: float
    local_ranks: int
    num_ranks: int
    rank: int = 0
