"""What is known of a run after some of its events: the one thing that every view of a going run is drawn from."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from paam.progress import Progress
from paam.record import Event
from paam.report.checking import require
from paam.schedule import Phase, Schedule, phase_at


@dataclass
class RunState:
    """``done``: epochs that are finished; ``seconds``: how long each took, by phase; ``phases``: of every epoch."""

    start: Event | None = None
    last: Event | None = None
    scores: Event | None = None
    selection: Event | None = None
    end: Event | None = None
    done: int = 0
    accuracies: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    progress: Progress | None = None
    phases: list[Phase | None] = field(default_factory=list)

    @property
    def epochs(self) -> int:
        return 0 if self.start is None else int(self.start["epochs"])

    @property
    def current(self) -> Progress | None:
        """Progress of the epoch that is under way; what is left over from an earlier one does not count."""
        return self.progress if self.progress is not None and self.progress.epoch == self.done else None

    @property
    def phase(self) -> Phase | None:
        """Where the epoch that is under way stands; None behind the last, or when the record does not tell."""
        return self.phases[self.done] if self.done < len(self.phases) else None

    @property
    def cycles(self) -> int:
        return max((phase.cycle for phase in self.phases if phase is not None), default=0)

    def seconds_left(self) -> float | None:
        """Of all epochs: each is taken to last as long as the median of its phase, or of all where its phase is new.

        During the very first epoch its own pace stands for all.
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
        rest = Counter("" if phase is None else phase.name for phase in self.phases[self.done :])
        left = sum(length.get(name, usual) * epochs for name, epochs in rest.items())
        if current is not None and rest:
            now = "" if self.phase is None else self.phase.name
            left -= length.get(now, usual) * current.step / current.steps
        return left


def after(state: RunState, event: Event) -> RunState:
    """The state with one more event; a start, or a resumed run that tells its record again, begins anew."""
    require(event)
    kind = event["event"]
    if kind == "start":
        schedule = _schedule(event["recipe"]["schedule"])
        total = 0 if schedule is None else schedule.total
        phases = [phase_at(schedule, e) if schedule and e < total else None for e in range(event["epochs"])]
        return RunState(start=event, phases=phases)
    if kind == "resumed":
        return RunState()
    if kind in ("scores", "selection", "end"):
        setattr(state, kind, event)
    elif kind == "epoch":
        state.last = event
        state.done = event["epoch"] + 1
        state.seconds.setdefault(event["phase"], []).append(event["seconds"])
        if event["accuracy"] is not None:
            state.accuracies.append(event["accuracy"])
    return state


class Resuming:
    """A resumed run tells its record again, from the start: which of its events were there before."""

    def __init__(self) -> None:
        self.left = 0

    def is_old(self, event: Event) -> bool:
        if event["event"] == "resumed":
            self.left = event["told"]
            return False
        self.left -= 1
        return self.left >= 0


def _schedule(recipe: dict[str, Any]) -> Schedule | None:
    names = [item.name for item in dataclasses.fields(Schedule)]
    values = {name: recipe[name] for name in names if name in recipe}
    if len(values) < len(names) or not all(isinstance(v, int) and 0 <= v < 2**31 for v in values.values()):
        return None
    schedule = Schedule(**values)
    return schedule if schedule.cycles == 0 or schedule.score + schedule.weight else None
