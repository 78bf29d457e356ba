"""Whether the process of a run is still at work: by its lock where it holds one, by its silence otherwise."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from paam.progress import PROGRESS_FILE
from paam.record import LOCK_FILE, RECORD_FILE

try:
    import fcntl
except ImportError:  # not a Unix: silence must do
    fcntl = None  # type: ignore[assignment]

SILENCE = 60.0
"""Seconds without a sign of life after which a run seems to have stopped; more where its epochs are longer."""
FRESH = 5.0
"""Seconds for which a sign of life needs no second look, so that nobody tries the lock of a run that just begins."""

Life = Literal["alive", "silent", "gone"]


def life(run: Path, longest_epoch: float, grace: float = FRESH) -> Life:
    """ "gone": nobody holds its lock. "silent": nobody knows, and it has written nothing for long.

    Within ``grace`` seconds of a sign of life nothing else is asked; 0: a lock, where there is one, decides alone.
    Measuring takes a while without a sign of life: three times the longest epoch, in seconds, is enough for it.
    """
    silence = silent_for(run)
    if grace and silence < grace:
        return "alive"
    held = lock_held(run / LOCK_FILE)
    if held is not None:
        return "alive" if held else "gone"
    return "silent" if silence > max(SILENCE, 3 * longest_epoch) else "alive"


def silent_for(run: Path) -> float:
    """Seconds since a run wrote its record or its progress; where neither can be seen, since its folder changed."""
    times = _written(run / RECORD_FILE, run / PROGRESS_FILE) or _written(run) or [0.0]
    return time.time() - max(times)


def _written(*paths: Path) -> list[float]:
    times = []
    for path in paths:
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return times


def lock_held(path: Path) -> bool | None:
    """None when there is no lock to ask. The question is a shared lock, given back at once."""
    if fcntl is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(descriptor)
    return False
