"""Handle Ctrl-C while torch is imported, which takes seconds, without a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Inside, Ctrl-C ends the program immediately with one sentence, unless SIGINT is ignored."""
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
    """Exit immediately: an exception could be swallowed, or mistaken for a failed import, by a module being loaded."""
    os.write(2, b"paam: Stopped before anything started.\n")
    os._exit(128 + number)
