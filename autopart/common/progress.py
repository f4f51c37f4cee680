"""Progress messages for long computations such as planning.

A function calls `phase("tracing the model")` when it begins a phase. Inside a `with shown(write)` block, `write` gets
one line per phase, beginning two seconds after the start of the block. `announce` writes a line without delay. Outside
of such a block, `phase` and `announce` do nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

AFTER_S = 2.0
"""Seconds before the first message. Work that takes less time prints nothing."""

SETTLED_S = 0.2
"""Seconds that a phase must last to get a message."""

Item = TypeVar("Item")
Listener = Callable[[str], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_position: ContextVar[str] = ContextVar("position", default="")
_announcer: ContextVar[Listener | None] = ContextVar("announcer", default=None)


def phase(text: str) -> None:
    """Report that a new phase begins, such as `phase("simulating 3 of 12")`."""
    listener = _listener.get()
    if listener is not None:
        listener(f"{text}{_position.get()}")


def numbered(items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items. Messages of phases that begin meanwhile end in ` (4 of 20)`."""
    for number, item in enumerate(items, 1):
        token = _position.set(f" ({number} of {len(items)})")
        try:
            yield item
        finally:
            _position.reset(token)


def announce(text: str) -> None:
    """Write a message line immediately, without the delay of `phase`."""
    announcer = _announcer.get()
    if announcer is not None:
        announcer(text)


class _ProgressWriter:
    """Thread that writes the current phase as a line, beginning `after_s` seconds after its creation."""

    def __init__(self, write: Listener, after_s: float):
        self.write, self.after_s = write, after_s
        self.start_s = time.monotonic()
        self.text, self.since_s, self.is_written = "", self.start_s, True
        self.lock, self.done = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._watch, name="autopart-progress", daemon=True)

    def begin(self, text: str) -> None:
        with self.lock:
            self.text, self.since_s, self.is_written = text, time.monotonic(), False

    def _watch(self) -> None:
        self.done.wait(self.after_s)
        while not self.done.wait(SETTLED_S / 2):
            with self.lock:
                now_s = time.monotonic()
                if self.is_written or now_s - self.since_s < SETTLED_S:
                    continue
                self.is_written, text = True, self.text
            self.write(f"[{now_s - self.start_s:3.0f} s] {text}")


@contextmanager
def shown(write: Listener, after_s: float = AFTER_S) -> Iterator[None]:
    """Write each phase that begins inside a `with` block as a line: `[ 12 s] simulating 3 of 12`.

    Args:
        write: function that prints a line.
        after_s: seconds from the start of the block until the first line.

    Example:
        >>> with shown(lambda line: print(line, file=sys.stderr)):    # doctest: +SKIP
        ...     plans = autopart.search(model, 64)
    """
    lines = _ProgressWriter(write, after_s)
    token, announcing = _listener.set(lines.begin), _announcer.set(write)
    lines.thread.start()
    try:
        yield
    finally:
        _listener.reset(token)
        _announcer.reset(announcing)
        lines.done.set()
        lines.thread.join()
