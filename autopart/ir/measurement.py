"""What was measured of a device, as data: the runtime measures it, a hardware profile is made of it."""

from __future__ import annotations

from dataclasses import dataclass

LINKS = ("link", "node_link")
"""Between ranks of one node, and between nodes."""


@dataclass(frozen=True)
class Measured:
    """Seconds that one call of something took.

    `kind`: `"matmul"` (a product of `shape` (m, k, n) in `dtype`), `"memory"` (an operator that reads and writes
    `size_bytes`, into memory that is new each time), `"memory in place"`, `"launch"`, or a collective as
    `autopart.cost.collectives` names it, over an array of `size_bytes`, of `num_ranks` ranks on a `link`.
    """

    kind: str
    time_s: float = 0.0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    size_bytes: float = 0.0
    link: str = ""
    num_ranks: int = 1

    @property
    def flops(self) -> float:
        """Of a product, a multiplication and an addition counted as two."""
        rows, inner, columns = self.shape or (0, 0, 0)
        return 2.0 * rows * inner * columns

    @property
    def label(self) -> str:
        if self.kind == "matmul":
            return f"{self.dtype} {' x '.join(map(str, self.shape))}"
        size = f"{self.size_bytes / 1e6:.4g} MB" if self.size_bytes else ""
        where = f"{self.num_ranks} ranks, {self.link.replace('_', ' ')}" if self.link else ""
        return ", ".join(part for part in (size, where) if part)


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
