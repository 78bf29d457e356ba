"""Progress within the current epoch: in memory for this process, in a small file for `paam watch`.

The record has one event per epoch, and an epoch may take an hour. The file is replaced about twice a second, so it
also shows that a run is alive; it is not part of the record, and is deleted when the run ends.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from paam.errors import ArtifactError
from paam.events import End, Epoch, Event
from paam.files.durable import write_atomically
from paam.files.reading import parse_json, read_bytes

PROGRESS_FILE = "progress.json"
LARGEST_FILE = 1 << 12
WRITE_EVERY = 0.5
"""Seconds between writes of the file."""


@dataclass(frozen=True)
class Progress:
    """``step`` of ``steps`` in an ``epoch`` counted from 0; ``pace``: seconds per step, None until it is known."""

    epoch: int
    step: int
    steps: int
    pace: float | None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the end of the epoch."""
        return None if self.pace is None else self.pace * (self.steps - self.step)


class StepClock:
    """Tracks progress from events and steps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.epoch = 0
        self.first: tuple[int, float] | None = None

    def event(self, event: Event) -> None:
        if isinstance(event, Epoch):
            self.epoch = event.epoch + 1
            self.first = None

    def step(self, step: int, steps: int) -> Progress:
        """The first step of an epoch is not timed: it compiles, captures and warms up."""
        now = self.clock()
        if self.first is None:
            self.first = step, now
        taken = step - self.first[0]
        return Progress(self.epoch, step, steps, (now - self.first[1]) / taken if taken > 0 else None)


class ProgressFile:
    """Writes progress for other processes. Write errors are ignored: training does not depend on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = StepClock()
        self.written = -math.inf

    def event(self, event: Event) -> None:
        self.clock.event(event)
        if isinstance(event, End):
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)

    def step(self, step: int, steps: int) -> None:
        progress = self.clock.step(step, steps)
        if time.monotonic() - self.written < WRITE_EVERY:
            return
        self.written = time.monotonic()
        # Not flushed to the disk, unlike everything else: it is useless after a crash.
        with contextlib.suppress(ArtifactError):
            write_atomically(self.path, json.dumps(asdict(progress)).encode(), flush=False)


def read_progress(path: Path) -> Progress | None:
    """The content of the file; None if it is missing or invalid."""
    try:
        found = parse_json(read_bytes(path, LARGEST_FILE).decode("utf-8"))
        progress = Progress(int(found["epoch"]), int(found["step"]), int(found["steps"]), found["pace"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return None
    pace = progress.pace
    sensible = pace is None or (isinstance(pace, int | float) and 0 <= pace < math.inf)
    return progress if sensible and progress.epoch >= 0 and 0 <= progress.step <= progress.steps > 0 else None
