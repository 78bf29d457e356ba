"""What is known of a run after some of its events: the one thing that every view of a going run is drawn from."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field

from paam.progress import Progress
from paam.record import Event
from paam.report.checking import recorded_schedule, require
from paam.schedule import Phase, phase_at


@dataclass
class RunState:
    """``done``: epochs that are finished; ``seconds``: how long each took, by phase, since something was changed;
    ``longest``: seconds of the longest epoch of all; ``phases``: of every epoch.

    ``last`` and ``accuracies`` are of the network that is pruned; ``control``: accuracy of the dense control, percent.
    """

    start: Event | None = None
    last: Event | None = None
    scores: Event | None = None
    selection: Event | None = None
    end: Event | None = None
    failed: Event | None = None
    changed: Event | None = None
    control: float | None = None
    done: int = 0
    accuracies: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    longest: float = 0.0
    progress: Progress | None = None
    phases: list[Phase] = field(default_factory=list)

    @property
    def epochs(self) -> int:
        return len(self.phases)

    @property
    def current(self) -> Progress | None:
        """Progress of the epoch that is under way; what is left over from an earlier one does not count."""
        return self.progress if self.progress is not None and self.progress.epoch == self.done else None

    @property
    def phase(self) -> Phase | None:
        """Where the epoch that is under way stands; None behind the last one."""
        return self.phases[self.done] if self.done < len(self.phases) else None

    @property
    def cycles(self) -> int:
        return max((phase.cycle for phase in self.phases), default=0)

    def seconds_left(self) -> float | None:
        """Of all epochs: each is taken to last as long as the median of its phase, or of all where its phase is new.

        During the very first epoch, and the first behind a change, its own pace stands for all.
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
        rest = Counter(phase.name for phase in self.phases[self.done :])
        left = sum(length.get(name, usual) * epochs for name, epochs in rest.items())
        if current is not None and self.phase is not None:
            left -= length.get(self.phase.name, usual) * current.step / current.steps
        return left


def after(state: RunState, event: Event) -> RunState:
    """The state with one more event; a start, or a resumed run that tells its record again, begins anew."""
    require(event)
    kind = event["event"]
    if kind == "start":
        schedule = recorded_schedule(event)
        return RunState(start=event, phases=[phase_at(schedule, epoch) for epoch in range(schedule.total)])
    if kind == "resumed":
        return RunState()
    if kind in ("scores", "selection", "end", "failed", "changed"):
        setattr(state, kind, event)
        if kind == "changed":
            state.seconds = {}  # on another machine, or with other settings, epochs last as long as they do there
    elif kind == "epoch":
        state.done = event["epoch"] + 1
        state.seconds.setdefault(event["phase"], []).append(event["seconds"])
        state.longest = max(state.longest, event["seconds"])
        if event["phase"] == "control":  # another network: its numbers are not those of the one that is pruned
            state.control = state.control if event["accuracy"] is None else event["accuracy"]
            return state
        state.last = event
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
