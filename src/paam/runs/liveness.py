"""Whether the process of a run is still at work: by its lock where it holds one, by its silence otherwise."""

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
"""Seconds without a sign of life after which a run seems to have stopped; more where its epochs are longer."""
FRESH = 5.0
"""Seconds for which a sign of life needs no second look, so that nobody tries the lock of a run that just begins."""


Life = Literal["alive", "silent", "gone"]


def life(run: Path, longest_epoch: float, silence: float, grace: float = FRESH) -> Life:
    """ "gone": nobody holds its lock. "silent": nobody knows, and it has written nothing for long.

    Within ``grace`` seconds of a sign of life nothing else is asked; 0: a lock, where there is one, decides alone.
    Measuring takes a while without a sign of life: three times the longest epoch, in seconds, is enough for it.
    """
    if grace and silence < grace:
        return "alive"
    held = lock_held(run / LOCK_FILE)
    if held is not None:
        return "alive" if held else "gone"
    return "silent" if silence > max(SILENCE, 3 * longest_epoch) else "alive"


def silent_for(run: Path) -> float:
    """Seconds since a run wrote its record or its progress; 0 where a clock says that this is still to come."""
    return max(time.time() - _last_sign(run), 0.0)


class Silence:
    """How long a run that is watched has written nothing, by a clock that nobody can set.

    Only what was written before the first look is aged by the clock of the day.
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
    """When a run wrote its record or its progress; where neither can be seen, when its folder changed."""
    return max(_written(record_in(run), run / PROGRESS_FILE) or _written(run) or [0.0])


def _written(*paths: Path) -> list[float]:
    times = []
    for path in paths:
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return times


def lock_held(path: Path) -> bool | None:
    """None when there is no lock to ask. The question is a shared lock, given back at once."""
    try:
        descriptor = open_regular(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        free = try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)
    return None if free is None else not free
