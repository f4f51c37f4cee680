"""Methods that change gradients alone: every data rank ends with the same ones, bit for bit.

What a rank gives is its part of the global gradient, so the exact sum of all is what `"all_reduce"` makes. In the
papers' words a rank has the gradient of its own rows' mean, n times that part, and the mean is taken: all compressors
here let a factor pass, so it is the same, without its rounding. `State` holds what a method remembers of a parameter
on a rank, in these units.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopart.ir.run.dp_sync import Method
from autopart.runtime.dp_sync.compressors import Compressor, Draw, compressor_of
from autopart.runtime.dp_sync.transports import Wire

State = dict[str, dict[str, Tensor]]
"""{parameter: {what: vector of its local elements}}."""

Gradients = Mapping[str, Tensor]
"""{parameter: this rank's part of its gradient}, in the same order on every rank."""


@dataclass(frozen=True)
class Draws:
    """What random numbers follow from: every rank draws its own, for each part of a parameter the same wherever that is
    held. `parts`: {parameter: which part of it}."""

    seed: int
    step: int
    parts: Mapping[str, str] = field(default_factory=dict)

    def of(self, name: str, rank: int) -> Draw:
        """The numbers of a parameter on a rank."""
        text = f"{self.seed} {self.step} {name} {self.parts.get(name, '')} {rank}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")

        def draw(count: int) -> Tensor:
            return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

        return draw


def synchronised(
    method: Method, gradients: Sequence[Gradients], states: Sequence[State], wire: Wire, draws: Draws
) -> list[dict[str, Tensor]]:
    """What every rank hands to its optimizer, of the ranks that are here; `states` are changed."""
    flat = [{name: gradient.reshape(-1) for name, gradient in of.items()} for of in gradients]
    if method.name in ("double_squeeze", "neolithic", "parameter_server"):
        sums = _through_servers(method, flat, states, wire, draws)
    elif method.name in ("ef21", "ef21_sgdm"):
        sums = _tracked(method, flat, states, wire, draws)
    elif method.name == "all_reduce":
        sums = summed(flat, wire)
    else:
        sums = _compressed(method, flat, states, wire, draws)
    return [{name: value.view(of[name].shape) for name, value in rank.items()}
            for rank, of in zip(sums, gradients, strict=True)]  # fmt: skip


def summed(vectors: Sequence[Mapping[str, Tensor]], wire: Wire) -> list[dict[str, Tensor]]:
    """The exact sums of vectors of one dtype."""
    sizes = [vector.numel() for vector in vectors[0].values()]
    totals = wire.sum([torch.cat(list(of.values())) for of in vectors])
    return [dict(zip(of, total.split(sizes), strict=True)) for of, total in zip(vectors, totals, strict=True)]


def _compressed(
    method: Method, gradients: Sequence[Gradients], states: Sequence[State], wire: Wire, draws: Draws
) -> list[dict[str, Tensor]]:
    """The sum of what ranks compress: p = e + g is sent as C(p), and e = p - C(p) is remembered."""
    compressor = compressor_of(method)
    remembers = method.name != "qsgd" and bool(method.memory)
    sent = []
    for rank, of, state in zip(wire.here, gradients, states, strict=True):
        known = {name: state.setdefault(name, {}) if remembers else None for name in of}
        sent.append([_encoded(gradient, known[name], "error", compressor, draws.of(name, rank))
                     for name, gradient in of.items()])  # fmt: skip
    return _sums_of(sent, gradients, compressor, wire)


def _encoded(x: Tensor, known: dict[str, Tensor] | None, error: str, compressor: Compressor, draw: Draw) -> Tensor:
    """What is sent of a vector and of what was left out of it before, `known[error]`; what is left out now replaces
    that. None: nothing is remembered."""
    corrected = x + known[error] if known and error in known else x
    sent = compressor.encode(corrected, draw)
    if known is not None:
        known[error] = corrected - compressor.decode(sent, x)
    return sent


def _sums_of(
    sent: Sequence[Sequence[Tensor]], like: Sequence[Gradients], compressor: Compressor, wire: Wire
) -> list[dict[str, Tensor]]:
    """On every rank the sum, in the order of ranks, of what all sent of every parameter."""
    received = wire.to_all([torch.cat(list(parts)) for parts in sent])
    known: dict[int, dict[str, Tensor]] = {}
    sums = []
    for rows, of in zip(received, like, strict=True):
        if id(rows) not in known:  # lists give all ranks the same
            sizes = [compressor.size_bytes(gradient) for gradient in of.values()]
            split = [row.split(sizes) for row in rows]
            known[id(rows)] = {
                name: torch.stack([compressor.decode(parts[index], gradient) for parts in split]).sum(0)
                for index, (name, gradient) in enumerate(of.items())
            }
        sums.append(known[id(rows)])
    return sums


