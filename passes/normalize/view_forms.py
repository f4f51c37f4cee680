"""Rewrites of copies, casts, views and splits with few operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import argument, is_floating, is_tensor, operator_name, shape, value
from autopart.ir.selection import is_data_dependent
from autopart.passes.pass_pipeline import on_calls
from autopart.passes.rewriting import emit, getitem, replace

aten = torch.ops.aten

_TRANSPARENT = {
    "aten::alias", "aten::contiguous", "aten::clone", "aten::lift_fresh_copy", "aten::_assert_tensor_metadata",
    "aten::to", "aten::_to_copy", "aten::reshape", "aten::expand", "aten::slice", "aten::dropout",
    "aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout", "aten::detach",
}  # fmt: skip

_TAKE_CONTIGUOUS = {"aten::_pdist_forward", "aten::view_as_complex"}
"""Operators that need a contiguous first operand."""


def drop_no_ops(graph: fx.Graph) -> None:
    """Remove calls without effect: copies to the same device, casts to the same dtype, dropout with p=0."""
    with_gradient = _with_gradient(graph) if graph.find_nodes(op="call_function", target=aten.detach.default) else set()
    for node in list(graph.nodes):
        name = operator_name(node) if node.op == "call_function" else ""
        if name not in _TRANSPARENT:
            continue
        if name == "aten::_assert_tensor_metadata":
            graph.erase_node(node)
            continue
        source = node.args[0]
        now, before = value(node), value(source)
        same = (now.shape, now.dtype, now.device) == (before.shape, before.dtype, before.device)
        if "dropout" in name:
            same = node.args[1] == 0 or not node.args[2]
        if name == "aten::detach":
            same = source not in with_gradient
        needed = name == "aten::contiguous" and any(operator_name(n) in _TAKE_CONTIGUOUS for n in node.users)
        if same and not needed:
            replace(node, source)


@on_calls(*_TAKE_CONTIGUOUS)
def contiguous_operands(graph: fx.Graph, node: fx.Node) -> None:
    """Make the first operand of operators that need contiguous memory contiguous.

    Other passes remove copies and reorder views, so an operand can have other strides than in the model.
    """
    if operator_name(node.args[0]) != "aten::contiguous":
        with graph.inserting_before(node):
            node.update_arg(0, emit(graph, node.args[0], aten.contiguous.default, node.args[0]))


def _with_gradient(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes through which a gradient flows to a parameter or an input."""
    with_gradient: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            carries = value(node).requires_grad
        elif node.op == "placeholder":
            carries = facts(node).get("input_grad", False)
        elif node.op == "call_function":
            stops = operator_name(node) == "aten::detach" or (is_tensor(node) and not is_floating(node))
            carries = not stops and not with_gradient.isdisjoint(node.all_input_nodes)
        else:
            carries = False
        if carries:
            with_gradient.add(node)
    return with_gradient


def positional_arguments(graph: fx.Graph) -> None:
    """Pass arguments by position, except keyword-only arguments."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not node.kwargs:
            continue
        args, kwargs = list(node.args), dict(node.kwargs)
        positional = [declared for declared in schema.arguments if not declared.kwarg_only]
        last = max((i for i, declared in enumerate(positional) if declared.name in kwargs), default=-1)
        for declared in positional[len(args) : last + 1]:
            args.append(kwargs.pop(declared.name, declared.default_value))
        node.args, node.kwargs = tuple(args), kwargs


@on_calls("aten::copy", "aten::expand_as", "aten::view_as", "aten::reshape_as", "aten::type_as")
def plain_copies(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite operators that use only the shape or dtype of an operand.

    The new operators do not use this operand. `view_as`, `expand_as` and `type_as` become calls with a constant shape
    or dtype. `copy(a, b)`, the functional form of a write to `a`, becomes `b` in the dtype and shape of `a`.
    """
    name = operator_name(node)
    source = node.args[1] if name == "aten::copy" else node.args[0]
    reshapes = name in ("aten::view_as", "aten::reshape_as")
    with graph.inserting_before(node):
        if value(source).dtype != value(node).dtype:
            source = emit(graph, node, aten.to.dtype, source, value(node).dtype)
        if shape(source) != shape(node):
            target = aten.reshape.default if reshapes else aten.expand.default
            source = emit(graph, node, target, source, list(shape(node)))
        replace(node, source)


