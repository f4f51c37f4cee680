"""ZeRO-3: unshard a block's weights before their use, prefetch the next block, reshard after use.

A stage graph has one all-gather per weight. When the runtime prepares the graph for a rank, it merges the all-gathers
of a block into one collective, which overlaps with the compute of another block. The forward prefetches the next block,
and the backward prefetches the previous block.

Autograd would save every unsharded weight, to compute the gradients of activations. After a forward, a rank would then
store all weights unsharded. Saved-tensor hooks therefore save references instead, and the backward gathers the block
again (Rajbhandari et al. 2020, arXiv:1910.02054, section 7.2.2; prefetch of one block: Zhao et al. 2023,
arXiv:2304.11277, section 3.3.2).

The gradients of a block are also reduce-scattered in one collective, which overlaps with the backward of earlier
blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autopart.compat.torch_function_internals import on_local_values
from autopart.compat.training_internals import in_backward
from autopart.errors import StageError
from autopart.ir.collective_nodes import axis_of
from autopart.ir.facts import facts
from autopart.ir.program import Program
from autopart.ir.run.unshard_policy import gather_groups, gather_of, gathers_stored, source_name, storing_axes
from autopart.ops.operators import autopart_ops, is_cast, stored_source
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.gradients.param_bucket import ParamBucket
from autopart.runtime.gradients.reducer import Reducer
from autopart.runtime.gradients.shard_collectives import ShardCollectives, ShardedParam

MAX_UNSHARDED_IN_BACKWARD = 2
"""Number of blocks that stay unsharded in the backward, not counting prefetched blocks.

