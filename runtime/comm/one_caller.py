"""Check that only one thread at a time calls a partitioned model, outside of `torch.func` transforms."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from autopart.compat.training_internals import current_transform
from autopart.errors import UsageError

_TABLE = threading.Lock()


class Caller(NamedTuple):
    """Current call of a partitioned model: its thread, the called method, and the depth of nested calls."""

    thread: int
    method: str
    depth: int


@contextmanager
def one_caller(process: Any, method: str) -> Iterator[None]:
    """Context manager that marks that this thread runs a collective method.

    Raises UsageError if another thread runs a collective method, or if a `torch.func` transform calls the method.
    """
    transform = current_transform()
    if transform:
        raise UsageError(
            f"{method}() is called inside of a transform of torch.func ({transform})",
            why="a partitioned model sends tensors between ranks, which torch.func cannot transform",
            hint="loss.backward() or torch.autograd.grad(..., create_graph=True) of pm(...); or torch.func in the "
            "model's own forward()",
        )
    thread = threading.get_ident()
    with _TABLE:
        before = process.caller
        if before is not None and before.thread != thread:
            raise UsageError(
                f"{method}() is called while another thread runs {before.method}()",
                why="ranks match their collectives by order, which two threads do not preserve",
                hint="make all calls of pm from one thread, or one after the other (a queue, or a lock around "
                "each call)",
            )
        process.caller = before._replace(depth=before.depth + 1) if before else Caller(thread, method, 1)
    try:
        yield
    finally:
        with _TABLE:
            process.caller = before