@on_calls("aten::slice_scatter", "aten::select_scatter")
def complex_writes(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite a write to a slice of a complex tensor as `index_copy`, which torch can differentiate."""
    if not value(node).is_complex():
        return
    source, dim = node.args[1], argument(node, "dim") % len(shape(node))
    places = range(shape(node)[dim])
    with graph.inserting_before(node):
        if operator_name(node) == "aten::slice_scatter":
            places = places[slice(*(argument(node, name) for name in ("start", "end", "step")))]
        else:
            start = places[argument(node, "index")]
            places = range(start, start + 1)
            source = emit(graph, node, aten.unsqueeze.default, source, dim)
        options: dict[str, Any] = {"dtype": torch.int64, "device": value(node).device}
        index = emit(graph, node, aten.arange.start_step, places.start, places.stop, places.step, **options)
        replace(node, emit(graph, node, aten.index_copy.default, node.args[0], dim, index, source))


@on_calls("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::flatten", "aten::unflatten")
def one_reshape(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite every view that merges or splits dims as `reshape` with its full output shape."""
    if node.target is aten.view.dtype:  # a view that reinterprets the bits of each number
        return
    is_open = is_data_dependent(node) and isinstance(node.args[1], (list, tuple)) and -1 in node.args[1]
    sizes = list(node.args[1] if is_open else shape(node))  # -1: data-dependent size
    if node.target is not aten.reshape.default or list(node.args[1]) != sizes:
        with graph.inserting_before(node):
            reshaped = emit(graph, node, aten.reshape.default, node.args[0], sizes)
            if "counted" in facts(node):
                facts(reshaped)["counted"] = is_data_dependent(node)
            replace(node, reshaped)


@on_calls("aten::squeeze")
def exact_squeeze(graph: fx.Graph, node: fx.Node) -> None:
    """Pass explicit dims to `squeeze`, because a dim can have local size 1 after sharding."""
    before = shape(node.args[0])
    asked = node.args[1] if len(node.args) > 1 else range(len(before))
    asked = [asked] if isinstance(asked, int) else asked
    gone = sorted({dim % len(before) for dim in asked if before[dim] == 1} if before else set())
    with graph.inserting_before(node):
        replace(node, emit(graph, node, aten.squeeze.dims, node.args[0], gone) if gone else node.args[0])


@on_calls("aten::repeat")
def explicit_repeats(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite `repeat` as an `expand` to new dims and a `reshape` that merges them."""
    source, times = node.args
    before = [1] * (len(times) - len(shape(source))) + list(shape(source))
    pairs = [(1, size) for size in before]
    with graph.inserting_before(node):
        apart = emit(graph, node, aten.reshape.default, source, [size for pair in pairs for size in pair])
        full = [size for time, length in zip(times, before, strict=True) for size in (time, length)]
        wide = emit(graph, node, aten.expand.default, apart, full)
        replace(node, emit(graph, node, aten.reshape.default, wide, list(shape(node))))


@on_calls("aten::broadcast_tensors")
def plain_broadcasts(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite `broadcast_tensors` as an `expand` of each tensor that has another shape than the result."""
    for part in list(node.users):
        source = node.args[0][part.args[1]]
        with graph.inserting_before(part):
            same = shape(source) == shape(part)
            replace(part, source if same else emit(graph, part, aten.expand.default, source, list(shape(part))))


@on_calls("aten::cat")
def no_empty_parts(graph: fx.Graph, node: fx.Node) -> None:
    """Remove operands of shape [0] from `cat` (such as an empty key cache)."""
    parts = [part for part in node.args[0] if shape(part) != (0,)]
    if len(parts) == 1:
        replace(node, parts[0])
    elif parts and len(parts) < len(node.args[0]):
        node.args = (parts, *node.args[1:])


def one_split(graph: fx.Graph) -> None:
    """Rewrite `split`, `chunk` and slices that together cover a dim as `split_with_sizes`."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = operator_name(node)
        if name in ("aten::split", "aten::chunk"):
            dim = argument(node, "dim") % len(shape(node.args[0]))
            sizes = [t.shape[dim] for t in value(node)]
            with graph.inserting_before(node):
                replace(node, emit(graph, node, aten.split_with_sizes.default, node.args[0], sizes, dim))
        else:
            _join_slices(graph, node)


def _join_slices(graph: fx.Graph, node: fx.Node) -> None:
    slices: dict[int, list[tuple[int, int, fx.Node]]] = {}
    for user in node.users:
        if (
            user.op == "call_function"
            and operator_name(user) == "aten::slice"
            and len(user.args) <= 4
            and value(user).numel()
        ):
            dim, start = argument(user, "dim") % len(shape(node)), argument(user, "start") or 0
            start += shape(node)[dim] if start < 0 else 0
            slices.setdefault(dim, []).append((start, start + shape(user)[dim], user))
    for dim, pieces in slices.items():
        pieces.sort(key=lambda piece: piece[:2])
        ends = [0, *(end for _, end, _ in pieces)]
        if len(pieces) < 2 or [start for start, _, _ in pieces] != ends[:-1] or ends[-1] != shape(node)[dim]:
            continue
        first = min(user for _, _, user in pieces)
        with graph.inserting_before(first):
            whole = emit(graph, first, aten.split_with_sizes.default, node, [e - s for s, e, _ in pieces], dim)
            parts = [getitem(graph, whole, i) for i in range(len(pieces))]
        for part, (_, _, user) in zip(parts, pieces, strict=True):
            replace(user, part)
