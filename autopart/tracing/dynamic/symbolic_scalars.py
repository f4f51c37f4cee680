"""Data-dependent scalars (`x.norm().item()`) as 0-d tensors, and their arithmetic as operators."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopart.compat.symbolic_shape_internals import expression, symbolic_functions
from autopart.compat.torch_internals import is_operator, tree_leaves
from autopart.errors import Refusal, TraceError
from autopart.ir.graph import operator_name, short_name, source_text, tuple_values, value
from autopart.tracing.dynamic.random_branches import depends_only_on_random

aten = torch.ops.aten

_OPEN = (torch.SymInt, torch.SymFloat, torch.SymBool)
_ITEMS = {"aten::item", "aten::_local_scalar_dense"}
_ARITHMETIC: Mapping[Any, Any] = {
    operator.add: aten.add.Tensor, operator.sub: aten.sub.Tensor, operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor, operator.floordiv: aten.floor_divide.default,
    operator.mod: aten.remainder.Tensor, operator.pow: aten.pow.Tensor_Tensor, operator.neg: aten.neg.default,
    operator.abs: aten.abs.default, operator.eq: aten.eq.Tensor, operator.ne: aten.ne.Tensor,
    operator.lt: aten.lt.Tensor, operator.le: aten.le.Tensor, operator.gt: aten.gt.Tensor, operator.ge: aten.ge.Tensor,
    torch.sym_max: aten.maximum.default, torch.sym_min: aten.minimum.default, torch.sym_not: aten.logical_not.default,
    torch.sym_int: aten.trunc.default, torch.sym_float: aten.positive.default,
    **{function: getattr(aten, name).default for function, name in symbolic_functions().items()},
}  # fmt: skip
_IN_FLOAT = {operator.truediv, torch.sym_float, *symbolic_functions()}


def is_open(val: Any) -> bool:
    """Return True for a data-dependent scalar, and for a tensor with a data-dependent size."""
    if isinstance(val, Tensor):
        return not all(isinstance(expression(size), int) for size in val.shape)
    return isinstance(val, _OPEN)


def is_number(node: fx.Node) -> bool:
    """Return True if a node computes a scalar, not a tensor."""
    return isinstance(value(node), _OPEN)


def added(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call before the current insertion point. The call gets the source line of `like`.

    Its result is a fake tensor or a symbolic scalar.
    """
    node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in like.meta.items() if k in ("nn_module_stack", "stack_trace")}
    near = [v for used in (*node.all_input_nodes, like) for v in tuple_values(used)]
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), value)
    with next(v for v in near if isinstance(v, Tensor)).fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


