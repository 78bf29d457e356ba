"""Dense against pruned in four figures, in the words the console uses; and the facts a result depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paam.report.facts import Facts, Outcome
from paam.report.phrases import MONITORS
from paam.report.values import text
from paam.report.words import NOTHING, TIMES, duration, plain, signed


@dataclass(frozen=True)
class Card:
    """``value``: the large figure. ``kept``: share for a small bar, where there is one."""

    label: str
    value: str
    lines: list[str]
    kept: float | None = None


def cards(facts: Facts) -> list[Card]:
    return [
        _accuracy(facts),
        _count(facts, "params", "Parameters"),
        _count(facts, "macs", "MACs (conv + fc)"),
        _latency(facts),
    ]


def _accuracy(facts: Facts) -> Card:
    dense, pruned = facts.dense.accuracy, facts.pruned.accuracy
    if pruned is None:
        return Card("Test accuracy", NOTHING, ["not recorded", *_so_far(facts)])
    if dense is None:
        return Card("Test accuracy", f"{pruned:.2f} %", ["dense: not recorded"])
    trained = f" ({facts.trained})" if facts.trained else ""
    return Card("Test accuracy", f"{pruned:.2f} %", [f"dense {dense:.2f}\u00a0%{trained}", against_dense(facts)])


def _so_far(facts: Facts) -> list[str]:
    """The accuracy after the last epoch of the network itself; the dense control is another network."""
    seen = [epoch for epoch in facts.own_epochs if epoch.accuracy is not None]
    if not seen:
        return []
    measured = MONITORS.get(text(facts.start.get("monitor")))
    line = f"{seen[-1].accuracy:.2f} % after epoch {seen[-1].number}"
    lines = [f"{measured} {line}" if measured else f"{line} (set not recorded)"]
    return lines if any(cycle.kept for cycle in facts.cycles) else [*lines, "nothing is pruned yet"]


def against_dense(facts: Facts) -> str:
    """The change in accuracy, where the two may be compared."""
    dense, pruned = facts.dense.accuracy, facts.pruned.accuracy
    if dense is None or pruned is None:
        return "not recorded"
    return f"{signed(pruned - dense)} points" if facts.fair else "not comparable"


def _count(facts: Facts, key: str, label: str) -> Card:
    dense: int | None = getattr(facts.dense, key)
    pruned: int | None = getattr(facts.pruned, key)
    if dense and pruned is not None:
        kept = pruned / dense
        return Card(label, f"{signed(100 * (kept - 1), 1)} %", [f"{dense:,} → {pruned:,}"], kept)
    known = [share for cycle in facts.cycles if (share := getattr(cycle, f"kept_{key}")) is not None]
    lines = [f"dense: {dense:,}"] if dense else ["dense: not recorded"]
    if not known:
        return Card(label, NOTHING, ["not recorded", *lines])
    return Card(label, f"{signed(100 * (known[-1] - 1), 1)} %", [*lines, "as of the last selection"], known[-1])


def _latency(facts: Facts) -> Card:
    ratio = facts.speed_up
    if ratio is None:
        return Card("Latency", NOTHING, ["not recorded"])
    batch = f"batch {facts.latency_batch}, quartiles" if facts.latency_batch else "quartiles"
    return Card(
        "Latency", f"{ratio:.2f} {TIMES} as fast", [f"{_times(facts.dense)} →", f"{_times(facts.pruned)}", batch]
    )


def _times(outcome: Outcome) -> str:
    median, low, high = outcome.latency or (0.0, 0.0, 0.0)
    return f"{median:.1f} ms ({low:.1f} to {high:.1f})"


def origins(facts: Facts) -> dict[str, str]:
    """What the numbers depend on, by name; what is not recorded is left out."""
    start = facts.start
    samples = start.get("samples")
    classes = start.get("classes")
    rows = {
        "seed": text(start.get("seed")),
        "commit": text(start.get("commit")),
        "hardware": text(start.get("hardware")),
        "device": text(start.get("device")),
        "time in epochs": duration(facts.seconds) if facts.seconds else "",
        "paam": text(start.get("paam")),
        "torch": text(start.get("torch")),
        "python": text(start.get("python")),
        "samples": ", ".join(f"{k} {plain(v)}" for k, v in samples.items()) if isinstance(samples, dict) else "",
        "classes": ", ".join(map(text, classes)) if isinstance(classes, list) else "",
    }
    return {name: value for name, value in rows.items() if value}


def recipe_rows(recipe: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Every key of a recipe by section; keys outside of a section come first, without a name."""
    rows: dict[str, dict[str, str]] = {"": {}}
    for section, values in recipe.items():
        if isinstance(values, dict):
            rows[text(section)] = {text(key): plain(value) for key, value in values.items()}
        else:
            rows[""][text(section)] = plain(values)
    return {section: values for section, values in rows.items() if values}
