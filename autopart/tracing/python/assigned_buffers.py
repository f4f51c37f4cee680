"""Assignments to buffers in a forward (`self.cache = ...`), which a trace would not record.

`AssignedBuffers` converts them into in-place writes, which a trace records.

A buffer that is None before the first call is a cache: the first call fills it and later calls read it. This is allowed
if every call would compute the same value. The program then computes the value in every call, and the model's own
buffer stays None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from autopart.errors import Refusal, TraceError
from autopart.tracing.python.concrete_constants import ConcreteConstants
from autopart.tracing.with_loss import users_modules


class _BufferMetadata(NamedTuple):
    size: torch.Size
    dtype: torch.dtype
    device: torch.device


class AssignedBuffers:
    """Record of the buffers that a forward assigns.

    Attributes:
        caches: buffers that were None before the forward, and that the forward filled.
        are_filled: True if the caches are filled before the forward starts.
    """

    def __init__(self, model: nn.Module):
        self.model, self.are_filled = model, False
        self.caches: dict[tuple[nn.Module, str], _BufferMetadata] = {}

    @contextmanager
    def written(self, known: ConcreteConstants | None) -> Iterator[None]:
        """Convert assignments to buffers into in-place writes, for a forward inside this `with` block.

        Args:
            known: constants of the trace; None outside of a trace.
        """
        before = [
            (module, dict(module._buffers), set(module._non_persistent_buffers_set)) for module in self.model.modules()
        ]
        if known is not None:
            known.hold(
                {
                    f"{path}.{name}".lstrip("."): buffer
                    for path, module in users_modules(self.model)
                    for name, buffer in module._buffers.items()
                    if buffer is not None
                }
            )
        for (module, name), form in self.caches.items() if self.are_filled else ():
            module._buffers[name] = torch.empty(**form._asdict())
        try:
            yield
            if known is not None:
                known.forget([buffer for module, buffers, _ in before for buffer in _replaced(module, buffers)])
            for module, buffers, _ in before:
                self._write(module, buffers, known)
        finally:
            for module, buffers, names in before:
                module._buffers.clear()
                module._buffers.update(buffers)
                module._non_persistent_buffers_set = names

    def _write(self, module: nn.Module, before: Mapping[str, Tensor | None], known: ConcreteConstants | None) -> None:
        for name in {**before, **module._buffers}:
            buffer, new = before.get(name), module._buffers.get(name)
            if new is buffer:
                continue
            if buffer is None and new is not None:
                self._note_cache(module, name, new, known)
                continue
            if buffer is None or new is None or new.shape != buffer.shape:
                raise changed_shape(type(module).__name__, name, buffer, new)
            with torch.no_grad():
                buffer.copy_(new)

    def _note_cache(self, module: nn.Module, name: str, new: Tensor, known: ConcreteConstants | None) -> None:
        if self.are_filled or known is None:
            return
        if not known.is_fixed(new):
            raise TraceError(
                f"{type(module).__name__} fills its buffer '{name}' in its forward",
                refusal=Refusal.STATE,
                why="it was None, and its new value depends on more than constants and unchanged buffers: the next "
                "call would reuse this call's value",
                hint=f"register_buffer('{name}', ...) with a value in __init__; "
                "or call the model once before parallelize()",
            )
        self.caches[module, name] = _BufferMetadata(new.shape, new.dtype, new.device)


FIRST_CALL = "call the model once before parallelize(), if only the first call changes the shape"


def changed_shape(
    owner: str, name: str, before: Tensor | None, after: Tensor | None,
    hint: str = "create the buffer with its largest shape, and write parts of it",
) -> TraceError:  # fmt: skip
    """Return the error of a forward that changes the shape of a buffer of `owner`."""
    was, now = ("None" if buffer is None else f"of shape {list(buffer.shape)}" for buffer in (before, after))
    return TraceError(
        f"{owner} changes the shape of its buffer '{name}' in its forward",
        refusal=Refusal.STATE, why=f"it was {was}, and is {now}",
        hint=hint,
    )  # fmt: skip


def _replaced(module: nn.Module, before: Mapping[str, Tensor | None]) -> list[Tensor]:
    return [buffer for name, buffer in before.items() if buffer is not None and module._buffers.get(name) is not buffer]


def check_caches(model: nn.Module, buffers: AssignedBuffers, program: Any, again: Callable[[], Any]) -> None:
    """Raise TraceError if a forward computes something else when its caches are filled.

    `again` traces the call again with filled caches. Both traces must contain equal operator calls; calls that depend
    on no input or parameter are ignored.
    """
    if not buffers.caches:
        return
    if computed(again_filled(buffers, again)) != computed(program):
        names = ", ".join(f"'{name}'" for _, name in list(buffers.caches)[:3])
        raise TraceError(
            f"the traced call of {type(model).__name__} differs from later calls", refusal=Refusal.STATE,
            why=f"forward() fills the buffer {names} and branches on whether it is None",
            hint="call the model once before parallelize(), so that the buffer is filled",
        )  # fmt: skip


def again_filled(buffers: AssignedBuffers, again: Callable[[], Any]) -> Any:
    """Trace the call again, with the caches filled before the forward starts."""
    buffers.are_filled = True
    try:
        return again()
    finally:
        buffers.are_filled = False


def computed(program: Any) -> Counter[tuple]:
    """Return {(operator, constant arguments, result shape): number of calls} of a trace.

    Only calls that depend on inputs or parameters are counted.
    """
    signature = program.graph_signature
    fixed = {*signature.inputs_to_buffers, *signature.inputs_to_lifted_tensor_constants}
    depending: dict[fx.Node, bool] = {}
    for node in program.graph.nodes:
        is_input = node.op == "placeholder" and node.name not in fixed
        depending[node] = is_input or any(depending[source] for source in node.all_input_nodes)
    return Counter(
        (str(node.target), _others(node), str(getattr(node.meta.get("val"), "shape", None)))
        for node, depends in depending.items() if depends and node.op == "call_function"
    )  # fmt: skip


def _others(node: fx.Node) -> str:
    return str(fx.map_arg((node.args, node.kwargs), lambda _: "value"))
