"""Signals while a run goes on: the first asks it to stop after its step, the second ends it at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a polite end, and a terminal that was closed."""


class Stopping:
    """Catches these signals while it is entered, in the main thread; elsewhere, and where they are ignored, none.

    ``on_asked`` is called when the run is asked to stop, ``at_once`` before the process ends without waiting for it.
    """

    def __init__(self, on_asked: Callable[[], object], at_once: Callable[[], object]) -> None:
        self.on_asked, self.at_once = on_asked, at_once
        self.training = False
        """Until there is something to save, the first signal is as good as the second."""
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, lambda number, frame: self.receive(number))
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def asked(self) -> bool:
        return self.received is not None

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP, as shells have it."""
        assert self.received is not None
        return 128 + self.received

    def receive(self, number: int) -> None:
        """As if that signal had come; from any thread."""
        again = self.received is not None
        if again and number == signal.SIGHUP:
            return  # a closed terminal is told by the system and by its shell
        self.received = number
        if self.training and not again:
            self.on_asked()
            return
        self.at_once()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.exit_code)  # files are written whole or not at all, so that nothing needs to be tidied up
