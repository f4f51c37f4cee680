"""Handler of SIGTERM, which cluster schedulers and torchrun send to stop a job.

A rank only records the signal. The next call reports it to all ranks (`consistency/same_call.py`).
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from autopart.errors import UsageError

_received = threading.Event()


def listen() -> None:
    """Install a handler that records SIGTERM, instead of ending the process.

    It also calls the Python handler that was installed before.

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
