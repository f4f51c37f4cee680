"""Python code of graph nodes: one statement for each operator, with comments."""

from __future__ import annotations

import keyword
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from autopart.compat.torch_internals import is_operator
from autopart.errors import PlanError
from autopart.ir.collective_nodes import MOVES, autopart_operator, axis_of
from autopart.ir.facts import facts
from autopart.ir.graph import describe, format_value, module_path, source_line
from autopart.ir.layout import format_layout
from autopart.ops.operators import embedding_shard, pick_class

LOCAL_OPERATORS: Mapping[str, Callable[..., Any]] = {"embedding_shard": embedding_shard, "pick_class": pick_class}
"""{operator of autopart without communication: its function, whose source is copied into the package}."""
COLLECTIVES = ({*MOVES, "all_reduce_max", "axis_index"}) - {"dispatch", "combine"}
"""Operators of autopart that `package_collectives.py` implements."""
_INFIX: Mapping[Any, str] = {
    torch.ops.aten.add.Tensor: "+", torch.ops.aten.sub.Tensor: "-", torch.ops.aten.mul.Tensor: "*",
    torch.ops.aten.div.Tensor: "/", operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//",
}  # fmt: skip
_METHODS = (
    "amax", "chunk", "contiguous", "cos", "cumsum", "detach", "eq", "exp", "expand", "log", "masked_fill", "mean", "ne",
    "neg", "permute", "pow", "reshape", "rsqrt", "sin", "split_with_sizes", "sqrt", "squeeze", "sum", "tanh",
    "transpose", "unsqueeze", "view",
)  # fmt: skip
_FUNCTIONAL = {"linear": 3, "silu": 1, "gelu": 1, "relu": 1, "layer_norm": 5, "scaled_dot_product_attention": 6}
"""{function of torch.nn.functional: the most positional arguments that it shares with the aten operator}."""
RESERVED = (
    "F", "aten", "checkpoint", "collectives", "device", "float", "local_operators", "operator", "slice", "torch", "w",
)  # fmt: skip
"""Names that values in generated code cannot have."""
INDENT = "    "
MAX_COLUMNS = 120


class Names:
    """Names of values in one generated function: the operator's name, then `name_1`, `name_2`."""

    def __init__(self, given: Mapping[fx.Node, str], weights_prefix: str = ""):
        self.names: dict[fx.Node, str] = dict(given)
        self.prefix = weights_prefix
        self.used = {*given.values(), *RESERVED}

    def add(self, node: fx.Node) -> str:
        """Choose a name for a node that the function computes. Return it."""
        base, number = _base_name(node), 0
        while (name := f"{base}_{number}" if number else base) in self.used:
            number += 1
        self.used.add(name)
        self.names[node] = name
        return name

    def text(self, argument: Any) -> str:
        """Return Python code for an argument of an operator."""
        if isinstance(argument, fx.Node):
            if argument in self.names:
                return self.names[argument]
            assert argument.op == "get_attr", f"{argument} has no name"
            return f'w["{str(argument.target).removeprefix(self.prefix)}"]'
        if isinstance(argument, (list, tuple)):
            inside = ", ".join(map(self.text, argument))
            return f"[{inside}]" if isinstance(argument, list) else f"({inside}{',' * (len(argument) == 1)})"
        if isinstance(argument, slice):
            return f"slice({self.text(argument.start)}, {self.text(argument.stop)}, {self.text(argument.step)})"
        if isinstance(argument, float) and not math.isfinite(argument):
            return f'float("{argument}")'
        if isinstance(argument, torch.device):
            return "device()"
        if isinstance(argument, str):
            return f'"{argument}"'
        if argument is None or isinstance(argument, (bool, int, float, complex)):
            return repr(argument)
        if isinstance(argument, (torch.dtype, torch.memory_format, torch.layout)):
            return str(argument)
        raise PlanError(f"a value of type {type(argument).__name__} cannot be written as code",
                        hint="train with autopart.parallelize, which runs the program itself")  # fmt: skip


def _base_name(node: fx.Node) -> str:
    name = _operator_base(node)
    if name == "linear" and (path := module_path(node)):
        last = path.rpartition(".")[2]
        name = last if last.isidentifier() else name
    name = re.sub(r"\W", "_", name).strip("_").lower() or "value"
    return f"{name}_value" if keyword.iskeyword(name) or name in RESERVED else name


