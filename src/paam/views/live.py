"""Full-screen view of a run, redrawn in place a few times a second; messages remain on the terminal afterwards."""

from __future__ import annotations

import contextlib
import io
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from paam.events import Event
from paam.runs.progress import Progress, StepClock
from paam.views.format import clean, event_lines
from paam.views.live_layout import frame
from paam.views.state import Resuming, RunState, after

REDRAWS_PER_SECOND = 4
LINES_KEPT, LONGEST_LINE = 1000, 10_000


class LiveView:
    """Displays events as they arrive; a context manager, so that the terminal is always restored.

    It uses the terminal's alternate screen: resizing cannot corrupt the drawing, and nothing wraps or scrolls.
    """

    def __init__(self, console: Console, hint: str) -> None:
        self.console = console
        self.hint = hint
        self.heard = True
        self.closing = False
        self.warning = ""
        self.state = RunState()
        self.clock = StepClock()
        self.story: list[str] = []
        self.resuming = Resuming()
        self.said = _Said()
        self.lock = threading.Lock()  # the redrawing thread must not see a half-processed event
        self.failure: Exception | None = None
        """Why drawing failed."""
        self.live = _Redrawn(
            self._failed,
            console=console,
            screen=True,
            refresh_per_second=REDRAWS_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
            get_renderable=self._render,
        )
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> LiveView:
        self.live.start(refresh=True)
        self.stack.enter_context(contextlib.redirect_stdout(self.said))
        self.stack.enter_context(contextlib.redirect_stderr(self.said))
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self.close()
        story = [] if kind is KeyboardInterrupt else self.story  # after Ctrl-C the user has seen it
        with contextlib.suppress(OSError):
            for line in [*story, *self.said.lines()]:
                self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Restore the terminal, also from a signal handler; idempotent."""
        if self.closing:
            return
        self.stack.close()
        self.closing = True
        self.live.refresh()
        with contextlib.suppress(Exception):  # the terminal is gone, or an earlier error
            self.live.stop()

    def _failed(self, error: Exception) -> None:
        self.failure = self.failure or error

    def event(self, event: Event) -> None:
        self._check()
        with self.lock:
            self.state = after(self.state, event)
            self.clock.event(event)
            if self.resuming.is_old(event):
                return
            self.story += event_lines(event)

    def step(self, step: int, steps: int) -> None:
        self._check()
        self.at(self.clock.step(step, steps))

    def at(self, progress: Progress | None) -> None:
        self.state.progress = progress

    def warn(self, sentence: str) -> None:
        """Show a message about the current state of the run; an empty one removes it."""
        self.warning = sentence

    def _check(self) -> None:
        """Raise an error of the drawing thread."""
        if self.failure is not None and not self.closing:
            raise self.failure

    def _render(self) -> Group:
        if self.closing:  # terminals that were resized meanwhile may keep rows of the alternate screen
            return Group()
        width, height = self.console.size
        # With a timeout: a signal handler may close the view while it processes an event.
        if not self.lock.acquire(timeout=0.5):
            return Group()
        try:
            lines = frame(self.state, width, height, hint=self.hint, warning=self.warning, news=self.said.latest(3))
        finally:
            self.lock.release()
        return Group(*lines)


class _Redrawn(Live):
    """Reports drawing errors, which would be lost in the drawing thread."""

    def __init__(self, failed: Callable[[Exception], object], **options: Any) -> None:
        self.failed = failed
        super().__init__(**options)

    def refresh(self) -> None:
        try:
            super().refresh()
        except Exception as error:
            self.failed(error)


class _Said(io.TextIOBase):
    """Captures what libraries print meanwhile (warnings, a model's own print) and keeps the last lines of it."""

    def __init__(self) -> None:
        self.whole: deque[str] = deque(maxlen=LINES_KEPT)
        self.rest = ""
        self.lost = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *whole, self.rest = (self.rest + text).replace("\r", "\n").split("\n")
        for line in whole:
            if line.strip():
                self.lost += len(self.whole) == LINES_KEPT
                self.whole.append(clean(line))
        self.rest = self.rest[-LONGEST_LINE:]
        return len(text)

    def latest(self, count: int) -> list[str]:
        return list(self.whole)[-count:]

    def lines(self) -> list[str]:
        rest = [clean(self.rest)] if self.rest.strip() else []
        return [*([f"({self.lost} lines before these are lost)"] if self.lost else []), *self.whole, *rest]
