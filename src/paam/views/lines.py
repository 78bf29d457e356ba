"""A run as calm lines, for logs and pipes; as JSON, for machines; or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from paam.events import Epoch, Event, as_line
from paam.runs.progress import Progress, StepClock
from paam.views.format import MONITORS, clean, countdown, epoch_line, event_lines, phase_line
from paam.views.state import Resuming, RunState, after

LINE_EVERY = 30.0
"""Seconds between lines inside of one epoch."""
LONGEST = 4000
"""Characters of a sentence; nothing that we say comes near."""


class QuietView:
    """Shows nothing; the other views begin with it."""

    def __init__(self) -> None:
        self.heard = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        pass

    def event(self, event: Event) -> None:
        pass

    def step(self, step: int, steps: int) -> None:
        pass

    def at(self, progress: Progress | None) -> None:
        pass

    def warn(self, sentence: str) -> None:
        pass


class JsonView(QuietView):
    """Every event as one line, as it stands in the record, on what is standard output now."""

    def __init__(self) -> None:
        super().__init__()
        self.out = sys.stdout

    def event(self, event: Event) -> None:
        self.heard = put(json.dumps(as_line(event)), self.out) and self.heard


class LinesView(QuietView):
    """A line when something has happened, and now and then within a long epoch."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.state = RunState()
        self.clock = StepClock(clock)
        self.resuming = Resuming()
        self.now = clock
        self.spoken = clock()
        self.warning = ""

    def event(self, event: Event) -> None:
        self.state = after(self.state, event)
        self.clock.event(event)
        if self.resuming.is_old(event):
            return
        for line in event_lines(event):
            self._say(line)
        if isinstance(event, Epoch) and self.state.start is not None:
            self._say(f"{self._count(self.state.done)}  {epoch_line(event, MONITORS[self.state.start.monitor])}")

    def step(self, step: int, steps: int) -> None:
        self.at(self.clock.step(step, steps))

    def at(self, progress: Progress | None) -> None:
        self.state.progress = progress
        place, current = self.state.place, self.state.current
        if current is None or place is None or self.now() - self.spoken < LINE_EVERY:
            return
        where = f"{self._count(self.state.done + 1)}  {phase_line(place.phase)}"
        left = f"{countdown(current.seconds_left)} left, {countdown(self.state.seconds_left())} of the run"
        self._say(f"{where}   step {current.step} of {current.steps}, {left}")

    def warn(self, sentence: str) -> None:
        if sentence and sentence != self.warning:
            self._say(sentence)
        self.warning = sentence

    def _count(self, epoch: int) -> str:
        return f"{epoch:4d}/{self.state.epochs}"

    def _say(self, line: str) -> None:
        self.spoken = self.now()
        self.heard = put(line) and self.heard


def show(console: Console, *parts: RenderableType) -> bool:
    """As ``put``, for what rich lays out for a console on standard output."""
    plain = [clean_lines(part) if isinstance(part, str) else part for part in parts]
    return _laid_out(console, sys.stdout, *plain)


def clean_lines(text: str) -> str:
    return "\n".join(map(clean, text.split("\n")))


def _laid_out(console: Console, out: TextIO, *parts: RenderableType) -> bool:
    try:
        with console.capture() as laid_out:
            for part in parts:
                console.print(part, highlight=False, soft_wrap=isinstance(part, str | Text), markup=False)
    except (OSError, ValueError):  # a terminal that is gone, or a stream that is closed: rich flushes it first
        let_go(out)
        return False
    return write(laid_out.get().removesuffix("\n"), out)


def let_go(out: TextIO) -> None:
    """Discard what a stream still buffers, and all that follows: it cannot be written."""
    with contextlib.suppress(OSError, ValueError):  # no file, or closed
        number = out.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def put(line: str, out: TextIO | None = None) -> bool:
    """A line on standard output; False when its reader has gone (``| head``), which must not end a long run."""
    return write(clean(line), out or sys.stdout)


def complain(sentence: str) -> None:
    """A sentence on standard error, shortened and without control characters, whatever it quotes."""
    if len(sentence) > LONGEST:
        sentence = f"{sentence[: LONGEST // 2]} [...] {sentence[-LONGEST // 2 :]}"
    _laid_out(Console(stderr=True), sys.stderr, Text(f"paam: {clean(sentence)}", "red"))


def write(text: str, out: TextIO) -> bool:
    """A text as it is, and a line break. Of characters that the stream does not know, standard error shows the code."""
    encoding, unknown = out.encoding or "utf-8", "backslashreplace" if out is sys.stderr else "replace"
    try:
        print(text.encode(encoding, unknown).decode(encoding), file=out, flush=True)
    except (OSError, ValueError):  # its reader has gone, its disk is full, or a model's code has closed it
        let_go(out)
        return False
    except RuntimeError:  # a signal handler spoke in the middle of another line: that one goes first
        pass
    return True
