"""Sample calls of torch's operators, from torch's own database (`op_db`): several hundred operators in float64.

One call is also made with tensors of the numbers 0, 1, -1 and 0.5: ties and zeros, where formulas of gradients differ.
"""

from __future__ import annotations

import itertools
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from in_place_samples import Written
from torch import Tensor

from autopart.compat.torch_internals import tree_flatten, tree_map, tree_unflatten

MOST = 4
"""Maximum number of samples of an operator, of which the first is also made with tied numbers."""
TIED = (0.0, 1.0, -1.0, 0.5)
NOT_RUN = {
    "the result is the uninitialized memory of a tensor": "empty empty_like empty_permuted empty_strided new_empty "
    "new_empty_strided",
    "verification replaces casts": "bfloat16 float half cfloat",
    "the sample seeds the random generator itself": "cauchy exponential geometric log_normal normal uniform",
    "runs on a GPU only": "jiterator_2inputs_2outputs jiterator_4inputs_with_extra_args jiterator_binary "
    "jiterator_binary_return_by_ref jiterator_unary",
    "returns no tensor": "allclose equal item",
}
"""{why an operator is not compared: its names}."""
MAY_BE_REFUSED = {
    "a size or a position that depends on values": "argwhere linalg.lstsq linalg.lstsq.grad_oriented masked_select "
    "narrow nonzero repeat_interleave tensor_split",
    "a sparse parameter": "sparse.mm.reduce sparse.sampled_addmm",
    "running statistics of a function": "nn.functional.instance_norm",
    "a wrong gradient in torch itself": "as_strided_scatter",
}
"""{why an operator may end in a TraceError: its names}."""


@cache
def database() -> dict[str, Any]:
    """Return {name: entry} of torch's database of operators with float64 samples."""
    stub: Any = types.ModuleType("expecttest")  # a package that the module imports for other tests
    stub.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stub)
    from torch.testing._internal.common_methods_invocations import op_db

    entries = {f"{e.name}.{e.variant_test_name}" if e.variant_test_name else e.name: e for e in op_db}
    skipped = set(" ".join(NOT_RUN.values()).split())
    return {
        name: entry
        for name, entry in entries.items()
        if entry.name not in skipped and torch.float64 in entry.supported_dtypes("cpu")
    }


def calls(name: str) -> Iterator[tuple[str, Written]]:
    """Yield (description, module that makes the call) of the samples of an operator."""
    entry = database()[name]
    torch.manual_seed(0)
    samples = entry.sample_inputs("cpu", torch.float64, requires_grad=entry.supports_autograd)
    for i, sample in enumerate(itertools.islice(samples, MOST)):
        call = sample.input, sample.args, sample.kwargs
        yield f"{name} {i}", _module(entry.op, call)
        if not i:
            yield f"{name} {i} with ties", _module(entry.op, tree_map(_tied, call))


def _tied(argument: Any) -> Any:
    if not isinstance(argument, Tensor) or not argument.is_floating_point() or argument.layout != torch.strided:
        return argument
    numbers = torch.tensor(TIED, dtype=argument.dtype)
    return numbers[torch.randint(len(TIED), argument.shape)].requires_grad_(argument.requires_grad)


def _module(operator: Callable[..., Any], call: Any) -> Written:
    flat, spec = tree_flatten(call)
    places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]

    def function(*tensors: Tensor) -> list[Tensor]:
        leaves = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            leaves[place] = tensor
        first, args, kwargs = tree_unflatten(leaves, spec)
        return [leaf for leaf in tree_flatten(operator(first, *args, **kwargs))[0] if isinstance(leaf, Tensor)]

    return Written(function, [flat[place] for place in places])
