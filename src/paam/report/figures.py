"""Facts of a run -> figures as plain geometry, in percent of the plot; the templates draw them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from paam.events import Epoch
from paam.report.facts import Cycle, Facts
from paam.report.scales import Axis, Tick, linear, logarithmic, round_step

ROLES = {
    "warmup": "warm-up",
    "score": "scores",
    "weight": "weights",
    "finetune": "fine-tune",
    "control": "dense control",
}
"""Short names of phases by role."""
LEGEND = {"score": "score phase", "weight": "weight phase", "control": "dense control, grey line"}
"""Roles with a different name in the legend."""


@dataclass(frozen=True)
class Band:
    """A shaded range of x, in percent."""

    left: float
    width: float
    kind: str
    label: str = ""


@dataclass(frozen=True)
class Line:
    """``path``: an SVG path in a square of 100 by 100 that is stretched over the plot."""

    kind: str
    path: str


@dataclass(frozen=True)
class Mark:
    """A point with text: ``label`` is printed next to it, ``tip`` is shown on hover, focus or tap."""

    left: float
    top: float
    kind: str
    tip: str
    label: str = ""
    name: str = ""
    """A longer label, shown if the page is wide enough."""
    before: bool = False
    """Whether the label is on the left."""
    shift: float = 0.0
    """Downward shift of the label from its point in percent, to avoid overlap; negative is up."""
    look: str = ""
    """Colour and shape, if marks of a kind differ."""
    ring: int = 0
    """How many others are on top of it at the same position."""


@dataclass(frozen=True)
class Plot:
    x_label: str
    y_label: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    lines: list[Line]
    bands: list[Band] = field(default_factory=list)
    stages: list[Band] = field(default_factory=list)
    """Labelled ranges along the top."""
    marks: list[Mark] = field(default_factory=list)
    rule: Mark | None = None
    """A vertical line with a label, such as the threshold."""


def polyline(points: Iterable[tuple[float, float] | None]) -> str:
    """Points in percent from the bottom left; None breaks the line."""
    parts: list[str] = []
    pen = "M"
    for point in points:
        if point is None:
            pen = "M"
            continue
        parts.append(f"{pen}{point[0]:g} {round(100 - point[1], 2):g}")
        pen = "L"
    # A single point becomes a dot: a line of length zero with round ends.
    return "".join(f"{part}h0" if part[0] == "M" and _alone(parts, i) else part for i, part in enumerate(parts))


def _alone(parts: Sequence[str], index: int) -> bool:
    return index + 1 == len(parts) or parts[index + 1][0] == "M"


# --- curves over epochs -----------------------------------------------------------------------------------------------


def curves(facts: Facts) -> dict[str, Plot]:
    """Loss and accuracy over the epochs, with shaded phases."""
    epochs = facts.epochs
    x = Axis(epochs[0].epoch + 0.5, max(epochs[-1].epoch, epochs[0].epoch + 1) + 1.5)
    seen = [e.accuracy for e in epochs if e.accuracy is not None]
    bands, stages = _bands(epochs, x)
    plots = {}
    y = logarithmic([e.loss for e in epochs])
    scale = ", log scale" if y.log else ""
    lines = [Line(kind, polyline(points)) for kind, points in _lines(epochs, "loss", x, y)]
    plots["loss"] = Plot("", f"training loss{scale}", x.ticks, y.ticks, lines, bands, stages)
    if seen:
        y = linear(seen, least=1)
        lines = [Line(kind, polyline(points)) for kind, points in _lines(epochs, "accuracy", x, y)]
        label = f"accuracy, % ({monitor(facts)})"
        plots["accuracy"] = Plot("epoch", label, x.ticks, y.ticks, lines, bands)
    return plots


def monitor(facts: Facts) -> str:
    """The samples on which the accuracy per epoch was measured."""
    if facts.start is None:
        return "set not recorded"
    return {"holdout": "held-out samples", "test": "test set"}[facts.start.monitor]


def _lines(
    epochs: Sequence[Epoch], key: str, x: Axis, y: Axis
) -> Iterable[tuple[str, list[tuple[float, float] | None]]]:
    """The network's own curve, and that of the dense control."""
    for kind, dense in (("main", False), ("dense", True)):
        values = [(e.epoch + 1, getattr(e, key)) for e in epochs if (e.does == "control") == dense]
        points = [None if v is None else (x.place(number), y.place(v)) for number, v in values]
        if points:
            yield kind, points


