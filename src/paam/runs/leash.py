"""End a process when its parent ends, even by kill -9.

The child's standard input is a pipe that nobody writes to: the OS closes it when the last process that holds the other
end is gone. That is POSIX; a signal at the parent's death (PR_SET_PDEATHSIG) exists on Linux only.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

VARIABLE = "PAAM_ENDS_WITH_STDIN"


def leashed(environment: dict[str, str]) -> dict[str, str]:
    """Environment for a child process that must watch for the end of its standard input."""
    return {**environment, VARIABLE: "1"}


def when_orphaned(then: Callable[[], object]) -> None:
    """Call ``then``, in another thread, when the parent process is gone; does nothing outside of :func:`leashed`."""
    if os.environ.pop(VARIABLE, None) is None:  # not inherited by this process's children
        return
    leash = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)  # reads of standard input get EOF, as always in runs of a sweep
    os.close(nowhere)

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(leash, 1):
                pass
        then()

    threading.Thread(target=watch, name="leash", daemon=True).start()
