"""Private APIs of torch's symbolic shapes: data-dependent sizes and scalars."""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx.experimental import _config as shapes_config
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from autopart.common.scoped import attributes

Symbol: TypeAlias = Any
"""A sympy symbol in torch's shapes, such as the data-dependent size `u0`."""


def is_symbol(size: Any) -> bool:
    return isinstance(size, sympy.Symbol)


def expression(size: Any) -> Any:
    """Return a symbolic size or scalar of a trace as a sympy expression. Return a Python number unchanged."""
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size
    known = size.node.expr  # apply the replacements that torch has found since then
    return int(known) if isinstance(size, torch.SymInt) and known.is_Integer else known


def with_sizes(value: Any, sizes: Mapping[Any, int]) -> Any:
    """Replace size symbols in a traced value by the numbers in `sizes`. Other symbols stay."""
    if isinstance(value, (tuple, list)):
        return type(value)(with_sizes(part, sizes) for part in value)
    if isinstance(value, torch.SymInt):
        known = sympy.sympify(expression(value)).subs(sizes)
        return int(known) if known.is_Integer else value
    if not isinstance(value, torch.Tensor):
        return value
    shape, strides = ([with_sizes(size, sizes) for size in numbers] for numbers in (value.shape, value.stride()))
    with value.fake_mode:  # type: ignore[attr-defined]
        like = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    return like.requires_grad_(value.requires_grad) if value.is_leaf else like


def symbolic_functions() -> dict[Any, str]:
    """Return {operator: name of a `math` function} for functions that torch traces on symbolic scalars."""
    names = ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2")
    return {getattr(torch, f"_sym_{name}"): name for name in names if hasattr(torch, f"_sym_{name}")}


def evaluated(formula: Any, numbers: Iterable[tuple[Symbol, Any]]) -> Any:
    """Return the value of a symbolic formula as a Python number.

    Args:
        numbers: (symbol, number) for each symbol of the formula.
    """
    if not isinstance(formula, sympy.Basic):
        return formula
    return sympy_interp(PythonReferenceAnalysis, dict(numbers), formula)


def fix_size(size: int | torch.SymInt, value: int) -> None:
    """Replace a data-dependent size of a trace by a number, in all tensors that have this size."""
    torch._check(size == value)


def free_symbols(size: Any) -> set[Symbol]:
    """Return the sympy symbols in the formula of a traced size; the empty set for an integer."""
    return getattr(expression(size), "free_symbols", set())


def many_elements(
    answer_model: Callable[[types.FrameType, Callable[[], torch.Tensor]], bool | None],
    decide: Callable[[Any, types.FrameType], Any],
    answer_both: Callable[[types.FrameType, Callable[[], torch.Tensor]], bool | None],
) -> AbstractContextManager[None]:
    """Decide conditions on data-dependent sizes during a trace.

    If torch's own code tests whether a data-dependent size is 0 or 1, the result is False. This is safe, because
    torch's kernels for larger sizes also handle sizes 0 and 1. If the size depends on inputs alone, a condition in a
    layer of torch (`torch.nn`) counts as a condition in the model's code.

    Args:
        answer_model: decides a condition in the model's code. Its arguments are the frame that evaluates the condition
            and a function that returns the condition as a tensor. It returns None if it cannot decide.
        decide: called if `answer_model` returns None. Its arguments are the condition's formula and the frame that
            evaluates it. It returns the formula's value, or None.
        answer_both: decides a condition for which both outcomes can be traced. Called if `decide` returns None, with
            the arguments of `answer_model`.
    """
    ask: Any = ShapeEnv.evaluate_expr

    def answer(env: Any, asked: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return ask(env, asked, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            frame = _asking_frame()
            if frame is None:
                raise
            outcome = None if _is_of_layer(asked, frame) else _told(env, asked, frame, answer_model)
            if outcome is None:
                outcome = decide(asked, frame)
            if outcome is None:
                outcome = _told(env, asked, frame, answer_both)
            if outcome is None:
                raise
            if type(outcome) is int:  # from here on, torch treats the size as this number
                env.guard_or_defer_runtime_assert(sympy.Eq(asked, outcome), "")
            return sympy.sympify(outcome)

    def _told(env: Any, asked: Any, frame: types.FrameType, answer_model: Callable[..., bool | None]) -> Any:
        if "/torch/" in frame.f_code.co_filename:
            many = asked.subs(dict.fromkeys(asked.free_symbols, MANY))
            return many if many in (sympy.true, sympy.false) and asked.free_symbols <= env.size_like else None
        is_comparison = type(asked) in _COMPARISONS
        return answer_model(frame, lambda: _truth(env, asked)) if is_comparison else None

    divide = staticmethod(operator.truediv)  # torch's own function fails on some values of a graph
    return attributes({(ShapeEnv, "evaluate_expr"): answer, (PythonReferenceAnalysis, "int_truediv"): divide})


def _is_of_layer(asked: Any, frame: types.FrameType) -> bool:
    """Return True if a layer of torch, not the user's code, evaluates a condition on a size."""
    return "/torch/nn/modules/" in frame.f_code.co_filename and type(asked) in _COMPARISONS


def all_selected() -> AbstractContextManager[Any]:
    """Make `nonzero` of a meta tensor return the indices of all elements, inside a `with` block."""
    patch: AbstractContextManager[Any] = shapes_config.patch(meta_nonzero_assume_all_nonzero=True)
    return patch


def _truth(env: Any, asked: Any) -> torch.Tensor:
    """Return a comparison of symbolic scalars as a 0-d bool tensor of the trace."""
    left, right = (asked.lhs, asked.rhs) if asked.rhs.is_number else (asked.lhs - asked.rhs, sympy.S.Zero)
    kind, number = (int, torch.SymInt) if left.is_integer else (float, torch.SymFloat)
    tensor = as_tensor(number(SymNode(left, env, kind, None)), torch.int64 if kind is int else torch.float64)
    return _COMPARISONS[type(asked)](tensor, int(right) if right.is_integer else float(right))


def as_tensor(number: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return a symbolic scalar as a 0-d tensor of the trace."""
    return torch.full((), number, dtype=dtype)


_COMPARISONS: Mapping[Any, Callable[[torch.Tensor, float], torch.Tensor]] = {
    sympy.Eq: torch.eq, sympy.Ne: torch.ne, sympy.Gt: torch.gt, sympy.Ge: torch.ge, sympy.Lt: torch.lt,
    sympy.Le: torch.le,
}  # fmt: skip
MANY = 1_000_003
"""Number that represents a data-dependent size. It is a prime so that no other size divides it."""
_ASKING = ("/torch/fx/", "/torch/__init__.py", "/torch/utils/_sympy/", __file__)


def _asking_frame() -> types.FrameType | None:
    """Return the frame that evaluates a condition: the innermost one outside torch's symbolic-shape code."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and any(part in frame.f_code.co_filename for part in _ASKING):
        frame = frame.f_back
    return frame
