"""Rules of recurrent layers. Only the batch can be sharded."""

from __future__ import annotations

import math

from torch import fx

from autopart.ir.graph import argument, shape, tensor_inputs, value
from autopart.ir.pattern import Dims, Pattern
from autopart.passes.rules.factors import names


def recurrent(node: fx.Node) -> Pattern | None:
    """Return the rule of `lstm`, `gru`, `rnn_tanh`, `rnn_relu`: only the batch can be sharded.

    None for packed sequences.
    """
    inputs = tensor_inputs(node)
    if argument(node, "batch_first") is None:  # packed sequences: samples of different lengths in one dim
        return None
    states = len(node.args[1]) if isinstance(node.args[1], (list, tuple)) else 1
    sizes: dict[str, int] = {}

    def factors(of: tuple[int, ...], prefix: str, batch_at: int | None) -> Dims:
        dims = [("b",) if i == batch_at else d for i, d in enumerate(names(len(of), prefix))]
        sizes.update({d[0]: size for d, size in zip(dims, of, strict=True)})
        return tuple(dims)

    at = 0 if argument(node, "batch_first") else 1
    input_dims = [factors(shape(inputs[0]), "x", at)]
    input_dims += [factors(shape(n), f"state{i}_", 1) for i, n in enumerate(inputs[1 : 1 + states])]
    input_dims += [factors(shape(n), f"w{i}_", None) for i, n in enumerate(inputs[1 + states :])]
    output_dims = [factors(tuple(v.shape), f"y{i}_", 1 if i else at) for i, v in enumerate(value(node))]
    steps = math.prod(shape(inputs[0])[:2])
    flops = sum(2 * steps * math.prod(shape(n)) for n in inputs[1 + states :] if len(shape(n)) == 2)
    return Pattern(tuple(input_dims), tuple(output_dims), sizes, frozenset(sizes) - {"b"}, flops=flops)
