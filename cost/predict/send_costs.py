"""Cost of sends between pipeline stages: of full tensors, or of shards that the receivers gather."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.collective_costs import levels, time_s, wire_bytes
from autopart.ir.mesh import Mesh


class BoundaryBytes(NamedTuple):
    """Bytes of the values that one rank sends to the next stage in a microbatch.

    Args:
        whole: bytes of all values, each sent in full.
        alike: bytes of the values that can be sent as shards, because all ranks of the feature axes (`tp`) have equal
            copies (`autopart.ir.run.scatter_gather_sends`).
    """

    whole: float
    alike: float

    def sent_bytes(self, mesh: Mesh, scatters: bool) -> float:
        """Return the bytes that a rank sends over the link between stages.

        Args:
            scatters: True if replicated values are sent as shards.
        """
        return self.whole - self.alike + self.alike / mesh.tensor_parallel_size if scatters else self.whole

    def gathered_bytes(self, mesh: Mesh, scatters: bool) -> float:
        """Return the bytes of the values that the receiving ranks all-gather from shards."""
        return self.alike if scatters and mesh.tensor_parallel_size > 1 else 0.0

    def time_s(self, mesh: Mesh, hardware: Hardware, scatters: bool) -> float:
        """Return the seconds to send the values to the next stage, including an all-gather of shards.

        Sending the gradients back takes equally long. The stage that sent the values gathers the gradients.

        Args:
            scatters: True if replicated values are sent as shards.
        """
        if not self.whole:
            return 0.0
        sent = time_s("send", mesh.size("pp"), self.sent_bytes(mesh, scatters), hardware, mesh.stride("pp"))
        gathered = self.gathered_bytes(mesh, scatters)
        return sent + (gather_cost(gathered, mesh, hardware)[2] if gathered else 0.0)


def gather_cost(size_bytes: float, mesh: Mesh, hardware: Hardware) -> tuple[int, float, float]:
    """Return the cost of one all-gather of values that were sent as shards.

    Returns (number of all-gathers: 1, bytes that a rank sends, seconds).

    Args:
        size_bytes: bytes of the full values.
    """
    ranks = mesh.tensor_parallel_size
    return 1, wire_bytes("all_gather", ranks, size_bytes), time_s("all_gather", ranks, size_bytes, hardware)


def scatter_is_cheaper(crossings: Iterable[BoundaryBytes], mesh: Mesh, hardware: Hardware) -> bool:
    """Return True if sending shards takes less time in total than sending full tensors.

    Args:
        crossings: bytes that each stage boundary sends.
    """
    with_alike = [crossing for crossing in crossings if crossing.alike]
    whole, parts = (math.fsum(one.time_s(mesh, hardware, scatters) for one in with_alike) for scatters in (False, True))
    return parts < whole


COMPUTE_OF_FORWARD = 3
"""FLOPs of forward and backward together, divided by the FLOPs of the forward.

Source: Narayanan et al. 2021, arXiv:2104.04473, appendix.
"""


def load_per_byte(loads: np.ndarray, dtype: str, mesh: Mesh, hardware: Hardware) -> float:
    """Return the forward FLOPs that a rank could run in the time to send one byte to the next stage.

    In the steady state of 1F1B, a stage exchanges an activation and its gradient with each neighbour once per
    microbatch, in one step (PipeDream, arXiv:1806.03377, section 3.2). So each boundary of a stage adds one transfer
    per microbatch to the compute of a forward and a backward. The latency is left out, because it does not depend on
    the position of a boundary.

    Args:
        loads: array of the forward FLOPs of each operator, of one microbatch on a rank.
        dtype: dtype of most FLOPs, such as "bfloat16".
    """
    sizes, counts = np.unique(loads[loads > 0], return_counts=True)
    seconds = [hardware.matmul_time_s(float(size), 0.0, hardware.known_dtype(dtype)) for size in sizes]
    if not seconds:
        return 0.0
    flops_per_s = float(sizes @ counts) / float(np.array(seconds) @ counts)
    _, nodes = levels(mesh.size("pp"), hardware.devices_per_node, mesh.stride("pp"))
    inside, _, between, _ = hardware.links("send")
    return flops_per_s / (inside if nodes == 1 else between) / COMPUTE_OF_FORWARD
