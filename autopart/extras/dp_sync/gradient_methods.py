"""Methods that change only gradients: afterwards every data rank has bitwise identical gradients.

A method gets the partial gradient of each rank and returns the sum over ranks. Only `"all_reduce"` and
`"parameter_server"` return the exact sum. In the papers, a rank has the mean gradient of its samples, which is n times
the partial gradient on n ranks, and a method returns the mean over ranks. Both results are equal, because the output of
all compressors here scales with the input. Partial gradients avoid rounding in the multiplication by n.

`State` is the memory of a method on a rank, such as compression errors, in units of partial gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopart.extras.dp_sync.compressors import Compressor, Draw, compressor_of
from autopart.extras.dp_sync.sync_options import Method
from autopart.extras.dp_sync.transports import SyncTransport

State = dict[str, dict[str, Tensor]]
"""{parameter: {kind of state: vector of its local elements}}."""

Gradients = Mapping[str, Tensor]
"""{parameter: this rank's partial gradient}, in equal order on every rank."""


@dataclass(frozen=True)
class MethodSeeds:
    """Seeds of the random numbers of a method.

    Each data rank draws different numbers. If several `tp` ranks replicate a shard of a parameter, they draw equal
    numbers for it. `parts`: {parameter: name of its local shard}.
    """

    seed: int
    step: int
    parts: Mapping[str, str] = field(default_factory=dict)

    def of(self, name: str, rank: int) -> Draw:
        """Return a source of random numbers for a parameter on a data rank."""
        text = f"{self.seed} {self.step} {name} {self.parts.get(name, '')} {rank}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")

        def draw(count: int) -> Tensor:
            return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

        return draw


def synchronised(
    method: Method, gradients: Sequence[Gradients], states: Sequence[State], wire: SyncTransport, draws: MethodSeeds
) -> list[dict[str, Tensor]]:
    """Run a method, and update `states`. Return {name: synchronised gradient} for each local rank."""
    flat = [{name: gradient.reshape(-1) for name, gradient in of.items()} for of in gradients]
    if method.name in ("double_squeeze", "neolithic", "parameter_server"):
        sums = _double_squeeze(method, flat, states, wire, draws)
    elif method.name in ("ef21", "ef21_sgdm"):
        sums = _ef21(method, flat, states, wire, draws)
    elif method.name == "all_reduce":
        sums = summed(flat, wire)
    else:
        sums = _compress_and_sum(method, flat, states, wire, draws)
    return [{name: value.view(of[name].shape) for name, value in rank.items()}
            for rank, of in zip(sums, gradients, strict=True)]  # fmt: skip


def summed(vectors: Sequence[Mapping[str, Tensor]], wire: SyncTransport) -> list[dict[str, Tensor]]:
    """Return the exact sums over ranks of {name: vector}; all vectors have one dtype."""
    sizes = [vector.numel() for vector in vectors[0].values()]
    totals = wire.sum([torch.cat(list(of.values())) for of in vectors])
    return [dict(zip(of, total.split(sizes), strict=True)) for of, total in zip(vectors, totals, strict=True)]


def _compress_and_sum(
    method: Method, gradients: Sequence[Gradients], states: Sequence[State], wire: SyncTransport, draws: MethodSeeds
) -> list[dict[str, Tensor]]:
    """Sum compressed gradients, with error feedback except for `qsgd` and `memory=False`.

    C is the compressor of the method. With the gradient g and the error e of earlier steps, a rank sends C(e + g) and
    stores the new error e + g - C(e + g).
    """
    compressor = compressor_of(method)
    remembers = method.name != "qsgd" and bool(method.memory)
    sent = []
    for rank, of, state in zip(wire.here, gradients, states, strict=True):
        memory = {name: state.setdefault(name, {}) if remembers else None for name in of}
        sent.append([_encode_with_feedback(gradient, memory[name], "error", compressor, draws.of(name, rank))
                     for name, gradient in of.items()])  # fmt: skip
    return _sum_decoded(sent, gradients, compressor, wire)


