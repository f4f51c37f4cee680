"""Implementation of the collective operators (`autopart/ops/operators.py`) on process groups.

The collectives in a stage graph name mesh axes. `bind` replaces the axes by names of process groups, so that the graph
can run. The operators are registered as CompositeImplicitAutograd around one autograd function, so graphs with them can
be printed, exported and compiled. Each operator pairs a forward with a backward collective, as in Shoeybi et al. 2019
(arXiv:1909.08053, section 3: f and g) and Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import count
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from autopart.compat.torch_internals import is_gloo, resolve_group
from autopart.ir.collective_nodes import MOVES, autopart_operator, axis_of
from autopart.ir.facts import facts
from autopart.ir.layout import CONVERSIONS, DISPATCH_CONVERSIONS, Conversion
from autopart.ir.sharding import DimSharding
from autopart.ops.expert_dispatch import DispatchPlan, count_rows
from autopart.ops.operators import CUTTING, LIBRARY, autopart_ops
from autopart.runtime.comm.ring_attention import ring_attention
from autopart.runtime.comm.stack_traces import line_of_graph
from autopart.runtime.comm.watchdog import watching

Primitive = Callable[..., Any]


def conversion_cuts(operator: str, x: Tensor, num_ranks: int, arguments: tuple[Any, ...]) -> tuple[DimSharding, ...]:
    """Return how a collective operator splits dims of `x` over ranks, as a tuple of `DimSharding`.

    An all-to-all splits two dims: the source dim, whose shards must have equal sizes, and the target dim. All other
    operators split at most one dim.
    """
    if operator in CUTTING:
        dim, size, *sections = arguments
        return (DimSharding(dim % x.ndim, size, tuple(sections[0]) if sections else (), num_ranks),)
    if operator == "all_to_all":
        source, target = (dim % x.ndim for dim in arguments[:2])
        before, after = [tuple(sections) for sections in (*arguments[2:], (), ())[:2]]
        size = x.size(source) * num_ranks
        return DimSharding(source, size, before, num_ranks), DimSharding(target, x.size(target), after, num_ranks)
    return ()


Dtypes = tuple[torch.dtype | None, torch.dtype | None]
"""Dtypes to which a conversion casts a value, and its gradient, before communication. None: no cast."""


def in_dtype(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype)


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, conversion: Conversion, group_name: str, args: tuple[Any, ...], dtypes: Dtypes
    ) -> Tensor:
        ctx.conversion, ctx.group_name, ctx.told = conversion, group_name, args
        ctx.dtypes = (x.dtype, dtypes[1])
        ctx.set_materialize_grads(False)
        ctx.line = line_of_graph()
        return PRIMITIVES[conversion.forward](in_dtype(x, dtypes[0]), group_name, *args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        if grad is None:  # no loss uses this output: return None, not zeros, so that earlier parameters get no gradient
            return None, None, None, None, None
        stored, summed = ctx.dtypes
        if torch.is_grad_enabled():  # create_graph=True: the gradient must be differentiable
            told, back = tuple(reversed(ctx.told)), ctx.conversion.transposed
            return _Convert.apply(grad, back, ctx.group_name, told, (summed, None)).to(stored), None, None, None, None
        primitive = PRIMITIVES[ctx.conversion.backward]
        moved = primitive(in_dtype(grad, summed), ctx.group_name, *reversed(ctx.told))
        return moved.to(stored), None, None, None, None


def all_reduce_once_more(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce a gradient in a backward. The all-reduce is differentiable, for `create_graph=True`.

    Its own backward is the identity.
    """
    return _Convert.apply(grad, CONVERSIONS["P", "R"], group.group_name, (), (None, None))


def communicate(collective: Callable[..., Tensor], x: Tensor, *arguments: Any) -> Tensor:
    """Run a functional collective and wait for its result.

    The last of `arguments` is the name of the process group.
    """
    on_host = x.is_cuda and is_gloo(resolve_group(arguments[-1]), x.device)
    with watching(arguments[-1]):
        result = torch.ops._c10d_functional.wait_tensor(collective(x.cpu() if on_host else x, *arguments))
    return result.to(x.device) if on_host else result


