"""Signals during a run: the first asks it to stop after its step, the second ends the process immediately."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a request to terminate, and a closed terminal."""


class Stopping:
    """Context that catches these signals in the main thread; does nothing in other threads and for ignored signals.

    ``on_asked`` is called on a request to stop, ``before_exit`` before the process exits immediately.
    """

    def __init__(self, on_asked: Callable[[], object], before_exit: Callable[[], object]) -> None:
        self.on_asked, self.before_exit = on_asked, before_exit
        self.training = False
        """Until there is something to save, the first signal acts like the second."""
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
        """130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP, as in shells."""
        assert self.received is not None
        return 128 + self.received

    def receive(self, number: int) -> None:
        """Act as if this signal had been received; from any thread."""
        again = self.received is not None
        if again and number == signal.SIGHUP:
            return  # a closed terminal may send SIGHUP twice: from the OS and from its shell
        self.received = number
        if self.training and not again:
            self.on_asked()
            return
        self.before_exit()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.exit_code)  # file writes are atomic, so no cleanup is needed
