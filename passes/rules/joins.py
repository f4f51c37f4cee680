"""Rules of operators that cut, join, pad and read along one dim."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopart.ir.graph import argument, shape, tensor_inputs, value
from autopart.ir.pattern import Pattern

from .factors import UNARY_LINEAR, names, pattern
from .local import LocalCall


def cut(node: fx.Node) -> Pattern:
    """`slice`, `narrow`, `select`: the cut dim stays whole."""
    dims = names(len(shape(node.args[0])))
    at = argument(node, "dim") % len(dims)
    removed = len(shape(node)) < len(dims)
    output = [("cut",) if i == at else d for i, d in enumerate(dims) if not (removed and i == at)]
    return pattern(node, [dims], [output], [dims[at][0], "cut"], linear=UNARY_LINEAR)


def split(node: fx.Node) -> Pattern | None:
    """`split_with_sizes`: the cut dim is a concatenation; sharding it shards every section (factor `joined`)."""
    dims = names(len(shape(node.args[0])))
    dims[argument(node, "dim") % len(dims)] = ("joined",)
    joined = {"joined": tuple(node.args[1])}
    return pattern(
        node, [dims], [dims] * len(node.args[1]), linear=UNARY_LINEAR, joined=joined, local=_smaller_sections
    )


def _smaller_sections(call: LocalCall) -> fx.Node:
    return call.as_traced({1: [size // call.num_parts("joined") for size in call.args[1]]})


def unbind(node: fx.Node) -> Pattern:
    dims = names(len(shape(node.args[0])))
    at = argument(node, "dim") % len(dims)
    output = [d for i, d in enumerate(dims) if i != at]
    return pattern(node, [dims], [output] * len(value(node)), [dims[at][0]], linear=UNARY_LINEAR)


def join(node: fx.Node) -> Pattern:
    """`cat`: the joined dim is a concatenation; sharding it shards every part."""
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
    """`slice_scatter`, `select_scatter`: a part of one dim is overwritten; that dim stays whole."""
    dims = names(len(shape(node.args[0])))
    at = argument(node, "dim") % len(dims)
    part_dims = [("part",) if i == at else d for i, d in enumerate(dims)]
    if len(shape(node.args[1])) < len(dims):
        del part_dims[at]
    whole = [dims[at][0], "part"] if ("part",) in part_dims else [dims[at][0]]
    return pattern(node, [dims, part_dims], [dims], whole, linear=((0, 1),))
