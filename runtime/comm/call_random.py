"""Random numbers of one call: with `rng="exact"`, the numbers that a single device would draw.

A prologue is the part of a stage that runs on the global batch, before the microbatches. The prologue of every stage
runs all random operators of the model, so all prologues start from one generator state. After the call, the generator
has the state that it would have after a run on a single device, for any number of stages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.common.scoped import variable
from autopart.errors import OptionError, RuntimeSetupError
from autopart.ir.facts import facts
from autopart.ir.graph import RNG_EXACT_UNSUPPORTED, describe, inexact, is_host_draw
from autopart.ir.program import Program
from autopart.runtime.comm.process_mesh import Process, broadcast_from_first, reduce_over_all
from autopart.tracing.dynamic.host_functions import exchange


class HostResults:
    """Results of the host functions (Python or numpy code in the model) of one call, in model order.

    Each function runs once per rank, in the first stage prologue (the part of a stage that runs on the global batch).
    All other prologues get the stored results. All ranks use the first rank's results.

    Args:
        process: this rank. None if one process runs all ranks.
    """

    def __init__(self, process: Process | None):
        self.process, self.results = process, list[list[Tensor]]()
        self.position = 0

    def __call__(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return the first rank's results of the next host function.

        `run`: function that runs the host function on this rank.
        """
        if self.position == len(self.results):
            results = run()
            if self.process is not None:
                for result in results:
                    broadcast_from_first(result, self.process)
            self.results.append(results)
        self.position += 1
        return self.results[self.position - 1]


def has_host_functions(program: Program) -> bool:
    """Return True if the program has host functions: numpy or Python code that can draw random numbers.

    Host functions depend on no activation. Each call of the model runs them on the global batch, before the
    microbatches run.
    """
    return any(map(is_host_draw, program.drawn))


@contextmanager
def one_stream(
    program: Program, inputs: Sequence[Any], device: torch.device, process: Process | None = None
) -> Iterator[Callable[[], None]]:
    """Context manager in which the prologues of all stages draw equal random numbers.

    A prologue is the part of a stage that runs on the global batch. The block gets a function that resets the random
    state. The function must be called before each prologue.

    Args:
        process: this rank, which receives the first rank's results of host functions. None if one process runs all
            ranks.
    """
    if program.draws is None:
        yield lambda: None
        return
    before = {on: get_state(on) for on in drawn_on(program, device)}
    first = before
    if program.draws == "fast":
        seed = _one_seed(inputs[-1])
        first = {on: torch.Generator(on).manual_seed(seed).get_state() for on in before}

    host = HostResults(process)

    def rewind() -> None:
        host.position = 0
        for on, state in first.items():
            set_state(state, on)

    try:
        with variable(exchange, host):
            yield rewind
    finally:
        if program.draws == "fast":
            for on, state in before.items():
                set_state(state, on)


def drawn_on(program: Program, device: torch.device) -> list[torch.device]:
    """Return the devices on which a call draws random numbers."""
    host = torch.device("cpu")
    return list(dict.fromkeys(host if facts(node).get("on_host") else device for node in program.drawn))


def check_exact(program: Program, device: torch.device) -> None:
    """Raise OptionError if `rng="exact"` is set and this device cannot reproduce a random operator."""
    for node in program.drawn if program.draws == "exact" else ():
        if why := inexact(node, device):
            raise OptionError(RNG_EXACT_UNSUPPORTED, why=why, where=describe(node), hint="rng='fast'")


def get_state(device: torch.device) -> Tensor:
    """Return the state of torch's default generator for a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def random_states(device: torch.device) -> dict[torch.device, Tensor]:
    """Return {device: state of torch's default generator} for the CPU and a rank's device."""
    return {on: get_state(on) for on in {torch.device("cpu"), device}}


def restore_random_states(states: Mapping[torch.device, Tensor]) -> None:
    """Set torch's default generators to the result of an earlier call of `random_states`."""
    for on, state in states.items():
        set_state(state, on)


def set_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def check_same_state(program: Program, process: Process) -> None:
    """Raise RuntimeSetupError on every rank if ranks have different states of the generators in use."""
    digest = hashlib.blake2b(digest_size=7)
    for on in drawn_on(program, process.device):
        digest.update(get_state(on).numpy().tobytes())
    number = int.from_bytes(digest.digest(), "little")
    extremes = torch.tensor([number, -number])
    reduce_over_all(extremes, dist.ReduceOp.MAX, process)
    if extremes.sum() != 0:
        raise RuntimeSetupError(
            "the ranks' random generators are not in the same state",
            why="with rng='exact' every rank draws the random numbers of the global batch",
            hint="torch.manual_seed(0) on every rank, and no random draws on single ranks afterwards; or rng='fast'",
        )


def _one_seed(seeds: Tensor) -> int:
    """Derive from `seeds[0]` the seed of the random numbers that prologues draw, once per call."""
    packed = b"once per call" + int(seeds[0]).to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
