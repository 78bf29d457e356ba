"""Numbers and events as short pieces of text, the same in every view."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from paam.record import Event
from paam.report.words import score_words

PHASES = {
    "warmup": "warm-up (dense)",
    "score": "scoring filters",
    "weight": "training weights",
    "finetune": "fine-tuning the small network",
    "control": "training the dense control",
}
MONITORS = {"holdout": "held-out", "test": "test"}
SPARKS = "▁▂▃▄▅▆▇█"


def clean(text: object) -> str:
    """Text of a record, without what a terminal would obey."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def phase_name(phase: str) -> str:
    return PHASES.get(phase) or clean(phase)


def monitor_name(start: Event) -> str:
    """Which images the accuracy per epoch is measured on."""
    return MONITORS.get(start["monitor"]) or clean(start["monitor"])


def duration(seconds: float | None) -> str:
    """ "0:07", "12:34", "3:04:05", "2 d 03:04"; dashes while nothing is known."""
    if seconds is None:
        return "-:--"
    whole = max(round(seconds), 0)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours:02d}:{minutes:02d}"
    if hours:
        return f"{hours}:{minutes:02d}:{whole % 60:02d}"
    return f"{minutes}:{whole % 60:02d}"


def age(seconds: float) -> str:
    """ "40 s", "12 min", "5 h", "3 d" """
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(max(seconds, 0))} s"


def title(start: Event) -> str:
    recipe = start["recipe"]
    return f"{clean(recipe['model']['name'])} on {clean(recipe['data']['name'])}"


def start_line(start: Event) -> str:
    dense = start["dense"]
    return (
        f"{title(start)}: {dense['params']:,} parameters, {dense['macs']:,} MACs;"
        f" PAAM-{clean(start['recipe']['prune']['scorer'])}, seed {start['seed']}, {clean(start['hardware'])}"
    )


def told_lines(event: Event) -> list[str]:
    """What is said of an event besides epochs: the same in a log, and on a terminal behind the live view."""
    kind = event["event"]
    if kind == "start":
        return [start_line(event)]
    if kind == "resumed":
        inside = f" and {event['step']} steps" if event.get("step") else ""
        reasons = event.get("passed_over")
        older = [f"an older checkpoint is used: {clean(r)}" for r in reasons] if isinstance(reasons, list) else []
        return [*older, f"resumed after epoch {event['epoch']}{inside}"]
    if kind == "changed":
        return [
            f"from here on {clean(k)} = {clean(now)} (was {clean(old)})" for k, (old, now) in event["changes"].items()
        ]
    if kind == "vanished":
        return [vanished_line(event)]
    if kind == "failed":
        return [f"failed: {clean(event['reason'])}"]
    return [selection_line(event)] if kind == "selection" else []


def vanished_line(event: Event) -> str:
    names = clean(event["layers"]).split(", ") if event["layers"] else []
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    whole = f", all those of {', '.join(names[:4])}{more}" if names else ""
    return (
        f"{event['scales']:,} of {event['of']:,} batch-norm scales have vanished in warm-up{whole}: parts of the"
        " network are dead. A ramp of the rate (warmup.ramp) often prevents that."
    )


def selection_line(event: Event) -> str:
    kept, width = filters(event)
    theta = None if event["threshold"] is None else score_words(event["threshold"])
    if kept == width and theta is not None:
        return f"cycle {event['cycle']}: all {width} filters stay at a threshold of {theta}"
    from_here = "" if theta is None else f" (scores from {theta})"
    return (
        f"cycle {event['cycle']}: {kept} of {width} filters stay{from_here},"
        f" {100 * event['kept_macs']:.1f} % of MACs, {100 * event['kept_params']:.1f} % of parameters"
    )


def filters(event: Event) -> tuple[int, int]:
    """Kept filters and all filters of a selection or an end."""
    pairs = event["kept_filters"].values()
    return sum(kept for kept, _ in pairs), sum(width for _, width in pairs)


def phase_line(phase: str, cycle: int) -> str:
    return phase_name(phase) + (f" in cycle {cycle}" if cycle else "")


def epoch_line(event: Event, monitor: str) -> str:
    seen = "" if event["accuracy"] is None else f"   {monitor} accuracy {event['accuracy']:.2f} %"
    return f"{phase_line(event['phase'], event['cycle'])}   loss {event['loss']:.4f}{seen}"


def control_line(accuracy: float) -> str:
    return f"dense control {accuracy:.2f} %"


def bar_cells(kept: int, width: int, bar: int) -> int:
    """Full cells of a bar: all only where all are kept, one at least where any is."""
    return max(bar * kept // width, min(kept, 1))


def removed(end: Event, key: str) -> float:
    """Percent of the dense network's "params" or "macs" that are gone."""
    return 100 * (1 - float(end["pruned"][key]) / float(end["dense"][key]))


def less(percent: float) -> str:
    """What is gone, as a change: "-52.4 %", and "0.0 %" where nothing is."""
    return f"{-percent:.1f} %".replace("-0.0 %", "0.0 %")


def result_line(start: Event, end: Event) -> str:
    return (
        f"{title(start)}: test accuracy {end['pruned']['accuracy']:.2f} %, {removed(end, 'macs'):.1f} % of MACs and"
        f" {removed(end, 'params'):.1f} % of parameters removed"
    )


def score_blocks(scores: Iterable[Sequence[float]], bins: int = 20) -> str:
    """How all scores spread over 0 to 1, as a row of blocks; those outside count in the first and the last."""
    counts = [0] * bins
    for values in scores:
        for score in values:
            counts[min(max(math.floor(score * bins), 0), bins - 1)] += 1
    top = max(counts)
    # Any count at all is visible: the lowest block is for one filter, a blank for none.
    return "".join(" " if not count else SPARKS[(len(SPARKS) - 1) * count // top] for count in counts)


def curve_blocks(values: Sequence[float], width: int) -> str:
    """Values over time as blocks from the lowest to the highest; where they do not fit, neighbours are averaged."""
    if len(values) > width:
        edges = [len(values) * place // width for place in range(width + 1)]
        values = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in values)
