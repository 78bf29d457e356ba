"""Dense against pruned in four figures, worded as in the console; and the facts a result depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paam.events import Outcome
from paam.report.control import removes_nothing
from paam.report.facts import Facts
from paam.views.format import MONITORS, NOTHING, TIMES, TRAINED, duration, setting_text, signed


@dataclass(frozen=True)
class Card:
    """``value``: the large figure. ``kept``: share for a small bar, if there is one."""

    label: str
    value: str
    lines: list[str]
    kept: float | None = None


def cards(facts: Facts, control: Facts | None = None) -> list[Card]:
    """``control``: another run that is this one's dense control."""
    return [
        _accuracy(facts, control),
        _count(facts, "params", "Parameters"),
        _count(facts, "macs", "MACs (conv + fc)"),
        _latency(facts),
    ]


def _accuracy(facts: Facts, control: Facts | None) -> Card:
    if facts.end is None:
        return Card("Test accuracy", NOTHING, ["not recorded", *_so_far(facts)])
    dense = facts.end.dense
    trained = f" ({TRAINED[dense.trained]})" if dense.trained else ""
    lines = [f"dense {dense.accuracy:.2f}\u00a0%{trained}", against_dense(facts, control)]
    return Card("Test accuracy", f"{facts.end.pruned.accuracy:.2f} %", lines)


def _so_far(facts: Facts) -> list[str]:
    """The accuracy after the last epoch of the network itself; the dense control is another network."""
    seen = [epoch for epoch in facts.own_epochs if epoch.accuracy is not None]
    if not seen:
        return []
    line = f"{seen[-1].accuracy:.2f} % after epoch {seen[-1].epoch + 1}"
    lines = [f"{line} (set not recorded)" if facts.start is None else f"{MONITORS[facts.start.monitor]} {line}"]
    return lines if any(cycle.kept for cycle in facts.cycles) else [*lines, "nothing is pruned yet"]


def against_dense(facts: Facts, control: Facts | None = None) -> str:
    """The change in accuracy if the dense network is comparable, or against a control from a separate run."""
    if facts.end is None:
        return "not recorded"
    if (points := gain(facts, control)) is not None:
        return f"{signed(points)} points" + ("" if facts.fair or control is None else f" against {control.name}")
    return "nothing removed" if removes_nothing(facts) else "not comparable"


def gain(facts: Facts, control: Facts | None) -> float | None:
    """Points of accuracy over the dense control; None if there is none."""
    if facts.end is not None and facts.fair:
        return facts.end.pruned.accuracy - facts.end.dense.accuracy
    if facts.end is not None and control is not None and control.end is not None:
        return facts.end.pruned.accuracy - control.end.pruned.accuracy
    return None


def _count(facts: Facts, key: str, label: str) -> Card:
    if facts.end is not None:
        dense, pruned = getattr(facts.end.dense, key), getattr(facts.end.pruned, key)
        kept = pruned / dense
        return Card(label, f"{signed(100 * (kept - 1), 1)} %", [f"{dense:,} → {pruned:,}"], kept)
    cost = facts.dense_cost
    lines = ["dense: not recorded"] if cost is None else [f"dense: {getattr(cost, key):,}"]
    known = [share for cycle in facts.cycles if (share := getattr(cycle, f"kept_{key}")) is not None]
    if not known:
        return Card(label, NOTHING, ["not recorded", *lines])
    return Card(label, f"{signed(100 * (known[-1] - 1), 1)} %", [*lines, "as of the last selection"], known[-1])


def _latency(facts: Facts) -> Card:
    if facts.end is None:
        return Card("Latency", NOTHING, ["not recorded"])
    times = [f"{_times(facts.end.dense)} →", _times(facts.end.pruned), f"batch {facts.end.latency_batch}, quartiles"]
    return Card("Latency", f"{facts.speed_up:.2f} {TIMES} as fast", times)


def _times(outcome: Outcome) -> str:
    latency = outcome.latency_ms
    return f"{latency.median:.1f} ms ({latency.low:.1f} to {latency.high:.1f})"


def origins(facts: Facts) -> dict[str, str]:
    """What the numbers depend on, by name; unrecorded values are omitted."""
    start = facts.start
    time = {"time in epochs": duration(facts.seconds)} if facts.seconds else {}
    if start is None:
        return time
    covered = start.data.get("of")
    data = f"{start.data.get('hash')} ({', '.join(map(str, covered))})" if isinstance(covered, list) else ""
    rows = {
        "method": start.method,
        "seed": str(start.seed),
        "commit": start.commit,
        "hardware": start.hardware,
        "device": start.device,
        **time,
        "paam": start.paam,
        "torch": start.torch,
        "python": start.python,
        "data": data,
        "samples": ", ".join(f"{name} {setting_text(count)}" for name, count in start.samples.items()),
        "classes": ", ".join(start.classes),
    }
    return {name: value for name, value in rows.items() if value}


def recipe_rows(recipe: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Every key of a recipe by section; top-level keys come first, under an empty name."""
    rows: dict[str, dict[str, str]] = {"": {}}
    for section, values in recipe.items():
        if isinstance(values, dict):
            rows[section] = {key: setting_text(value) for key, value in values.items()}
        else:
            rows[""][section] = setting_text(values)
    return {section: values for section, values in rows.items() if values}
