"""Rewrites of views and in-place writes that torch would functionalize with a wrong value or gradient.

`run_decompositions` writes a changed view back to the tensor that it is a view of (its base). For `as_strided`, it uses
an operator with a wrong gradient. For `unfold`, it sets all other elements to zero. For `detach`, it drops the gradient
of the base. `docs/notes/in-place-writes.md` has minimal examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, fx

from autopart.compat.export_internals import is_batched
from autopart.errors import Refusal, TraceError
from autopart.ir.graph import argument, is_floating, operator_name, shape, short_name, source_text, tuple_values, value
from autopart.tracing.dynamic.symbolic_scalars import added
from autopart.tracing.exported_graph import record_origin

aten = torch.ops.aten

_WITHOUT_DERIVATIVE = {"logical_and_", "logical_not_", "logical_or_", "logical_xor_"}
"""In-place operators after which eager PyTorch uses the gradient of the value before the write."""


@torch.no_grad()  # in grad mode torch rejects writes to weights, even fake ones
def explicit_writes(graph: fx.Graph) -> None:
    """Rewrite `as_strided` views, `unfold` windows that are written, and `fill_diagonal_` in a graph.

    The graph comes from torch.export. Raises TraceError for a write that cannot be rewritten with the right gradient.
    """
    for node in list(graph.nodes):
        if operator_name(node) == "aten::as_strided_scatter":
            raise _refused(
                node, "torch.as_strided_scatter has a wrong gradient in torch",
                why="the gradient is zero for elements that stay, and non-zero for written ones",
                hint="x = x.clone(); x.as_strided(size, stride).copy_(src)",
            )  # fmt: skip
        elif operator_name(node) == "aten::fill_diagonal_":
            _rewrite(node, _masked_diagonal)
    written = _written_views(graph)
    for node in list(graph.nodes):
        if operator_name(node) == "aten::as_strided" and value(node).numel():
            _rewrite(node, lambda node: _strided(node, node in written))
        elif operator_name(node) == "aten::unfold" and node in written:
            _rewrite(node, _unfolded)


def _rewrite(node: fx.Node, form: Callable[[fx.Node], fx.Node]) -> None:
    with node.graph.inserting_before(node):
        node.replace_all_uses_with(form(node))
    node.graph.erase_node(node)


def _masked_diagonal(node: fx.Node) -> fx.Node:
    """Replace `fill_diagonal_` by a masked write, which can be sharded."""
    target, device = node.args[0], value(node).device
    rows, *others = shape(node)

    def index(size: int, dim: int) -> fx.Node:
        indices = added(node.graph, node, aten.arange.default, size, device=device, pin_memory=False)
        sizes = [size if i == dim else 1 for i in range(len(others) + 1)]
        return added(node.graph, node, aten.view.default, indices, sizes)

    row, mask = index(rows, 0), None
    if argument(node, "wrap") and rows > others[0] + 1:
        if not value(target).is_contiguous():
            raise _refused(
                node, "fill_diagonal_(wrap=True) writes memory outside of its input",
                why="torch assumes that each row begins where the previous one ends", hint="x.contiguous()",
            )  # fmt: skip
        row = added(node.graph, node, aten.remainder.Scalar, row, others[0] + 1)
    for dim, size in enumerate(others, 1):
        equal = added(node.graph, node, aten.eq.Tensor, row, index(size, dim))
        mask = equal if mask is None else added(node.graph, node, aten.logical_and.default, mask, equal)
    return added(node.graph, node, aten.masked_fill_.Scalar, target, mask, argument(node, "fill_value"))


def _strided(node: fx.Node, is_written: bool) -> fx.Node:
    """Replace `as_strided` by equivalent permutes, reshapes and slices.

    Later passes change the strides of tensors. These views do not depend on strides, so they stay correct.
    """
    graph, source = node.graph, node.args[0]
    traced: Tensor = value(source)
    offset = argument(node, "storage_offset")
    start = 0 if offset is None else offset - traced.storage_offset()
    sizes_and_strides = list(zip(*node.args[1:3], strict=True))
    order = sorted(range(traced.dim()), key=lambda dim: (traced.stride(dim), traced.shape[dim]), reverse=True)
    last = start + sum((size - 1) * stride for size, stride in sizes_and_strides)
    if not traced.permute(order).is_contiguous() or not 0 <= start <= last < traced.numel():
        raise _refused(
            node, "as_strided reads memory outside of its input",
            why="a rank stores only the elements of the input, contiguously", hint="unfold, or slices and stack",
        )  # fmt: skip
    if order != list(range(len(order))):
        source = added(graph, node, aten.permute.default, source, order)
    view = source if len(order) == 1 else added(graph, node, aten.view.default, source, [traced.numel()])
    view = _narrowed(node, view, start, traced.numel())
    moving = [dim for dim, (size, stride) in enumerate(sizes_and_strides) if size > 1 and stride]
    moving.sort(key=lambda dim: sizes_and_strides[dim][1], reverse=True)
    for i, dim in enumerate(moving):
        count, step = sizes_and_strides[dim]
        inner = 1 + sum((sizes_and_strides[d][0] - 1) * sizes_and_strides[d][1] for d in moving[i + 1 :])
        view = _windows(node, view, count, inner, step, is_written)
    if not moving:
        view = _narrowed(node, view, 0, 1)
    view = added(graph, node, aten.squeeze.dim, view, len(moving))
    if moving != sorted(moving):
        view = added(graph, node, aten.permute.default, view, [moving.index(dim) for dim in sorted(moving)])
    for dim in range(len(sizes_and_strides)):
        view = view if dim in moving else added(graph, node, aten.unsqueeze.default, view, dim)
    return view if shape(view) == shape(node) else added(graph, node, aten.expand.default, view, list(shape(node)))


def _unfolded(node: fx.Node) -> fx.Node:
    """Replace an `unfold` whose windows do not overlap by a reshape of the dim."""
    size, step = node.args[2:4]
    dim = node.args[1] % max(len(shape(node.args[0])), 1)
    view = added(node.graph, node, aten.movedim.int, node.args[0], dim, -1)
    view = _narrowed(node, _windows(node, view, shape(node)[dim], size, step, is_written=True), 0, size)
    return added(node.graph, node, aten.movedim.int, view, -2, dim)


def _windows(node: fx.Node, view: fx.Node, count: int, size: int, step: int, is_written: bool) -> fx.Node:
    """Return a view of shape [..., count, window], which splits the last dim into `count` windows.

    A window of the view can have more than `size` elements; the caller drops the last ones.

    Args:
        step: distance in elements between the starts of two consecutive windows.
    """
    graph = node.graph
    if size == 1:
        view = _narrowed(node, view, 0, (count - 1) * step + 1, step)
        return added(graph, node, aten.unsqueeze.default, view, -1)
    if size <= step and count * step <= shape(view)[-1]:
        view = _narrowed(node, view, 0, count * step)
        return added(graph, node, aten.unflatten.int, view, -1, [count, step])
    if is_written:
        raise _refused(
            node, f"a view made by {short_name(node)} is written in place",
            why=f"{count} windows of {size} elements, one every {step}, do not tile {shape(view)[-1]} elements",
            hint="a write to slices, or index_put_ with the positions",
        )  # fmt: skip
    return added(graph, node, aten.unfold.default, _narrowed(node, view, 0, (count - 1) * step + size), -1, size, step)


def _narrowed(node: fx.Node, view: fx.Node, start: int, end: int, step: int = 1) -> fx.Node:
    """Return a slice of the last dim, or the view itself if the slice is the full dim."""
    if (start, end, step) == (0, shape(view)[-1], 1):
        return view
    return added(node.graph, node, aten.slice.Tensor, view, -1, start, end, step)


def _written_views(graph: fx.Graph) -> set[fx.Node]:
    """Return all nodes that share memory with a tensor that is written in place.

    Raises TraceError if a detached view of a value with a gradient is written, and the value is read after the write.
    """
    bases = {node: base for node in graph.nodes if (base := _base(node)) is not None}
    with_gradient: set[fx.Node] = set()
    written: set[fx.Node] = set()
    for node in graph.nodes:
        if _carries_gradient(node, with_gradient):
            with_gradient.add(node)
        for target in _targets(node):
            if short_name(node) in _WITHOUT_DERIVATIVE and target in with_gradient:
                raise _gradient_before(node, "a value that has a gradient")
            views = list(_chain(target, bases))
            written.update(views)
            if node in with_gradient:
                with_gradient.update(views)
            detached = [view for view in views if operator_name(view) == "aten::detach"]
            _check_unread(node, [view for view in detached if view.args[0] in with_gradient], bases)
    return written


def _base(node: fx.Node) -> fx.Node | None:
    """Return the input with which a node's result shares memory; None if the result is not a view."""
    if node.op != "call_function":
        return None
    memory = _memory(node)
    return next((used for used in node.all_input_nodes if memory and memory & _memory(used)), None)