def _identity(x: Tensor, group_name: str, *cuts: DimSharding) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group_name: str) -> Tensor:
    return communicate(torch.ops._c10d_functional.all_reduce, x.contiguous(), "sum", group_name)


def _own(x: Tensor, group_name: str) -> Tensor:
    return x.clone() if resolve_group(group_name).rank() == 0 else torch.zeros_like(x)


def _slice(x: Tensor, group_name: str, cut: DimSharding) -> Tensor:
    return cut.take(x, resolve_group(group_name).rank())


def _pad(x: Tensor, group_name: str, cut: DimSharding) -> Tensor:
    return cut.place(x, resolve_group(group_name).rank())


def _all_gather(x: Tensor, group_name: str, cut: DimSharding) -> Tensor:
    num_ranks = cut.num_shards
    collective = torch.ops._c10d_functional.all_gather_into_tensor
    gathered = communicate(collective, cut.padded(x), num_ranks, group_name)
    if cut.is_contiguous:
        return gathered
    shards = gathered.chunk(num_ranks)
    return cut.join([cut.trimmed(shard, index) for index, shard in enumerate(shards)])


def _reduce_scatter(x: Tensor, group_name: str, cut: DimSharding) -> Tensor:
    num_ranks = cut.num_shards
    shards = (cut.padded(cut.take(x, index)) for index in range(num_ranks))
    wire = x.contiguous() if cut.is_contiguous else torch.cat(list(shards))
    shard = communicate(torch.ops._c10d_functional.reduce_scatter_tensor, wire, "sum", num_ranks, group_name)
    return cut.trimmed(shard, resolve_group(group_name).rank()).contiguous()


