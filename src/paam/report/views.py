"""The view of a going run that suits where it is shown."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console

from paam.errors import RecipeError
from paam.progress import Progress
from paam.record import Event
from paam.report.live import LiveView
from paam.report.plain import JsonView, PlainView, QuietView


class View(Protocol):
    """Told of events and steps. ``heard``: whether anybody still reads it."""

    heard: bool

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def close(self) -> None:
        """Give the terminal back at once; leaving the view does it too."""

    def event(self, event: Event) -> None: ...

    def step(self, step: int, steps: int) -> None:
        """A step of this process's own run."""

    def at(self, progress: Progress | None) -> None:
        """Progress of a run in another process."""

    def warn(self, sentence: str) -> None: ...


def choose_view(hint: str, *, quiet: bool = False, as_json: bool = False) -> View:
    """Live on a terminal, lines elsewhere; ``hint`` stands at the bottom of the live view."""
    if quiet and as_json:
        raise RecipeError("--quiet and --json contradict each other; give one of them.")
    if quiet:
        return QuietView()
    if as_json:
        return JsonView()
    # Not rich's own answer alone: FORCE_COLOR calls a log file a terminal.
    console = Console(file=sys.stdout)
    if sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console, hint)
    return PlainView()
