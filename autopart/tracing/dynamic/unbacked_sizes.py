"""Replacement of data-dependent sizes by their maxima, so that planning needs no tensor values.

`torch.export` gives `torch.where(mask)`, `nonzero` and `x[mask]` an unbacked size (`u0`). Here every such selection
becomes `autopart::positions`, whose size in the trace is the maximum: the number of elements of the mask. Values that
depend on this size get sizes computed from the maximum, and the entry `counted` in the node's meta is True. A mean over
such values becomes a sum divided by the actual number of elements. Data-dependent scalars become tensors
(`symbolic_scalars.py`).

Some data-dependent sizes have no maximum (`bincount`, a slice up to a scalar). The caller must refuse them.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopart.compat.symbolic_shape_internals import Symbol, expression, free_symbols, is_symbol, with_sizes
from autopart.compat.torch_internals import is_operator
from autopart.errors import Refusal, TraceError
from autopart.ir.facts import facts
from autopart.ir.graph import argument, operator_name, shape, source_text, tensor_inputs, tuple_values, value
from autopart.ir.selection import POSITIONS, is_data_dependent
from autopart.tracing.dynamic.branch_source import Skipped
from autopart.tracing.dynamic.data_dependent_branches import Marks, check_only_writes
from autopart.tracing.dynamic.symbolic_scalars import SymbolicScalars, added, check_formula, is_number, is_open
from autopart.tracing.python.concrete_constants import tensors_in

aten = torch.ops.aten

_CHECKS = {"aten::_assert_scalar", "aten::sym_constrain_range", "aten::sym_constrain_range_for_size"}
_VIEWS = {"view", "reshape", "_unsafe_view", "expand"}
_FILLS = {"zeros": 0, "ones": 1, "full": None, "new_zeros": 0, "new_ones": 1, "new_full": None, "empty": 0,
          "new_empty": 0}  # fmt: skip
_BY_LABELS = {"aten::cross_entropy_loss", "aten::nll_loss_nd"}
_SELECTING = {"aten::where", "aten::nonzero", "aten::nonzero_numpy", "aten::argwhere", "aten::index",
              "aten::masked_select"}  # fmt: skip
_NONE, _MEAN = 0, 1


def _tensor_of(number: fx.Node) -> fx.Node:
    """Return a tensor from which a symbolic number is computed."""
    while is_number(number):
        number = number.all_input_nodes[0]
    return number


def with_bounded_sizes(graph: fx.Graph, skipped: Sequence[Skipped] = ()) -> None:
    """Replace data-dependent sizes of a graph by their maxima, and data-dependent scalars by tensors.

    Args:
        skipped: data-dependent branches that were traced as if their code ran.
    Raises TraceError if a data-dependent scalar is used where an operator accepts no tensor, or if skippable code does
    more than write to selected elements.
    """
    if skipped or any(_selects(node) or any(map(is_open, tuple_values(node))) for node in graph.nodes):
        rewriter = _Rewriter(graph, skipped)
        rewriter.run()
        check_only_writes(graph, rewriter.marks, rewriter.selected())


class _Rewriter:
    """Rewriter of the data-dependent sizes and scalars of a graph, node by node in topological order."""

    def __init__(self, graph: fx.Graph, skipped: Sequence[Skipped]):
        self.graph = graph
        self.marks = Marks(skipped, lambda one, other: self._number(one) == self._number(other))
        self.numbers = SymbolicScalars(graph, self._count)
        self.traced: dict[fx.Node, Any] = {}  # {node: its value before the rewrite, whose sizes may contain symbols}
        self.sizes: dict[Symbol, int] = {}
        self.selections: dict[Symbol, fx.Node] = {}
        self.sized: dict[Any, tuple[fx.Node, int]] = {}  # {data-dependent size: (a value that has this size, the dim)}
        self.positions: dict[tuple[int, tuple[int, ...]], fx.Node] = {}
        """{mask: positions, and the number of selected elements if known}"""
        self.values: dict[Hashable, int] = {}  # {node: number that is equal for equal computations}
        self.known: dict[fx.Node, int] = {}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if self.marks.pass_by(node):
                continue
            if node.op == "call_function" and operator_name(node) not in _CHECKS and not is_number(node):
                with self.graph.inserting_before(node):
                    self._write(node)
        output = self.graph.output_node()
        returned = [isinstance(one, fx.Node) and is_number(one) for one in output.args[0]]
        facts(output)["numbers"] = frozenset(i for i, is_returned in enumerate(returned) if is_returned)
        with self.graph.inserting_before(output):
            output.args = fx.map_arg(
                output.args, lambda n: self.numbers.tensor(n, _tensor_of(n)) if is_number(n) else n
            )
        for node in reversed(list(self.graph.nodes)):
            is_unread = is_number(node) and not node.users
            if node.op == "call_function" and (is_unread or operator_name(node) in _CHECKS):
                self.graph.erase_node(node)

    def _write(self, node: fx.Node) -> None:
        traced = value(node)
        if operator_name(node) == "aten::masked_fill":
            node.args = (node.args[0], self._guarded(node, node.args[1]), *node.args[2:])
        reads_counted = any(map(is_data_dependent, node.all_input_nodes))
        if (
            not _selects(node)
            and not reads_counted
            and not any(map(is_number, tensor_inputs(node)))
            and all(isinstance(size, int) for tensor in tensors_in(traced) for size in tensor.shape)
        ):
            return
        for size in (size for tensor in tensors_in(traced) for size in tensor.shape):
            check_formula(expression(size), node)
        written = self._selection(node) or self._sized(node) or self._mean(node) or node
        if written is node and any(map(is_number, tensor_inputs(node))):
            written = self.numbers.call_with_tensors(node)
        if written is node:
            is_part = node.target is operator.getitem
            node.meta["val"] = value(node.args[0])[node.args[1]] if is_part else with_sizes(traced, self.sizes)
        else:
            node.replace_all_uses_with(written)
            self.graph.erase_node(node)
        _check_open(written, traced)
        self.traced[written] = traced
        if isinstance(traced, Tensor):
            known = [isinstance(expression(size), int) for size in traced.shape]
            if known.count(False) == 1:
                dim = known.index(False)
                self.sized.setdefault(expression(traced.shape[dim]), (written, dim))
        facts(written)["counted"] = any(map(is_open, tensors_in(traced)))

    def _call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return added(self.graph, like, target, *args, **kwargs)

    # Selections

    def _selection(self, node: fx.Node) -> fx.Node | None:
        """Rewrite a selection with `autopart::positions` and return the new node; None for all other calls."""
        name = operator_name(node)
        if node.target is aten.where.default or name == "aten::nonzero_numpy":
            return self._positions(node, node.args[0])
        if name in ("aten::nonzero", "aten::argwhere"):
            return self._call(node, aten.stack.default, self._places(node, node.args[0]), 1)
        if (
            name == "aten::select"
            and node.args[0].target is aten.stack.default
            and node.args[1:2] == node.args[0].args[1:]
        ):
            return node.args[0].args[0][node.args[2]]
        if name == "aten::masked_select":
            both = self._call(node, aten.broadcast_tensors.default, list(node.args[:2]))
            source, mask = (self._call(node, operator.getitem, both, i) for i in range(2))
            return self._call(node, aten.index.Tensor, source, self._places(node, mask))
        if name in ("aten::index", "aten::index_put") and any(map(_is_mask, node.args[1])):
            places = [p for used in node.args[1] for p in (self._places(node, used) if _is_mask(used) else [used])]
            return self._call(node, node.target, node.args[0], places, *node.args[2:], **node.kwargs)
        return None

    def _places(self, node: fx.Node, mask: fx.Node) -> list[fx.Node]:
        """Return one index tensor per dim of a mask, with the indices of its true elements."""
        return self._parts(node, self._positions(node, mask))

    def _parts(self, node: fx.Node, positions: fx.Node) -> list[fx.Node]:
        parts = {part.args[1]: part for part in positions.users}
        return [parts.get(i) or self._place(node, positions, i) for i in range(len(shape(positions.args[0])))]

    def _place(self, node: fx.Node, positions: fx.Node, dim: int) -> fx.Node:
        place = self._call(node, operator.getitem, positions, dim)
        facts(place)["counted"] = True
        return place

    def _positions(self, node: fx.Node, mask: fx.Node) -> fx.Node:
        """Return the `autopart::positions` node for a mask: its results are the indices of the true elements.

        Equal masks get the same node.
        """
        if not shape(mask):
            raise TraceError(
                "a 0-d mask (a single value) selects elements", refusal=Refusal.SIZE,
                why="the result has size 1 or 0 in its first dim, depending on the value of the mask",
                where=source_text(node), hint="torch.where(mask, x, 0)",
            )  # fmt: skip
        size = self._selected(node, mask)
        if not isinstance(size, int):
            mask = self._guarded(node, mask)
        known = (size,) if isinstance(size, int) else ()
        key = self._number(mask), known
        if key not in self.positions:
            chosen = mask if value(mask).dtype == torch.bool else self._call(node, aten.ne.Scalar, mask, 0)
            self.positions[key] = self._call(node, POSITIONS, chosen, *known)
            facts(self.positions[key])["counted"] = not known
        positions = self.positions[key]
        if is_symbol(size) and size not in self.sizes:
            self.sizes[size], self.selections[size] = value(mask).numel(), positions
            self.sized[size] = self._parts(node, positions)[0], 0
        return positions

    def _guarded(self, node: fx.Node, mask: fx.Node) -> fx.Node:
        """Return a mask that equals `mask` if the model would run `node`, and is false everywhere otherwise."""
        return self.marks.guarded(mask, lambda *both: self._call(node, aten.logical_and.default, *both))

    def _selected(self, node: fx.Node, mask: fx.Node) -> Any:
        """Return the number of elements that a mask selects: an integer if known, else torch's symbol for it."""
        sizes = next(tensors_in(value(node))).shape
        if operator_name(node) == "aten::index_put":
            return next((known[0] for number, known in self.positions if number == self._number(mask) and known), None)
        if operator_name(node) != "aten::index":
            return expression(sizes[0])
        before = node.args[1].index(mask)
        alone = [index for index in node.args[1] if index is not None] == [mask]
        opened = [size for size in map(expression, sizes) if not isinstance(size, int)]
        return expression(sizes[before]) if alone else opened[0] if opened else sizes[0]

    def _number(self, node: fx.Node) -> int:
        """Return a number that identifies the computation of a node: equal computations have equal numbers."""
        for source in self._made_of(node):
            random = torch.Tag.nondeterministic_seeded in getattr(source.target, "tags", ())
            key: Hashable = source
            if source.op == "call_function" and not random:
                key = source.target, self._told(source.args), self._told(tuple(source.kwargs.items()))
            self.known[source] = self.values.setdefault(key, len(self.values))
        return self.known[node]

    def _made_of(self, node: fx.Node) -> list[fx.Node]:
        """Return a node and its ancestors in graph order, except nodes that `_number` has already numbered."""
        todo, unknown = [node], set[fx.Node]()
        while todo:
            source = todo.pop()
            if source not in self.known and source not in unknown:
                unknown.add(source)
                todo += source.all_input_nodes if source.op == "call_function" else ()
        return [one for one in self.graph.nodes if one in unknown]

    def _told(self, part: Any) -> Hashable:
        if isinstance(part, (list, tuple)):
            return tuple(map(self._told, part))
        if isinstance(part, fx.Node):
            return "node", self.known[part]
        return type(part), repr(part)

    # Sizes

    def _sized(self, node: fx.Node) -> fx.Node | None:
        """Replace the data-dependent sizes in a view or a factory call such as `zeros`.

        The sizes in a view become their maxima, and the result is None. For a factory call, the result is a new call
        that computes a tensor of these sizes. Returns None for all other calls.
        """
        name = operator_name(node).removeprefix("aten::")
        if name in _VIEWS:
            sizes = fx.map_arg(node.args[1], self._known)
            is_open = [not isinstance(expression(size), int) for size in value(node).shape]
            if is_open.count(True) == 1 and len(sizes) == len(is_open):
                sizes = [-1 if of else size for of, size in zip(is_open, sizes, strict=True)]
            node.args = (node.args[0], sizes, *node.args[2:])
            return None
        if name not in _FILLS and name != "arange":
            return None
        sizes = [expression(size) for size in value(node).shape]
        like = self._of_sizes(node, sizes)
        if like is None:
            return None
        output = value(node)
        if name == "arange":
            start, step = argument(node, "start") or 0, argument(node, "step") or 1
            if isinstance(start, fx.Node) or isinstance(step, fx.Node):
                return None
            ones = self._call(node, aten.ones_like.default, like, dtype=output.dtype)
            counted = self._call(node, aten.sub.Tensor, self._call(node, aten.cumsum.default, ones, 0), 1)
            return self._call(node, aten.add.Tensor, self._call(node, aten.mul.Tensor, counted, step), start)
        fill = argument(node, "fill_value") if _FILLS[name] is None else _FILLS[name]
        return self._call(node, aten.full_like.default, like, fill, dtype=output.dtype)

    def _of_sizes(self, node: fx.Node, sizes: list[Any]) -> fx.Node | None:
        """Return a tensor that has the given sizes at run time, even if they depend on data.

        It is expanded from values that have the data-dependent sizes. Returns None if no size is data-dependent, or if
        no value has such a size.
        """
        is_open = [not isinstance(size, int) for size in sizes]
        if not any(is_open) or any(of and size not in self.sized for of, size in zip(is_open, sizes, strict=True)):
            return None
        like: fx.Node | None = None
        for i, size in enumerate(sizes):
            if is_open[i]:
                form = [-1 if j == i else 1 for j in range(len(sizes))]
                column = self._call(node, aten.reshape.default, self._vector(node, *self.sized[size]), form)
                like = column if like is None else self._call(node, aten.add.Tensor, like, column)
        whole = [-1 if of else size for of, size in zip(is_open, sizes, strict=True)]
        return self._call(node, aten.expand.default, like, whole)

    def _vector(self, line: fx.Node, source: fx.Node, dim: int) -> fx.Node:
        """Return one dim of a value as a 1-d tensor: all other dims are indexed at 0."""
        vector = self._call(line, aten.detach.default, source)
        for other in reversed([i for i in range(value(source).dim()) if i != dim]):
            vector = self._call(line, aten.select.int, vector, other, 0)
        return vector

    def _known(self, number: fx.Node) -> Any:
        """Return the maximum of a symbolic size as an integer; the node of the size if it has no maximum."""
        known = with_sizes(value(number), self.sizes)
        return known if isinstance(known, int) else number

    def _count(self, line: fx.Node, symbol: Symbol) -> fx.Node | None:
        selection = self.selections.get(symbol)
        if selection is None:
            return None
        return self._call(line, aten.sum.default, selection.args[0])

    def selected(self) -> dict[fx.Node, set[fx.Node]]:
        """Return {node that selects elements by a mask: all nodes with a dim of these elements}."""
        values_of: dict[fx.Node, set[fx.Node]] = {
            selection: set(selection.users) for selection in self.positions.values()
        }
        for node, traced in self.traced.items():
            symbols = {s for tensor in tensors_in(traced) for size in tensor.shape for s in free_symbols(size)}
            for symbol in symbols & self.selections.keys():
                values_of[self.selections[symbol]].add(node)
        return values_of

    # Means

    def _mean(self, node: fx.Node) -> fx.Node | None:
        """Rewrite a mean over a data-dependent number of elements as a sum divided by that number."""
        name = operator_name(node)
        reduces = is_operator(node.target) and name not in _BY_LABELS and argument(node, "reduction") == _MEAN
        if name != "aten::mean" and not reduces:
            return None
        source = node.args[0]
        sizes = [expression(size) for size in self.traced.get(source, value(source)).shape]
        if reduces:
            names = [declared.name for declared in node.target._schema.arguments]
            place = names.index("reduction")
            args = [_NONE if i == place else passed for i, passed in enumerate(node.args)]
            kwargs = {k: passed for k, passed in node.kwargs.items() if k != "reduction"}
            kwargs |= {"reduction": _NONE} if len(args) <= place else {}
            total = self._call(node, aten.sum.default, self._call(node, node.target, *args, **kwargs))
        elif node.target is aten.mean.default:
            total = self._call(node, aten.sum.default, source, **node.kwargs)
        else:
            dims = argument(node, "dim")
            total = self._call(node, aten.sum.dim_IntList, *node.args, **node.kwargs)
            sizes = [size for i, size in enumerate(sizes) if i in {d % len(sizes) for d in dims}] if dims else sizes
        number = 1
        for size in sizes:
            number = number * size
        if not any(is_symbol(size) or not isinstance(size, int) for size in sizes):
            return None
        count = self.numbers.size(number, node)
        return self._call(node, aten.div.Tensor, total, count)


def _selects(node: fx.Node) -> bool:
    """Return True if a call returns the elements that a mask selects."""
    if node.op != "call_function":
        return False
    masks = operator_name(node) == "aten::index" and any(map(_is_mask, node.args[1]))
    return (
        masks or node.target is aten.where.default or operator_name(node) in _SELECTING - {"aten::where", "aten::index"}
    )


def _check_open(node: fx.Node, traced: Any) -> None:
    """Raise TraceError if the model used a selection as if it had a fixed number of elements."""
    for tensor, largest in zip(tensors_in(traced), tensors_in(value(node)), strict=True):
        for size, most in zip(tensor.shape, largest.shape, strict=False):
            num_used = expression(size)
            if not free_symbols(size) and num_used != most:
                raise TraceError(
                    f"a mask selects from {most} elements, but the model uses the result as if it had {num_used}",
                    refusal=Refusal.SIZE,
                    why=f"the number of selected elements depends on tensor values, so it may differ from {num_used}",
                    where=source_text(node), hint=f"a selection of known size: gather, or topk with k={num_used}",
                )  # fmt: skip


def _is_mask(index: Any) -> bool:
    return isinstance(index, fx.Node) and value(index).dtype in (torch.bool, torch.uint8)
