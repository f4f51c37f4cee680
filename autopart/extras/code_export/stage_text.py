"""Python code of a pipeline stage: its prologue, one function for each kind of block, and its forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from torch import fx

from autopart.extras.code_export.function_text import INDENT, RESERVED, Names, statements, unsupported
from autopart.ir.collective_nodes import autopart_operator, axis_of
from autopart.ir.facts import facts
from autopart.ir.mesh import Mesh
from autopart.ir.program import Stage
from autopart.ir.subgraphs import ancestors_of
from autopart.ops.operators import autopart_ops

Note = Callable[[fx.Node], str]
OTHER_NAMES = ("INDEX", "INPUTS", "RECEIVES", "PARAMETERS", "REDUCED", "forward", "prologue", "weights_below")
"""Names that a stage module defines."""
MIN_CALLS = 4
"""Minimum number of operators for which a block becomes a function."""


@dataclass
class CallBlock:
    """Consecutive operators of one numbered module, such as `model.layers.3`.

    Attributes:
        path: path of the module, "" for operators outside of numbered modules.
        region: number of the recompute region that the operators form; None if their values are saved.
        inputs: values of other operators that these operators read, by first use.
        outputs: values that later operators read.
        function: name of the function that computes the block, "" if its statements are written in `forward`.
    """

    path: str
    region: int | None
    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    function: str = ""

    @property
    def prefix(self) -> str:
        return f"{self.path}." if self.path else ""


class StageText:
    """Python source of one stage.

    Args:
        note: returns the comment of a collective.
    """

    def __init__(self, stage: Stage, mesh: Mesh, note: Note):
        self.stage, self.mesh, self.note = stage, mesh, note
        self.functions: dict[str, str] = {}  # {body: name}
        self.inputs, self.prologue = self._prologue()
        self.uses_checkpoint = False
        self.forward = self._forward()

    # --- Prologue

    def _prologue(self) -> tuple[list[tuple[str, int | None, tuple[int, ...]]], list[str]]:
        """Write the prologue. Equal values are computed once, and passed to the stage as one input.

        Returns the stage's inputs as (name, batch dim, sections), and the lines of the function.
        """
        graph = _copied(self.stage.prologue.graph)
        equal: dict[fx.Node, fx.Node] = {}
        first: dict[str, fx.Node] = {}
        for node in graph.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: equal[used])
            key = f"{node.op} {node.target} {args} {kwargs}"
            equal[node] = node if node.op in ("placeholder", "output") else first.setdefault(key, node)
            if equal[node] is node and node.op != "output":
                node.args, node.kwargs = args, kwargs
        results = [equal[one] if isinstance(one, fx.Node) else one for one in graph.output_node().args[0]]
        live = ancestors_of([one for one in results if isinstance(one, fx.Node)])
        names = Names({node: node.name for node in graph.nodes if node.op == "placeholder"})
        lines = statements([n for n in graph.nodes if n in live and n.op == "call_function"], names, self.note)
        inputs: dict[Any, str] = {}
        self.shared: dict[str, str] = {}
        values: list[str] = []
        for stage_input, result in zip(self.stage.inputs, results, strict=False):
            value = result if isinstance(result, fx.Node) else repr(result)
            input_key = (value, stage_input.batch_dim, stage_input.sections)
            if input_key not in inputs:
                inputs[input_key] = stage_input.name
                values.append(names.text(result))
            self.shared[stage_input.name] = inputs[input_key]
        arguments = ", ".join(["w", *(node.name for node in graph.nodes if node.op == "placeholder")])
        doc = '"""Compute masks, positions and labels of the global batch."""'
        head = [f"def prologue({arguments}):", f"{INDENT}{doc}"]
        end = f"{INDENT}return ({', '.join(values)}{',' * (len(values) == 1)})"
        return [(name, *key[1:]) for key, name in inputs.items()], [*head, *_indented(lines), end]

    # --- Forward

    def _forward(self) -> list[str]:
        """Write the functions of blocks and the function `forward`. Returns the lines of `forward`."""
        graph = _copied(self.stage.graph.graph)
        self._simplify(graph)
        blocks = self._blocks(graph)
        received = [n for n in graph.nodes if n.op == "placeholder" and n.target not in self.shared]
        given = {n: self.shared.get(str(n.target), n.name) for n in graph.nodes if n.op == "placeholder"}
        for block in blocks:
            self._as_function(block, given)
        outputs = graph.output_node().args[0]
        names = Names(given)
        lines: list[str] = []
        for run in _loops(blocks):
            lines += self._call(run, names) if run[0].function else statements(run[0].nodes, names, self.note)
        arguments = ", ".join(["w", *(n.name for n in received), *(name for name, *_ in self.inputs)])
        end = f"return ({', '.join(names.text(one) for one in outputs)}{',' * (len(outputs) == 1)})"
        doc = f'"""Compute stage {self.stage.index} on one microbatch. `w`: this rank\'s weights by name."""'
        return [f"def forward({arguments}):", *_indented([doc, *lines, end])]

    def _simplify(self, graph: fx.Graph) -> None:
        """Remove collectives over axes with one rank, and all but one of equal inputs."""
        first = {node.target: node for node in graph.nodes if node.op == "placeholder"}
        for node in list(graph.nodes):
            axis = axis_of(node)
            if node.op == "placeholder" and self.shared.get(str(node.target), node.target) != node.target:
                node.replace_all_uses_with(first[self.shared[str(node.target)]])
            if axis is None or autopart_operator(node) == "axis_index" or self.mesh.size(axis) > 1:
                continue
            if (dtype := node.kwargs.get("dtype")) is not None:
                node.target, node.args, node.kwargs = autopart_ops.cast.default, (node.args[0], dtype), {}
            else:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)

    def _blocks(self, graph: fx.Graph) -> list[CallBlock]:
        calls = [node for node in graph.nodes if node.op == "call_function"]
        for node in graph.nodes:
            if node.op == "call_module":
                raise unsupported(f"the submodule {node.target}", "it contains operators of its own")
        blocks = [CallBlock(path, region, list(nodes)) for (path, region), nodes in groupby(calls, _block_key)]
        for block in blocks:
            members = set(block.nodes)
            read = [n for node in block.nodes for n in node.all_input_nodes if n not in members]
            block.inputs = list(dict.fromkeys(n for n in read if not _is_weight(n, block.prefix)))
            block.outputs = [node for node in block.nodes if not members.issuperset(node.users)]
        return blocks

    def _as_function(self, block: CallBlock, given: dict[fx.Node, str]) -> None:
        """Write a block as a function, unless an equal function exists. Sets `block.function`."""
        if block.region is None and (not block.path or len(block.nodes) < MIN_CALLS):
            return
        names = Names({}, block.prefix)
        for node in block.inputs:
            is_given = node in given and given[node] in {name for name, *_ in self.inputs}
            base = given[node] if is_given else "weight" if node.op == "get_attr" else "x"
            names.names[node] = _free(base, names.used)
            names.used.add(names.names[node])
        arguments = [names.names[node] for node in block.inputs]
        lines = statements(block.nodes, names, self.note, block.path)
        results = [names.text(node) for node in block.outputs]
        body = "\n".join(_indented([*lines, f"return {', '.join(results)}"]))
        text = f"({', '.join(['w', *arguments])}):\n" + body
        if text not in self.functions:
            self.functions[text] = _free(_function_name(block), {*self.functions.values(), *RESERVED, *OTHER_NAMES})
        block.function = self.functions[text]
        self.uses_checkpoint |= block.region is not None

    def _call(self, run: Sequence[CallBlock], names: Names) -> list[str]:
        """Write the call of one block, or a loop over equal blocks."""
        first, last = run[0], run[-1]
        if len(run) == 1:
            code = self._call_code(first, f'"{first.prefix}"', [names.text(node) for node in first.inputs])
            return [f"{', '.join(names.add(node) for node in first.outputs)} = {code}"]
        carried = _carried(first, run[1])
        assert carried is not None
        lines, arguments = [], [names.text(node) for node in first.inputs]
        results = ["_"] * len(first.outputs)
        for position, output in carried.items():
            if results[output] == "_":
                results[output] = names.add(first.outputs[output])
            lines.append(f"{results[output]} = {arguments[position]}")
            arguments[position] = results[output]
        for output, node in enumerate(last.outputs):
            if results[output] == "_":
                results[output] = names.add(node)
            names.names[node] = results[output]
        stem, _, begin = first.path.rpartition(".")
        end = int(last.path.rpartition(".")[2]) + 1
        code = self._call_code(first, f'f"{stem}.{{index}}."', arguments)
        return [*lines, f"for index in range({begin}, {end}):", f"{INDENT}{', '.join(results)} = {code}"]

    def _call_code(self, block: CallBlock, prefix: str, arguments: Sequence[str]) -> str:
        weights = f"weights_below(w, {prefix})" if block.path else "w"
        if block.region is not None:
            return f"checkpoint({', '.join([block.function, weights, *arguments])}, use_reentrant=False)"
        return f"{block.function}({', '.join([weights, *arguments])})"

    def lines(self) -> list[str]:
        """Return the lines of all functions of the stage."""
        functions = [["", "", *f"def {name}{text}".splitlines()] for text, name in self.functions.items()]
        blocks = [line for lines in functions for line in lines]
        return ["", "", *self.prologue, *blocks, "", "", *self.forward]


