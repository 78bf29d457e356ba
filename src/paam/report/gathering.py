"""Events -> the facts of a run.

A record may be truncated, corrupt or unfinished: missing parts are listed in ``problems``, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from paam.events import Changed, End, Epoch, Event, Failed, Scores, Selected, Start, Vanished, last, of_kind
from paam.report.facts import Change, Cycle, Facts
from paam.views.format import vanished_line


def gather(name: str, events: Sequence[Event], problems: Iterable[str] = ()) -> Facts:
    """The facts of a run. ``problems``: those found when its record was read."""
    start, end = next(iter(of_kind(events, Start)), None), last(events, End)
    epochs = {event.epoch: event for event in of_kind(events, Epoch)}  # the last event of each epoch wins
    failed = None if end else last(events, Failed)
    facts = Facts(
        name=name,
        start=start,
        epochs=[epochs[number] for number in sorted(epochs)],
        cycles=_cycles(events),
        end=end,
        failure=failed.reason if failed else "",
        problems=[*problems],
        changes=[
            Change(event.epoch, key, *pair) for event in of_kind(events, Changed) for key, pair in event.changes.items()
        ],
    )
    facts.problems.extend(_gaps(facts, of_kind(events, Vanished)))
    return facts


def _cycles(events: Iterable[Event]) -> list[Cycle]:
    """Cycles in order, each merged from its scores and its selection."""
    merged: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, Scores):
            merged.setdefault(event.cycle, {})["scores"] = event.scores
        elif isinstance(event, Selected):
            threshold = event.threshold
            merged.setdefault(event.cycle, {}).update(
                threshold=threshold if threshold is not None and math.isfinite(threshold) else None,
                kept=event.kept_filters,
                kept_params=event.kept_params,
                kept_macs=event.kept_macs,
                accuracy=event.accuracy,
                epoch=event.epoch,
            )
    return [Cycle(number, **merged[number]) for number in sorted(merged)]


def _gaps(facts: Facts, vanished: Iterable[Vanished]) -> list[str]:
    """Sentences about what is missing or went wrong."""
    found = []
    if facts.start is None:
        found.append("The start of the record is missing: recipe, seed, hardware and command are not known.")
    found += map(vanished_line, vanished)
    if facts.failure:
        found.append(f"The run failed: {facts.failure}")
    if facts.end is None:
        planned = "" if facts.start is None else f" of {facts.start.epochs}"
        done = f"{len(facts.epochs)}{planned} epochs are recorded"
        found.append(f"The run is not finished: {done}, and the last measurements are missing.")
    elif facts.start is not None:
        cycles = max((phase.cycle for phase in facts.start.phases), default=0)
        for what, held, there in (("epochs", facts.epochs, facts.start.epochs), ("cycles", facts.cycles, cycles)):
            if len(held) < there:
                found.append(f"Of {there} {what} {len(held)} are recorded.")
    if not facts.kept:
        found.append("No selection is recorded, so that nothing is known of what the layers keep.")
    return found
