"""Key ranges that attention masks allow, computed without materialising the masks.

For a hundred thousand tokens, a mask over all pairs of query and key would be too large to build. A mask mostly
consists of comparisons between a value of the query and a value of the key: position, document number, padding. If the
keys' values are sorted, every query attends one contiguous range of keys. The conjunction of two masks is the
intersection of their ranges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autopart.ir.graph import operator_name, shape, value
from autopart.ir.mask_structure import MaskWindow, QueryRun
from autopart.ir.sharding import DimSharding

_LARGEST = 2**24
"""Maximum number of elements of a value that is computed as a tensor. A larger mask is tracked as key ranges only."""

_MOST_RUNS, _WORTH_IT = 64, 0.9
"""Limits for computing attention run by run: number of runs, and fraction of (query, key) pairs that they compute.

Above either limit, one attention call with a mask tensor is faster.
"""

MaskStructure = MaskWindow | tuple[QueryRun, ...]
"""Structure of a mask: a sliding window, or runs of consecutive queries (`QueryRun`)."""

_COMPARED: Mapping[str, tuple[str, str]] = {
    "le": ("", "right"), "lt": ("", "left"), "ge": ("left", ""), "gt": ("right", ""), "eq": ("left", "right"),
}  # fmt: skip
"""{comparison of a key with a query: `searchsorted` sides for the begin and the end of the attended key range}.

