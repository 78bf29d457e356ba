"""Where the program begins. Loading it takes a second, and Ctrl-C in that second must not end in a traceback."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    before = signal.getsignal(signal.SIGINT)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)
    from paam.cli import main as program

    signal.signal(signal.SIGINT, before)
    program()


def _leave(number: int, frame: FrameType | None) -> None:
    """At once: an exception could be swallowed, or be taken for a failed import, by whatever is just being loaded."""
    os.write(2, b"paam: Stopped; nothing was begun.\n")
    os._exit(128 + number)