class SymbolicScalars:
    """Data-dependent scalars of a graph as 0-d tensors. Each tensor is added to the graph on first use.

    `count`: function that returns a data-dependent size as a tensor, given torch's symbol of the size.
    """

    def __init__(self, graph: fx.Graph, count: Callable[[fx.Node, Any], fx.Node | None]):
        self.graph, self.count = graph, count

    def call_with_tensors(self, node: fx.Node) -> fx.Node:
        """Return a call in which each data-dependent scalar argument is replaced by a tensor.

        Raises TraceError if the operator accepts no tensor for such an argument.
        """
        name = operator_name(node)
        if name == "aten::select" and is_number(node.args[2]):
            index = added(self.graph, node, aten.reshape.default, self.tensor(node.args[2], node), [1])
            read = added(self.graph, node, aten.index_select.default, node.args[0], node.args[1], index)
            return added(self.graph, node, aten.squeeze.dim, read, node.args[1])
        if name in ("aten::add", "aten::sub") and _is_number(node.kwargs.get("alpha")):
            other = added(self.graph, node, aten.mul.Tensor, node.args[1], self.tensor(node.kwargs["alpha"], node))
            return added(self.graph, node, node.target, node.args[0], other)
        if name == "aten::scalar_tensor":
            return self._like(self.tensor(node.args[0], node), value(node), node)
        if name == "aten::full" and _is_number(node.args[1]):
            full = self._like(self.tensor(node.args[1], node), value(node), node)
            return added(self.graph, node, aten.expand.default, full, node.args[0])
        arguments = _arguments(node)
        for target in _forms(node.target, arguments):
            call = self._in_dtype(node, target, arguments)
            if call is not None:
                return call
        where = next(name for name, argument in arguments.items() if _holds_number(argument))
        numbers = [leaf for leaf in tree_leaves(arguments[where]) if isinstance(leaf, fx.Node)]
        is_drawn = any(map(depends_only_on_random, numbers))
        drawn = "draw the number before the call, and pass it to forward() as an argument"
        raise TraceError(
            f"'{where}' of {short_name(node)} is a {'random ' * is_drawn}number that the model "
            f"{'draws' if is_drawn else 'computes'}", refusal=Refusal.SIZE,
            why=f"it is only known when the program runs, and {short_name(node)} accepts no tensor for it",
            where=source_text(node), hint=drawn if is_drawn else "operations on the tensor itself, without .item()",
        )  # fmt: skip

    def _in_dtype(self, node: fx.Node, target: Any, arguments: Mapping[str, Any]) -> fx.Node | None:
        """Return the call with overload `target`, which accepts a tensor in place of each scalar.

        The result has the dtype of the result of `node`. A tensor operand could change this dtype, which a scalar
        operand does not do, so the tensor or the result is cast.
        """
        wanted = value(node)
        declared = target._schema.arguments
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in declared:
            if argument.name not in arguments:
                continue
            passed = arguments[argument.name]
            if _takes_tensor(argument) and _is_plain(passed):
                passed = self._constant(passed, node)
            elif _is_number(passed):
                passed = self.tensor(passed, node)
                if wanted.dtype != torch.bool and value(passed).is_floating_point() != wanted.is_floating_point():
                    passed = self._like(passed, wanted, node)
            if argument.kwarg_only:
                kwargs[argument.name] = passed
            else:
                args.append(passed)
        call = added(self.graph, node, target, *args, **kwargs)
        if value(call).dtype == wanted.dtype:
            return call
        return self._like(call, wanted, node)

    def _like(self, node: fx.Node, wanted: Tensor, line: fx.Node) -> fx.Node:
        return added(self.graph, line, aten._to_copy.default, node, dtype=wanted.dtype)

    def _constant(self, number: Any, line: fx.Node) -> fx.Node:
        return added(self.graph, line, aten.full.default, [], number, dtype=_dtype(type(number)))

    def tensor(self, number: fx.Node, line: fx.Node) -> fx.Node:
        """Return a scalar as a 0-d tensor of dtype float64, int64 or bool, the precision of Python numbers."""
        dtype = _dtype(_KINDS[type(value(number))])
        name = operator_name(number)
        if name in _ITEMS:
            alone = added(self.graph, line, aten.reshape.default, number.args[0], [])
            result = added(self.graph, line, aten.detach.default, alone)
        elif name == "aten::sym_size":
            result = self.size(expression(value(number)), line)
        elif number.target is torch.sym_sum:
            first, *others = (self._operand(n, line) for n in number.args[0])
            result = functools.reduce(functools.partial(added, self.graph, line, aten.add.Tensor), others, first)
        elif number.target in _ARITHMETIC:
            operands = [self._operand(n, line) for n in number.args]
            if number.target in _IN_FLOAT:
                operands = [self._cast(operand, torch.float64, line) for operand in operands]
            result = added(self.graph, line, _ARITHMETIC[number.target], *operands)
        else:
            raise TraceError(
                f"{getattr(number.target, '__name__', name)} is called with a number that the model computes",
                refusal=Refusal.SIZE,
                why="autopart knows no tensor operator that does the same",
                where=source_text(number) or source_text(line),
                hint="operations on the tensor itself, without .item()",
            )
        return self._cast(result, dtype, line)

    def _operand(self, number: Any, line: fx.Node) -> fx.Node:
        return self.tensor(number, line) if _is_number(number) else self._constant(number, line)

    def _cast(self, node: fx.Node, dtype: torch.dtype, line: fx.Node) -> fx.Node:
        return node if value(node).dtype == dtype else added(self.graph, line, aten._to_copy.default, node, dtype=dtype)

    def size(self, size: Any, line: fx.Node) -> fx.Node:
        """Return a data-dependent size, given as a formula in torch's symbols, as a tensor."""
        if isinstance(size, int) or size.is_Integer:
            return self._constant(int(size), line)
        counted = self.count(line, size) if size.is_Symbol else None
        if counted is not None:
            return counted
        if size.is_Symbol:
            raise _no_formula(size, line)
        check_formula(size, line)
        first, *others = [self.size(part, line) for part in size.args]
        for other in others:
            first = added(self.graph, line, aten.add.Tensor if size.is_Add else aten.mul.Tensor, first, other)
        return first


def check_formula(size: Any, line: fx.Node) -> None:
    """Raise TraceError for a data-dependent size that is not a sum of products of sizes, such as `u0//8`."""
    if isinstance(size, int) or size.is_Integer or size.is_Symbol:
        return
    if not (size.is_Add or size.is_Mul):
        raise _no_formula(size, line)
    for part in size.args:
        check_formula(part, line)


def _no_formula(size: Any, line: fx.Node) -> TraceError:
    return TraceError(
        "a size that depends on values of a tensor is used in a computation", refusal=Refusal.SIZE,
        why=f"autopart has no formula for it: {size}", where=source_text(line),
        hint="if the size is a number of selected elements, as in x[mask], compute it as mask.sum()",
    )  # fmt: skip


_KINDS: Mapping[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def _dtype(kind: type) -> torch.dtype:
    return {bool: torch.bool, int: torch.int64, float: torch.float64}[kind]


def _is_number(argument: Any) -> bool:
    return isinstance(argument, fx.Node) and is_number(argument)


def _holds_number(argument: Any) -> bool:
    """Return True for a symbolic scalar, or a list that contains one (such as sizes)."""
    return any(map(_is_number, argument)) if isinstance(argument, (list, tuple)) else _is_number(argument)


def _is_plain(argument: Any) -> bool:
    return isinstance(argument, (bool, int, float))


def _takes_tensor(argument: Any) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]")


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return {name: value} of the arguments that a call passes."""
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _forms(target: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """Return the overloads of an operator that accept tensors for all scalars of a call.

    The overload of the call itself comes first.
    """
    packet = getattr(torch.ops.aten, target._schema.name.removeprefix("aten::"))
    forms = [target, *(getattr(packet, name) for name in packet.overloads() if not name.endswith("out"))]
    return [form for form in forms if is_operator(form) and _fits(form, arguments)]


def _fits(form: Any, arguments: Mapping[str, Any]) -> bool:
    declared = {argument.name: argument for argument in form._schema.arguments}
    if form._schema.is_mutable or not arguments.keys() <= declared.keys():
        return False
    missing = [a for a in declared.values() if a.name not in arguments and not a.has_default_value()]
    return not missing and all(
        _takes_tensor(declared[name])
        for name, passed in arguments.items()
        if _holds_number(passed) or isinstance(passed, fx.Node)
    )