def _bands(epochs: Sequence[Epoch], x: Axis) -> tuple[list[Band], list[Band]]:
    """Shaded phases, and labelled ranges: warm-up, all cycles, fine-tune, control."""

    def band(run: list[Epoch], kind: str, label: str) -> Band:
        left, right = x.place(run[0].epoch + 0.5), x.place(run[-1].epoch + 1.5)
        return Band(left, round(right - left, 2), kind, label)

    shades = [
        band(list(run), kind, "") for (kind, _, _), run in groupby(epochs, key=lambda e: (kind_of(e), e.phase, e.cycle))
    ]
    stages = []
    for stage, run in groupby(epochs, key=lambda e: "cycles" if e.cycle else phase_label(e)):
        members = list(run)
        stages.append(band(members, kind_of(members[0]), stage))
    return shades, stages


def kind_of(epoch: Epoch) -> str:
    """CSS class of an epoch: the role of its phase."""
    return epoch.does or "other"


def phase_label(epoch: Epoch) -> str:
    return epoch.label or ROLES.get(epoch.does) or epoch.phase


def phase_legend(facts: Facts) -> list[tuple[str, str]]:
    """CSS classes of the phases that were trained, in order, and their labels."""
    found: dict[str, dict[str, None]] = {}
    for epoch in facts.epochs:
        words = epoch.label or LEGEND.get(epoch.does) or phase_label(epoch)
        found.setdefault(kind_of(epoch), {})[words] = None
    return [(kind, ", ".join(words)) for kind, words in found.items()]


def curve_data(facts: Facts) -> list[list[Any]]:
    """Data for the tooltips of the curves, per epoch: number, phase, cycle, loss, accuracy, share of MACs kept."""
    return [
        [
            e.epoch + 1,
            phase_label(e),
            e.cycle,
            round(e.loss, 4),
            _short(e.accuracy, 2),
            round(e.kept_macs, 4),
        ]
        for e in facts.epochs
    ]


