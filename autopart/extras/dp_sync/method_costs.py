"""Costs of each data-parallel method: exchanges, memory traffic, and state between steps.

With `n` ranks, a gradient or model of `S` bytes, and `C` bytes of its compressed form (`sent_bytes`):

| method | exchanges | passes over `S` | state |
|---|---|---|---|
| parameter_server | the server receives, then sends `(n - 1) S` | 2 | 0 |
| qsgd | all-gather of `n C` | 3 + n | 0 |
| top_k, sign | all-gather of `n C` | 6 + n | S |
| ef21 | all-gather of `n C` | 8 + n | 2 S |
| ef21_sgdm | all-gather of `n C` | 10 + n | 3 S |
| double_squeeze | all-to-all of `n C`, all-gather of `C` | 10 | S + S/n |
| neolithic | all-to-all of `n C`, all-gather of `C` | 10 per round | S + S/n |
| powersgd | three all-reduces: of both factors, and of uncompressed parameters | 10 | S + factors |
| gossip | a send of `S` to every neighbour | 2, and 1 per neighbour | 0 |
| exact_diffusion | a send of `S` to every neighbour | 2, and 1 per neighbour | S |
| gradient_tracking | a send of `2 S` to every neighbour | 2, and 1 per neighbour | 2 S |
| local | an all-reduce of `S` every `every` steps | 2 in such a step | 0 |
| diloco | an all-reduce of `S` every `every` steps | 8 in such a step | 2 S |

A pass is a read or a write of `S` bytes by the runtime (`data_sync.py`). Periodic averaging of gossip adds an
all-reduce of `S` every `every` steps. Sources: Patarasuk and Yuan 2009 for the bytes of a ring all-reduce; Yuan's
lecture for the parameter server.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from autopart.ir.run.sync_option import Exchange, MethodParameters

if TYPE_CHECKING:
    from autopart.extras.dp_sync.sync_options import Method


def neighbours(graph: str, num_ranks: int) -> int:
    """Return the maximum number of ranks with which a rank exchanges values on a gossip graph.

    >>> [neighbours(graph, 8) for graph in ("ring", "grid", "exp", "one_peer", "complete")]
    [2, 3, 3, 1, 7]
    """
    height = max(h for h in range(1, math.isqrt(num_ranks) + 1) if num_ranks % h == 0)
    counts = {
        "ring": 2, "grid": sum(min(2, side - 1) for side in (height, num_ranks // height)),
        "exp": math.ceil(math.log2(num_ranks)), "one_peer": 1,
    }  # fmt: skip
    return min(counts.get(graph, num_ranks - 1), num_ranks - 1)


def sent_elements(method: Method, numel: int) -> int:
    """Return the number of elements that `top_k` sends of `numel` elements: max(1, round(ratio * numel)).

    With `"top_k:0.01"` these are 10 of 1000 elements, and 1 of 4.
    """
    return min(numel, max(1, round(method.ratio * numel)))


def sent_bytes(method: Method, numel: int, itemsize: int) -> int:
    """Return the bytes that a rank sends for a vector of `numel` elements.

    `top_k` sends values with 32-bit indices. Other compressors send a scale and some bits per element.
    """
    if method.name == "double_squeeze":
        return sent_bytes(method.compressor, numel, itemsize)
    if method.name in ("top_k", "ef21", "ef21_sgdm", "neolithic"):
        rounds = method.rounds if method.name == "neolithic" else 1
        return rounds * sent_elements(method, numel) * (itemsize + 4)
    if method.name in ("sign", "qsgd"):
        bits = 1 if method.name == "sign" else method.bits
        return itemsize + -(-numel * bits // 8)
    return numel * itemsize


def factor_bytes(method: Method, elements: float, itemsize: int, shape: tuple[int, ...]) -> float:
    """Return the bytes that PowerSGD sends for a rank's shard of a parameter.

    For a matrix [m, n'] and rank r, PowerSGD sends factors of r (m + n') elements in total. If this exceeds half of the
    matrix, it sends the matrix uncompressed.
    """
    if method.name != "powersgd" or len(shape) < 2 or not elements:
        return elements * itemsize
    width = elements / shape[0]
    edges = (shape[0] + width) * min(method.rank, shape[0], width)
    return itemsize * (edges if 2 * edges <= elements else elements)


def exchanges(method: Method, of: MethodParameters, num_ranks: Any, several: int) -> list[Exchange]:
    """Return the collectives and sends of a method per step, for two or more ranks.

    Args:
        of: sizes of the parameters that the method synchronises.
        num_ranks: number of ranks, an integer or a sympy expression. Bytes can be sympy expressions as well.
        several: number of ranks as an integer, to compute the number of neighbours on a gossip graph.
    """
    size, sent = of.size_bytes, of.made_bytes
    if method.name == "parameter_server":
        return [Exchange("send", size, 2 * (num_ranks - 1))]
    if method.name in ("double_squeeze", "neolithic"):
        return [Exchange("all_to_all", num_ranks * sent), Exchange("all_gather", sent)]
    if method.name == "powersgd":
        return [Exchange("all_reduce", of.factor_bytes / 3)] * 3
    if method.name in ("local", "diloco"):
        return [Exchange("all_reduce", size, 1 / method.every)]
    if method.changes == "models":
        times = 2 if method.name == "gradient_tracking" else 1
        if method.graph == "complete":
            return [Exchange("all_reduce", times * size)]
        gossip = [Exchange("send", times * size, neighbours(method.graph, several))]
        every = dict(method.numbers).get("every", 0)
        return [*gossip, Exchange("all_reduce", size, 1 / every)] if every else gossip
    if method.name == "all_reduce":
        return [Exchange("all_reduce", size)]
    return [Exchange("all_gather", num_ranks * sent)]


def passes(method: Method, num_ranks: int) -> float:
    """Return the number of passes over the gradients' memory in a step (see the table above in this file)."""
    several = {"qsgd": 3, "top_k": 6, "sign": 6, "ef21": 8, "ef21_sgdm": 10}
    if method.name in several:
        return several[method.name] + num_ranks
    if method.name in ("double_squeeze", "neolithic"):
        return 10.0 * dict(method.numbers).get("rounds", 1)
    if method.name == "powersgd":
        return 10.0
    if method.name in ("local", "diloco"):
        return (8.0 if method.name == "diloco" else 2.0) / method.every
    if method.changes == "models":
        return 2.0 + neighbours(method.graph, num_ranks)
    return 2.0


def state_bytes(method: Method, of: MethodParameters, num_ranks: int) -> float:
    """Return the bytes of state that a rank stores between steps."""
    size = of.size_bytes
    times = {"sign": 1.0, "ef21": 2.0, "ef21_sgdm": 3.0, "double_squeeze": 1 + 1 / num_ranks,
             "neolithic": 1 + 1 / num_ranks, "exact_diffusion": 1.0, "gradient_tracking": 2.0,
             "diloco": 2.0}  # fmt: skip
    if method.name == "top_k":
        return size if method.memory else 0.0
    return size + of.factor_bytes if method.name == "powersgd" else times.get(method.name, 0.0) * size
