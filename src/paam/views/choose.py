"""Choose the console view of a run: live, lines, JSON or none."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console

from paam.errors import PaamError, RecipeError, one_line
from paam.events import Event
from paam.runs.progress import Progress
from paam.views.lines import JsonView, LinesView, QuietView
from paam.views.live import LiveView


class View(Protocol):
    """Displays events and steps as they arrive. ``heard``: whether its output can still be written."""

    heard: bool

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def close(self) -> None:
        """Restore the terminal immediately; leaving the context does it too."""

    def event(self, event: Event) -> None: ...

    def step(self, step: int, steps: int) -> None:
        """A step of a run in this process."""

    def at(self, progress: Progress | None) -> None:
        """Progress of a run in another process."""

    def warn(self, sentence: str) -> None: ...


class Harmless:
    """A view whose failure is reported once; after that it is skipped, and the run continues.

    ``name``: the name of the view in that message, which goes to ``report``.
    """

    def __init__(self, view: Any, name: str, report: Callable[[str], object]) -> None:
        self.view, self.name, self.report = view, name, report
        self.working = True

    @property
    def heard(self) -> bool:
        return bool(self.view.heard)

    def __enter__(self) -> Self:
        self._try(self.view.__enter__)
        return self

    def __exit__(self, *exception: object) -> None:
        self._try(self.view.__exit__, *exception)

    def close(self) -> None:
        self._try(self.view.close)

    def event(self, event: Event) -> None:
        self._try(self.view.event, event)

    def step(self, step: int, steps: int) -> None:
        self._try(self.view.step, step, steps)

    def warn(self, sentence: str) -> None:
        self._try(self.view.warn, sentence)

    def _try(self, tell: Callable[..., object], *what: object) -> None:
        if not self.working:
            return
        try:
            tell(*what)
        except Exception as error:
            self.working = False
            with contextlib.suppress(Exception):
                self.view.__exit__(None, None, None)
            why = one_line(error) if isinstance(error, PaamError) else f"{type(error).__name__}: {one_line(error)}"
            self.report(f"{self.name} failed and is skipped from here on; the run continues ({why}).")


def choose_view(hint: str, *, quiet: bool = False, as_json: bool = False) -> View:
    """Live on a terminal, lines elsewhere; ``hint`` is the last line of the live view."""
    if quiet and as_json:
        raise RecipeError("--quiet and --json contradict each other; give one of them.")
    if quiet:
        return QuietView()
    if as_json:
        return JsonView()
    # rich's check is not enough: with FORCE_COLOR it treats a log file as a terminal.
    console = Console(file=sys.stdout)
    if sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console, hint)
    return LinesView()