def _operator_base(node: Any) -> str:
    if node.target is operator.getitem:
        return "part"
    if is_operator(node.target):
        name = str(node.target.overloadpacket.__name__)
        return "attention" if name == "scaled_dot_product_attention" else name
    return str(getattr(node.target, "__name__", node.name))


def expression(node: fx.Node, names: Names) -> str:
    """Return Python code that computes a node.

    Raises PlanError for an operator that exported code cannot contain.
    """
    target: Any = node.target
    args = [names.text(argument) for argument in node.args]
    keywords = {key: names.text(given) for key, given in node.kwargs.items() if given is not None}
    arguments = ", ".join([*args, *(f"{key}={text}" for key, text in keywords.items())])
    if (name := autopart_operator(node)) is not None:
        if name == "cast":
            return f"{args[0]}.to({args[1]})"
        if name not in COLLECTIVES and name not in LOCAL_OPERATORS:
            raise unsupported(f"the operator {name} ({describe(node)})", "it is a kernel of autopart",
                              "context='gather' or 'ulysses'" if name == "ring_attention" else "")  # fmt: skip
        return f"{'collectives' if name in COLLECTIVES else 'local_operators'}.{name}({arguments})"
    if target is operator.getitem:
        return f"{args[0]}[{args[1]}]"
    if target in _INFIX and len(args) == 2 and not keywords:
        return f"{args[0]} {_INFIX[target]} {args[1]}"
    if is_operator(target) and target.namespace == "aten":
        packet = target.overloadpacket.__name__
        if packet in _METHODS and isinstance(node.args[0], fx.Node):
            return f"{args[0]}.{packet}({arguments.partition(', ')[2] if len(args) > 1 or keywords else ''})"
        if target is torch.ops.aten.to.dtype and len(args) == 2:
            return f"{args[0]}.to({args[1]})"
        if len(args) <= _FUNCTIONAL.get(packet, -1):
            return f"F.{packet}({arguments})"
        overloads = target.overloadpacket.overloads()
        return f"aten.{packet}{'' if overloads == ['default'] else f'.{target._overloadname}'}({arguments})"
    if getattr(target, "__module__", "") == "_operator":
        return f"operator.{target.__name__}({arguments})"
    raise unsupported(f"the operator {describe(node)}", "it is not an operator of torch")


def unsupported(what: str, why: str, hint: str = "") -> PlanError:
    """Return the error for a part of a program that cannot be exported as code."""
    return PlanError(f"{what} cannot be exported as code", why=why,
                     hint=hint or "train with autopart.parallelize, which runs every plan")  # fmt: skip


def statements(nodes: Iterable[fx.Node], names: Names, note: Callable[[fx.Node], str], path: str = "") -> list[str]:
    """Return the lines that compute nodes: one statement for each, and a comment for each module.

    Args:
        note: returns the comment of a collective, "" for other nodes.
        path: path of the module that contains the nodes; comments show paths relative to it.
    """
    lines: list[str] = []
    shown = path
    for node in nodes:
        code = expression(node, names)
        module = module_path(node)
        if module != shown:
            relative = module.removeprefix(path).removeprefix(".") if path else module
            line = source_line(node)
            title = relative or ("the block itself" if path else "the model itself")
            lines.append(f"# {title} ({line})" if line else f"# {title}")
            shown = module
        if comment := note(node):
            lines += _wrapped_comment(comment)
        lines.append(_with_shape(f"{names.add(node)} = {code}", node))
    return lines


def _wrapped_comment(comment: str) -> list[str]:
    limit = MAX_COLUMNS - len(INDENT) - 2
    return [f"# {comment if len(comment) <= limit else comment[: limit - 3] + '...'}"]


def _with_shape(code: str, node: fx.Node) -> str:
    if not isinstance(facts(node).get("val"), torch.Tensor):
        return code
    layout = format_layout(facts(node).get("layout") or {})
    shape = f"  # {format_value(node, layout if layout != '{}' else '')}"
    return code + shape if len(INDENT + code + shape) <= MAX_COLUMNS else code


def is_collective(node: fx.Node) -> bool:
    """Return True for a node that is a conversion or collective over a mesh axis."""
    return axis_of(node) is not None and autopart_operator(node) != "axis_index"
