"""Events -> the facts of a run.

A record may be cut, damaged or not finished: what cannot be read is left out and named in ``problems``, never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from paam.record import Event, of_kind
from paam.report.checking import problem
from paam.report.facts import Change, Cycle, Epoch, Facts, Outcome
from paam.report.phrases import vanished_line
from paam.report.values import fraction, listed, mapping, number_or_none, percent, positive, text, whole

KINDS = ("start", "changed", "epoch", "scores", "selection", "vanished", "failed", "end")


def gather(name: str, events: Iterable[Event], problems: Iterable[str] = ()) -> Facts:
    """The facts of a run. ``problems``: what was found when its record was read."""
    events = list(events)
    found = list(problems)
    start = next(iter(of_kind(events, "start")), {})
    ends = of_kind(events, "end")
    end = ends[-1] if ends else {}
    epochs, bad_epochs = _epochs(of_kind(events, "epoch"))
    cycles, bad_cycles = _cycles(events)
    changes, bad_changes = _changes(of_kind(events, "changed"))
    dense = _outcome(end.get("dense"))
    if not end:
        counted = mapping(start.get("dense"))
        dense = Outcome(params=whole(counted.get("params")), macs=whole(counted.get("macs")))
    pruned = _outcome(end.get("pruned"))
    kept = _widths(end.get("kept_filters")) or next((c.kept for c in reversed(cycles) if c.kept), {})
    groups = mapping(start.get("groups"))
    streams = frozenset(name for name, group in groups.items() if mapping(group).get("stream") is True)

    if not start:
        found.append("The start of the record is missing: recipe, seed, hardware and command are not known.")
    if bad := bad_epochs + bad_cycles + bad_changes:
        found.append(f"{bad} {'event' if bad == 1 else 'events'} could not be read and were left out.")
    lost = [str(epoch.number) for epoch in epochs if epoch.loss is None]
    if lost:
        found.append(f"No finite loss is recorded for epoch {', '.join(lost[:5])}{' and others' if lost[5:] else ''}.")
    unknown = Counter(text(event["event"]) for event in events if event["event"] not in KINDS)
    if unknown:
        found.append(f"Events of a kind that is not known here were passed over: {', '.join(sorted(unknown))}.")
    failures = [] if end else of_kind(events, "failed")
    failure = (text(failures[-1].get("reason")) or "no reason is recorded") if failures else ""
    found += [vanished_line(event) for event in of_kind(events, "vanished") if problem(event) is None]
    if not end:
        found += [f"The run failed: {failure}"] if failure else []
        found.append(_unfinished(start, epochs))
    else:
        results = {"dense": dense, "pruned": pruned}
        lacking = [f"{key} of the {name} network" for name, o in results.items() for key in LABELS if not _has(o, key)]
        if lacking:
            found.append(f"The end of the record lacks: {', '.join(lacking)}.")
        found += _gaps(start, epochs, cycles)
    if not kept:
        found.append("No selection is recorded, so that nothing is known of what the layers keep.")
    return Facts(
        name=name,
        start=start,
        epochs=epochs,
        cycles=cycles,
        dense=dense,
        pruned=pruned,
        trained=text(mapping(end.get("dense")).get("trained")),
        latency_batch=whole(end.get("latency_batch")),
        kept=kept,
        streams=streams,
        finished=bool(end),
        failure=failure,
        problems=found,
        changes=changes,
    )


LABELS = ("accuracy", "params", "macs", "latency")


def _has(outcome: Outcome, key: str) -> bool:
    return getattr(outcome, key) is not None


def _gaps(start: Event, epochs: list[Epoch], cycles: list[Cycle]) -> list[str]:
    """What a finished run must have gone through, and its record does not hold."""
    schedule = mapping(mapping(start.get("recipe")).get("schedule"))
    planned = {"epochs": whole(start.get("epochs")), "cycles": whole(schedule.get("cycles"))}
    held = {"epochs": len(epochs), "cycles": len(cycles)}
    return [
        f"Of {there} {what} {held[what]} are recorded." for what, there in planned.items() if held[what] < (there or 0)
    ]


def _unfinished(start: Event, epochs: list[Epoch]) -> str:
    planned = whole(start.get("epochs"))
    done = f"{len(epochs)}{f' of {planned}' if planned else ''} epochs are recorded"
    return f"The run is not finished: {done}, and the last measurements are missing."


def _epochs(events: Iterable[Event]) -> tuple[list[Epoch], int]:
    """Epochs in order, the last word on each; and how many events could not be read."""
    found: dict[int, Epoch] = {}
    bad = 0
    for event in events:
        number, phase = whole(event.get("epoch")), event.get("phase")
        if number is None or not isinstance(phase, str):
            bad += 1
            continue
        found[number] = Epoch(
            number=number + 1,
            phase=phase,
            cycle=whole(event.get("cycle")) or 0,
            loss=number_or_none(event.get("loss")),
            accuracy=percent(event.get("accuracy")),
            kept_params=fraction(event.get("kept_params")),
            kept_macs=fraction(event.get("kept_macs")),
            seconds=positive(event.get("seconds")),
        )
    return [found[number] for number in sorted(found)], bad


def _cycles(events: Iterable[Event]) -> tuple[list[Cycle], int]:
    """Cycles in order, each from its scores and its selection; and how many events could not be read."""
    merged: dict[int, dict[str, Any]] = {}
    bad = 0
    for event in events:
        if event["event"] not in ("scores", "selection"):
            continue
        number = whole(event.get("cycle"))
        if number is None:
            bad += 1
            continue
        facts = merged.setdefault(number, {})
        if event["event"] == "scores":
            facts["scores"] = _scores(event.get("scores"))
        else:
            facts["threshold"] = number_or_none(event.get("threshold"))
            facts["kept"] = _widths(event.get("kept_filters"))
            facts["kept_params"] = fraction(event.get("kept_params"))
            facts["kept_macs"] = fraction(event.get("kept_macs"))
            facts["accuracy"] = percent(event.get("accuracy"))
    return [Cycle(number, **merged[number]) for number in sorted(merged)], bad


def _changes(events: Iterable[Event]) -> tuple[list[Change], int]:
    """What was changed on the way, in order; and how many events could not be read."""
    found, bad = [], 0
    for event in events:
        epoch, changes = whole(event.get("epoch")), event.get("changes")
        pairs = [(key, listed(pair)) for key, pair in mapping(changes).items()]
        if epoch is None or not pairs or any(len(pair) != 2 for _, pair in pairs):
            bad += 1
            continue
        found += [Change(epoch, key, *pair) for key, pair in pairs]
    return found, bad


def _scores(value: Any) -> dict[str, list[float]]:
    read = {name: [number_or_none(score) for score in listed(scores)] for name, scores in mapping(value).items()}
    return {name: [score for score in scores if score is not None] for name, scores in read.items()}


def _widths(value: Any) -> dict[str, tuple[int, int]]:
    widths = {}
    for name, pair in mapping(value).items():
        numbers = [whole(number) for number in listed(pair)]
        if len(numbers) == 2 and numbers[0] is not None and numbers[1] and numbers[0] <= numbers[1]:
            widths[name] = (numbers[0], numbers[1])
    return widths


def _outcome(value: Any) -> Outcome:
    read = mapping(value)
    times = mapping(read.get("latency_ms"))
    median, low, high = (positive(times.get(key)) for key in ("median", "low", "high"))
    return Outcome(
        accuracy=percent(read.get("accuracy")),
        params=whole(read.get("params")),
        macs=whole(read.get("macs")),
        latency=(median, low, high) if median and low is not None and high is not None else None,
    )