def _tracked(
    method: Method, gradients: Sequence[Gradients], states: Sequence[State], wire: Wire, draws: Draws
) -> list[dict[str, Tensor]]:
    """EF21: a rank's h follows its gradient, h = h + C(g - h), and the sum of all h is handed on; the first h is g,
    sent whole. With momentum h follows v = (1 - eta) v + eta g in its place."""
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
            known, followed = state[name], gradient
            if method.name == "ef21_sgdm":
                followed = (1 - method.momentum) * known["momentum"] + method.momentum * gradient
                known["momentum"] = followed
            parts.append(compressor.encode(followed - known["tracked"], draws.of(name, rank)))
            known["tracked"] = known["tracked"] + compressor.decode(parts[-1], gradient)
        sent.append(parts)
    sums = []
    for changes, state in zip(_sums_of(sent, gradients, compressor, wire), states, strict=True):
        for name, change in changes.items():
            state[name]["sum"] = state[name]["sum"] + change
        sums.append({name: state[name]["sum"] for name in changes})
    return sums


def servers(method: Method, sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """{parameter: the rank that is its server}: each next one goes to the rank with least so far; of
    `"parameter_server"` the first rank is that of all."""
    if method.name == "parameter_server":
        return dict.fromkeys(sizes, 0)
    load, home = [0] * num_ranks, {}
    for name, size in sizes.items():
        home[name] = load.index(min(load))
        load[home[name]] += size
    return home


def _through_servers(
    method: Method, gradients: Sequence[Gradients], states: Sequence[State], wire: Wire, draws: Draws
) -> list[dict[str, Tensor]]:
    """DoubleSqueeze: q = C(g + e) goes to the parameter's server, which sends u = C(the sum of all q + E) to all; both
    remember what they left out. Each parameter has one server, so that C sees all of it."""
    compressor = compressor_of(method)
    is_lossy = method.name != "parameter_server"
    home = servers(method, {name: gradient.numel() for name, gradient in gradients[0].items()}, wire.num_ranks)
    sent: list[list[list[Tensor]]] = []
    for rank, of, state in zip(wire.here, gradients, states, strict=True):
        parts: list[list[Tensor]] = [[] for _ in range(wire.num_ranks)]
        for name, gradient in of.items():
            known = state.setdefault(name, {}) if is_lossy else None
            parts[home[name]].append(_encoded(gradient, known, "error", compressor, draws.of(name, rank)))
        sent.append(parts)
    arrived = wire.to_each([[_joined(part, of) for part in parts] for parts, of in zip(sent, gradients, strict=True)])
    answers = []
    for rank, of, state, rows in zip(wire.here, gradients, states, arrived, strict=True):
        names = [name for name in of if home[name] == rank]
        split = [row.split([compressor.size_bytes(of[name]) for name in names]) for row in rows]
        answer = []
        for index, name in enumerate(names):
            total = torch.stack([compressor.decode(parts[index], of[name]) for parts in split]).sum(0)
            known = state.setdefault(name, {}) if is_lossy else None
            answer.append(_encoded(total, known, "server_error", compressor, draws.of(f"{name} of the server", rank)))
        answers.append(_joined(answer, of))
    return _answered(method, answers, gradients, home, compressor, wire)


def _answered(
    method: Method, answers: Sequence[Tensor], gradients: Sequence[Gradients], home: Mapping[str, int],
    compressor: Compressor, wire: Wire,
) -> list[dict[str, Tensor]]:  # fmt: skip
    """What all servers answer, on every rank: padded to the longest, which is about as long as each."""
    names = [[name for name in gradients[0] if home[name] == server] for server in range(wire.num_ranks)]
    like = gradients[0]
    lengths = [sum(compressor.size_bytes(like[name]) for name in of_server) for of_server in names]
    padded = [torch.nn.functional.pad(answer, (0, max(lengths) - answer.numel())) for answer in answers]
    if method.name == "parameter_server":
        received = [[row, *[row[:0]] * (wire.num_ranks - 1)] for row in wire.from_first(padded)]
    else:
        received = wire.to_all(padded)
    sums = []
    for rows, of in zip(received, gradients, strict=True):
        decoded: dict[str, Tensor] = {}
        for row, served, length in zip(rows, names, lengths, strict=True):
            sizes = [compressor.size_bytes(of[name]) for name in served]
            parts = row[:length].split(sizes) if served else ()
            decoded |= {name: compressor.decode(part, of[name]) for name, part in zip(served, parts, strict=True)}
        sums.append({name: decoded[name] for name in of})
    return sums


def _joined(parts: Sequence[Tensor], of: Gradients) -> Tensor:
    empty = next(iter(of.values())).new_empty(0, dtype=torch.uint8)
    return torch.cat([empty, *parts])
