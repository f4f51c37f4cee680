"""Helpers for sharding rules that are Python functions of an operator's call.

A factor is a named divisor of a dim's size (`notation.py`): a dim of 12 heads with 64 features has the factors 12 and
64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import fx

from autopart.ir.graph import argument, shape, tensor_inputs, value
from autopart.ir.pattern import Dim, Pattern

UNARY_LINEAR = ((0,),)


def names(count: int, prefix: str = "d") -> list[Dim]:
    """Return `count` dims, each with one new letter of a sharding rule: `("d0",)`, `("d1",)`, ..."""
    return [(f"{prefix}{i}",) for i in range(count)]


def names_and_dim(node: fx.Node, argument_name: str = "dim") -> tuple[list[Dim], int]:
    """Return the dims of a call's first operand, one letter each, and its non-negative argument `dim`.

    The operand must have at least one dim.
    """
    dims = names(len(shape(node.args[0])))
    return dims, argument(node, argument_name) % len(dims)


def pattern(
    node: fx.Node, inputs: Sequence, outputs: Sequence, whole: Sequence[str] = (),
    known: Mapping[str, int] = MappingProxyType({}), **options: Any,
) -> Pattern:  # fmt: skip
    """Return the sharding rule of a call (a `Pattern`), given the factors (letters) of its dims.

    Args:
        inputs: for each tensor input, its dims as tuples of factors.
        outputs: for each output, its dims as tuples of factors.
        whole: factors that cannot be sharded.
        known: sizes of factors that do not follow from the call's shapes.
        options: other fields of `Pattern`.
    """
    sizes = dict(known)
    shapes = [shape(n) for n in tensor_inputs(node)] + output_shapes(node)
    for dims, sizes_of in zip((*inputs, *outputs), shapes, strict=True):
        for dim, size in zip(dims, sizes_of, strict=True):
            if len(dim) == 1:
                sizes.setdefault(dim[0], size)
    return Pattern(
        tuple(map(tuple, inputs)), tuple(map(tuple, outputs)), sizes, frozenset(whole), **{"linear": (), **options}
    )


def output_shapes(node: fx.Node) -> list[tuple[int, ...]]:
    outputs = value(node)
    return [tuple(t.shape) for t in (outputs if isinstance(outputs, (tuple, list)) else [outputs])]
