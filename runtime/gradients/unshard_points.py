"""Insert an unshard point before the first use of each parameter bucket in a stage graph.

In forward, an unshard point waits for the bucket's all-gather. In backward, it starts the reduction of the bucket's
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem

from torch import Tensor, fx, nn

from autopart.runtime.gradients.param_bucket import ParamBucket


class UnshardPoint(nn.Module):
    """Module that a stage graph calls at the first use of a bucket. It returns unsharded parameters."""

    def __init__(self, bucket: ParamBucket, names: Sequence[str]):
        super().__init__()
        self.bucket, self.names = bucket, names

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.bucket.enter(self.names, tensors)


def insert_unshard_points(module: fx.GraphModule, buckets: Sequence[ParamBucket]) -> fx.GraphModule:
    """Insert an unshard point before the first use of each bucket, and replace all uses of its parameters."""
    graph = module.graph
    order = {node: index for index, node in enumerate(graph.nodes)}
    reads: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "get_attr" and node.users:
            reads.setdefault(str(node.target), []).append(node)
    for index, bucket in enumerate(buckets):
        names = [name for name in bucket.names if name in reads]
        users = [user for name in names for node in reads[name] for user in node.users]
        if not users:
            continue
        submodule = f"entry_{index}"
        module.add_submodule(submodule, UnshardPoint(bucket, names))
        with graph.inserting_before(min(users, key=order.__getitem__)):
            tensors = [graph.get_attr(name) for name in names]
            outputs = graph.call_module(submodule, tuple(tensors))
            for position, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
                item = graph.call_function(getitem, (outputs, position))
                item.meta.update(reads[name][0].meta)
                tensor.meta.update(reads[name][0].meta)
                item.meta["val"] = module.get_parameter(name).detach()
                for node in reads[name]:
                    node.replace_all_uses_with(item)
                    graph.erase_node(node)
    module.recompile()
    return module
