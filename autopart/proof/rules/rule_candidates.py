"""Brute-force search for all shardings with which an operator gives the right result.

The search uses no sharding rule. It runs the operator on two ranks with every combination of input placements. It
combines the ranks' outputs in every possible way, and compares the result and the gradients with the operator on
unsharded inputs. A sharding is valid if it is right in two trials with different values and shard sizes.
`torch.distributed.tensor` validates its strategies in a similar way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from autopart.ir.decisions import Strategy
from autopart.ir.graph import tensor_inputs, value
from autopart.ir.layout import R_GRAD_P, P, Placement, R, section_sizes, shard
from autopart.proof.comparison import relative

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
HALVES = (1, 2)
"""Share of every sharded dim on the first rank in the first trial: (numerator, denominator)."""
UNEVEN = ((1, 4), (1, 3), HALVES)
"""Candidates for the share on the first rank in the second trial.

The first candidate whose denominator divides all sharded dims is used.
"""

Edit = Callable[[Any, int, int], Any]
"""Function `edit(args_and_kwargs, numerator, denominator)` that scales integers of a call's arguments.

It returns the new arguments.
"""


@dataclass(frozen=True)
class Possibility:
    """A valid sharding of an operator on two ranks: its input and output placements.

    `inputs` has, for each input, the set of its valid placements. A replicated input can have two: `R` (its gradient is
    complete on each rank) and `R(grad P)` (its gradient is a partial sum on each rank). `is_edited`: True if an integer
    argument of the call, such as a size of a view, is scaled to the size of a shard.
    """

    inputs: tuple[frozenset[Placement], ...]
    outputs: tuple[Placement, ...]
    is_edited: bool = False

    def __str__(self) -> str:
        inputs = ", ".join("R" if R in places else str(min(places)) for places in self.inputs)
        edited = " with other arguments" if self.is_edited else ""
        return f"{inputs} -> {', '.join(map(str, self.outputs))}{edited}"

    def is_claimed_by(self, strategies: Sequence[Strategy]) -> bool:
        return any(
            s.outputs == self.outputs and all(p in places for p, places in zip(s.inputs, self.inputs, strict=True))
            for s in strategies
        )


def candidates(node: fx.Node) -> Iterator[Possibility]:
    """Yield the valid shardings of an operator call on two ranks, except full replication.

    Two kinds of combinations are tried: each input is sharded or replicated, or each input is a partial sum or
    replicated. Each combination is first tried with the integer arguments of the call unchanged. If this fails, one of
    them, such as a size of a view, is scaled to the size of a shard.

    Args:
        node: the call. The entry `val` in `node.meta` of each input must be a real tensor, not a fake one.
    """
    values = [value(source) for source in tensor_inputs(node)]
    # Sparse tensors are never sharded.
    if not values or not all(isinstance(v, Tensor) and not v.is_sparse for v in values):
        return
    even = _Trial(node, values, (HALVES,))
    other = _Trial(node, [_shuffled(v, i) for i, v in enumerate(values)], UNEVEN)
    for inputs in _combinations(values):
        for edit in (None, *_edits(node)):
            if edit is None and all(p == R for p in inputs):
                continue
            first = even.valid_placements(inputs, edit)
            second = other.valid_placements(inputs, edit) if first else {}
            possibilities = [
                Possibility(places, outputs, edit is not None)
                for outputs in first if outputs in second
                if all(places := tuple(map(frozenset.intersection, first[outputs], second[outputs])))
            ]  # fmt: skip
            yield from possibilities
            if possibilities:
                break  # unchanged arguments give right results, so scaled ones are not tried


def _random(like: Tensor, low: float, high: float, seed: int) -> Tensor:
    if not like.is_floating_point():
        return like
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(like.shape, generator=generator, dtype=torch.float64) * (high - low) + low).to(like.dtype)


def _shuffled(tensor: Tensor, seed: int) -> Tensor:
    order = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(seed))
    shuffled = tensor.detach().reshape(-1)[order].reshape(tensor.shape)
    return shuffled.requires_grad_(tensor.requires_grad)


def _combinations(values: Sequence[Tensor]) -> Iterator[tuple[Placement, ...]]:
    """Yield combinations of input placements: first those of `S` and `R`, then those of `P` and `R`.

    Only floating-point inputs can be partial sums (`P`).
    """
    shards = [[R, *(shard(d) for d, size in enumerate(v.shape) if size > 1)] for v in values]
    sums = [[R, P] if v.is_floating_point() else [R] for v in values]
    yield from itertools.product(*shards)
    yield from (places for places in itertools.product(*sums) if P in places)


class _Trial:
    """Reference results of an operator on unsharded inputs. Runs on two ranks are compared with them."""

    def __init__(self, node: fx.Node, values: Sequence[Tensor], parts: Sequence[tuple[int, int]]):
        self.node, self.parts = node, parts
        self.values = [v.detach().clone().requires_grad_(v.requires_grad) for v in values]
        self.outputs = self._call(self.values)
        self.weights = [_random(o, -1.0, 1.0, i) for i, o in enumerate(self.outputs)]
        self.grads = _gradients(self.outputs, self.weights, self.values)

    def _call(self, values: Sequence[Tensor], edit: Edit | None = None, part: tuple[int, int] = (1, 1)) -> list[Tensor]:
        remaining = iter(values)
        args, kwargs = fx.map_arg((self.node.args, self.node.kwargs), lambda _: next(remaining))
        if edit is not None:
            args, kwargs = edit((args, kwargs), *part)
        result = self.node.target(*args, **kwargs)
        return list(result) if isinstance(result, (tuple, list)) else [result]

    def valid_placements(
        self, inputs: Sequence[Placement], edit: Edit | None
    ) -> dict[tuple[Placement, ...], tuple[frozenset[Placement], ...]]:
        """Run the operator on two ranks with these input placements, and compare with the unsharded run.

        Returns {output placements that give the right outputs: for each input, the set of placements with right
        gradients}. The set of a replicated input can contain `R`, `R(grad P)` or both.

        Args:
            edit: function that scales an integer argument of the call; None to leave the arguments unchanged.
        """
        cut = [(v.shape[p.dim]) for v, p in zip(self.values, inputs, strict=True) if p.is_shard]
        part = next((part for part in self.parts if all(size % part[1] == 0 for size in cut)), None)
        if part is None:
            return {}
        numerator, denominator = part
        parts = [part, (denominator - numerator, denominator)]
        local = [_local(v, p, part, i) for i, (v, p) in enumerate(zip(self.values, inputs, strict=True))]
        ranks = [list(values) for values in zip(*local, strict=True)]
        try:
            outputs = [self._call(values, edit, p) for values, p in zip(ranks, parts, strict=True)]
        except (RuntimeError, ValueError, IndexError, TypeError):
            return {}
        if any(len(results) != len(self.outputs) for results in outputs):
            return {}
        summed = P in inputs
        options = [
            [p for p in _output_placements(whole, self.values, part, summed) if _recombines(whole, both, p, part)]
            for whole, both in zip(self.outputs, zip(*outputs, strict=True), strict=True)
        ]
        allowed_by_places = {}
        for places in itertools.product(*options):
            allowed = self._gradients_hold(inputs, ranks, outputs, places, part)
            if allowed is not None:
                allowed_by_places[places] = allowed
        return allowed_by_places

    def _gradients_hold(
        self, inputs: Sequence[Placement], ranks: list[list[Tensor]], outputs: list[list[Tensor]],
        places: Sequence[Placement], part: tuple[int, int],
    ) -> tuple[frozenset[Placement], ...] | None:  # fmt: skip
        grads = []
        for rank, (values, results) in enumerate(zip(ranks, outputs, strict=True)):
            seeds = [_expected(w, p, part)[rank] for w, p in zip(self.weights, places, strict=True)]
            grads.append(_gradients(results, seeds, values))
        allowed = []
        for place, whole, (first, second) in zip(inputs, self.grads, zip(*grads, strict=True), strict=True):
            options = {R: R, R_GRAD_P: P} if place == R else {place: R if place == P else place}
            allowed.append(frozenset(p for p, way in options.items() if _recombines(whole, (first, second), way, part)))
        return tuple(allowed) if all(allowed) else None


def _gradients(outputs: Sequence[Tensor], weights: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of all values; zeros for a value that does not require a gradient."""
    wanted = [v for v in values if v.requires_grad]
    used = [(o, w.to(o.dtype)) for o, w in zip(outputs, weights, strict=True) if o.requires_grad]
    if not wanted or not used:
        return [torch.zeros_like(v) for v in values]
    differentiable, seeds = zip(*used, strict=True)
    grads = iter(torch.autograd.grad(differentiable, wanted, seeds, retain_graph=True, materialize_grads=True))
    return [next(grads) if v.requires_grad else torch.zeros_like(v) for v in values]


