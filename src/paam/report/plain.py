"""A run as calm lines, for logs and pipes; as JSON, for machines; or not at all."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from rich.console import Console, RenderableType

from paam.progress import Progress, StepClock
from paam.record import Event
from paam.report.checking import require
from paam.report.phrases import duration, epoch_line, monitor_name, phase_line, told_lines
from paam.report.state import Resuming, RunState, after

LINE_EVERY = 30.0
"""Seconds between lines inside of one epoch."""


class QuietView:
    """Nothing; what the other views begin with."""

    def __init__(self) -> None:
        self.heard = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        pass

    def event(self, event: Event) -> None:
        require(event)

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
        self.heard = put(json.dumps(event), self.out) and self.heard


class PlainView(QuietView):
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
        kind, start = event["event"], self.state.start
        for line in told_lines(event):
            self._say(line)
        if kind == "epoch" and start is not None:
            self._say(f"{self._place(self.state.done)}  {epoch_line(event, monitor_name(start))}")

    def step(self, step: int, steps: int) -> None:
        self.at(self.clock.step(step, steps))

    def at(self, progress: Progress | None) -> None:
        self.state.progress = progress
        phase, current = self.state.phase, self.state.current
        if current is None or phase is None or self.now() - self.spoken < LINE_EVERY:
            return
        where = f"{self._place(self.state.done + 1)}  {phase_line(phase.name, phase.cycle)}"
        left = f"{duration(current.seconds_left)} left, {duration(self.state.seconds_left())} of the run"
        self._say(f"{where}   step {current.step} of {current.steps}, {left}")

    def warn(self, sentence: str) -> None:
        if sentence and sentence != self.warning:
            self._say(sentence)
        self.warning = sentence

    def _place(self, epoch: int) -> str:
        return f"{epoch:4d}/{self.state.epochs}"

    def _say(self, line: str) -> None:
        self.spoken = self.now()
        self.heard = put(line) and self.heard


def show(console: Console, *parts: RenderableType) -> bool:
    """As ``put``, of what rich lays out for a console on standard output."""
    with console.capture() as laid_out:
        for part in parts:
            console.print(part, highlight=False, soft_wrap=isinstance(part, str), markup=False)
    return put(laid_out.get().removesuffix("\n"))


def let_go(out: TextIO) -> None:
    """Nothing more goes to a stream, also not what it still keeps: it cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def put(line: str, out: TextIO | None = None) -> bool:
    """A line on standard output; False when it goes nowhere any more (``| head``), which must not cost a long run."""
    out = out or sys.stdout
    encoding = out.encoding or "utf-8"
    try:
        print(line.encode(encoding, "replace").decode(encoding), file=out, flush=True)
    except OSError:  # the same for a full disk behind it
        let_go(out)
        return False
    except RuntimeError:  # a signal handler spoke in the middle of another line: that one goes first
        pass
    return True