def _encode_with_feedback(
    x: Tensor, memory: dict[str, Tensor] | None, error: str, compressor: Compressor, draw: Draw
) -> Tensor:
    """Encode a vector plus its earlier error `memory[error]`, and store the new error there.

    If `memory` is None, there is no error feedback.
    """
    corrected = x + memory[error] if memory and error in memory else x
    sent = compressor.encode(corrected, draw)
    if memory is not None:
        memory[error] = corrected - compressor.decode(sent, x)
    return sent


def _sum_decoded(
    sent: Sequence[Sequence[Tensor]], like: Sequence[Gradients], compressor: Compressor, wire: SyncTransport
) -> list[dict[str, Tensor]]:
    """Exchange the encoded vectors of all ranks, decode them, and return their sums in rank order.

    Args:
        sent: encoded gradients of each local rank.
        like: for each local rank, gradients with the names, lengths and dtypes of the results.
    """
    received = wire.all_gather_equal([torch.cat(list(parts)) for parts in sent])
    sums_of_rows: dict[int, dict[str, Tensor]] = {}
    sums = []
    for rows, of in zip(received, like, strict=True):
        if id(rows) not in sums_of_rows:  # `ListTransport` returns one object to all ranks
            sizes = [compressor.size_bytes(gradient) for gradient in of.values()]
            split = [row.split(sizes) for row in rows]
            sums_of_rows[id(rows)] = {
                name: torch.stack([compressor.decode(parts[index], gradient) for parts in split]).sum(0)
                for index, (name, gradient) in enumerate(of.items())
            }
        sums.append(sums_of_rows[id(rows)])
    return sums


def _ef21(
    method: Method, gradients: Sequence[Gradients], states: Sequence[State], wire: SyncTransport, draws: MethodSeeds
) -> list[dict[str, Tensor]]:
    """Run EF21 and return the sum of the ranks' gradient estimates h.

    In each step a rank sends C(g - h), the compressed difference between its gradient g and its estimate h, and adds it
    to h. The first h is g, sent uncompressed. With momentum, h follows v = (1 - eta) v + eta g instead of g.
    """
    compressor = compressor_of(method)
    if any("tracked" not in states[0].get(name, {}) for name in gradients[0]):
        totals = summed(gradients, wire)
        for of, state, total in zip(gradients, states, totals, strict=True):
            for name, gradient in of.items():
                state[name] = {"tracked": gradient.clone(), "sum": total[name].clone()}
                if method.name == "ef21_sgdm":
                    state[name]["momentum"] = gradient.clone()
        return totals
    sent = []
    for rank, of, state in zip(wire.here, gradients, states, strict=True):
        parts = []
        for name, gradient in of.items():
            memory, target = state[name], gradient
            if method.name == "ef21_sgdm":
                target = (1 - method.momentum) * memory["momentum"] + method.momentum * gradient
                memory["momentum"] = target
            parts.append(compressor.encode(target - memory["tracked"], draws.of(name, rank)))
            memory["tracked"] = memory["tracked"] + compressor.decode(parts[-1], gradient)
        sent.append(parts)
    sums = []
    for changes, state in zip(_sum_decoded(sent, gradients, compressor, wire), states, strict=True):
        for name, change in changes.items():
            state[name]["sum"] = state[name]["sum"] + change
        sums.append({name: state[name]["sum"] for name in changes})
    return sums


