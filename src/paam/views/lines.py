"""Non-interactive views of a run: lines for logs and pipes, JSON for programs, or nothing."""

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
"""Seconds between lines within one epoch."""
LONGEST = 4000
"""Maximum characters of a message; our own are far shorter."""


class QuietView:
    """Shows nothing; the base class of the other views."""

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
    """Writes every event as one line, as in the record, to the standard output at construction."""

    def __init__(self) -> None:
        super().__init__()
        self.out = sys.stdout

    def event(self, event: Event) -> None:
        self.heard = put(json.dumps(as_line(event)), self.out) and self.heard


class LinesView(QuietView):
    """A line for every event, and one at intervals within a long epoch."""

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
    """Like ``put``, for rich renderables, laid out for a console on standard output."""
    plain = [clean_lines(part) if isinstance(part, str) else part for part in parts]
    return _laid_out(console, sys.stdout, *plain)


def clean_lines(text: str) -> str:
    return "\n".join(map(clean, text.split("\n")))


def _laid_out(console: Console, out: TextIO, *parts: RenderableType) -> bool:
    try:
        with console.capture() as laid_out:
            for part in parts:
                console.print(part, highlight=False, soft_wrap=isinstance(part, str | Text), markup=False)
    except (OSError, ValueError):  # the terminal is gone, or the stream is closed: rich flushes it first
        let_go(out)
        return False
    return write(laid_out.get().removesuffix("\n"), out)


def let_go(out: TextIO) -> None:
    """Discard the buffer of a stream that cannot be written, and everything written to it later."""
    with contextlib.suppress(OSError, ValueError):  # not backed by a file, or closed
        number = out.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def put(line: str, out: TextIO | None = None) -> bool:
    """Print a line; False if its reader has gone (``| head``), which must not end a long run."""
    return write(clean(line), out or sys.stdout)


def complain(sentence: str) -> None:
    """Print a message to standard error, shortened and without control characters, whatever it quotes."""
    if len(sentence) > LONGEST:
        sentence = f"{sentence[: LONGEST // 2]} [...] {sentence[-LONGEST // 2 :]}"
    _laid_out(Console(stderr=True), sys.stderr, Text(f"paam: {clean(sentence)}", "red"))


def write(text: str, out: TextIO) -> bool:
    """Write text and a newline. Unencodable characters become escape sequences on standard error, else "?"."""
    encoding, unknown = out.encoding or "utf-8", "backslashreplace" if out is sys.stderr else "replace"
    try:
        print(text.encode(encoding, unknown).decode(encoding), file=out, flush=True)
    except (OSError, ValueError):  # its reader has gone, its disk is full, or a model's code has closed it
        let_go(out)
        return False
    except RuntimeError:  # reentrant write from a signal handler: the interrupted line takes precedence
        pass
    return True