"" as side: the range begins at the first key, or ends at the last key.
"""
_MIRRORED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}
_AND = {"__and__", "bitwise_and", "logical_and"}


class KeyRanges(NamedTuple):
    """Range of attended keys for each query: from key `first` to before key `end`.

    `first` and `end` are tensors of shape [..., queries]. `keys` is the number of all keys.
    """

    first: Tensor
    end: Tensor
    keys: int

    def also(self, other: KeyRanges) -> KeyRanges:
        """Return the intersection of these key ranges with those of another mask."""
        return KeyRanges(torch.maximum(self.first, other.first), torch.minimum(self.end, other.end), self.keys)

    def equal_for_samples(self) -> tuple[Tensor, Tensor] | None:
        """Return `first` and `end` of one sample, each of shape [queries], if all samples are equal.

        None if samples differ or some query attends no key.
        """
        rows = [part.reshape(-1, part.size(-1)) for part in torch.broadcast_tensors(self.first, self.end)]
        first, end = (part[0] for part in rows)
        are_equal = first.numel() and not any((part != part[:1]).any() for part in rows)
        return (first, end) if are_equal and (end > first).all() else None

    def runs(self) -> list[QueryRun]:
        """Split the queries into `QueryRun`s: groups of consecutive queries with simple key ranges.

        Returns [] if samples differ or some query attends no key.
        """
        bounds = self.equal_for_samples()
        if bounds is None:
            return []
        first, end = (part.tolist() for part in bounds)
        runs, start = [], 0
        for stop in range(1, len(first) + 1):
            if stop == len(first) or not _continues_run(first, end, start, stop):
                runs.append(_run(first[start:stop], end[start:stop]))
                start = stop
        return runs

    def band(self) -> MaskWindow | None:
        """Return the sliding window by which these key ranges are defined.

        Returns None if no sliding window has these ranges, if samples differ, or if some query attends no key.
        """
        bounds = self.equal_for_samples()
        if bounds is None:
            return None
        first, end = bounds
        query = torch.arange(first.numel(), device=first.device)
        before, after = int((first == 0).sum()) - 1, int(end[0]) - 1
        is_band = before >= 0 and after >= 0
        is_band = is_band and bool((first == (query - before).clamp(min=0)).all())
        return (
            MaskWindow(before, after) if is_band and (end == (query + after + 1).clamp(max=self.keys)).all() else None
        )


def _continues_run(first: Sequence[int], end: Sequence[int], start: int, query: int) -> bool:
    """Return True if `query` belongs to the `QueryRun` that begins with query `start`.

    The queries from `start` to `query` - 1 belong to this run already. In a run, `first` stays constant for some
    queries, then increases by one per query. `end` increases by one per query, then stays constant.
    """
    begins, ends = first[query] - first[query - 1], end[query] - end[query - 1]
    has_risen, has_stayed = first[query - 1] > first[start], query - start > 1 and end[query - 1] == end[query - 2]
    return begins in ((1,) if has_risen else (0, 1)) and ends in ((0,) if has_stayed else (0, 1))


def _run(first: Sequence[int], end: Sequence[int]) -> QueryRun:
    """Return the `QueryRun` of consecutive queries that attend the keys `first[i]` to `end[i]` - 1."""
    rises = sum(begin == first[0] for begin in first)
    begins = first[0] + 1 - rises if rises < len(first) else first[0] - len(first)
    return QueryRun(len(first), first[0], end[-1], begins, end[0] if end[0] < end[-1] else end[-1])


def mask_structure_of(intervals: KeyRanges, queries: int, keys: int) -> MaskStructure | None:
    """Return the structure of a mask that a kernel can use: a sliding window, or runs of queries.

    Runs (groups of consecutive queries) are returned only if they skip enough keys to be faster. None if the mask has
    no such structure.
    """
    band = intervals.band()
    if band is not None and queries == keys:
        return band
    runs = tuple(intervals.runs())
    num_read = sum(run.queries * (run.high - run.low) for run in runs)
    return runs if runs and len(runs) <= _MOST_RUNS and num_read <= _WORTH_IT * queries * keys else band


def key_ranges_of(mask: Tensor) -> KeyRanges | None:
    """Return the key ranges of a boolean mask of shape [..., queries, keys].

    None if the attended keys of some query are not contiguous.
    """
    keys, counts = mask.size(-1), mask.sum(-1)
    first = mask.to(torch.uint8).argmax(-1)
    end = torch.where(counts > 0, first + counts, first)
    position = torch.arange(keys, device=mask.device)
    inside = (position >= first.unsqueeze(-1)) & (position < end.unsqueeze(-1))
    return KeyRanges(first, end, keys) if bool((inside == mask).all()) else None


def key_ranges_of_window(band: MaskWindow, queries: int, keys: int) -> KeyRanges:
    """Return the key ranges of a sliding window, for `queries` queries and `keys` keys."""
    query = torch.arange(queries)
    return KeyRanges((query - band.before).clamp(min=0), (query + band.after + 1).clamp(max=keys), keys)


class KeyRangeEvaluator:
    """Evaluator of graph nodes that compute masks: it returns key ranges in place of mask tensors.

    >>> KeyRangeEvaluator({}).of(mask)    # doctest: +SKIP
    KeyRanges(first=tensor([0, 0, 0]), end=tensor([1, 2, 3]), keys=3)
    """

    def __init__(
        self, values: Mapping[fx.Node, Any], device: torch.device | str = "cpu",
        rank: Mapping[str, tuple[int, int]] | None = None,
    ):  # fmt: skip
        """Start from the values that are known for some nodes.

        Args:
            values: {node: its value}.
            device: device of new tensors.
            rank: for a graph that runs on one rank, {mesh axis: (index of the rank, number of ranks)}.
        """
        self.known: dict[fx.Node, Any] = dict(values)
        self.device, self.rank = torch.device(device), rank or {}

    @torch.no_grad()
    def of(self, mask: fx.Node) -> KeyRanges | None:
        """Return the key ranges of the mask that a node computes, None if they cannot be derived."""
        result = self.made(mask)
        if isinstance(result, Tensor) and result.dtype == torch.bool and result.dim() >= 2:
            return key_ranges_of(result)
        return result if isinstance(result, KeyRanges) else None

    @torch.no_grad()
    def made(self, node: fx.Node) -> Any:
        """Return the value of a node as a tensor or as key ranges; None if neither can be computed."""
        todo = [node]
        while todo:
            current = todo[-1]
            missing = [used for used in current.all_input_nodes if used not in self.known]
            if current in self.known or not missing:
                todo.pop()
                self.known.setdefault(current, None) if current.op != "call_function" else self._keep(current)
            else:
                todo += missing
        return self.known[node]

    def _keep(self, node: fx.Node) -> None:
        if node not in self.known:
            read = [self.known[used] for used in node.all_input_nodes]
            self.known[node] = None if any(each is None for each in read) else self._compute(node)

    def _compute(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.known.__getitem__)
        name = operator_name(node).removeprefix("aten::")
        output = value(node)
        if name == "autopart::slice":
            return self._shard(args[0], *args[1:], dims=len(shape(node)))
        if any(isinstance(self.known[used], KeyRanges) for used in node.all_input_nodes):
            return _apply_to_ranges(name, args, len(shape(node)))
        if name in _COMPARED and output.dim() >= 2 and output.numel() > _LARGEST:
            return _compared(name, *args)
        if name == "expand" and output.dim() >= 2 and output.numel() > _LARGEST:
            return _expanded(args[0], *output.shape[-2:])
        if not isinstance(output, Tensor) or output.numel() > _LARGEST:
            return None
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self.device}
        try:
            return node.target(*args, **kwargs)
        except RuntimeError:  # the call raises on real tensors too, such as a float32 `full` of the smallest float64
            return None

    def _shard(
        self, whole: Tensor | KeyRanges, axis: str, dim: int, size: int, sections: Sequence[int] = (), *, dims: int
    ) -> Any:
        """Return this rank's shard of a tensor or of key ranges.

        Key ranges can be sharded along queries, and along samples if all samples are equal. Returns None for any other
        sharding of key ranges.
        """
        index, ranks = self.rank[axis]
        if isinstance(whole, Tensor):
            return DimSharding(dim, size, tuple(sections), ranks).take(whole, index)
        if dim < dims - 2:
            return whole if whole.equal_for_samples() is not None else None
        if dim == dims - 1:
            return None
        parts = (part.expand(*part.shape[:-1], size) for part in whole[:2])
        first, end = (DimSharding(part.dim() - 1, size, tuple(sections), ranks).take(part, index) for part in parts)
        return KeyRanges(first, end, whole.keys)


def _compared(name: str, one: Any, other: Any) -> KeyRanges | None:
    """Return the key ranges of a comparison between query values [..., q, 1] and key values [..., 1, k]."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return None
    if one.size(-1) != 1:
        one, other = other, one
    else:
        name = _MIRRORED[name]
    if one.dim() < 2 or one.size(-1) != 1 or (other.dim() >= 2 and other.size(-2) != 1):
        return None
    queries, keys = one.squeeze(-1), other.squeeze(-2) if other.dim() >= 2 else other
    if bool((keys[..., 1:] < keys[..., :-1]).any()):
        return None
    rows = torch.broadcast_shapes(queries.shape[:-1], keys.shape[:-1])
    queries = queries.expand(*rows, -1).contiguous()
    keys = keys.expand(*rows, -1).contiguous()
    begins, ends = _COMPARED[name]
    first = torch.searchsorted(keys, queries, side=begins) if begins else torch.zeros_like(queries, dtype=torch.int64)
    number = keys.size(-1)
    end = torch.searchsorted(keys, queries, side=ends) if ends else torch.full_like(first, number)
    return KeyRanges(first, end, number)


