"""Values that depend on the sizes of a program's inputs, as functions of these sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopart.recipe.sizes.size_formula import NotDerivable, SizeFormula, Sizes, fit_integer

Evaluate = Callable[[SizeFormula], Any]
"""Function from the formula of an integer to its value for the sizes of a call, or to a graph input with this value."""
Fitted = Callable[[Evaluate, Callable[[fx.Node], fx.Node]], Any]
"""Function `fitted(evaluate, node_of)` that returns a value. `evaluate` gives its integers, `node_of` its nodes."""


def fit(values: Sequence[Any], sizes: Sequence[Sizes], numbers: Sequence[Any]) -> Fitted | None:
    """Return a function that computes a value from the sizes; None if the value is equal in all traces.

    Integers become formulas. Tuples, lists, dicts and dataclasses are fitted entry by entry. For tensors without
    values, shapes and strides are fitted.

    Args:
        values: the value in each trace. The function gives these values for the sizes of the traces.
        sizes: values of the size variables in each trace.
        numbers: for each trace, a function that maps a node to its index in the graph.
    Raises:
        NotDerivable: the values differ, and no formula of the sizes describes the difference.
    """
    first, kind = values[0], type(values[0])
    if any(type(value) is not kind for value in values):
        raise NotDerivable(f"types differ: {', '.join(sorted({type(value).__name__ for value in values}))}")
    if isinstance(first, fx.Node):
        if len({number(value) for number, value in zip(numbers, values, strict=True)}) > 1:
            raise NotDerivable(f"{first} has other operands")
        return None
    if isinstance(first, Tensor):
        return _fit_tensor(values, sizes)
    if isinstance(first, int) and kind is int:
        return None if len({*values}) == 1 else _at(fit_integer(values, sizes))
    if isinstance(first, dict):
        if any(list(value) != list(first) for value in values):
            raise NotDerivable("keys differ")
        parts = {key: fit([value[key] for value in values], sizes, numbers) for key in first}
        return _entries(first, parts, lambda entries: kind(entries))
    if isinstance(first, (tuple, list)):
        if len({len(value) for value in values}) > 1:
            raise NotDerivable("lengths differ")
        parts = dict(enumerate(fit(column, sizes, numbers) for column in zip(*values, strict=True)))
        build = (lambda entries: kind(*entries.values())) if hasattr(first, "_fields") else (
            lambda entries: kind(entries.values()))  # fmt: skip
        return _entries(dict(enumerate(first)), parts, build)
    if dataclasses.is_dataclass(first) and not isinstance(first, type) and not all(value == first for value in values):
        known = {field.name: getattr(first, field.name) for field in dataclasses.fields(first)}
        parts = {name: fit([getattr(value, name) for value in values], sizes, numbers) for name in known}
        return _entries(known, parts, lambda entries: dataclasses.replace(first, **entries))
    if not all(value is first or value == first for value in values):
        raise NotDerivable(f"{kind.__name__} values differ: {', '.join(map(str, values))}")
    return None


def _at(formula: SizeFormula) -> Fitted:
    return lambda evaluate, node_of: evaluate(formula)


def _entries(known: dict, parts: dict[Any, Fitted | None], build: Callable[[dict], Any]) -> Fitted | None:
    if not any(parts.values()):
        return None

    def fitted(evaluate: Evaluate, node_of: Callable[[fx.Node], fx.Node]) -> Any:
        return build({
            key: fx.map_arg(value, node_of) if (part := parts[key]) is None else part(evaluate, node_of)
            for key, value in known.items()
        })  # fmt: skip

    return fitted


def _fit_tensor(values: Sequence[Tensor], sizes: Sequence[Sizes]) -> Fitted | None:
    first = values[0]
    if len({(value.dtype, value.device, value.layout, value.requires_grad, value.dim()) for value in values}) > 1:
        raise NotDerivable("tensors differ in dtype, device, layout or number of dims")
    shape = fit([tuple(value.shape) for value in values], sizes, [])
    strides = fit([value.stride() for value in values], sizes, []) if first.layout == torch.strided else None
    if shape is None and strides is None:
        return None

    def fitted(evaluate: Evaluate, node_of: Callable[[fx.Node], fx.Node]) -> Tensor:
        new_shape = tuple(first.shape) if shape is None else shape(evaluate, node_of)
        new_strides = first.stride() if strides is None else strides(evaluate, node_of)
        with getattr(first, "fake_mode", torch.device(first.device)):
            like = torch.empty_strided(new_shape, new_strides, dtype=first.dtype, device=first.device)
        return like.requires_grad_(first.requires_grad)

    return fitted


def evaluated(fitted: Fitted, sizes: Sizes, node_of: Callable[[fx.Node], fx.Node] = lambda node: node) -> Any:
    """Return the value that a result of `fit` has for these sizes.

    Raises NotDerivable if a formula gives no integer.
    """
    return fitted(lambda formula: formula.at(sizes), node_of)
