"""Subgraph of a partitioned graph that can run alone, and its text form.

`str(subgraph)` has one line per value. `Subgraph.parse` converts this text to a subgraph with random input values, so
that a failure can be pasted into a test:

    mesh tp2
    x = recorded f64[8,12] | tp R
    w = weight f64[6,12] | tp S(0)
    y = aten.linear.default(x, w) | tp R(grad P), S(0) -> S(1)  # linear at attention.py:27 (layers.0.attn.q)
    return y

The fields between the bars `|` are the stage, the placements on the batch (`batch`: dp and microbatches), and the
placements on `tp`. An `input` is sharded over the batch like an input of the model. A `weight` is a parameter with its
stored placement on `tp` and `dp`. A `recorded` value is computed by an operator outside of the subgraph. It has the
layout of that operator's output.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopart.compat.torch_internals import tree_flatten
from autopart.errors import LayoutError, PlanError
from autopart.ir.decisions import Decisions, Strategy, data_strategies
from autopart.ir.facts import ACTIVE, INPUT, PARAMETER, WEIGHT, facts
from autopart.ir.graph import DTYPE_NAMES, describe, format_value
from autopart.ir.layout import R_GRAD_P, Layout, P, Placement, R, shard
from autopart.ir.mesh import AXES, Axis, Mesh
from autopart.ir.trace import Call, Trace
from autopart.passes.facts.analyze import annotate
from autopart.passes.facts.strategies import ANY_KIND, strategies
from autopart.proof.comparison import Arrangement, GraphUnderTest

aten = torch.ops.aten
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_RECORDED = "recorded_"
ROWS = "batch"
"""Name of the batch in the text form: all axes that shard it, and the microbatches."""


@dataclass(frozen=True)
class Subgraph:
    """Subgraph of a partitioned graph, with the values of its inputs and its sharding decisions.

    Example:
        >>> assert Subgraph.parse(text).max_error() < 1e-10    # doctest: +SKIP
    """

    subject: GraphUnderTest
    arrangement: Arrangement

    def errors(self) -> dict[str, float]:
        """Run the subgraph unpartitioned and on all ranks. Return the errors of outputs and gradients.

        If the partitioned run raises an exception, it is not caught.
        """
        return self.subject.errors(self.arrangement, self.subject.expected())

    def max_error(self) -> float:
        return max(self.errors().values(), default=0.0)

    @property
    def operators(self) -> list[fx.Node]:
        """The operators of the subgraph, without the helper operators that shard recorded values."""
        nodes = self.arrangement.decisions.stage_of
        return [node for node in nodes if "recorded" not in facts(node) and "hidden" not in facts(node)]

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    @staticmethod
    def parse(text: str, axes: tuple[Axis, ...] = AXES) -> Subgraph:
        """Convert the text form to a subgraph with random input values. Raises PlanError for an invalid line.

        Args:
            axes: all possible mesh axes.
        """
        return _Parser(text, axes).subgraph()


class Builder:
    """Builder of a subgraph. Its methods add one value at a time, in graph order."""

    def __init__(self, mesh: Mesh, microbatches: int = 1, num_stages: int = 1, scatter_sends: bool = False):
        self.mesh, self.microbatches, self.num_stages = mesh, microbatches, num_stages
        self.scatter_sends = scatter_sends
        self.graph = fx.Graph()
        self.inputs: dict[str, Tensor] = {}
        self.weights: dict[str, nn.Parameter] = {}
        self.parts = {ROWS: mesh.data_parallel_size * microbatches} | {axis: mesh.size(axis) for axis in mesh.chosen}
        self.chosen: dict[str, dict[fx.Node, Strategy]] = {over: {} for over in self.parts}
        self.stored: dict[str, Layout] = {}
        self.stage_of: dict[fx.Node, int] = {}

    def input(self, name: str, tensor: Tensor) -> fx.Node:
        """Add an input of the model."""
        node = self.graph.placeholder(name)
        node.meta = _meta(tensor, INPUT, input_name=name)
        self.inputs[name] = tensor
        return node

    def weight(self, target: str, tensor: Tensor, layout: Layout | None = None, name: str = "") -> fx.Node:
        """Add a parameter with its stored layout."""
        node = self.graph.create_node("get_attr", target, (), {}, name or target)
        node.meta = _meta(tensor, PARAMETER, tensor.requires_grad)
        self.weights[target] = nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
        self.stored[target] = {axis: place for axis, place in (layout or {}).items() if place != R}
        return node

    def recorded(self, name: str, tensor: Tensor, layout: Layout, stage: int) -> fx.Node:
        """Add a value that an operator outside of the subgraph computes, with the layout of its output.

        The value is stored as a weight, so that its gradient is compared too. Helper operators give it the layout: to
        shard the batch, they select samples by index. To create partial sums, they multiply the value by factors that
        differ for every rank and entry; the factors of all ranks add up to one.

        Args:
            layout: {axis: placement} for `ROWS` (the batch) and each axis on which the solver chooses layouts.
            stage: index of the stage that computes the value.

        Raises LayoutError if a rank's samples are not one contiguous range of the batch.
        """
        layout = {over: layout.get(over, R) if size > 1 else R for over, size in self.parts.items()}
        if layout[ROWS].sections:
            raise LayoutError(
                f"a subgraph cannot contain '{name}' with the batch layout {layout[ROWS]}",
                why="a rank's samples must be one contiguous range",
            )
        node = self.weight(_RECORDED + name, tensor)
        facts(node)["hidden"] = True
        partial = [over for over, place in layout.items() if place == P]
        current = {over: R_GRAD_P if place == P else place for over, place in layout.items()}
        rows, first_name = current[ROWS], None if partial else name
        if rows.is_shard:
            picked = self.input(f"rows_of_{name}", torch.arange(tensor.shape[rows.dim], device=tensor.device))
            facts(picked)["hidden"] = True
            node = self._made(aten.index_select.default, (node, rows.dim, picked), tensor, stage, first_name)
            for over, place in current.items():
                self.chosen[over][node] = Strategy((R_GRAD_P, shard(0)) if over == ROWS else (place, R), (place,))
        else:
            node = self._made(aten.clone.default, (node,), tensor, stage, first_name)
            for over, place in current.items():
                self.chosen[over][node] = Strategy((place,), (place,))
        for over in partial:
            others = {other: place for other, place in current.items() if other != over}
            node = self._as_partial_sums(node, tensor, over, others, stage, name if over == partial[-1] else None)
            current[over] = P
        node.meta = _meta(tensor, ACTIVE, tensor.requires_grad, recorded=True)
        return node

    def _as_partial_sums(
        self, node: fx.Node, tensor: Tensor, over: str, others: Layout, stage: int, name: str | None
    ) -> fx.Node:  # fmt: skip
        """Add operators that convert a value to partial sums over one axis, or over the batch.

        Args:
            over: the axis, or `ROWS` for the batch.
            others: placements of the value on all other axes.
        """
        num_parts = self.parts[over]
        shares = torch.linspace(1, 3, num_parts * tensor.numel(), dtype=torch.float64, device=tensor.device)
        shares = (7 * shares).sin().reshape(num_parts, *tensor.shape)
        shares[0] += 1 - shares.sum(0)
        shares_node = self.input(f"{over}_shares_of_{node.args[0]}", shares.to(tensor.dtype))
        facts(shares_node)["hidden"] = True
        ones = self._made(aten.sum.dim_IntList, (shares_node, [0]), tensor.detach(), stage)
        product = self._made(aten.mul.Tensor, (node, ones), tensor, stage, name)
        self.chosen[over][ones], self.chosen[over][product] = Strategy((shard(0),), (P,)), Strategy((R_GRAD_P, P), (P,))
        for other, place in others.items():
            cut = shard(place.dim + 1, place.sections) if place.is_shard else R
            after = place if place.is_shard else R
            self.chosen[other][ones] = Strategy((cut,), (after,))
            self.chosen[other][product] = Strategy((place, after), (place,))
        return product

    def _made(self, target: Any, args: tuple, tensor: Tensor, stage: int, name: str | None = None) -> fx.Node:
        node = self.graph.call_function(target, args, name=name)
        node.meta = _meta(tensor, ACTIVE, tensor.requires_grad, hidden=True)
        self.stage_of[node] = stage
        return node

    def subject(self, outputs: Sequence[fx.Node], loss: fx.Node | None = None) -> GraphUnderTest:
        """Add the output node and return the finished graph."""
        self.graph.output(tuple(outputs))
        call = Call(
            tuple(self.inputs.values()), tuple(self.inputs), {}, tuple(t.requires_grad for t in self.inputs.values())
        )
        spec = tree_flatten(tuple(outputs))[1]
        return GraphUnderTest(Trace(self.graph, call, self.weights, {}, {}, {}, spec, (), "train"), loss)

    def arrangement(self, **options: Any) -> Arrangement:
        strategies = {**data_strategies(self.mesh, self.microbatches, self.chosen[ROWS]), **self.chosen}
        del strategies[ROWS]
        decisions = Decisions(
            self.mesh, self.microbatches, strategies, self.stored, self.stage_of, self.num_stages,
            scatter_sends=self.scatter_sends,
        )  # fmt: skip
        return Arrangement(decisions, **options)


def _meta(tensor: Tensor, role: str, needs_grad: bool = False, **others: Any) -> dict[str, Any]:
    """Return the `node.meta` of a new node, with all entries that passes read."""
    return {"val": tensor.detach(), "role": role, "needs_grad": needs_grad, "pattern": None, "sections": {},
            "atoms": tuple(() for _ in tensor.shape), **others}  # fmt: skip


# Text


def _lines(subgraph: Subgraph) -> list[str]:
    decisions, subject = subgraph.arrangement.decisions, subgraph.subject
    header = [f"mesh {decisions.mesh}"]
    header += [f"microbatches {decisions.microbatches}"] * (decisions.microbatches > 1)
    header += [f"stages {decisions.num_stages}"] * (decisions.num_stages > 1)
    header += ["sends in parts"] * decisions.scatter_sends
    header += ["V"] * (subgraph.arrangement.stage_style == "V")
    lines = [" | ".join(header)]
    for node in subject.traced.graph.nodes:
        if node.op == "output" or facts(node).get("hidden"):
            continue
        lines.append(" | ".join([f"{node.name} = {_what(node, subgraph)}", *_fields(node, decisions)]) + _comment(node))
    outputs = ", ".join(node.name for node in subject.outputs)
    return [*lines, f"return {outputs}" + (f" | loss {subject.loss.name}" if subject.loss is not None else "")]


def _what(node: fx.Node, subgraph: Subgraph) -> str:
    if node.op == "placeholder":
        tensor = dict(zip(subgraph.subject.traced.call.names, subgraph.subject.traced.call.tensors, strict=True))
        return f"input {format_value(node)}{_below(tensor[node.target])}"
    if node.op == "get_attr" or "recorded" in facts(node):
        weight = subgraph.subject.weights[node.target if node.op == "get_attr" else _RECORDED + node.name]
        fixed = " fixed" if weight.is_floating_point() and not weight.requires_grad else ""
        return f"{'weight' if node.op == 'get_attr' else 'recorded'} {format_value(node)}{fixed}{_below(weight)}"
    target = "getitem" if node.target is operator.getitem else str(node.target)
    args = [_argument(a) for a in node.args] + [f"{name}={_argument(a)}" for name, a in node.kwargs.items()]
    return f"{target}({', '.join(args)})"


def _below(tensor: Tensor) -> str:
    """Return the range of an integer tensor as text: ` below 8` for entries 0 to 7; "" for other dtypes."""
    counts = not tensor.is_floating_point() and tensor.dtype != torch.bool and tensor.numel()
    return f" below {max(int(tensor.max()), 0) + 1}" if counts else ""


def _argument(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, (list, tuple)):
        return "[" + ", ".join(map(_argument, argument)) + "]"
    if isinstance(argument, float) and math.isinf(argument):
        return "1e999" if argument > 0 else "-1e999"
    if isinstance(argument, torch.device):
        return repr(str(argument))
    return str(argument) if str(argument).startswith("torch.") else repr(argument)


def _fields(node: fx.Node, decisions: Decisions) -> list[str]:
    fields = []
    if node in decisions.stage_of and decisions.num_stages > 1:
        fields.append(f"stage {decisions.stage_of[node]}")
    if node.op == "get_attr":
        places = {axis: decisions.place(node.target, axis) for axis in _stored_over(decisions.mesh)}
        return fields + [f"{axis} {place}" for axis, place in places.items() if place != R]
    for axis, size, chosen in _axes(decisions):
        if size > 1 and node in chosen:
            fields.append(f"{axis} {chosen[node].outputs[0] if 'recorded' in facts(node) else chosen[node]}")
    return fields


def _axes(decisions: Decisions) -> tuple[tuple[str, int, Mapping[fx.Node, Strategy]], ...]:
    features = ((axis, decisions.mesh.size(axis), on) for axis, on in decisions.features.items())
    return (ROWS, decisions.batch_shards, decisions.rows), *features


def _stored_over(mesh: Mesh) -> list[str]:
    """Return the names of mesh axes and flattened axes (`dp_cp`) over which parameters can be sharded."""
    return [*mesh.chosen, *mesh.storing()]


def _comment(node: fx.Node) -> str:
    text = facts(node).get("comment", "")
    if node.op == "get_attr" and node.target != node.name:
        text = node.target
    elif node.op == "call_function" and "recorded" not in facts(node) and facts(node).get("stack_trace"):
        text = describe(node)
    return f"  # {text}" if text else ""


def _layout(places: Mapping[str, str], axes: Iterable[str]) -> Layout:
    return {axis: Placement.parse(places.get(axis, "R")) for axis in axes}


class _Parser:
    def __init__(self, text: str, axes: tuple[Axis, ...]):
        lines = [line.partition("  # ")[0].strip() for line in text.strip().splitlines()]
        head, *self.lines = [line for line in lines if line and not line.startswith("#")]
        options = dict(field.partition(" ")[::2] for field in head.split(" | "))
        if "mesh" not in options:
            raise PlanError(
                "the text of a subgraph must begin with its mesh", why=f"it begins with '{head}'", hint="mesh dp2,tp2"
            )
        self.stage_style = "V" if "V" in options else "loop"
        mesh = Mesh.parse(options["mesh"], axes) if options["mesh"] != "one device" else Mesh({})
        microbatches, stages = (int(options.get(name, 1)) for name in ("microbatches", "stages"))
        self.builder = Builder(mesh, microbatches, stages, "sends" in options)
        self.nodes: dict[str, fx.Node] = {}
        self.values: dict[fx.Node, Any] = {}
        self.said: dict[fx.Node, dict[str, str]] = {}

    def subgraph(self) -> Subgraph:
        *lines, last = self.lines
        for line in lines:
            match = re.fullmatch(r"(\w+) = (.+)", line)
            if match is None:
                raise PlanError(f"'{line}' is not a line of a subgraph", hint="name = aten.add.Tensor(x, y)")
            what, *fields = match[2].split(" | ")
            settings = {field.partition(" ")[0]: field.partition(" ")[2] for field in fields}
            kind, _, rest = what.partition(" ")
            known = (kind in ("input", "weight", "recorded") and rest.endswith(("]", "fixed"))) or " below " in rest
            node = self._leaf(match[1], kind, rest, settings) if known else self._call(match[1], what, settings)
            self.nodes[match[1]] = node
        outputs, _, loss = last.removeprefix("return ").partition(" | loss ")
        named = [self.nodes[name.strip()] for name in outputs.split(",")]
        subject = self.builder.subject(named, self.nodes[loss] if loss else None)
        annotate(subject.traced)
        for node in self.builder.stage_of:  # recorded values
            facts(node)["role"] = ACTIVE
        arrangement = self.builder.arrangement(stage_style=self.stage_style)
        for node, settings in self.said.items():
            if facts(node)["role"] not in (ACTIVE, WEIGHT):
                continue
            if facts(node)["role"] == ACTIVE:
                self.builder.stage_of[node] = int(settings.get("stage", 0))
            for axis, size, chosen in _axes(arrangement.decisions):
                chosen[node] = _strategy(node, settings.get(axis, ""), size)  # type: ignore[index]
        return Subgraph(subject, arrangement)

    def _leaf(self, name: str, kind: str, rest: str, settings: Mapping[str, str]) -> fx.Node:
        match = re.fullmatch(r"(\w+)\[([\d, ]*)\]( fixed)?(?: below (\d+))?", rest)
        if match is None:
            raise PlanError(f"'{rest}' does not describe a tensor", hint="f64[8,12], or i64[8,12] below 7")
        sizes = [int(size) for size in match[2].split(",") if size.strip()]
        tensor = random_values(sizes, _DTYPES[match[1]], len(self.nodes), int(match[4] or 2))
        tensor.requires_grad_(tensor.is_floating_point() and not match[3] and kind != "input")
        if kind == "input":
            node = self.builder.input(name, tensor)
        elif kind == "weight":
            node = self.builder.weight(name, tensor, _layout(settings, _stored_over(self.builder.mesh)))
        else:
            layout = _layout(settings, self.builder.parts)
            node = self.builder.recorded(name, tensor, layout, int(settings.get("stage", 0)))
        self.values[node] = tensor.detach()
        return node

    def _call(self, name: str, what: str, settings: Mapping[str, str]) -> fx.Node:
        call = ast.parse(what, mode="eval").body
        if not isinstance(call, ast.Call):
            raise PlanError(f"'{what}' is not a call", hint="aten.add.Tensor(x, y)")
        target = _attribute(torch.ops, call.func) if ast.unparse(call.func) != "getitem" else operator.getitem
        args = tuple(self._argument(a) for a in call.args)
        kwargs = {k.arg: self._argument(k.value) for k in call.keywords if k.arg}
        node = self.builder.graph.create_node("call_function", target, args, kwargs, name)
        real_args, real_kwargs = fx.map_arg((args, kwargs), self.values.__getitem__)
        self.values[node] = node.meta["val"] = target(*real_args, **real_kwargs)
        if target is not operator.getitem:
            self.said[node] = dict(settings)
        return node

    def _argument(self, tree: ast.expr) -> Any:
        if isinstance(tree, ast.Name):
            return self.nodes[tree.id]
        if isinstance(tree, ast.List):
            return [self._argument(element) for element in tree.elts]
        return _attribute(torch, tree) if isinstance(tree, ast.Attribute) else ast.literal_eval(tree)


def _attribute(root: Any, tree: ast.expr) -> Any:
    """Return the attribute of `root` that a dotted name denotes, such as `aten.add.Tensor`.

    `tree`: the name as a syntax tree.
    """
    for name in ast.unparse(tree).removeprefix("torch.").split("."):
        root = getattr(root, name)
    return root


def random_values(sizes: Sequence[int], dtype: torch.dtype, seed: int, below: int = 2) -> Tensor:
    """Return random floats in (0.1, 0.9), integers below `below`, or booleans. The seed determines them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.rand(sizes, generator=generator, dtype=torch.float64).mul(0.8).add(0.1).to(dtype)
    return torch.randint(below, sizes, generator=generator).to(dtype)


def _strategy(node: fx.Node, text: str, num_shards: int) -> Strategy:
    """Parse the strategy (input and output placements) of an operator on one axis: `R, S(0) -> S(1)`.

    Empty text means that all inputs and outputs are replicated.
    """
    options = strategies(node, num_shards, ANY_KIND)
    for option in options:
        if str(option) == text or not text:
            return option
    inputs, _, outputs = text.partition(" -> ")
    taken, produced = (tuple(Placement.parse(place) for place in side.split(", ")) for side in (inputs, outputs))
    return Strategy(taken, produced)
