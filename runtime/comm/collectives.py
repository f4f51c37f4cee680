"""The custom operators `torch.ops.autopart.*` that stand in partitioned graphs, on process groups.

Each conversion of `autopart.ir.layout.CONVERSIONS` is one operator with one primitive forward and one backward:

    all_reduce, sum_grad, own, own_grad, own_both, all_reduce_both, all_reduce_max (x, axis)
    slice, slice_pad, all_gather, all_gather_sum, reduce_scatter                   (x, axis, dim, size, sections)
    all_to_all                                                    (x, axis, source_dim, target_dim)
    axis_index                                                    (axis) -> int

`size` is the size of dim `dim` before it is cut over this axis. In a program `axis` is the name of a mesh axis; `bind`
puts the name of a process group in its place, and then the graph runs. The operators are CompositeImplicitAutograd
around one autograd function, so they print, export and compile. Source of the pairs: Shoeybi et al. 2019
(arXiv:1909.08053, section 3: f and g) and Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2).

Three local helpers know where a shard starts: `embedding_shard`, `pick_class` and `expert_linear` (`experts.py`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from autopart.compat import is_gloo, resolve_group
from autopart.ir.layout import CONVERSIONS, Conversion
from autopart.runtime.comm import experts
from autopart.runtime.comm.pieces import Cut
from autopart.runtime.comm.stacks import line_of_graph
from autopart.runtime.comm.watch import watching

OPERATORS = {conversion.operator: conversion for conversion in CONVERSIONS.values()}
CUTTING = ("slice", "slice_pad", "all_gather", "all_gather_sum", "reduce_scatter")

Primitive = Callable[..., Any]


def conversion_cuts(operator: str, x: Tensor, num_ranks: int, arguments: tuple[Any, ...]) -> tuple[Cut, ...]:
    """What the primitives of `operator` have to know beside the values; in backward all-to-all reads it reversed.

    An all-to-all is not told the full size of its source dim, so that dim has to divide evenly; its target need not.
    """
    if operator in CUTTING:
        dim, size, *sections = arguments
        return (Cut(dim % x.ndim, size, tuple(sections[0]) if sections else (), num_ranks),)
    if operator == "all_to_all":
        source, target = (dim % x.ndim for dim in arguments)
        return Cut(source, x.size(source) * num_ranks, (), num_ranks), Cut(target, x.size(target), (), num_ranks)
    return ()


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, conversion: Conversion, group_name: str, cuts: tuple[Cut, ...]) -> Tensor:
        ctx.conversion, ctx.group_name, ctx.cuts = conversion, group_name, cuts
        ctx.line = line_of_graph()
        return PRIMITIVES[conversion.forward](x, group_name, *cuts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        primitive = PRIMITIVES[ctx.conversion.backward]
        return primitive(grad, ctx.group_name, *reversed(ctx.cuts)), None, None, None


def _communicate(collective: Callable[..., Tensor], x: Tensor, *arguments: Any) -> Tensor:
    """Runs a functional collective, whose last argument is the group's name, and waits for it."""
    on_host = x.is_cuda and is_gloo(resolve_group(arguments[-1]), x.device)
    with watching(arguments[-1]):
        result = torch.ops._c10d_functional.wait_tensor(collective(x.cpu() if on_host else x, *arguments))
    return result.to(x.device) if on_host else result


def _identity(x: Tensor, group_name: str, *cuts: Cut) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group_name: str) -> Tensor:
    return _communicate(torch.ops._c10d_functional.all_reduce, x.contiguous(), "sum", group_name)


def _own(x: Tensor, group_name: str) -> Tensor:
    return x.clone() if resolve_group(group_name).rank() == 0 else torch.zeros_like(x)


def _slice(x: Tensor, group_name: str, cut: Cut) -> Tensor:
    return cut.take(x, resolve_group(group_name).rank())


def _pad(x: Tensor, group_name: str, cut: Cut) -> Tensor:
    return cut.place(x, resolve_group(group_name).rank())


def _all_gather(x: Tensor, group_name: str, cut: Cut) -> Tensor:
    num_ranks = cut.num_shards
    collective = torch.ops._c10d_functional.all_gather_into_tensor
    gathered = _communicate(collective, cut.padded(x), num_ranks, group_name)
    if cut.is_in_order:
        return gathered
    shards = gathered.chunk(num_ranks)
    return cut.join([cut.trimmed(shard, index) for index, shard in enumerate(shards)])


