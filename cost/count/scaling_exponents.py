"""Scaling exponents: how bytes and FLOPs grow with batch, sequence, `1 / tp`, `1 / cp` and `1 / ep`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import Tensor, fx

from autopart.cost.count.stage_footprint import LocalValue, MemoryBuffer
from autopart.cost.predict.operator_work import CHOSEN, NOTHING, Exponents, Size
from autopart.ir.atoms import BATCH, DATA_DIM, Atom, factor_atoms
from autopart.ir.facts import facts
from autopart.ir.graph import tensor_inputs, value
from autopart.ir.program import MICROBATCH_AXIS, Program
from autopart.ir.trace import Trace


def tokens(trace: Trace) -> int:
    """Return the tokens per sample: dim 1 of the first input of token ids or embeddings, else 1."""
    for node in trace.graph.find_nodes(op="placeholder"):
        tensor = value(node)
        if tensor.dim() == 3 or (tensor.dim() == 2 and not tensor.dtype.is_floating_point):
            return int(tensor.shape[1])
    return 1


class ScalingExponents:
    """Scaling exponents (`Exponents`) of the values and FLOPs of nodes of a stage graph.

    The exponents follow from the dims of traced values. A dim, or one factor of a merged dim, scales with the sequence
    if its size is a multiple of the tokens per sample. Dims of weights do not scale.
    """

    def __init__(self, trace: Trace, program: Program):
        self._traced = {node.name: node for node in trace.graph.nodes}
        self._tokens = tokens(trace)
        cut = () if program.copied else program.mesh.along("rows")
        sizes = {axis: program.mesh.size(axis) for axis in cut} | {MICROBATCH_AXIS: program.microbatches}
        self._axes = {name: program.mesh.innermost(cuts) for name, cuts in CHOSEN.items()}
        self._row_axes = [axis for axis, size in sizes.items() if size > 1]
        # Caches of: exponents of a stage graph's value, exponents of a traced value, dim that is sharded over an axis.
        self.of, self._of_traced, self._cut = cache(self._of_written), cache(self._of_atoms), cache(self._cut_dim)

    def of_value(self, node: fx.Node, result: Any) -> Size:
        """Return the bytes of a node's value as a `Size` (a polynomial in batch, sequence and axis sizes).

        Returns `NOTHING` if the node returns several values.
        """
        return Size.of(result.form.size_bytes, self.of(node)) if isinstance(result, LocalValue) else NOTHING

    def of_memory(self, memory: MemoryBuffer) -> Size:
        """Return the bytes of a buffer as a `Size` (a polynomial in batch, sequence and axis sizes)."""
        return Size.of(memory.size_bytes, self.of(memory.made_by))

    def _of_written(self, node: fx.Node) -> Exponents:
        """Return the scaling exponents of the bytes of a stage graph's node.

        A layout conversion can have intermediate nodes, whose values are not in the trace. For such a node, the result
        is the exponents of its users or inputs.
        """
        origin, layout = self._traced.get(facts(node).get("origin", "")), facts(node).get("layout", {})
        if origin is None:  # an intermediate node of a conversion, or a tuple
            parts = [self.of(user) for user in node.users if "origin" in facts(user) and user.args[0] is node]
            powers = _largest(parts or [self.of(n) for n in tensor_inputs(node)])
            whole = {} if parts else {name: 0 for name, axis in self._axes.items() if self._cut(node, axis) is None}
            return powers._replace(**whole)
        powers = self._of_traced(origin)
        cut = all(layout[axis].is_shard for axis in self._row_axes if axis in layout)
        over = {name: int(axis in layout and layout[axis].is_partitioned) for name, axis in self._axes.items()}
        return Exponents(powers.b * cut, powers.s, **over)

    def _of_atoms(self, origin: fx.Node) -> Exponents:
        return self._count(atom for dim in facts(origin)["atoms"] for atom in dim)

    def _cut_dim(self, node: fx.Node, axis: str) -> int | None:
        """Return the dim of a node's value that is sharded over an axis, or None.

        A layout conversion can have intermediate nodes, whose values are not in the trace. For such a node, the result
        is the sharded dim of its input, if its own value still has this dim.
        """
        if facts(node).get("origin", "") in self._traced:
            placement = facts(node).get("layout", {}).get(axis)
            return placement.dim if placement is not None and placement.is_partitioned else None
        for used in tensor_inputs(node):
            dim, written, read = self._cut(used, axis), value(node), value(used)
            if dim is None:
                continue
            if not isinstance(written, Tensor) or not isinstance(read, Tensor) or written.numel() == read.numel():
                return dim
            if written.shape[: dim + 1] == read.shape[: dim + 1]:
                return dim
        return None

    def of_product(self, node: fx.Node) -> Exponents:
        """Return the scaling exponents of a matrix product's FLOPs.

        The FLOPs are proportional to m, k and n. Each of the three dims counts once, although two tensors have it.
        """
        largest = _largest([self.of(n) for n in (node, *tensor_inputs(node))])
        origin = self._traced.get(facts(node).get("origin", ""))
        pattern = facts(origin).get("pattern") if origin is not None else None
        if origin is None or pattern is None or not pattern.flops:
            return largest
        factors = self._count(atom for atoms in factor_atoms(origin, pattern).values() for atom in atoms)
        return largest._replace(s=factors.s)

    def _count(self, atoms: Iterable[Atom]) -> Exponents:
        all_atoms = list(atoms)
        rows = any(atom.kind == BATCH for atom in all_atoms)
        counted = [a for a in all_atoms if a.kind == DATA_DIM and self._tokens > 1 and a.size % self._tokens == 0]
        return Exponents(int(rows), len(counted))


def _largest(powers: list[Exponents]) -> Exponents:
    return Exponents(*map(max, zip(*powers, strict=True))) if powers else Exponents()