def _local(tensor: Tensor, place: Placement, part: tuple[int, int], seed: int) -> list[Tensor]:
    """Return the two ranks' tensors of an input (shards, copies or partial sums), as leaf tensors.

    Args:
        place: placement of the input.
        part: fraction of the sharded dim on the first rank, as (numerator, denominator).
        seed: seed of the random numbers that split a value into partial sums.
    """
    if place == P:
        first = _random(tensor, -2.0, 2.0, seed)
        parts = [first, tensor.detach() - first]
    else:
        parts = _expected(tensor.detach(), place, part)
    return [p.clone().requires_grad_(tensor.requires_grad) for p in parts]


def _expected(whole: Tensor, place: Placement, part: tuple[int, int]) -> list[Tensor]:
    """Return the shards of a value on two ranks; two full values if it is replicated.

    Args:
        part: fraction of the sharded dim on the first rank, as (numerator, denominator).
    """
    if not place.is_shard:
        return [whole, whole]
    numerator, denominator = part
    sections = whole.split(section_sizes(whole.shape[place.dim], place.sections), place.dim)
    pairs = [s.split([s.shape[place.dim] * numerator // denominator,
                      s.shape[place.dim] - s.shape[place.dim] * numerator // denominator], place.dim)
             for s in sections]  # fmt: skip
    return [torch.cat(parts, place.dim) for parts in zip(*pairs, strict=True)]


def _output_placements(
    whole: Tensor, values: Sequence[Tensor], part: tuple[int, int], summed: bool
) -> Iterator[Placement]:
    """Yield the placements to try for an output: `P`, and, if no input is a partial sum, also `R` and `S`."""
    if whole.is_floating_point():
        yield P
    if summed:
        return
    yield R
    for dim, size in enumerate(whole.shape):
        joined = tuple(v.shape[dim] for v in values if v.dim() == whole.dim())
        ways = [(), *((k,) for k in range(2, size // 2 + 1) if size % k == 0)]
        ways += [joined] if len(set(joined)) > 1 and sum(joined) == size else []
        for sections in ways:
            if size > 1 and all(s % part[1] == 0 for s in section_sizes(size, sections)):
                yield shard(dim, sections)


def _recombines(whole: Tensor, both: Sequence[Tensor], place: Placement, part: tuple[int, int]) -> bool:
    """Return True if the tensors of two ranks, combined under this placement, give the full value."""
    first, second = both
    tolerance = TOLERANCE.get(whole.dtype, 0.0)
    if place == P:
        return first.shape == whole.shape == second.shape and relative(first + second, whole) <= tolerance
    expected = _expected(whole, place, part)
    return all(relative(actual, wanted) <= tolerance for actual, wanted in zip(both, expected, strict=True))


# Scaled arguments


def _edits(node: fx.Node) -> list[Edit]:
    """Return one function per integer argument of a call: it scales the argument to the size of a shard."""
    return [partial(_scaled, path=path) for path in _integers((node.args, node.kwargs), ())]


def _integers(arguments: Any, path: tuple) -> Iterator[tuple]:
    """Yield the path (keys, indices) of each integer above 1 and each list of integers in the arguments."""
    if isinstance(arguments, dict):
        for name, argument in arguments.items():
            yield from _integers(argument, (*path, name))
    elif isinstance(arguments, (list, tuple)):
        if arguments and all(type(a) is int for a in arguments):
            yield path
        for i, argument in enumerate(arguments):
            yield from _integers(argument, (*path, i))
    elif type(arguments) is int and arguments > 1:
        yield path


def _scaled(arguments: Any, numerator: int, denominator: int, path: tuple) -> Any:
    """Multiply the argument at `path` by numerator / denominator.

    Raise ValueError if the result is not an integer.
    """
    if path:
        copy = dict(arguments) if isinstance(arguments, dict) else list(arguments)
        copy[path[0]] = _scaled(copy[path[0]], numerator, denominator, path[1:])
        return copy
    if isinstance(arguments, (list, tuple)):
        return [_scaled(a, numerator, denominator, ()) for a in arguments]
    if arguments * numerator % denominator:
        raise ValueError(f"{arguments} times {numerator}/{denominator} is not an integer")
    return arguments * numerator // denominator
