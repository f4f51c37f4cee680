"""Progress of long work: code reports its current phase, and a caller can print it.

`phase("tracing the model")` costs nothing if nobody listens. Inside `shown(write)`, each phase of work that takes
longer than two seconds is written, and every announcement at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

AFTER_S = 2.0
"""Seconds: work that takes less time prints nothing."""

SETTLED_S = 0.2
"""Seconds: a phase that ends sooner gets no line."""

Listener = Callable[[str], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_announcer: ContextVar[Listener | None] = ContextVar("announcer", default=None)


def phase(text: str) -> None:
    """Report the phase of work that begins now: `phase("simulating 3 of 12")`."""
    listener = _listener.get()
    if listener is not None:
        listener(text)


def announce(text: str) -> None:
    """Report at once, in one line, work that is about to start. Does nothing outside of `shown`."""
    announcer = _announcer.get()
    if announcer is not None:
        announcer(text)


class _Lines:
    """The current phase, and a thread that writes it once work has taken `after_s` seconds."""

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
    """Write each phase inside a `with` block as a line, `[ 12 s] simulating 3 of 12`.

    Args:
        after_s: seconds of work after which lines are written.

    Example:
        >>> with shown(lambda line: print(line, file=sys.stderr)):    # doctest: +SKIP
        ...     plans = autopart.search(model, 64)
    """
    lines = _Lines(write, after_s)
    token, announcing = _listener.set(lines.begin), _announcer.set(write)
    lines.thread.start()
    try:
        yield
    finally:
        _listener.reset(token)
        _announcer.reset(announcing)
        lines.done.set()
        lines.thread.join()
