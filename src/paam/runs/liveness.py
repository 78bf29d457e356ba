"""Whether the process of a run is still alive: by its lock if there is one, otherwise by its last write."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from paam.files.system import open_regular, try_lock
from paam.runs.progress import PROGRESS_FILE
from paam.runs.record import LOCK_FILE, record_in

SILENCE = 60.0
"""Seconds without a write after which a run seems to have stopped; more if its epochs are longer."""
FRESH = 5.0
"""Seconds after a write in which the lock is not tried, so that a run that is just starting can take it."""


Life = Literal["alive", "silent", "gone"]


def life(run: Path, longest_epoch: float, silence: float, grace: float = FRESH) -> Life:
    """ "gone": no process holds its lock. "silent": unknown, but it has not written for a long time.

    Within ``grace`` seconds after a write the lock is not tried; with 0 the lock alone decides, if there is one.
    Measuring the result writes nothing for a while: three times the longest epoch, in seconds, is enough for it.
    """
    if grace and silence < grace:
        return "alive"
    held = lock_held(run / LOCK_FILE)
    if held is not None:
        return "alive" if held else "gone"
    return "silent" if silence > max(SILENCE, 3 * longest_epoch) else "alive"


def silent_for(run: Path) -> float:
    """Seconds since a run wrote its record or its progress; 0 if the clock says that this is in the future."""
    return max(time.time() - _last_sign(run), 0.0)


class Silence:
    """Time since the last write of a watched run, by a monotonic clock.

    Only the age of what was written before the first look depends on the wall clock.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.sign = _last_sign(run)
        self.since = time.monotonic() - silent_for(run)

    def seconds(self) -> float:
        if (sign := _last_sign(self.run)) != self.sign:
            self.sign, self.since = sign, time.monotonic()
        return time.monotonic() - self.since


def _last_sign(run: Path) -> float:
    """When a run last wrote its record or its progress; if there is neither, when its folder changed."""
    return max(_written(record_in(run), run / PROGRESS_FILE) or _written(run) or [0.0])


def _written(*paths: Path) -> list[float]:
    times = []
    for path in paths:
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return times


def lock_held(path: Path) -> bool | None:
    """None if there is no lock to try. Tries a shared lock and releases it immediately."""
    try:
        descriptor = open_regular(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        free = try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)
    return None if free is None else not free
