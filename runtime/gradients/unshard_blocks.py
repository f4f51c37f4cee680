"""ZeRO 3: the weights of a block are gathered when a stage graph reaches it, one block ahead, and not kept.

The graph of a stage gathers every weight by itself. Where it is bound to a rank, the gathers of a block become one
collective, which begins while the block before runs: in the forward the next block's, in the backward that of the block
before. Autograd would save the whole weight for the gradient of the other operand, so that at the end of a forward a
rank held all weights whole; here it saves where to find it, and the backward gathers the block again (Rajbhandari et
al. 2020, arXiv:1910.02054, section 7.2.2; one block ahead: Zhao et al. 2023, arXiv:2304.11277, section 3.3.2).

The gradients of a block are scattered in one collective too, beside the backward of the blocks before it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autopart.compat.torch_function_internals import on_local_values
from autopart.compat.training_internals import in_backward
from autopart.errors import StageError
from autopart.ir.collective_nodes import axis_of
from autopart.ir.facts import facts
from autopart.ir.program import Program
from autopart.ir.run.unshard_policy import gathered_together, gathers_stored, source_name, storing_axes, way_of
from autopart.ops.operators import autopart_ops, is_cast, stored_source
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.gradients.double_backward import Scattered
from autopart.runtime.gradients.reducer import Crossing, Pending, Reducer, Waits, added, arrive
from autopart.runtime.gradients.shard_buckets import PartBucket, Stored

KEPT_IN_BACKWARD = 2
"""Blocks whose weights are whole at a time in the backward, beside those that are gathered ahead: a value that two
blocks read makes it go to and fro between them."""


def gather_blocks(
    module: fx.GraphModule, program: Program, process: Process, reducer: Reducer, alone: bool = False,
    compiled: bool = False,
) -> GatheredBlocks | None:  # fmt: skip
    """Lets a stage's bound graph gather the weights that it reads over the axes that store parameters, a block at a
    time, and cast others to what is computed in; None where it does neither.

    Args:
        reducer: of the stage: it tells which backward is the last one of a step.
        alone: a weight at a time, for a backward that runs for each one by itself.
        compiled: outside of what is compiled, also what a region that is run again reads. A compiler casts again by
            itself.
    """
    groups = {str(process.along(axis).group_name): axis for axis in storing_axes(program)}
    nodes = [n for n in module.graph.nodes if gathers_stored(n, groups)]
    # What a region that is run again casts is not kept anyway.
    casts = [] if compiled else [n for n in module.graph.nodes if is_cast(n) and "region" not in facts(n)]
    if not nodes and not casts:
        return None
    for node in nodes if compiled else ():
        facts(node).pop("region", None)
    blocks = GatheredBlocks(program.prefetch, reducer, alone)
    for node in casts:
        _insert_cast(module, node, blocks)

    def others(node: fx.Node) -> tuple[str, ...]:
        return reducer.parts_summed_over.get(source_name(node), ())

    def kind(node: fx.Node) -> Any:
        return module.get_parameter(source_name(node)).dtype, others(node)

    for row in gathered_together(nodes, kind, alone):
        axis = groups[str(axis_of(row[0]))]
        group, reducing = process.along(axis), [process.beside(one) for one in (axis, *others(row[0]))]
        part = [module.get_parameter(source_name(node)) for node in row]
        stored = tuple(Stored.of(source_name(node), one, way_of(node), group.size())
                       for node, one in zip(row, part, strict=True))  # fmt: skip
        block = GatheredBlock(len(blocks.order), PartBucket(stored, group), part, blocks, reducing)
        _insert(module, row, block)
        if "region" in facts(row[0]):
            blocks.read_again.add(block.index)
        blocks.order.append(block)
    module.recompile()
    return blocks


def _insert_cast(module: fx.GraphModule, node: fx.Node, blocks: GatheredBlocks) -> None:
    """Lets autograd save where a weight is stored in the place of what it is cast to."""
    source, name = stored_source(node), f"cast_{node.name}"
    assert source is not None
    module.add_submodule(name, CastWeight(str(source.target), node.args[1], blocks))
    with module.graph.inserting_before(node):
        copy = module.graph.call_module(name, (node.args[0],))
    copy.meta.update(node.meta)
    node.replace_all_uses_with(copy)
    module.graph.erase_node(node)


def _insert(module: fx.GraphModule, row: Sequence[fx.Node], block: GatheredBlock) -> None:
    """Puts a block in the place of what gathers its weights, where the first of them is."""
    graph, name = module.graph, f"block_{block.index}"
    module.add_submodule(name, block)
    with graph.inserting_before(row[0]):
        wholes = graph.call_module(name)
        copies = [graph.call_function(getitem, (wholes, index)) for index in range(len(row))]
    if "region" in facts(row[0]):
        for node in (wholes, *copies):
            facts(node)["region"] = facts(row[0])["region"]
    for node, copy in zip(row, copies, strict=True):
        copy.meta.update(node.meta)
        node.replace_all_uses_with(copy)
        graph.erase_node(node)


@dataclass(eq=False)
class GatheredBlocks:
    """The blocks of a stage graph, in their order, and what is under way of them."""

    prefetch: int
    reducer: Reducer
    splits: bool
    """Whether the backward of the weights runs by itself, for each one."""
    order: list[GatheredBlock] = field(default_factory=list)
    begun: dict[int, Callable[[], list[Tensor]]] = field(default_factory=dict)
    """{block: what waits for its weights}, of those that are gathered ahead."""
    left: list[Callable[[], list[Tensor]]] = field(default_factory=list)
    """The same of calls that have failed."""
    again: OrderedDict[int, list[Tensor]] = field(default_factory=OrderedDict)
    """{block: its weights}, which the backward has gathered again; the last one that was read is last."""
    read_again: set[int] = field(default_factory=set)
    """The blocks whose weights the backward reads."""
    weights: dict[StorageWeakRef, _Weight | _Cast] = field(default_factory=dict)
    """The weights that the forward which runs has gathered or cast so far, by the memory they are in."""
    under_way: deque[Pending] = field(default_factory=deque)

    @contextmanager
    def forward_of_microbatch(self) -> Iterator[None]:
        """Inside, autograd saves where to find gathered weights in the place of these."""
        self.rest()
        for block in self.order:
            if torch.is_grad_enabled():
                block.begin_call(dict(zip(block.names, block.parts, strict=True)))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self.weights.clear()
            for block in self.order:
                block.end_call()

    def rest(self, failed: bool = False) -> None:
        """Lets go of what was gathered: weights may change before they are read again. What was gathered ahead and not
        read is waited for, as what is sent after a receive that was given up never arrives.

        `failed`: others may never send it: it stays as it is.
        """
        if failed:
            self.left += self.begun.values()
        else:
            for wait in self.begun.values():
                wait()
        self.begun.clear()
        self.again.clear()

    def take(self, index: int) -> list[Tensor]:
        """The weights of a block, and begins to gather those of the next."""
        wait = self.begun.pop(index, None) or self.order[index].begin()
        weights = wait()
        del wait  # and with it what was received, before there is more
        for following in self._following(index):
            if following not in self.begun and following not in self.again:
                self.begun[following] = self.order[following].begin()
        return weights

    def _following(self, index: int) -> list[int]:
        """The blocks to gather ahead where one is read."""
        if in_backward():
            return [i for i in range(index - 1, -1, -1) if i in self.read_again][: self.prefetch]
        return list(range(index + 1, len(self.order))[: self.prefetch])

    def take_again(self, index: int) -> list[Tensor]:
        """The weights of a block in the backward."""
        if index not in self.again:
            while len(self.again) >= KEPT_IN_BACKWARD:
                self.again.popitem(last=False)
            with torch.no_grad():
                self.again[index] = self.take(index)
        self.again.move_to_end(index)
        return self.again[index]

    def _pack(self, saved: Tensor) -> Any:
        weight = self.weights.get(StorageWeakRef(saved.untyped_storage()))
        if weight is None or saved.dtype != weight.dtype or saved.is_conj():
            return saved
        if isinstance(weight, _Weight):
            self.read_again.add(weight.block.index)
        return _View(weight, saved.shape, saved.stride(), saved.storage_offset())


@dataclass(frozen=True)
class _Weight:
    """Where to find a gathered weight: number `position` of a block. `version`: of the part, when it was gathered."""

    block: GatheredBlock
    position: int
    version: int
    dtype: torch.dtype

    def again(self) -> Tensor:
        _check_unchanged(self.block.bucket.names[self.position], self.block.parts[self.position], self.version)
        return self.block.blocks.take_again(self.block.index)[self.position]


@dataclass(frozen=True)
class _Cast:
    """Where to find a weight that was cast. `version`: of the weight, when it was."""

    name: str
    stored: Tensor
    version: int
    dtype: torch.dtype

    def again(self) -> Tensor:
        _check_unchanged(self.name, self.stored, self.version)
        return self.stored.to(self.dtype)


def _check_unchanged(name: str, stored: Tensor, version: int) -> None:
    """Raises StageError where a parameter is not what a forward has read."""
    if stored._version != version:
        raise StageError(
            f"'{name}' was changed between a forward and its backward",
            why="the backward reads it again, and would find other values",
            hint="optimizer.step() after backward()",
        )  # fmt: skip


@dataclass(frozen=True)
class _View:
    """What autograd saves: a view of a gathered weight, without the weight."""

    weight: _Weight | _Cast
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@on_local_values
def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, _View):
        return saved
    return saved.weight.again().as_strided(saved.shape, saved.stride, saved.offset)


class CastWeight(nn.Module):
    """Casts a weight, each time that a graph reads it."""

    def __init__(self, name: str, dtype: torch.dtype, blocks: GatheredBlocks):
        super().__init__()
        self.name, self.dtype, self.blocks = name, dtype, blocks

    def forward(self, stored: Tensor) -> Tensor:
        cast = autopart_ops.cast(stored, self.dtype)
        if torch.is_grad_enabled() and not in_backward():
            record = _Cast(self.name, stored.detach(), stored._version, cast.dtype)
            self.blocks.weights[StorageWeakRef(cast.untyped_storage())] = record
        return cast


class GatheredBlock(Crossing, nn.Module):
    """Gathers the weights of a block, each time that a graph reads them; scatters their gradients in the first group of
    `reducing`, and sums the parts over the others."""

    def __init__(
        self, index: int, bucket: PartBucket, parts: list[nn.Parameter], blocks: GatheredBlocks,
        reducing: Sequence[dist.ProcessGroup],
    ):  # fmt: skip
        super().__init__()
        self.index, self.bucket, self.blocks, self.reducing = index, bucket, blocks, reducing
        self.names, self.under_way = bucket.names, blocks.under_way
        self.parts = parts  # in a list: they are not parameters of this module

    def begin(self) -> Callable[[], list[Tensor]]:
        return self.bucket.gather([part.detach() for part in self.parts])

    def forward(self) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():
            wholes = tuple(self.blocks.take(self.index))
        elif self.pending is None:  # a region that is run again, whose own gradients are never asked for
            wholes = self.cross(*arrive(self.parts))
        else:
            wholes = self.cross(self.pending, self.arrived)
        if torch.is_grad_enabled() and not in_backward():
            for position, (whole, part) in enumerate(zip(wholes, self.parts, strict=True)):
                weight = _Weight(self, position, part._version, whole.dtype)
                self.blocks.weights[StorageWeakRef(whole.untyped_storage())] = weight
        return wholes

    def values(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self.blocks.take(self.index)

    def differentiable_sums(self, grads: Sequence[Tensor], present: Sequence[int]) -> Sequence[Tensor]:
        self.blocks.again.pop(self.index, None)
        group, *others = self.reducing
        return Scattered.apply(PartBucket(self.bucket.stored, group, tuple(others)), present, *grads)

    def send(self, grads: Sequence[Tensor], present: Sequence[int]) -> Waits:
        self.blocks.again.pop(self.index, None)
        group, *others = self.reducing
        stored, reducer = tuple(self.bucket.stored[i] for i in present), self.blocks.reducer
        goes_on = bool(others) and reducer.is_last
        earlier = [reducer.take_earlier(self.names[i], self.parts[i]) for i in present] if goes_on else None
        wait = PartBucket(stored, group, tuple(others)).scatter(grads, stored, earlier)
        if not reducer.is_armed or self.blocks.splits:
            return wait
        return added(wait, [self.parts[i] for i in present])  # and does not wait for the end of the backward with that
