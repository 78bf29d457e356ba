"""What views rely on in an event. A record may be cut, edited or somebody else's: it is checked before it is shown."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paam.errors import ArtifactError, RecipeError
from paam.record import Event, read_record
from paam.schedule import Schedule

Check = Callable[[Any], bool]
LARGEST = 2**63
"""Larger numbers are damage, and some do not even fit into a float."""


def number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def positive(value: Any) -> bool:
    return number(value) and value > 0


def whole(value: Any) -> bool:
    return number(value) and isinstance(value, int) and value >= 0


def text(value: Any) -> bool:
    return isinstance(value, str)


def threshold(value: Any) -> bool:
    """Where nothing is kept, or everything, it may be infinite; None where no score decided between groups."""
    return maybe_number(value) or (isinstance(value, float) and math.isinf(value))


def maybe_number(value: Any) -> bool:
    return value is None or number(value)


def widths(value: Any) -> bool:
    """{layer: [kept, width]}"""
    return isinstance(value, dict) and all(
        isinstance(pair, list) and len(pair) == 2 and all(map(whole, pair)) and pair[0] <= pair[1] > 0
        for pair in value.values()
    )


def scores(value: Any) -> bool:
    """{layer: [score of each filter]}"""
    return isinstance(value, dict) and all(isinstance(v, list) and v and _numbers(v) for v in value.values())


def _numbers(values: list[Any]) -> bool:
    """As ``number`` of each, but quick where all are floats, as in thousands of scores."""
    if set(map(type, values)) == {float}:  # a sum that is finite has no NaN in it, which min and max would overlook
        return math.isfinite(sum(values)) and min(values) > -LARGEST and max(values) < LARGEST
    return all(map(number, values))


def changes(value: Any) -> bool:
    """{key of the recipe: [before, now]}"""
    return isinstance(value, dict) and all(isinstance(pair, list) and len(pair) == 2 for pair in value.values())


def groups(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(group, dict) for group in value.values())


def schedule(value: Any) -> bool:
    return isinstance(value, dict) and _read_schedule(value) is not None


def _read_schedule(table: dict[str, Any]) -> Schedule | None:
    """The schedule of a recorded recipe, its unknown keys left out; None when it is none."""
    known = {item.name: item.default for item in dataclasses.fields(Schedule)}
    values = {name: value for name, value in table.items() if name in known}
    if not all(type(value) is type(known[name]) for name, value in values.items()):
        return None
    try:
        return Schedule(**values)
    except RecipeError:
        return None


_LATENCY = {"median": positive, "low": number, "high": number}
_RESULT = {"accuracy": number, "params": whole, "macs": whole, "latency_ms": _LATENCY}
_DENSE = {**_RESULT, "params": positive, "macs": positive, "trained": text}
_RECIPE = {"model": {"name": text}, "data": {"name": text}, "prune": {"scorer": text}, "schedule": schedule}
_SHARES = {"kept_params": number, "kept_macs": number}

KINDS: dict[str, dict[str, Any]] = {
    "start": {
        "seed": whole,
        "monitor": text,
        "hardware": text,
        "recipe": _RECIPE,
        "dense": {"params": positive, "macs": positive},
        "groups": groups,
    },
    "resumed": {"epoch": whole, "told": whole},
    "changed": {"changes": changes},
    "epoch": {
        "epoch": whole,
        "phase": text,
        "cycle": whole,
        "loss": number,
        "lr": number,
        "accuracy": maybe_number,
        **_SHARES,
        "seconds": number,
    },
    "scores": {"epoch": whole, "cycle": whole, "scores": scores},
    "selection": {"epoch": whole, "cycle": whole, "threshold": threshold, **_SHARES, "kept_filters": widths},
    "vanished": {"epoch": whole, "scales": whole, "of": positive, "layers": text},
    "failed": {"epoch": whole, "reason": text},
    "end": {"latency_batch": whole, "kept_filters": widths, "dense": _DENSE, "pruned": _RESULT},
}
"""Keys that are read of each kind of event, and what each must be. Other kinds and keys are passed over."""


def problem(event: Event) -> str | None:
    """What is wrong with an event; None when it can be shown, or when no view reads its kind."""
    kind = event["event"]
    if not isinstance(kind, str):
        return "an event without a name"
    return _problem(event, KINDS.get(kind, {}), f"the {kind} event")


def _problem(found: dict[str, Any], needed: dict[str, Any], where: str) -> str | None:
    for key, check in needed.items():
        if key not in found:
            return f"{where} has no '{key}'"
        value = found[key]
        if isinstance(check, dict):
            if not isinstance(value, dict):
                return f"'{key}' of {where} is not a table"
            if inside := _problem(value, check, f"'{key}' of {where}"):
                return inside
        elif not check(value):
            return f"'{key}' of {where} makes no sense"
    return None


def recorded_schedule(start: Event) -> Schedule:
    """Of a start event that has been checked."""
    schedule = _read_schedule(start["recipe"]["schedule"])
    assert schedule is not None
    return schedule


def require(event: Event) -> None:
    if wrong := problem(event):
        raise ArtifactError(f"The run cannot be shown: {wrong}.")


def read_events(path: Path) -> list[Event]:
    """A record whose every event can be shown, and which has one."""
    events = read_record(path)
    if not events:
        raise ArtifactError(f"The record {path} is empty: its run never began.")
    for line, event in enumerate(events, 1):
        check_line(event, path, line)
    return events


def check_line(event: Event, path: Path, line: int) -> None:
    """``line`` counts from 1; the first must be the start of a run."""
    if wrong := problem(event):
        raise ArtifactError(f"The record {path} is damaged at line {line}: {wrong}.")
    if line == 1 and event["event"] != "start":
        raise ArtifactError(f"The record {path} does not begin with the start of a run.")