def _all_to_all(x: Tensor, group_name: str, source: DimSharding, target: DimSharding) -> Tensor:
    num_ranks = source.num_shards
    rank = resolve_group(group_name).rank()
    x = source.padded(x)
    wire = torch.cat([target.padded(target.take(x, index)) for index in range(num_ranks)])
    rows = [wire.size(0) // num_ranks] * num_ranks
    received = communicate(torch.ops._c10d_functional.all_to_all_single, wire, rows, rows, group_name)
    blocks = [source.trimmed(block, sender) for sender, block in enumerate(received.chunk(num_ranks))]
    return source.join([target.trimmed(block, rank) for block in blocks])


def _dispatch(x: Tensor, group_name: str, route: DispatchPlan) -> Tensor:
    collective = torch.ops._c10d_functional.all_to_all_single
    return communicate(collective, route.rows_of(x).contiguous(), route.receives, route.sends, group_name)


def _combine(x: Tensor, group_name: str, route: DispatchPlan) -> Tensor:
    collective = torch.ops._c10d_functional.all_to_all_single
    return route.tokens_of(communicate(collective, x.contiguous(), route.sends, route.receives, group_name))


PRIMITIVES: dict[str, Primitive] = {
    "identity": _identity,
    "all_reduce": _all_reduce,
    "own": _own,
    "slice": _slice,
    "pad": _pad,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "dispatch": _dispatch,
    "combine": _combine,
}


def _implement_operators() -> None:
    """Register the implementations of `torch.ops.autopart` operators that communicate.

    `bind` has prepared the graph for this rank, so the argument `axis` of the operators is the name of a process group.
    """

    def converter(conversion: Conversion) -> Callable[..., Tensor]:
        def convert(
            x: Tensor, axis: str, *arguments: Any,
            dtype: torch.dtype | None = None, grad_dtype: torch.dtype | None = None,
        ) -> Tensor:  # fmt: skip
            if conversion.operator in DISPATCH_CONVERSIONS:
                args: tuple[Any, ...] = (DispatchPlan.of(*arguments),)
            else:
                args = conversion_cuts(conversion.operator, x, resolve_group(axis).size(), arguments)
            return _Convert.apply(x, conversion, axis, args, (dtype, grad_dtype))

        return convert

    def all_reduce_max(x: Tensor, axis: str) -> Tensor:
        return communicate(torch.ops._c10d_functional.all_reduce, x.detach().contiguous(), "max", axis)

    def exchange_counts(expert: Tensor, axis: str, num_experts: int, num_ranks: int) -> Tensor:
        sends, one = count_rows(expert, num_experts, num_ranks), [1] * num_ranks
        receives = communicate(torch.ops._c10d_functional.all_to_all_single, sends, one, one, axis)
        return torch.stack([sends, receives]).cpu()

    converters = {operator: converter(conversion) for operator, conversion in MOVES.items()}
    of_rank = {"all_reduce_max": all_reduce_max, "exchange_counts": exchange_counts, "ring_attention": ring_attention,
               "axis_index": lambda axis: resolve_group(axis).rank()}  # fmt: skip
    for name, implementation in {**converters, **of_rank}.items():
        LIBRARY.impl(name, implementation, "CompositeImplicitAutograd")


_implement_operators()


def on_device(node: fx.Node, arguments: Any, device: torch.device) -> Any:
    """Return a node's arguments with every `torch.device` replaced by `device`.

    If the user's model runs the node on the CPU, its arguments are not changed.
    """
    if facts(node).get("on_host"):
        return arguments
    return map_aggregate(arguments, lambda argument: device if isinstance(argument, torch.device) else argument)


def bind(
    graph_module: fx.GraphModule,
    groups: Mapping[str, dist.ProcessGroup],
    coordinates: Mapping[str, int],
    device: torch.device,
    tensors: Mapping[str, Tensor] | None = None,
    unsharded: Collection[str] = (),
    module_type: type[fx.GraphModule] = fx.GraphModule,
) -> fx.GraphModule:
    """Return a copy of a stage's graph that is prepared to run on this rank.

    Axis names become names of process groups, `axis_index` becomes an int, and device arguments become `device`.
    Collectives over an axis with one rank are removed.

    Args:
        graph_module: the graph. Its attributes that are not in `tensors` are moved to `device`.
        tensors: {dotted name: tensor} for `get_attr` nodes, so that several copies of a graph share one Parameter.
        unsharded: names of parameters that are already unsharded when the graph runs. Their all-gathers are removed.
        module_type: class of the copy.
    """
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    attributes: dict[str, Any] = {}
    for node in graph_module.graph.nodes:
        name, axis = autopart_operator(node), axis_of(node)
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], values.__getitem__))
        elif name == "axis_index" and axis is not None:
            values[node] = coordinates.get(axis, 0)
        elif axis is not None and _converts_one_of(node, unsharded):
            values[node] = values[node.args[0]]
        elif axis is not None and axis not in groups:
            values[node] = values[node.args[0]]
            if node.kwargs.get("dtype") is not None:
                values[node] = graph.call_function(autopart_ops.cast.default, (values[node], node.kwargs["dtype"]))
        else:
            copy = values[node] = graph.node_copy(node, values.__getitem__)
            copy.args, copy.kwargs = on_device(node, (copy.args, copy.kwargs), device)
            if axis is not None:
                copy.args = (copy.args[0], groups[axis].group_name, *copy.args[2:])
            if node.op == "get_attr":
                attributes[str(node.target)] = attribute(graph_module, str(node.target), tensors or {}, device)
    return module_type(attributes, graph, class_name=graph_module.__class__.__name__)


def _converts_one_of(node: fx.Node, names: Collection[str]) -> bool:
    """Return True if a node is a collective on a parameter with one of these names."""
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and source.op == "get_attr" and str(source.target) in names


def with_flat_names(module: fx.GraphModule) -> fx.GraphModule:
    """Move all weights of a graph module to direct attributes, without dots in their names. Return it.

    Each dot would cost one attribute lookup in Python per use.
    """
    names: dict[str, str] = {}
    free = (name for name in map("weight_{}".format, count()) if not hasattr(module, name))
    for node in module.graph.find_nodes(op="get_attr"):
        target = str(node.target)
        if "." in target and target not in names:
            names[target] = next(free)
            setattr(module, names[target], attrgetter(target)(module))
        node.target = names.get(target, target)
    module.delete_all_unused_submodules()
    module.recompile()
    return module


def attribute(root: fx.GraphModule, name: str, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """Return the value of a `get_attr` node: from `tensors`, else from `root`, moved to `device`."""
    if name in tensors:
        return tensors[name]
    value: Any = root
    for part in name.split("."):
        value = getattr(value, part)
    return value.to(device) if isinstance(value, Tensor) else value
