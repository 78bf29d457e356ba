"""Importing torch takes seconds, and Ctrl-C in them must not end in a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Inside, Ctrl-C ends the program at once with one sentence, unless it is ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before in (None, signal.SIG_IGN) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(number: int, frame: FrameType | None) -> None:
    """At once: an exception could be swallowed, or be taken for a failed import, by whatever is just being loaded."""
    os.write(2, b"paam: Stopped; nothing was begun.\n")
    os._exit(128 + number)