def _memory(node: fx.Node) -> set[int]:
    """Return the ids of the storages of a node's results. The set is empty for values inside of `vmap`."""
    tensors = [v for v in tuple_values(node) if isinstance(v, Tensor) and v.layout is torch.strided]
    return {tensor.untyped_storage()._cdata for tensor in tensors if not is_batched(tensor)}


def _chain(node: fx.Node, bases: Mapping[fx.Node, fx.Node]) -> Iterator[fx.Node]:
    """Yield a view, its base, the base of the base, and so on, up to the tensor that owns the memory."""
    yield node
    while node in bases:
        node = bases[node]
        yield node


def _targets(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that a call writes in place."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    if schema is None or not schema.is_mutable:
        return []
    declared = [(i, a) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    targets = [node.args[i] if i < len(node.args) else node.kwargs.get(a.name) for i, a in declared]
    return [target for target in targets if isinstance(target, fx.Node)]


def _carries_gradient(node: fx.Node, with_gradient: set[fx.Node]) -> bool:
    if node.op != "call_function":
        return isinstance(value(node), Tensor) and value(node).requires_grad
    tensors = [v for v in tuple_values(node) if isinstance(v, Tensor)]
    stops = operator_name(node) == "aten::detach" or (len(tensors) == 1 and not is_floating(node))
    return not stops and not with_gradient.isdisjoint(node.all_input_nodes)


def _check_unread(write: fx.Node, detached: list[fx.Node], bases: Mapping[fx.Node, fx.Node]) -> None:
    """Raise TraceError if a value is read after a write to a detached view of it."""
    for view in detached:
        *_, owner = _chain(view, bases)
        # Parameters and buffers are read after the forward, when the program updates them.
        if owner.op != "call_function":
            continue
        chains = {node: list(_chain(node, bases)) for node in (owner, *bases)}
        others = [node for node, chain in chains.items() if chain[-1] is owner and view not in chain]
        if any(user > write for node in others for user in node.users):
            raise _gradient_before(write, "a detached value whose gradient is used")


def _gradient_before(write: fx.Node, target: str) -> TraceError:
    name = short_name(write)
    return _refused(
        write, f"{name} writes in place to {target}", why="its gradient would be that of the value before the write",
        hint=f"{name.rstrip('_')} in grad mode, or on value.detach().clone()",
    )  # fmt: skip


def _refused(node: fx.Node, what: str, why: str, hint: str) -> TraceError:
    record_origin(node)
    return TraceError(what, refusal=Refusal.WRITE, why=why, where=source_text(node), hint=hint)
