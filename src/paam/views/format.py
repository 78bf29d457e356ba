"""Numbers and events as short text, the same in every view."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from paam.events import Changed, End, Epoch, Event, Failed, PhaseFacts, Resumed, Selected, Start, Vanished

ROLES = {
    "warmup": "warm-up (dense)",
    "score": "scoring filters",
    "weight": "training weights",
    "finetune": "fine-tuning the small network",
    "control": "training the dense control",
}
"""Description of a phase by its role."""
MONITORS = {"holdout": "held-out", "test": "test"}
TRAINED = {"as long": "the same epochs", "warm-up": "warm-up only", "as given": "as it came"}
"""How long the dense network of a result was trained."""
SPARKS = "▁▂▃▄▅▆▇█"
NOTHING = "–"
"""A dash if nothing is recorded or set."""
TIMES = "×"
MINUS = "−"


# --- texts and numbers ------------------------------------------------------------------------------------------------


def clean(text: object) -> str:
    """Text of a record, without control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def signed(value: float, digits: int = 2) -> str:
    """A number with its sign."""
    return f"{value:+.{digits}f}".replace("-", MINUS)


def change(percent: float) -> str:
    """The share removed, as a change: "-52.4 %", or "0.0 %" if nothing is removed."""
    return f"{-percent:.1f} %".replace("-0.0 %", "0.0 %")


def score_text(score: float) -> str:
    """Three digits, or as many as distinguish it from 1, the initial score."""
    digits = next((digits for digits in range(3, 7) if score == 1 or round(score, digits) != 1), 7)
    return f"{score:.{digits if digits == 3 else digits + 1}f}"


def setting_text(value: Any) -> str:
    """A value of a recipe."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):  # of scalars: deeper nesting means a corrupt record, and may be endless
        return ", ".join("…" if isinstance(part, list) else setting_text(part) for part in value) or "none"
    if isinstance(value, dict):
        return "…"
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value)


def countdown(seconds: float | None) -> str:
    """ "0:07", "12:34", "3:04:05", "2 d 03:04"; dashes if unknown."""
    if seconds is None:
        return "-:--"
    whole = max(round(seconds), 0)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours:02d}:{minutes:02d}"
    if hours:
        return f"{hours}:{minutes:02d}:{whole % 60:02d}"
    return f"{minutes}:{whole % 60:02d}"


def duration(seconds: float) -> str:
    """ "1 h 12 min", "3 min 5 s", "42 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def age(seconds: float) -> str:
    """ "40 s", "12 min", "5 h", "3 d" """
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(max(seconds, 0))} s"


# --- events -----------------------------------------------------------------------------------------------------------


def model_name(start: Start) -> str:
    return clean(start.setting("model.name") or "unknown network")


def data_name(start: Start) -> str:
    return clean(start.setting("data.name") or "unknown data")


def title(start: Start) -> str:
    return f"{model_name(start)} on {data_name(start)}"


def event_lines(event: Event) -> list[str]:
    """Sentences about an event other than an epoch: the same in a log and on a terminal after the live view."""
    match event:
        case Start():
            return [start_line(event)]
        case Resumed():
            inside = f" and {event.step} steps" if event.step else ""
            older = [f"an older checkpoint is used: {clean(reason)}" for reason in event.skipped]
            where = [f"resumed after epoch {event.epoch}{inside}"] if event.epoch or inside else []
            return [*older, *map(clean, event.notes), *where]
        case Changed():
            changes = event.changes.items()
            return [f"from here on {clean(key)} = {clean(now)} (was {clean(old)})" for key, (old, now) in changes]
        case Vanished():
            return [vanished_line(event)]
        case Failed():
            return [f"failed: {clean(event.reason)}"]
        case Selected():
            return [selection_line(event)]
        case _:
            return []


def start_line(start: Start) -> str:
    return (
        f"{title(start)}: {start.dense.params:,} parameters, {start.dense.macs:,} MACs;"
        f" {clean(start.method)}, seed {start.seed}, {clean(start.hardware)}"
    )


def vanished_line(event: Vanished) -> str:
    names = clean(event.layers).split(", ") if event.layers else []
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    whole = f", all those of {', '.join(names[:4])}{more}" if names else ""
    return (
        f"{event.scales:,} of {event.of:,} batch-norm scales have vanished in warm-up{whole}: parts of the"
        " network are dead. A ramp of the rate (warmup.ramp) often prevents that."
    )


def selection_line(event: Selected) -> str:
    kept, width = filters(event)
    theta = None if event.threshold is None else score_text(event.threshold)
    where = f"cycle {event.cycle}: " if event.cycle else ""
    if kept == width and theta is not None:
        return f"{where}all {width} filters stay at a threshold of {theta}"
    from_here = "" if theta is None else f" (scores from {theta})"
    return (
        f"{where}{kept} of {width} filters stay{from_here},"
        f" {100 * event.kept_macs:.1f} % of MACs, {100 * event.kept_params:.1f} % of parameters"
    )


def filters(event: Selected | End) -> tuple[int, int]:
    """Kept filters and all filters."""
    pairs = event.kept_filters.values()
    return sum(kept for kept, _ in pairs), sum(width for _, width in pairs)


def phase_name(phase: PhaseFacts | Epoch) -> str:
    """Description of a phase."""
    name = phase.phase if isinstance(phase, Epoch) else phase.name
    return clean(phase.label or ROLES.get(phase.does) or name)


def phase_line(phase: PhaseFacts | Epoch) -> str:
    return phase_name(phase) + (f" in cycle {phase.cycle}" if phase.cycle else "")


def epoch_line(event: Epoch, monitor: str) -> str:
    """``monitor``: the images the accuracy was measured on, as in MONITORS."""
    seen = "" if event.accuracy is None else f"   {monitor} accuracy {event.accuracy:.2f} %"
    return f"{phase_line(event)}   loss {event.loss:.4f}{seen}"


def control_line(accuracy: float) -> str:
    return f"dense control {accuracy:.2f} %"


def result_line(start: Start, end: End) -> str:
    return (
        f"{title(start)}: test accuracy {end.pruned.accuracy:.2f} %, {removed(end, 'macs'):.1f} % of MACs and"
        f" {removed(end, 'params'):.1f} % of parameters removed"
    )


def removed(end: End, key: str) -> float:
    """Percent of the dense network's "params" or "macs" that were removed."""
    return 100 * (1 - float(getattr(end.pruned, key)) / float(getattr(end.dense, key)))


# --- text graphics ----------------------------------------------------------------------------------------------------


def bar_cells(kept: int, width: int, bar: int) -> int:
    """Filled cells of a bar: all only if all filters are kept, at least one if any is."""
    return max(bar * kept // width, min(kept, 1))


def score_blocks(scores: Iterable[Sequence[float]], bins: int = 20) -> str:
    """Histogram of all scores from 0 to 1 as block characters; scores outside count in the first and last bin."""
    counts = [0] * bins
    for values in scores:
        for score in values:
            counts[min(max(math.floor(score * bins), 0), bins - 1)] += 1
    top = max(counts)
    # Any nonzero count is visible: the lowest block means at least one filter, a blank none.
    return "".join(" " if not count else SPARKS[(len(SPARKS) - 1) * count // top] for count in counts)


def curve_blocks(values: Sequence[float], width: int) -> str:
    """Sparkline from the lowest to the highest value; if values do not fit, neighbours are averaged."""
    if len(values) > width:
        edges = [len(values) * place // width for place in range(width + 1)]
        values = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in values)