def _apply_to_ranges(name: str, args: Any, dims: int) -> KeyRanges | None:
    """Apply an operator of a mask computation to key ranges. Returns None if the result has no key ranges."""
    intervals = args[0] if isinstance(args[0], KeyRanges) else None
    if name in _AND:
        keys = next(part.keys for part in args if isinstance(part, KeyRanges))
        one, other = (part if isinstance(part, KeyRanges) else _ranges_of_constant(part, keys) for part in args)
        return one.also(other) if one is not None and other is not None else None
    if intervals is None:
        return None
    if name in ("to", "_to_copy", "expand"):
        return intervals  # ranges broadcast over samples
    if name == "unsqueeze" and args[1] % dims < dims - 2:
        at, before = args[1] % dims, dims - 2  # dims of the mask before the new one, without its keys
        first, end = (part[(None,) * (before - part.dim())].unsqueeze(at) for part in intervals[:2])
        return KeyRanges(first, end, intervals.keys)
    if name == "where" and isinstance(args[1], (int, float)) and isinstance(args[2], (int, float)):
        return intervals if args[1] == 0 and args[2] <= torch.finfo(torch.bfloat16).min / 2 else None
    return None


def _expanded(mask: Any, queries: int, keys: int) -> KeyRanges | None:
    """Return the key ranges of a mask that is broadcast along queries, along keys or along both."""
    ranges = _ranges_of_constant(mask, keys)
    if ranges is None:
        return None
    first, end = (part.expand(*part.shape[:-1], queries) for part in ranges[:2])
    return KeyRanges(first, end, keys)


def _ranges_of_constant(mask: Any, keys: int) -> KeyRanges | None:
    """Return the key ranges of a mask that is equal for all queries, or for all keys."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        return None
    mask = mask.expand(1, 1) if mask.dim() == 0 else mask.unsqueeze(0) if mask.dim() == 1 else mask
    if mask.size(-1) == 1:
        is_attended = mask.squeeze(-1).to(torch.int64)
        return KeyRanges(torch.zeros_like(is_attended), is_attended * keys, keys)
    return key_ranges_of(mask) if mask.size(-2) == 1 else None