def servers(method: Method, sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Return {parameter: rank that is its server}.

    The server of a parameter sums its gradients and sends the sum. Each parameter is assigned to the rank with the
    least load. For `"parameter_server"`, the first rank is the server of all parameters.
    """
    if method.name == "parameter_server":
        return dict.fromkeys(sizes, 0)
    load, server_of = [0] * num_ranks, {}
    for name, size in sizes.items():
        server_of[name] = load.index(min(load))
        load[server_of[name]] += size
    return server_of


def _double_squeeze(
    method: Method, gradients: Sequence[Gradients], states: Sequence[State], wire: SyncTransport, draws: MethodSeeds
) -> list[dict[str, Tensor]]:
    """Run DoubleSqueeze: workers send compressed gradients to a server, which sends their compressed sum.

    C is the compressor of the method, e the compression error of a worker, and E the compression error of the server. A
    worker sends q = C(g + e) for its gradient g, and the server sends C(sum of all q + E). Worker and server store
    their new errors. Each parameter has a single server, so that C gets the full vector.
    """
    compressor = compressor_of(method)
    is_lossy = method.name != "parameter_server"
    server_of = servers(method, {name: gradient.numel() for name, gradient in gradients[0].items()}, wire.num_ranks)
    sent: list[list[list[Tensor]]] = []
    for rank, of, state in zip(wire.here, gradients, states, strict=True):
        parts: list[list[Tensor]] = [[] for _ in range(wire.num_ranks)]
        for name, gradient in of.items():
            memory = state.setdefault(name, {}) if is_lossy else None
            parts[server_of[name]].append(
                _encode_with_feedback(gradient, memory, "error", compressor, draws.of(name, rank))
            )
        sent.append(parts)
    arrived = wire.all_to_all_vectors(
        [[_concatenated(part, of) for part in parts] for parts, of in zip(sent, gradients, strict=True)]
    )
    answers = []
    for rank, of, state, rows in zip(wire.here, gradients, states, arrived, strict=True):
        names = [name for name in of if server_of[name] == rank]
        split = [row.split([compressor.size_bytes(of[name]) for name in names]) for row in rows]
        answer = []
        for index, name in enumerate(names):
            total = torch.stack([compressor.decode(parts[index], of[name]) for parts in split]).sum(0)
            memory = state.setdefault(name, {}) if is_lossy else None
            answer.append(
                _encode_with_feedback(
                    total, memory, "server_error", compressor, draws.of(f"{name} of the server", rank)
                )
            )
        answers.append(_concatenated(answer, of))
    return _gather_answers(method, answers, gradients, server_of, compressor, wire)


def _gather_answers(
    method: Method, answers: Sequence[Tensor], gradients: Sequence[Gradients], server_of: Mapping[str, int],
    compressor: Compressor, wire: SyncTransport,
) -> list[dict[str, Tensor]]:  # fmt: skip
    """Gather the compressed sums of all servers on every rank, and return the decoded sums.

    An all-gather needs equal lengths, so every server pads its compressed sums to the longest length.
    """
    names = [[name for name in gradients[0] if server_of[name] == server] for server in range(wire.num_ranks)]
    like = gradients[0]
    lengths = [sum(compressor.size_bytes(like[name]) for name in of_server) for of_server in names]
    padded = [torch.nn.functional.pad(answer, (0, max(lengths) - answer.numel())) for answer in answers]
    if method.name == "parameter_server":
        received = [[row, *[row[:0]] * (wire.num_ranks - 1)] for row in wire.broadcast_first(padded)]
    else:
        received = wire.all_gather_equal(padded)
    sums = []
    for rows, of in zip(received, gradients, strict=True):
        decoded: dict[str, Tensor] = {}
        for row, served, length in zip(rows, names, lengths, strict=True):
            sizes = [compressor.size_bytes(of[name]) for name in served]
            parts = row[:length].split(sizes) if served else ()
            decoded |= {name: compressor.decode(part, of[name]) for name, part in zip(served, parts, strict=True)}
        sums.append({name: decoded[name] for name in of})
    return sums


def _concatenated(parts: Sequence[Tensor], of: Gradients) -> Tensor:
    empty = next(iter(of.values())).new_empty(0, dtype=torch.uint8)
    return torch.cat([empty, *parts])