def _block_key(node: fx.Node) -> tuple[str, int | None]:
    stack = facts(node).get("nn_module_stack") or {}
    numbered = [path for path, _ in stack.values() if path.rpartition(".")[2].isdigit()]
    return numbered[0] if numbered else "", facts(node).get("region")


def _is_weight(node: fx.Node, prefix: str) -> bool:
    """Return True for a parameter or buffer of the block with this prefix."""
    return node.op == "get_attr" and str(node.target).startswith(prefix)


def _copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _function_name(block: CallBlock) -> str:
    """Return the name of the class of a block's module as a function name, such as `llama_decoder_layer`."""
    stack = facts(block.nodes[0]).get("nn_module_stack") or {}
    kind = next((kind for path, kind in stack.values() if path == block.path), "block")
    name = str(getattr(kind, "__name__", kind)).rpartition(".")[2]
    name = "".join(f"_{c.lower()}" if c.isupper() and i and not name[i - 1].isupper() else c.lower()
                   for i, c in enumerate(name))  # fmt: skip
    return name if name.isidentifier() else "block"


def _free(base: str, used: Any) -> str:
    name, number = base, 0
    while name in used:
        number += 1
        name = f"{base}_{number}"
    return name


def _carried(block: CallBlock, after: CallBlock) -> dict[int, int] | None:
    """Return {index of an input: index of the output of the block before} of values that a loop carries.

    Returns None if an input is neither such a value nor equal for both blocks.
    """
    carried = {}
    for position, (before, now) in enumerate(zip(block.inputs, after.inputs, strict=True)):
        if now in block.outputs:
            carried[position] = block.outputs.index(now)
        elif now is not before:
            return None
    return carried


def _loops(blocks: Sequence[CallBlock]) -> Iterator[list[CallBlock]]:
    """Group consecutive calls of one function on modules with consecutive numbers, which a loop can call."""
    run: list[CallBlock] = []
    for block in blocks:
        if run and _continues(run, block):
            run.append(block)
            continue
        if run:
            yield run
        run = [block]
    if run:
        yield run


def _continues(run: Sequence[CallBlock], block: CallBlock) -> bool:
    last = run[-1]
    if not block.function or block.function != last.function or not block.path:
        return False
    (stem, _, number), (stem_now, _, number_now) = last.path.rpartition("."), block.path.rpartition(".")
    if stem != stem_now or int(number) + 1 != int(number_now):
        return False
    carried = _carried(last, block)
    if carried is None or (len(run) > 1 and carried != _carried(run[-2], last)):
        return False
    # Values of all but the last iteration are read by the next iteration only.
    members = set(block.nodes)
    return all(members.issuperset(set(output.users) - set(last.nodes)) for output in last.outputs)


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"{INDENT}{line}" if line else line for line in lines]
