"""The random numbers of one call: from the default generator as one device draws them, or from the call's seeds.

Every stage's prologue makes all draws of the model, so each has to begin in the same state of the generator, and the
state afterwards is that of one device, however many stages run here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.errors import RuntimeSetupError
from autopart.ir.program import Program
from autopart.runtime.comm.processes import Process


@contextmanager
def one_stream(program: Program, inputs: Sequence[Any], device: torch.device) -> Iterator[Callable[[], None]]:
    """Around the prologues of a call on `inputs`; what it yields is to be called before each of them."""
    if program.draws is None:
        yield lambda: None
        return
    before = first = get_state(device)
    if program.draws == "exact":
        yield lambda: set_state(first, device)
        return
    first = torch.Generator(device).manual_seed(_one_seed(inputs[-1])).get_state()
    try:
        yield lambda: set_state(first, device)
    finally:
        set_state(before, device)


def get_state(device: torch.device) -> Tensor:
    """The state of torch's default generator for a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def check_same_state(process: Process) -> None:
    """Raises RuntimeSetupError, on every rank, where the ranks' default generators are in different states."""
    digest = hashlib.blake2b(get_state(process.device).numpy().tobytes(), digest_size=7).digest()
    number = int.from_bytes(digest, "little")
    extremes = torch.tensor([number, -number], device=process.device)
    for group in process.groups.values():
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    if extremes.sum() != 0:
        raise RuntimeSetupError(
            "the ranks' random generators are not in the same state",
            why="with rng='exact' every rank draws the numbers of the whole batch itself",
            hint="torch.manual_seed(0) on every rank, and no draws on one rank alone after it; or rng='fast'",
        )


def _one_seed(seeds: Tensor) -> int:
    """A seed for what is drawn once per call, apart from those of its microbatches."""
    packed = b"once per call" + int(seeds[0]).to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
