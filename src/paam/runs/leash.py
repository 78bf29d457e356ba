"""A process that ends with the one that started it, however that one ends, a kill -9 included.

Its standard input is a pipe that nobody writes to: the system closes it when the last process that holds the other end
is gone. All of POSIX has that; asking for a signal at a parent's death is Linux's alone.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

VARIABLE = "PAAM_ENDS_WITH_STDIN"


def leashed(environment: dict[str, str]) -> dict[str, str]:
    """The environment of a process that is to look out for the end of its standard input."""
    return {**environment, VARIABLE: "1"}


def when_let_go(then: Callable[[], object]) -> None:
    """Call ``then``, in another thread, once the process that started this one is gone; never where none said so."""
    if os.environ.pop(VARIABLE, None) is None:  # not for the processes that this one starts
        return
    leash = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)  # who asks for input gets none, as ever in runs of a sweep
    os.close(nowhere)

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(leash, 1):
                pass
        then()

    threading.Thread(target=watch, name="leash", daemon=True).start()
