"""Compile a stage graph block by block: equal blocks are compiled once.

A block consists of the consecutive graph nodes of one numbered module (`layers.3`), found by their module paths. Two
blocks have one kind if their operators, their constants and the metadata of their inputs are equal. Blocks of one kind
share one compiled function, which takes parameters and activations as inputs. Compile time therefore grows with the
number of kinds, not with the number of blocks. Nodes between blocks, and blocks that are not repeated, are compiled as
separate subgraphs. The outer graph stores the parameters and calls the subgraphs. It is not compiled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter, getitem, itemgetter
from typing import Any

from torch import Tensor, fx

from autopart.compat.torch_internals import compiled_apart, generate_code, resolve_group
from autopart.ir.collective_nodes import autopart_operator, axis_of
from autopart.ir.facts import facts
from autopart.ops.operators import with_salt
from autopart.runtime.comm.collectives import with_flat_names
from autopart.runtime.graphs.recompute_calls import Region, with_regions

Calls = list[fx.Node]
"""Consecutive calls of a graph."""
Span = tuple[int, int]
"""First index of some calls, and the index after the last."""


def compiled(module: fx.GraphModule, serves_all_sizes: bool = False) -> fx.GraphModule:
    """Compile this rank's stage graph. Each region that backward recomputes becomes one checkpointed call.

    Args:
        serves_all_sizes: True if the graph runs with many sequence lengths and batch sizes. When the second size
            occurs, the graph is compiled with dynamic sizes, which serve all further sizes.
    """
    module = with_regions(_with_salts(module))
    subgraphs = _Partition(module).subgraphs()
    if len(subgraphs) == 1 and all(node.op in ("placeholder", "get_attr") for node in module.graph.nodes
                                   if _is_given(node, module)):  # fmt: skip
        return _compile(module, serves_all_sizes)
    return _calling(module, subgraphs, serves_all_sizes)


def _compile(module: fx.GraphModule, serves_all_sizes: bool) -> fx.GraphModule:
    generate_code(module)
    # torch counts recompilations by code object. Each graph's `forward` has its own; modules share `__call__`.
    module.forward = compiled_apart(module.forward, _ranks(module), None if serves_all_sizes else False)
    return module


def _ranks(module: fx.GraphModule) -> str:
    """Return the process's rank in each process group of a graph, as text for torch's compile cache key.

    Without the text, a rank could load code that was compiled for another rank from the cache on disk.
    """
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    groups = sorted({axis for graph in graphs for node in graph.nodes if (axis := axis_of(node)) is not None})
    return ", ".join(f"{name}: {resolve_group(name).rank()} of {resolve_group(name).size()}" for name in groups)


def _with_salts(module: fx.GraphModule) -> fx.GraphModule:
    """Combine seed and salt of each dropout at the start of the graph, outside of all blocks.

    The salt is the number of the dropout in the model. If it were a constant in a block, equal blocks could not share
    compiled code.
    """
    graph = module.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in [node for node in graph.nodes if autopart_operator(node) in ("dropout", "attention_dropout")]:
        *others, seed, salt, shard = node.args
        with graph.inserting_before(first):
            both = graph.call_function(with_salt, (seed, salt))
        node.args = (*others, both, None, shard)
    module.recompile()
    return module


class _Partition:
    """Partition of a stage graph into subgraphs: each repeated block, and the nodes between two of them."""

    def __init__(self, module: fx.GraphModule):
        self.module = module
        self.calls = [node for node in module.graph.nodes if not _is_given(node, module) and node.op != "output"]

    def subgraphs(self) -> list[tuple[str, Calls]]:
        """Return (kind, calls) of all subgraphs in graph order. Subgraphs of one kind share compiled code."""
        subgraphs, begin = list[Calls](), 0
        for start, stop in sorted(self._blocks(0, len(self.calls), 0)):
            if start < begin:  # a call between two blocks belongs to the block before it
                continue
            subgraphs += [self.calls[begin:start], self.calls[start:stop]]
            begin = stop
        subgraphs.append(self.calls[begin:])
        return [(self._kind(calls), calls) for calls in subgraphs if calls]

    def _blocks(self, begin: int, end: int, depth: int) -> Iterator[Span]:
        """Yield the repeated blocks among `calls[begin:end]`.

        Args:
            depth: nesting depth: number of numbered modules that contain all these calls. Inside `layers.3` it is 1.
        """
        for siblings in self._siblings(begin, end, depth):
            gap = min((after - stop for (_, stop), (after, _) in pairwise(siblings)), default=0)
            limits = [*(start for start, _ in siblings[1:]), end]
            # A call between two blocks, such as a residual sum, joins the block before it if all blocks stay equal.
            longer = [(start, min(stop + gap, limit)) for (start, stop), limit in zip(siblings, limits, strict=True)]
            spans = min((longer, siblings), key=lambda spans: len(set(self._kinds(spans))))
            kinds = self._kinds(spans)
            for kind, span, sibling in zip(kinds, spans, siblings, strict=True):
                if kinds.count(kind) > 1:
                    yield span
                else:
                    yield from self._blocks(*sibling, depth + 1)

    def _siblings(self, begin: int, end: int, depth: int) -> Iterable[list[Span]]:
        """Return, for each module list (`layers`), the index ranges of its blocks (`layers.0`, `layers.1`)."""
        inside = [(position, _numbered(self.calls[position], self.module)) for position in range(begin, end)]
        placed = [(paths[depth], position) for position, paths in inside if len(paths) > depth]
        spans: defaultdict[str, list[Span]] = defaultdict(list)
        for path, calls in groupby(placed, key=itemgetter(0)):
            positions = [position for _, position in calls]
            spans[path.rpartition(".")[0]].append((positions[0], positions[-1] + 1))
        return spans.values()

    def _kinds(self, spans: Sequence[Span]) -> list[str]:
        return [self._kind(self.calls[start:stop]) for start, stop in spans]

    def _kind(self, calls: Iterable[fx.Node]) -> str:
        """Return a key of a sequence of calls. Sequences with equal keys can share compiled code."""
        numbers: dict[fx.Node, int] = {}
        lines = list[Any]()

        def number(node: fx.Node) -> Any:
            if node not in numbers:
                numbers[node] = len(numbers)
                lines.append(self._input_metadata(node))
            return _Value(numbers[node])

        for node in calls:
            if node.op == "placeholder":
                number(node)
                continue
            called = self._kind(_operators(node, self.module)) if node.op == "call_module" else node.target
            lines.append((called, fx.map_arg((node.args, node.kwargs), number)))
            numbers[node] = len(numbers)
        lines.append([numbers[node] for node in _results(numbers)])
        return repr(lines)

    def _input_metadata(self, node: fx.Node) -> Any:
        """Return the metadata of an input on which compiled code depends, such as shape and dtype."""
        value, needs_grad = facts(node).get("val"), facts(node).get("needs_grad")
        if node.op == "get_attr":
            value = attrgetter(str(node.target))(self.module)
            needs_grad = value.requires_grad
        if not isinstance(value, Tensor):
            return type(value)
        return value.shape, value.stride(), value.dtype, value.device, needs_grad


def _numbered(node: fx.Node, module: fx.GraphModule) -> list[str]:
    """Return the paths of the numbered modules (`layers.3`) that contain a call, outermost first."""
    operators = _operators(node, module)
    stacks = (facts(inner).get("nn_module_stack") for inner in operators if inner.op != "placeholder")
    paths = [path for path, _ in next(filter(None, stacks), {}).values()]
    return [path for path in dict.fromkeys(paths) if path.rpartition(".")[2].isdigit()]


def _operators(node: fx.Node, module: fx.GraphModule) -> Iterable[fx.Node]:
    """Return the operators that a call runs: its own operator, or all operators of its recompute region."""
    called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    return called.operators.graph.nodes if isinstance(called, Region) else [node]


@dataclass(frozen=True)
class _Value:
    """Reference to a value in a block's key: a number, because names of nodes differ between blocks."""

    number: int


