"""Rules of operators that slice, concatenate and overwrite along one dim."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopart.ir.graph import argument, shape, tensor_inputs
from autopart.ir.pattern import Pattern
from autopart.passes.rules.factors import UNARY_LINEAR, names, names_and_dim, output_shapes, pattern
from autopart.passes.rules.local_forms import LocalCall


def cut(node: fx.Node) -> Pattern:
    """Return the rule of `slice`, `narrow`, `select`, `unbind`: the sliced dim cannot be sharded."""
    dims, at = names_and_dim(node)
    after = output_shapes(node)
    removed = any(len(sizes) < len(dims) for sizes in after)
    output = [("cut",) if i == at else d for i, d in enumerate(dims) if not (removed and i == at)]
    return pattern(node, [dims], [output] * len(after), [dims[at][0], "cut"], linear=UNARY_LINEAR)


def split(node: fx.Node) -> Pattern | None:
    """Return the rule of `split_with_sizes`: if the split dim is sharded, each output is sharded along it."""
    dims, at = names_and_dim(node)
    dims[at] = ("joined",)
    joined = {"joined": tuple(node.args[1])}
    return pattern(node, [dims], [dims] * len(node.args[1]), linear=UNARY_LINEAR, joined=joined, local=_local_sections)


def _local_sections(call: LocalCall) -> fx.Node:
    return call.as_traced({1: [size // call.num_parts("joined") for size in call.args[1]]})


def join(node: fx.Node) -> Pattern:
    """Return the rule of `cat`: if the concatenated dim is sharded, each input is sharded along it.

    A shard of the output is then a concatenation of shards of the inputs (`Placement.sections`).
    """
    inputs = tensor_inputs(node)
    dims = names(len(shape(node)))
    at = argument(node, "dim") % len(dims)
    dims[at] = ("joined",)
    parts = tuple(shape(n)[at] for n in inputs)
    joined = pattern(node, [dims] * len(inputs), [dims], linear=(tuple(range(len(inputs))),), joined={"joined": parts})
    return replace(joined, sizes={**joined.sizes, "joined": sum(parts)})


def stack(node: fx.Node) -> Pattern:
    inputs = tensor_inputs(node)
    dims = names(len(shape(node)))
    at = argument(node, "dim") % len(dims)
    part_dims = [d for i, d in enumerate(dims) if i != at]
    return pattern(node, [part_dims] * len(inputs), [dims], [dims[at][0]], linear=(tuple(range(len(inputs))),))


def overwrite(node: fx.Node) -> Pattern:
    """Return the rule of `slice_scatter`, `select_scatter`: the overwritten dim cannot be sharded."""
    dims, at = names_and_dim(node)
    part_dims = [("part",) if i == at else d for i, d in enumerate(dims)]
    if len(shape(node.args[1])) < len(dims):
        del part_dims[at]
    whole = [dims[at][0], "part"] if ("part",) in part_dims else [dims[at][0]]
    return pattern(node, [dims, part_dims], [dims], whole, linear=((0, 1),))