def _short(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


# --- scores -----------------------------------------------------------------------------------------------------------

BIN = 0.02
TOP = 2.0
"""Scores from here on count in the last bin."""
NARROW, LEAST, PARTS = 0.4, 1e-3, 40
"""Score ranges below the first are enlarged, down to a range of the second, in about PARTS bins."""


def score_data(facts: Facts) -> dict[str, Any] | None:
    """Sparse histograms of every cycle and layer, as [bin, count, bin, count, ...], with kept filters and threshold."""
    cycles = [cycle for cycle in facts.cycles if any(cycle.scores.values())]
    if not cycles:
        return None
    layers = list(dict.fromkeys(name for cycle in cycles for name in cycle.scores))
    start, width, bins = _grid(
        [score for cycle in cycles for scores in cycle.scores.values() for score in scores]
        + [cycle.threshold for cycle in cycles if cycle.threshold is not None]
    )
    digits = max(3, 1 - math.floor(math.log10(width)))
    return {
        "start": start,
        "bin": width,
        "bins": bins,
        "layers": layers,
        "cycles": [
            {
                "cycle": cycle.number,
                "threshold": _short(cycle.threshold, 7),
                "shown": None if cycle.threshold is None else f"{cycle.threshold:.{digits}f}",
                "kept": [list(cycle.kept.get(name, ())) for name in layers],
                "counts": [_histogram(cycle.scores.get(name, []), start, width, bins) for name in layers],
            }
            for cycle in cycles
        ],
    }


def _grid(values: Sequence[float]) -> tuple[float, float, int]:
    """Start, width and number of histogram bins: from 0, or enlarged."""
    low, high = (min(max(value, -TOP), TOP) for value in (min(values), max(values)))
    if high - low < NARROW:
        middle, half = (low + high) / 2, max(high - low, LEAST) / 2
        width = round_step(2 * half / PARTS)
        first, last = (math.floor((middle + side) / width + 1e-6) for side in (-half, half))
        return round((first - 1) * width, 9), width, last - first + 3
    first, last = min(math.floor(low / BIN + 1e-6), 0), max(math.floor(high / BIN + 1e-6), round(1 / BIN))
    return round(first * BIN, 9), BIN, min(last + 1, round(TOP / BIN)) - first


def _histogram(scores: Iterable[float], start: float, width: float, bins: int) -> list[int]:
    counts: dict[int, int] = {}
    for score in scores:
        place = min(max(int((score - start) / width + 1e-6), 0), bins - 1)
        counts[place] = counts.get(place, 0) + 1
    return [number for place in sorted(counts) for number in (place, counts[place])]


def score_plots(data: dict[str, Any]) -> tuple[Plot, Plot]:
    """All layers of the last cycle: the histogram, split at the threshold, and the cumulative curve. page.js redraws
    both in the same way when another cycle or layer is chosen.
    """
    cycle = data["cycles"][-1]
    counts = [0] * data["bins"]
    for sparse in cycle["counts"]:
        for place, count in zip(sparse[::2], sparse[1::2], strict=True):
            counts[place] += count
    x = Axis(data["start"], data["start"] + data["bins"] * data["bin"], count=6)
    most = max(counts) * 1.06
    y = Axis(0, most, count=min(4, most))  # counts of filters are integers
    split = 0.0 if cycle["threshold"] is None else x.place(cycle["threshold"])
    width = 100 / data["bins"]
    cut, stay, steps, total = "", "", "M0 100", 0
    for place, count in enumerate(counts):
        left, right, top = place * width, (place + 1) * width, 100 - y.place(count)
        total += count
        steps += f"L{right:.2f} {100 - 100 * total / sum(counts):.2f}"
        if count:
            cut += _bar(left, min(right, split), top)
            stay += _bar(max(left, split), right, top)
    rule = None
    if cycle["threshold"] is not None:
        rule = Mark(split, 0, "theta", f"threshold {cycle['shown']}", f"θ = {cycle['shown']}")
    bars = [Line("cut", cut), Line("stay", stay)]
    histogram = Plot("score", "filters", x.ticks, y.ticks, bars, rule=rule)
    shares = Axis(0, 100)
    return histogram, Plot(
        "score", "filters up to this score, %", x.ticks, shares.ticks, [Line("main", steps)], rule=rule
    )


def _bar(left: float, right: float, top: float) -> str:
    # A threshold at the edge of two bins, up to rounding, splits neither.
    return f"M{left:.2f} 100V{top:.2f}H{right:.2f}V100Z" if right - left > 0.01 else ""


def score_line(cycle: dict[str, Any]) -> str:
    """ "512 of 688 filters stay; threshold θ = 0.474"."""
    known = [pair for pair in cycle["kept"] if pair]
    if not known:
        return "The selection of this cycle is not recorded."
    stay, width = sum(pair[0] for pair in known), sum(pair[1] for pair in known)
    threshold = "" if cycle["threshold"] is None else f"; threshold θ = {cycle['shown']}"
    return f"{stay:,} of {width:,} filters stay{threshold}"


# --- cycle by cycle ---------------------------------------------------------------------------------------------------


def costs(facts: Facts) -> Plot | None:
    """Shares of MACs, parameters and filters that each selection keeps, starting from the dense network."""
    cycles = [cycle for cycle in facts.cycles if cycle.number and (cycle.kept_macs, cycle.kept_params) != (None, None)]
    if not cycles:
        return None
    x = Axis(-0.25, cycles[-1].number + 0.25)
    y = Axis(0, 106)
    series: dict[str, list[tuple[int, float | None]]] = {
        "params": [(0, 1.0), *((c.number, c.kept_params) for c in cycles)],
        "filters": [(0, 1.0), *((c.number, filters_kept(c)) for c in cycles)],
        "macs": [(0, 1.0), *((c.number, c.kept_macs) for c in cycles)],
    }
    names = {"params": "parameters", "filters": "filters", "macs": "MACs"}
    lines, marks = [], []
    for kind, points in series.items():
        places = [None if v is None else (x.place(n), y.place(100 * v)) for n, v in points]
        lines.append(Line(kind, polyline(places)))
        for (number, value), place in zip(points[1:], places[1:], strict=True):
            if place is not None and value is not None:
                tip = f"cycle {number}: {100 * value:.1f} % of {names[kind]}"
                marks.append(Mark(place[0], round(100 - place[1], 2), kind, tip))
    step = max(1, round(cycles[-1].number / 10))
    ticks = [Tick(x.place(n), "dense" if n == 0 else str(n)) for n in range(0, min(cycles[-1].number, 10**4) + 1, step)]
    return Plot("after the selection of cycle", "kept, % of dense", ticks, y.ticks, lines, marks=marks)


def filters_kept(cycle: Cycle) -> float | None:
    width = sum(w for _, w in cycle.kept.values())
    return sum(k for k, _ in cycle.kept.values()) / width if width else None


FIGURES: dict[str, Callable[[Facts], Any]] = {
    "curves": lambda facts: curves(facts) if facts.epochs else {},
    "curve_data": curve_data,
    "phases": phase_legend,
    "costs": costs,
}
"""Figures by their names in the template of a run."""
