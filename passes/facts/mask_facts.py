"""Structure (causal, sliding window) of attention masks, for the memory and FLOPs of a plan.

The structure is found from the values that the masks have in the traced call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from autopart.compat.torch_internals import has_values
from autopart.ir.atoms import BATCH
from autopart.ir.facts import ACTIVE, DATA, INPUT, facts, weighted
from autopart.ir.graph import draws_random_numbers, is_tensor, operators, tuple_values
from autopart.ir.mask_structure import MaskWindow
from autopart.ir.subgraphs import ancestors_of
from autopart.ir.trace import Trace, batch_size
from autopart.ops.mask_key_ranges import KeyRangeEvaluator
from autopart.ops.masked_attention import mask_window_of
from autopart.ops.stage_masks import mask_of, scores_of
from autopart.passes.pass_pipeline import driven
from autopart.passes.rules import rule_of

_LARGEST = 2**28
"""Maximum number of elements of a mask that is evaluated.

The attended keys of a larger mask are derived symbolically. If that fails too, the plan assumes that attention kernels
read the mask.
"""


def band_notes(node: fx.Node) -> Iterator[str]:
    """Yield the structure of an attention mask (causal, sliding window) as text for the graph dump."""
    if band := facts(node).get("band"):
        yield f"sees {band.before} before, {band.after} after"


@driven(notes=lambda _: band_notes)
def find_bands(trace: Trace) -> None:
    """Write `band` (a `MaskWindow`) on attention masks that are causal or a window in the traced call.

    Only masks that depend on inputs alone are analyzed. If one of them is causal, sequences are sharded in zigzag
    order.
    """
    calls = {
        mask: node for node in trace.graph.nodes
        if facts(node).get("role") == ACTIVE and (mask := mask_of(node)) is not None
        and facts(mask)["role"] in (INPUT, DATA) and not facts(mask)["needs_grad"]
    }  # fmt: skip
    seen = KeyRangeEvaluator(_available_values(trace))
    for mask, call in calls.items():
        values = values_in_call(trace, mask)
        spans = seen.of(mask) if values is None else None
        band = (
            mask_window_of(values, *scores_of(call))
            if values is not None
            else spans.band()
            if spans is not None
            else None
        )
        if band is not None:
            facts(mask)["band"], facts(mask)["queries"] = band, scores_of(call)[0]
    causal = (_is_causal(facts(mask).get("band"), *scores_of(call)) for mask, call in calls.items())
    set_zigzag(trace, any(causal))


def set_zigzag(trace: Trace, zigzag: bool) -> None:
    """Write `zigzag` on all nodes: True if sequences are sharded in zigzag order, False if contiguously.

    In zigzag order, each rank has one chunk from the start and one from the end of the sequence.
    """
    for node in trace.graph.nodes:
        facts(node)["zigzag"] = zigzag


def _is_causal(band: MaskWindow | None, queries: int, keys: int) -> bool:
    return band == (queries - 1, 0) and queries == keys > 1


def values_in_call(trace: Trace, node: fx.Node, all_rows: bool = False) -> torch.Tensor | None:
    """Return the value (a tensor) that a node has in the traced call.

    Unless `all_rows` is True, samples of the batch that equal an earlier sample are left out. Returns None if the node
    depends on a tensor without values (on meta), is random, or is too large.
    """
    known, nodes = _available_values(trace), ancestors_of([node])
    if not all(n in known if n.op != "call_function" else not draws_random_numbers(n) for n in nodes):
        return None
    found = None if all_rows else _CallValues(trace, nodes, known, all_rows).of(node)
    return _CallValues(trace, nodes, known, True).of(node) if found is None else found


def mask_notes(trace: Trace) -> list[str]:
    """Return the plan's note that counts attention masks by structure: `["... 2 causal ..."]`.

    The list is empty for a model without attention.
    """
    kinds = Counter[str]()
    for node, weight in weighted(operators(trace.graph)):
        mask = mask_of(node) if rule_of(node).context else None
        if isinstance(mask, fx.Node) and facts(mask)["role"] in (INPUT, DATA):
            kinds[_kind(facts(mask).get("band"), *scores_of(node))] += weight
    text = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return [f"attention by the masks of this call: {text}"] if text else []


def _kind(band: MaskWindow | None, queries: int, keys: int) -> str:
    if band is None:
        return "with its mask as it is"
    if band.before < queries - 1 or 0 < band.after < keys - 1:
        return f"in a window of {band.before + 1 + band.after}"
    return "causal" if band.after == 0 and keys > 1 else "to all keys"


def _available_values(trace: Trace) -> dict[fx.Node, torch.Tensor]:
    """Map the input, buffer and constant nodes of a trace to their tensors. Tensors on meta are left out."""
    tensors = {**trace.buffers, **trace.constants}
    inputs = zip(trace.graph.find_nodes(op="placeholder"), trace.call.tensors, strict=True)
    known = dict(inputs) | {n: tensors[n.target] for n in trace.graph.find_nodes(op="get_attr") if n.target in tensors}
    return {node: tensor for node, tensor in known.items() if has_values(tensor)}


class _CallValues:
    """Evaluation of a trace's nodes on the CPU, with the inputs of the traced call.

    Unless `all_rows` is True, samples of the batch whose inputs equal those of an earlier sample are left out.
    """

    def __init__(self, trace: Trace, nodes: set[fx.Node], known: Mapping[fx.Node, torch.Tensor], all_rows: bool):
        self.nodes, self.given, self.size = [n for n in trace.graph.nodes if n in nodes], known, batch_size(trace)
        read = [known[n].cpu() for n in self.nodes if n.op == "placeholder" and self._row_dims(n) == [0]]
        self.rows = _distinct_samples(read) if read else torch.zeros(1, dtype=torch.long)
        self.rows = torch.arange(self.size) if all_rows else self.rows

    @torch.no_grad()
    def of(self, last: fx.Node) -> torch.Tensor | None:
        """Return the value of a node, or None if it cannot be computed.

        A value cannot be computed for one of these reasons:

        - The value, or a value that it depends on, is too large.
        - An operator fails because equal samples were left out.
        - Several dims of a value could be the batch, such as `arange(8)` used both as samples and as position ids.
        """
        cpu, values = torch.device("cpu"), dict[fx.Node, Any]()
        for node in self.nodes:
            if node in self.given:
                values[node] = self._of_rows(node, self.given[node].to(cpu))
                continue
            if self._elements(node) > _LARGEST or (len(self._row_dims(node)) > 1 and len(self.rows) < self.size):
                return None
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            args, kwargs = map_aggregate((args, kwargs), lambda a: cpu if isinstance(a, torch.device) else a)
            try:
                values[node] = self._of_rows(node, node.target(*args, **kwargs))
            except (RuntimeError, IndexError):  # an argument is the size of the full batch
                return None
        result = values[last]
        assert isinstance(result, torch.Tensor)
        return result

    def _row_dims(self, node: fx.Node) -> list[int]:
        """Return the batch dims of a value. A dim in which the batch is merged with another dim is left out."""
        atoms = facts(node)["atoms"] if is_tensor(node) else ()
        return [dim for dim, of in enumerate(atoms) if [a.kind for a in of] == [BATCH] and of[0].size == self.size]

    def _of_rows(self, node: fx.Node, tensor: Any) -> Any:
        for dim in self._row_dims(node):
            if tensor.size(dim) == self.size:
                rows = self.rows if node.op == "placeholder" else torch.arange(len(self.rows))
                tensor = tensor.index_select(dim, rows)
        return tensor

    def _elements(self, node: fx.Node) -> float:
        share = (len(self.rows) / self.size) ** len(self._row_dims(node))
        return share * max((_elements(output) for output in tuple_values(node)), default=0)


def _distinct_samples(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Group the samples that are equal in all `values`.

    Return the index of the first sample of each group.
    """
    together = torch.cat([value.reshape(len(value), math.prod(value.shape[1:])).double() for value in values], 1)
    _, kinds = torch.unique(together, dim=0, return_inverse=True)
    firsts = torch.full((int(kinds.max()) + 1,), len(kinds))
    return firsts.scatter_reduce(0, kinds, torch.arange(len(kinds)), "amin").sort().values


def _elements(output: Any) -> int:
    """Return the number of elements that a tensor stores: broadcast dims (stride 0) count as size 1."""
    if not isinstance(output, torch.Tensor):
        return 0
    return math.prod(size for size, stride in zip(output.shape, output.stride(), strict=True) if stride)
