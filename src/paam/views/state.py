"""The state of a run after some of its events: the input of every view of a running run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paam.events import Changed, End, Epoch, Event, Failed, PhaseFacts, Resumed, Scores, Selected, Start
from paam.runs.progress import Progress


@dataclass(frozen=True)
class Place:
    """Position of an epoch: the ``index``-th of its phase, from 0."""

    phase: PhaseFacts
    index: int


def place_of(epoch: int, phases: Sequence[PhaseFacts]) -> Place | None:
    """Position of an epoch counted from 0; None after the last one."""
    for phase in phases:
        if epoch < phase.epochs:
            return Place(phase, epoch)
        epoch -= phase.epochs
    return None


def rest_of(phases: Sequence[PhaseFacts], done: int) -> Iterator[tuple[str, int]]:
    """Names of the remaining phases after ``done`` epochs, and the number of epochs left in each."""
    for phase in phases:
        yield phase.name, max(phase.epochs - max(done, 0), 0)
        done -= phase.epochs


@dataclass
class RunState:
    """``done``: finished epochs; ``seconds``: duration of each by phase, since the last change of settings;
    ``longest``: seconds of the longest epoch.

    ``last`` and ``accuracies`` are of the pruned network; ``control``: accuracy of the dense control in percent.
    """

    start: Start | None = None
    last: Epoch | None = None
    scores: Scores | None = None
    selection: Selected | None = None
    end: End | None = None
    failed: Failed | None = None
    changed: Changed | None = None
    control: float | None = None
    done: int = 0
    accuracies: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    longest: float = 0.0
    progress: Progress | None = None

    @property
    def phases(self) -> list[PhaseFacts]:
        return [] if self.start is None else self.start.phases

    @property
    def epochs(self) -> int:
        return 0 if self.start is None else self.start.epochs

    @property
    def current(self) -> Progress | None:
        """Progress of the current epoch; stale progress of an earlier one is ignored."""
        return self.progress if self.progress is not None and self.progress.epoch == self.done else None

    @property
    def place(self) -> Place | None:
        """Position of the current epoch; None after the last one."""
        return place_of(self.done, self.phases)

    @property
    def cycles(self) -> int:
        return max((phase.cycle for phase in self.phases), default=0)

    def seconds_left(self) -> float | None:
        """Estimate for all epochs: the median duration of their phase, or of all epochs if their phase is new.

        During the very first epoch, and the first after a change, its own pace is used for all.
        """
        current = self.current
        everything = [seconds for several in self.seconds.values() for seconds in several]
        if everything:
            usual = statistics.median(everything)
        elif current is not None and current.pace is not None:
            usual = current.pace * current.steps
        else:
            return None
        length = {name: statistics.median(several) for name, several in self.seconds.items()}
        left = sum(length.get(name, usual) * epochs for name, epochs in rest_of(self.phases, self.done))
        if current is not None and (place := self.place) is not None:
            left -= length.get(place.phase.name, usual) * current.step / current.steps
        return left


def after(state: RunState, event: Event) -> RunState:
    """The state after one more event; a start, or a resumed run that repeats its events, resets it."""
    match event:
        case Start():
            return RunState(start=event)
        case Resumed():
            return RunState()
        case Scores():
            state.scores = event
        case Selected():
            state.selection = event
        case End():
            state.end = event
        case Failed():
            state.failed = event
        case Changed():
            state.changed = event
            state.seconds = {}  # on another machine, or with other settings, epochs take a different time
        case Epoch():
            state.done = event.epoch + 1
            state.seconds.setdefault(event.phase, []).append(event.seconds)
            state.longest = max(state.longest, event.seconds)
            if event.does == "control":  # another network: its numbers are not those of the pruned one
                state.control = state.control if event.accuracy is None else event.accuracy
                return state
            state.last = event
            if event.accuracy is not None:
                state.accuracies.append(event.accuracy)
    return state


class Resuming:
    """Tells which events are old: a resumed run repeats its events from the start."""

    def __init__(self) -> None:
        self.left = 0

    def is_old(self, event: Event) -> bool:
        if isinstance(event, Resumed):
            self.left = event.told
            return False
        self.left -= 1
        return self.left >= 0