def _is_given(node: fx.Node, module: fx.GraphModule) -> bool:
    """Return True for a value that the outer graph computes or stores, and passes to subgraphs.

    Such a value is a graph input, a stored or unsharded parameter, or a dropout seed combined with its salt.
    """
    if node.op == "call_module":
        return not isinstance(module.get_submodule(str(node.target)), Region)
    if node.target is getitem and isinstance(node.args[0], fx.Node):
        return node.args[0].op == "call_module" and _is_given(node.args[0], module)
    return node.op in ("placeholder", "get_attr") or node.target is with_salt


def _results(nodes: Collection[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if any(user not in nodes for user in node.users)]


def _calling(
    module: fx.GraphModule, subgraphs: Sequence[tuple[str, Calls]], serves_all_sizes: bool
) -> fx.GraphModule:  # fmt: skip
    """Return the outer graph, which calls the subgraphs in order. Each kind has one compiled submodule."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    kinds: dict[str, str] = {}

    def value(node: fx.Node) -> fx.Node:
        if node not in values:
            values[node] = graph.node_copy(node, value)
        return values[node]

    for node in module.graph.nodes:
        if node.op == "placeholder":
            value(node)
    for kind, calls in subgraphs:
        subgraph, inputs = _subgraph(calls)
        if kind not in kinds:
            kinds[kind] = f"compiled_block_{len(kinds)}"
            part = fx.GraphModule(module, subgraph, class_name=kinds[kind])
            module.add_submodule(kinds[kind], _compile(part, serves_all_sizes))
        call = graph.call_module(kinds[kind], tuple(map(value, inputs)))
        for index, node in enumerate(_results(dict.fromkeys(calls))):
            values[node] = graph.call_function(getitem, (call, index))
    graph.output(fx.map_arg(module.graph.output_node().args[0], value))
    return with_flat_names(fx.GraphModule(module, graph, class_name=module.__class__.__name__))


def _subgraph(calls: Calls) -> tuple[fx.Graph, list[fx.Node]]:
    """Return (graph of these calls, nodes outside of them whose values the graph takes as inputs)."""
    graph = fx.Graph()
    members = set(calls)
    inputs = list(dict.fromkeys(node for call in calls for node in call.all_input_nodes if node not in members))
    copies = {node: graph.placeholder(f"read_{index}") for index, node in enumerate(inputs)}
    for node in calls:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in _results(dict.fromkeys(calls))))
    return graph, inputs
