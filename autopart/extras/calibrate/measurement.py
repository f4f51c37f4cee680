"""Measurements of a device, as data."""

from __future__ import annotations

from dataclasses import dataclass

LINKS = ("link", "node_link")
"""Kinds of links: between ranks of one node, and between nodes."""

ISSUE = "issue"
"""Kind of a measurement of CPU time per call.

The CPU launches kernels ahead of the GPU, so this time is not predicted.
"""


@dataclass(frozen=True)
class Measured:
    """Seconds of one call.

    `kind` is one of:

    - `"matmul"`: a matrix product of `shape` (m, k, n) in `dtype`;
    - `"sustained"`: a matrix product that is repeated for seconds, on a warm device;
    - `"between"`: a matrix product that alternates with a memory-bound operator;
    - `"attention"`, `"attention backward"`: of `shape` (samples x heads, tokens, head width);
    - `"memory"`: an operator that reads and writes `size_bytes`, with its result in new memory;
    - `"memory in place"`, `"copy"`, `"norm"`: other memory-bound operators of `size_bytes`;
    - `"optimizer"`: AdamW's update of `size_bytes` of parameters;
    - `"launch"`: the smallest operator;
    - `"issue"`: CPU time to launch one GPU operator, mean over forward and backward;
    - a collective by its name in `autopart.cost.predict.collective_costs`, of an array of `size_bytes` on `num_ranks`
      ranks over a `link`.

    `form`: variant of the call, such as `"causal"` or `"weight gradient"`. `is_held_out`: True if no profile is fitted
    to this measurement, so that its prediction error estimates the error for unmeasured calls.
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
        """FLOPs of the call: a multiplication and an addition count as two.

        For attention, all pairs of queries and keys are counted, even with a causal mask. For its backward, the five
        matrix products of a fused kernel are counted.
        """
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
    """The measured device.

    Attributes:
        software: versions of the software, and the number of threads.
        local_ranks: number of processes that share the device, all on one node.
        rank: rank of the process that describes the device.
    """

    name: str
    kind: str
    software: str
    memory_bytes: float
    local_ranks: int
    num_ranks: int
    rank: int = 0
