"""Rules of reductions, and of operators along a dim that cannot be sharded (softmax, sort)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from autopart.ir.graph import argument, shape, tensor_inputs
from autopart.ir.pattern import Pattern
from autopart.passes.rules.factors import UNARY_LINEAR, names, names_and_dim, output_shapes, pattern
from autopart.passes.rules.local_forms import LocalCall

aten = torch.ops.aten


def reduction(node: fx.Node) -> Pattern:
    """Return the rule of `sum`: sharding a summed dim makes the output a partial sum."""
    return _reduce(node, whole=False)


def mean(node: fx.Node) -> Pattern:
    """Return the rule of `mean`: sharding a reduced dim makes the output a partial sum.

    The results of all ranks add up to the global mean, because `_local_share` divides by the global size.
    """
    return replace(_reduce(node, whole=False), local=_local_share)


def _local_share(call: LocalCall) -> fx.Node | None:
    """Emit this rank's share of a global mean: the shares of all ranks add up to the mean.

    Return None if nothing is sharded. With equal shards, the share is the local mean divided by the number of shards.
    Otherwise it is the local sum divided by the global number of elements.
    """
    source, output = shape(call.node.args[0]), shape(call.node)
    sharded = {axis: s for axis, s in call.strategies.items() if s.factor and s.outputs[0].kind == "P"}
    if any(p.is_shard and source[p.dim] % call.sizes[axis] for axis, s in sharded.items() for p in s.inputs):
        total = aten.sum.default if len(call.args) == 1 else aten.sum.dim_IntList
        share = math.prod(output) / math.prod(source)
        return call.emit(aten.mul.Tensor, call.emit(total, *call.args, **call.kwargs), share)
    num_shards = math.prod(call.sizes[axis] for axis in sharded)
    return None if num_shards == 1 else call.emit(aten.mul.Tensor, call.as_traced(), 1.0 / num_shards)


def unsharded_reduction(node: fx.Node) -> Pattern:
    """Return the rule of `amax`, `argmax`, `std`, ...: the reduced dims cannot be sharded."""
    return _reduce(node, whole=True)


def _reduce(node: fx.Node, whole: bool) -> Pattern:
    before, after = shape(node.args[0]), output_shapes(node)
    dims = names(len(before))
    chosen = argument(node, "dim")
    everything = chosen is None or chosen == []
    chosen = range(len(before)) if everything else [chosen] if isinstance(chosen, int) else chosen
    reduced = {d % len(before) for d in chosen} if before else set()
    keep = len(after[0]) == len(before)
    output = [() if i in reduced else d for i, d in enumerate(dims) if keep or i not in reduced]
    unshardable = [dims[i][0] for i in reduced] if whole else []
    return pattern(node, [dims], [output] * len(after), unshardable, linear=() if whole else UNARY_LINEAR)


def extreme(node: fx.Node) -> Pattern | None:
    """Return the rule of `max` and `min` of one tensor; None for two tensors, which are elementwise."""
    return _reduce(node, whole=True) if len(tensor_inputs(node)) == 1 else None


def topk(node: fx.Node) -> Pattern | None:
    """Return the rule of `topk`: the searched dim cannot be sharded. Outputs are values and indices."""
    if not shape(node.args[0]):
        return None
    dims, at = names_and_dim(node)
    output = [("best",) if i == at else d for i, d in enumerate(dims)]
    return pattern(node, [dims], [output, output], [dims[at][0], "best"])


def half_spectrum(node: fx.Node) -> Pattern:
    """Return the rule of real Fourier transforms: the transformed dims cannot be sharded.

    The last transformed dim has another size in the output.
    """
    dims = names(len(shape(node.args[0])))
    over = [d % len(dims) for d in argument(node, "dim")]
    output = [(f"frequency{i}",) if i in over else d for i, d in enumerate(dims)]
    whole = [name for i in over for name in (dims[i][0], f"frequency{i}")]
    return pattern(node, [dims], [output], whole, linear=UNARY_LINEAR)


def along_dim(name: str, linear: bool = False) -> Callable[[fx.Node], Pattern]:
    """Return a function that derives the sharding rule (`Pattern`) of a call such as `softmax`.

    Such an operator works along dims that cannot be sharded, and its output has the shape of the input.

    Args:
        name: argument that lists these dims.
        linear: True if the input may be a partial sum.
    """

    def rule(node: fx.Node) -> Pattern:
        dims = names(len(shape(node.args[0])))
        chosen = argument(node, name)
        chosen = [chosen] if isinstance(chosen, int) else chosen or range(len(dims))  # no dim: the flattened tensor
        unshardable = [dims[d][0] for d in chosen] if dims else []
        return pattern(
            node, [dims], [dims] * len(output_shapes(node)), unshardable, linear=UNARY_LINEAR if linear else ()
        )

    return rule