It is more than one, because a value that two blocks use makes the backward alternate between them.
"""


def insert_unshard_blocks(
    module: fx.GraphModule, program: Program, process: Process, reducer: Reducer, compiled: bool = False
) -> UnshardBlocks | None:  # fmt: skip
    """Replace the weight all-gathers of a rank's stage graph by one all-gather per block.

    Casts of stored weights become `CastWeight` calls. Returns the blocks, or None if there is nothing to replace.

    Args:
        reducer: reducer of the stage. If the schedule runs the weight backward separately, weight by weight, each
            weight has a separate all-gather.
        compiled: True if the graph will be compiled. All-gathers then move out of recompute regions (activation
            checkpointing), so that compiled code does not contain them. Casts are not replaced, because the compiler
            recomputes them.
    """
    groups = {str(process.along(axis).group_name): axis for axis in storing_axes(program)}
    nodes = [n for n in module.graph.nodes if gathers_stored(n, groups)]
    # Casts in a recompute region are not saved for backward, so they need no replacement.
    casts = [] if compiled else [n for n in module.graph.nodes if is_cast(n) and "region" not in facts(n)]
    if not nodes and not casts:
        return None
    for node in nodes if compiled else ():
        facts(node).pop("region", None)
    blocks = UnshardBlocks(program.prefetch)
    for node in casts:
        _insert_cast(module, node, blocks)

    def other_axes(node: fx.Node) -> tuple[str, ...]:
        return reducer.shard_reduce_axes.get(source_name(node), ())

    def kind(node: fx.Node) -> Any:
        return module.get_parameter(source_name(node)).dtype, other_axes(node)

    for row in gather_groups(nodes, kind, reducer.splits_backward):
        axis = groups[str(axis_of(row[0]))]
        group, (reduce_group, *others) = (
            process.along(axis),
            [process.overlap_group(a) for a in (axis, *other_axes(row[0]))],
        )
        shards = [module.get_parameter(source_name(node)) for node in row]
        stored = tuple(ShardedParam.of(source_name(node), one, gather_of(node), group.size())
                       for node, one in zip(row, shards, strict=True))  # fmt: skip
        block = UnshardBlock(len(blocks.order), blocks, ShardCollectives(stored, group))
        block.bucket = ParamBucket(
            dict(zip(block.gathers.names, shards, strict=True)),
            ShardCollectives(stored, reduce_group, tuple(others)), reducer.queue, unshard=block, reducer=reducer,
        )  # fmt: skip
        _insert(module, row, block)
        if "region" in facts(row[0]):
            blocks.used_in_backward.add(block.index)
        blocks.order.append(block)
    module.recompile()
    return blocks


def _insert_cast(module: fx.GraphModule, node: fx.Node, blocks: UnshardBlocks) -> None:
    """Replace a cast node by a `CastWeight` call.

    With this call, autograd saves a reference to the stored weight instead of the cast weight.
    """
    source, name = stored_source(node), f"cast_{node.name}"
    assert source is not None
    module.add_submodule(name, CastWeight(str(source.target), node.args[1], blocks))
    with module.graph.inserting_before(node):
        copy = module.graph.call_module(name, (node.args[0],))
    copy.meta.update(node.meta)
    node.replace_all_uses_with(copy)
    module.graph.erase_node(node)


def _insert(module: fx.GraphModule, row: Sequence[fx.Node], block: UnshardBlock) -> None:
    """Replace the all-gathers `row` by one call of the module `block`, before the first of them."""
    graph, name = module.graph, f"unshard_block_{block.index}"
    module.add_submodule(name, block)
    with graph.inserting_before(row[0]):
        unsharded = graph.call_module(name)
        copies = [graph.call_function(getitem, (unsharded, index)) for index in range(len(row))]
    if "region" in facts(row[0]):
        for node in (unsharded, *copies):
            facts(node)["region"] = facts(row[0])["region"]
    for node, copy in zip(row, copies, strict=True):
        copy.meta.update(node.meta)
        node.replace_all_uses_with(copy)
        graph.erase_node(node)


@dataclass(eq=False)
class UnshardBlocks:
    """The blocks of sharded weights of a stage graph, in graph order, and their all-gathers in flight."""

    prefetch: int
    order: list[UnshardBlock] = field(default_factory=list)
    begun: dict[int, Callable[[], list[Tensor]]] = field(default_factory=dict)
    """{block: function that waits for its weights}, for prefetched blocks."""
    left: list[Callable[[], list[Tensor]]] = field(default_factory=list)
    """All-gathers in flight that a failed call did not wait for."""
    again: OrderedDict[int, list[Tensor]] = field(default_factory=OrderedDict)
    """{block: its weights, which the backward has gathered again}, least recently used first."""
    used_in_backward: set[int] = field(default_factory=set)
    """Blocks whose weights the backward uses."""
    weights: dict[StorageWeakRef, _Weight | _Cast] = field(default_factory=dict)
    """{storage: weight} that the current forward has gathered or cast so far."""

    @contextmanager
    def forward_of_microbatch(self) -> Iterator[None]:
        """Context manager in which the forward of a microbatch runs.

        In it, autograd saves references to unsharded weights instead of the weights themselves.
        """
        self.release_weights()
        for block in self.order:
            if torch.is_grad_enabled():
                block.bucket.begin_call()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self.weights.clear()
            for block in self.order:
                block.bucket.end_call()

    def release_weights(self, failed: bool = False) -> None:
        """Free all unsharded weights, because the optimizer may change weights before their next use.

        All-gathers that were prefetched but not used must end first, because other ranks take part in them.

        Args:
            failed: True if a call has failed. The function then does not wait for all-gathers, because other ranks may
                not take part.
        """
        if failed:
            self.left += self.begun.values()
        else:
            for wait in self.begun.values():
                wait()
        self.begun.clear()
        self.again.clear()

    def take(self, index: int) -> list[Tensor]:
        """Return the unsharded weights of a block, and prefetch the next blocks."""
        wait = self.begun.pop(index, None) or self.order[index].begin()
        weights = wait()
        del wait  # free the receive buffer before the next all-gather allocates one
        for following in self._following(index):
            if following not in self.begun and following not in self.again:
                self.begun[following] = self.order[following].begin()
        return weights

    def _following(self, index: int) -> list[int]:
        """Return the indices of blocks to prefetch: the next blocks in forward, previous blocks in backward."""
        if in_backward():
            return [i for i in range(index - 1, -1, -1) if i in self.used_in_backward][: self.prefetch]
        return list(range(index + 1, len(self.order))[: self.prefetch])

    def take_in_backward(self, index: int) -> list[Tensor]:
        """Return the unsharded weights of a block for the backward. Gather them again if they were released."""
        if index not in self.again:
            while len(self.again) >= MAX_UNSHARDED_IN_BACKWARD:
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
            self.used_in_backward.add(weight.block.index)
        return _View(weight, saved.shape, saved.stride(), saved.storage_offset())


@dataclass(frozen=True)
class _Weight:
    """Reference to an unsharded weight, which autograd saves in place of the weight.

    Attributes:
        block, position: block of the weight, and its index in the block.
        version: version counter of the shard at the all-gather, to detect later changes.
    """

    block: UnshardBlock
    position: int
    version: int
    dtype: torch.dtype

    def again(self) -> Tensor:
        bucket = self.block.bucket
        _check_unchanged(bucket.names[self.position], bucket.stored[self.position], self.version)
        return self.block.blocks.take_in_backward(self.block.index)[self.position]


@dataclass(frozen=True)
class _Cast:
    """Reference to a weight that was cast, which autograd saves in place of the cast weight.

    Attributes:
        version: version counter of the stored weight at the cast, to detect later changes.
    """

    name: str
    stored: Tensor
    version: int
    dtype: torch.dtype

    def again(self) -> Tensor:
        _check_unchanged(self.name, self.stored, self.version)
        return self.stored.to(self.dtype)


def _check_unchanged(name: str, stored: Tensor, version: int) -> None:
    """Raise StageError if a parameter has changed since the forward used it."""
    if stored._version != version:
        raise StageError(
            f"'{name}' was changed between a forward and its backward",
            why="the backward uses it again, and would compute with the changed values",
            hint="call optimizer.step() after backward()",
        )


@dataclass(frozen=True)
class _View:
    """Reference to a view of an unsharded or cast weight, which autograd saves in place of the view."""

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
    """Module that casts a weight at each use in a graph."""

    def __init__(self, name: str, dtype: torch.dtype, blocks: UnshardBlocks):
        super().__init__()
        self.name, self.dtype, self.blocks = name, dtype, blocks

    def forward(self, stored: Tensor) -> Tensor:
        cast = autopart_ops.cast(stored, self.dtype)
        if torch.is_grad_enabled() and not in_backward():
            record = _Cast(self.name, stored.detach(), stored._version, cast.dtype)
            self.blocks.weights[StorageWeakRef(cast.untyped_storage())] = record
        return cast


class UnshardBlock(nn.Module):
    """Module that unshards the weights of a block at each use in a graph.

    Attributes:
        gathers: all-gather of the weights.
        bucket: bucket of the weights, which reduces their gradients.
    """

    bucket: ParamBucket

    def __init__(self, index: int, blocks: UnshardBlocks, gathers: ShardCollectives):
        super().__init__()
        self.index, self.blocks, self.gathers = index, blocks, gathers

    def begin(self) -> Callable[[], list[Tensor]]:
        return self.gathers.gather([shard.detach() for shard in self.bucket.stored])

    def forward(self) -> tuple[Tensor, ...]:
        # The forward of a recompute region runs without gradients. Then the bucket is only unsharded.
        unsharded = self.bucket.cross() if torch.is_grad_enabled() else tuple(self.values())
        if torch.is_grad_enabled() and not in_backward():
            for position, (weight_tensor, shard) in enumerate(zip(unsharded, self.bucket.stored, strict=True)):
                weight = _Weight(self, position, shard._version, weight_tensor.dtype)
                self.blocks.weights[StorageWeakRef(weight_tensor.untyped_storage())] = weight
        return unsharded

    def values(self) -> list[Tensor]:
        return self.blocks.take(self.index)

    def reshard(self) -> None:
        self.blocks.again.pop(self.index, None)
