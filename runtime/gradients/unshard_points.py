"""Where a stage graph begins to read the parameters of a bucket: there is waited for what they need, and there begins
what their gradients cross last."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem

from torch import Tensor, fx, nn

from autopart.runtime.gradients.reducer import Crossing


class Entry(nn.Module):
    """What a graph reads of parameters of a bucket."""

    def __init__(self, bucket: Crossing, names: Sequence[str]):
        super().__init__()
        self.bucket, self.names = bucket, names

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.bucket.enter(self.names, tensors)


def with_entries(module: fx.GraphModule, buckets: Sequence[Crossing]) -> fx.GraphModule:
    """Lets a stage's bound graph read the parameters of these buckets through entries, where it first reads one."""
    graph = module.graph
    order = {node: index for index, node in enumerate(graph.nodes)}
    read: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "get_attr" and node.users:
            read.setdefault(str(node.target), []).append(node)
    for index, bucket in enumerate(buckets):
        names = [name for name in bucket.names if name in read]
        users = [user for name in names for node in read[name] for user in node.users]
        if not users:
            continue
        entry = f"entry_{index}"
        module.add_submodule(entry, Entry(bucket, names))
        with graph.inserting_before(min(users, key=order.__getitem__)):
            tensors = [graph.get_attr(name) for name in names]
            entered = graph.call_module(entry, tuple(tensors))
            for position, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
                item = graph.call_function(getitem, (entered, position))
                item.meta.update(read[name][0].meta)
                tensor.meta.update(read[name][0].meta)
                item.meta["val"] = module.get_parameter(name).detach()
                for node in read[name]:
                    node.replace_all_uses_with(item)
                    graph.erase_node(node)
    module.recompile()
    return module