def _reduce_scatter(x: Tensor, group_name: str, cut: Cut) -> Tensor:
    num_ranks = cut.num_shards
    shards = (cut.padded(cut.take(x, index)) for index in range(num_ranks))
    wire = x.contiguous() if cut.is_in_order else torch.cat(list(shards))
    shard = _communicate(torch.ops._c10d_functional.reduce_scatter_tensor, wire, "sum", num_ranks, group_name)
    return cut.trimmed(shard, resolve_group(group_name).rank()).contiguous()


def _all_to_all(x: Tensor, group_name: str, source: Cut, target: Cut) -> Tensor:
    num_ranks = source.num_shards
    rank = resolve_group(group_name).rank()
    x = source.padded(x)
    wire = torch.cat([target.padded(target.take(x, index)) for index in range(num_ranks)])
    rows = [wire.size(0) // num_ranks] * num_ranks
    received = _communicate(torch.ops._c10d_functional.all_to_all_single, wire, rows, rows, group_name)
    blocks = [source.trimmed(block, sender) for sender, block in enumerate(received.chunk(num_ranks))]
    return source.join([target.trimmed(block, rank) for block in blocks])


PRIMITIVES: dict[str, Primitive] = {
    "identity": _identity,
    "all_reduce": _all_reduce,
    "own": _own,
    "slice": _slice,
    "pad": _pad,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def embedding_shard(weight: Tensor, ids: Tensor, start: int, padding_idx: int = -1, num_rows: int = -1) -> Tensor:
    """Rows of an embedding table of which this rank holds rows [start, start + weight.size(0)).

    weight [rows, width], ids [...] in global numbering -> [..., width], zeros where the row is on another rank: a
    partial sum. Row `padding_idx` (global numbering, -1: none) gets no gradient. An id that is none of the `num_rows`
    rows of the whole table (-1: not checked) fails as it does in the whole table: IndexError, on a GPU an assertion.
    """
    local = ids - start
    mine = (local >= 0) & (local < weight.size(0))
    if weight.size(0) == 0:  # a rank that holds no row runs the same operators
        weight = F.pad(weight, (0, 0, 0, 1))
    elsewhere: Tensor | int = 0
    if num_rows >= 0:
        elsewhere = torch.where((ids >= 0) & (ids < num_rows), 0, weight.size(0))
    rows = F.embedding(torch.where(mine, local, elsewhere), weight) * mine.unsqueeze(-1)
    if padding_idx < 0:
        return rows
    # The padding row keeps its value and loses its gradient.
    return torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)


def dropout(x: Tensor, p: float, seed: Tensor, salt: int, shard: Sequence[int]) -> Tensor:
    """Dropout whose mask depends on nothing but `seed` (one number, of the microbatch), `salt` (of the operator) and
    `shard` (which shard of the value this is): the same on ranks that hold the same value, else independent."""
    keep = torch.ops.autopart.draw_mask(x.detach(), p, seed, salt, shard)
    return x * keep / (1 - p) if p < 1 else x * 0


def draw_mask(x: Tensor, p: float, seed: Tensor, salt: int, shard: Sequence[int]) -> Tensor:
    """The mask of `dropout` for a value like `x`, 1 for what is kept. A compiler does not look inside."""
    packed = struct.pack(f"<{2 + len(shard)}q", int(seed), salt, *shard)
    number = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
    generator = torch.Generator(x.device).manual_seed(number)
    return x.new_empty(x.shape).bernoulli_(1 - p, generator=generator)


def drop(x: Tensor, noise: Tensor) -> Tensor:
    """Dropout whose noise (0 or 1 / (1 - p) for every element of `x`) was drawn before."""
    return x * noise


def pick_class(logits: Tensor, target: Tensor, start: int) -> Tensor:
    """logits [..., local classes], target [...] in global numbering -> [...]: the target's logit, 0 where it is
    on another rank (or nowhere: an ignored target)."""
    local = target - start
    mine = (local >= 0) & (local < logits.size(-1))
    # One class more, so a rank that holds no class runs the same operators.
    padded = F.pad(logits, (0, 1)) if logits.size(-1) == 0 else logits
    picked = padded.gather(-1, torch.where(mine, local, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(mine, picked, torch.zeros_like(picked))


def _define_operators() -> torch.library.Library:
    library = torch.library.Library("autopart", "DEF")

    def define(name: str, arguments: str, result: str, implementation: Callable[..., Any]) -> None:
        library.define(f"{name}({arguments}) -> {result}")
        library.impl(name, implementation, "CompositeImplicitAutograd")

    def converter(conversion: Conversion) -> Callable[..., Tensor]:
        def convert(x: Tensor, axis: str, *arguments: Any) -> Tensor:
            cuts = conversion_cuts(conversion.operator, x, resolve_group(axis).size(), arguments)
            return _Convert.apply(x, conversion, axis, cuts)

        return convert

    for operator, conversion in OPERATORS.items():
        arguments = "Tensor x, str axis"
        if operator in CUTTING:
            arguments += ", int dim, int size, int[] sections=[]"
        elif operator == "all_to_all":
            arguments += ", int source_dim, int target_dim"
        define(operator, arguments, "Tensor", converter(conversion))

    def all_reduce_max(x: Tensor, axis: str) -> Tensor:
        return _communicate(torch.ops._c10d_functional.all_reduce, x.detach().contiguous(), "max", axis)

    define("all_reduce_max", "Tensor x, str axis", "Tensor", all_reduce_max)
    define("axis_index", "str axis", "int", lambda axis: resolve_group(axis).rank())
    table = ", int padding_idx=-1, int num_rows=-1"
    define("embedding_shard", f"Tensor weight, Tensor ids, int start{table}", "Tensor", embedding_shard)
    mask = "Tensor x, float p, Tensor seed, int salt, int[] shard"
    define("dropout", mask, "Tensor", dropout)
    library.define(f"draw_mask({mask}) -> Tensor")
    library.impl("draw_mask", draw_mask, "CompositeExplicitAutograd")
    torch.library.register_fake("autopart::draw_mask", lambda x, *_: x.new_empty(x.shape), lib=library)
    define("drop", "Tensor x, Tensor noise", "Tensor", drop)
    define("pick_class", "Tensor logits, Tensor target, int start", "Tensor", pick_class)
    return library


LIBRARY = _define_operators()  # the operators live as long as this object


def all_operators() -> list[str]:
    """The names of all operators of the namespace."""
    local = ["draw_mask", "drop", "dropout", "embedding_shard", "pick_class", *experts.OPERATORS]
    return [*OPERATORS, "all_reduce_max", "axis_index", *local]


def operator_name(node: fx.Node) -> str | None:
    """`all_reduce` for a node that calls `torch.ops.autopart.all_reduce`; None for any other node."""
    parts = str(node.target).split(".")
    return parts[1] if node.op == "call_function" and parts[0] == "autopart" else None


def axis_of(node: fx.Node) -> str | None:
    """The mesh axis that a node's operator works on, if any."""
    name = operator_name(node)
    if name == "axis_index":
        return str(node.args[0])
    return str(node.args[1]) if name in OPERATORS or name == "all_reduce_max" else None


def on_device(arguments: Any, device: torch.device) -> Any:
    """Arguments of a node with every `torch.device` replaced: a trace bakes in the device it was made on."""
    return map_aggregate(arguments, lambda argument: device if isinstance(argument, torch.device) else argument)


def bind(
    graph_module: fx.GraphModule,
    groups: Mapping[str, dist.ProcessGroup],
    coordinates: Mapping[str, int],
    device: torch.device,
    tensors: Mapping[str, Tensor] | None = None,
) -> fx.GraphModule:
    """A copy of a program's graph that runs on this rank.

    Axis names become process groups (an axis without a group has one rank: its conversions fall away), `axis_index`
    an int, every device `device`. `get_attr` nodes read `tensors` by their dotted name where it is there, so
    several bound graphs share one Parameter; other attributes come from `graph_module`, moved to `device`.
    """
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    attributes: dict[str, Any] = {}

    def value_of(argument: Any) -> Any:
        return values[argument] if isinstance(argument, fx.Node) else argument

    for node in graph_module.graph.nodes:
        name, axis = operator_name(node), axis_of(node)
        if node.op == "output":
            graph.output(map_aggregate(node.args[0], value_of))
        elif name == "axis_index" and axis is not None:
            values[node] = coordinates.get(axis, 0)
        elif axis is not None and axis not in groups:
            values[node] = value_of(node.args[0])
        else:
            copy = values[node] = graph.node_copy(node)
            copy.args = on_device(map_aggregate(node.args, value_of), device)
            copy.kwargs = on_device(map_aggregate(node.kwargs, value_of), device)
            if axis is not None:
                copy.args = (copy.args[0], groups[axis].group_name, *copy.args[2:])
            if node.op == "get_attr":
                attributes[str(node.target)] = attribute(graph_module, str(node.target), tensors or {}, device)
    return fx.GraphModule(attributes, graph, class_name=graph_module.__class__.__name__)


def attribute(root: fx.GraphModule, name: str, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """What a `get_attr` node reads: `tensors[name]` if it is there, else the graph module's own, on `device`."""
    if name in tensors:
        return tensors[name]
    value: Any = root
    for part in name.split("."):
        value = getattr(value, part)
    return value.to(device) if isinstance(value, Tensor) else value
