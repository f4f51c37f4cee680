"""SIGTERM, with which schedulers and torchrun stop a job.

A rank only notes the signal. In their next call, all ranks learn of it (`consistency/same_call.py`).
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from autopart.errors import UsageError

_received = threading.Event()


def listen() -> None:
    """Note SIGTERM from now on, instead of ending the process. A Python handler that exists runs too.

    Raises UsageError outside of the main thread.
    """
    earlier = signal.getsignal(signal.SIGTERM)
    if getattr(earlier, "notes_stop", False):
        return
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "pm.stop_requested is first read outside of the main thread",
            why="Python installs signal handlers only in the main thread", hint="read it once before the thread begins",
        )  # fmt: skip

    def handler(number: int, frame: FrameType | None) -> Any:
        _received.set()
        return earlier(number, frame) if callable(earlier) else None

    handler.notes_stop = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGTERM, handler)


def is_received() -> bool:
    """Return True if this process has received SIGTERM."""
    return _received.is_set()
