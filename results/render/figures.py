"""Records -> figures for the docs: the report's geometry as standalone SVG, in the reader's light or dark scheme.

Every figure has its own background, so that it stays legible if page and reader use different schemes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import paam.report
from paam.config.recipe import load_recipe
from paam.pruning.activations import ACTIVATIONS
from paam.report import budget, figures
from paam.report.facts import Facts
from paam.report.figures import Line, Mark, Plot, polyline
from paam.report.gathering import gather
from paam.report.scales import Axis
from paam.runs.record import read_events

WIDTH = 1000
MARGIN = 20
"""Pixels around everything, plus AXIS on the left of a plot."""
AXIS = 44
REACH = 5.0
"""Pre-activations are plotted from minus to plus this."""

Part = dict[str, Any]


def draw(record: Path) -> dict[str, str]:
    """File name -> figure, of one run and of the activations."""
    run = gather(record.parent.name, read_events(record))
    pictures: dict[str, Callable[[Facts], str]] = {"layers": layers, "scores": scores, "curves": curves}
    return {f"{name}.svg": picture(run) for name, picture in pictures.items()} | {"activations.svg": activations()}


def layers(run: Facts) -> str:
    """The filters each layer keeps: the learned budgets."""
    found = budget.budget(run)
    assert found is not None, f"{run.name} has no selection"
    entries = [("kept-inner", "inner layer"), ("removed", "removed (pale part of a bar)")]
    if found.streams:
        entries.insert(1, ("kept-stream", "layer that writes into a residual stream"))
    parts: list[Part] = [{"kind": "legend", "entries": entries, "left": MARGIN - 10, "top": 77}]
    left, top, row = MARGIN, 124, budget.HEIGHT + found.label_pixels + 24
    for panel in found.panels:
        if left > MARGIN and left + panel.pixels > WIDTH - MARGIN:
            left, top = MARGIN, top + row
        part = {"kind": "panel", "panel": panel, "budget": found, "left": left, "top": top, "height": budget.HEIGHT}
        parts.append(part)
        left += panel.pixels + 8
    tied = run.setting("prune.streams") == "tied"
    title = f"What each layer kept: {found.kept:,} of {found.total:,} filters"
    title += ", tied layers counted once" if tied else ""
    return _picture(title, _of(run), parts, top + row - 24)


def scores(run: Facts) -> str:
    """Histogram of all scores and their cumulative curve with the threshold, for the first and the last cycle."""
    data = figures.score_data(run)
    assert data is not None, f"{run.name} has no scores"
    cycles = data["cycles"]
    chosen = cycles if len(cycles) == 1 else [cycles[0], cycles[-1]]
    half = (WIDTH - 2 * MARGIN - 2 * AXIS - 30) // 2
    lefts = (MARGIN + AXIS, WIDTH - MARGIN - half)
    parts: list[Part] = []
    top = 0
    for row, cycle in enumerate(chosen):
        top = 122 + 250 * row
        words = f"Cycle {cycle['cycle']}: {figures.score_line(cycle)}"
        parts.append({"kind": "words", "words": words, "left": MARGIN, "top": top - 38})
        for left, plot in zip(lefts, figures.score_plots({**data, "cycles": [cycle]}), strict=True):
            parts.append(_plot(plot, left, top, half, 150))
    entries = [("stay", "at or above the threshold"), ("cut", "below")]
    parts.append({"kind": "legend", "entries": entries, "left": MARGIN + AXIS - 10, "top": top + 186})
    return _picture("Scores of all filters, and the threshold", _of(run), parts, top + 206)


def curves(run: Facts) -> str:
    """Loss and accuracy over the epochs, with shaded phases."""
    plots = figures.curves(run)
    left, width, top, height = MARGIN + AXIS, WIDTH - 2 * MARGIN - AXIS, 114, 190
    parts = []
    for plot in plots.values():
        parts.append(_plot(plot, left, top, width, height))
        top += height + 58
    penalty = {"score": "score phase (its loss holds the penalty)"}
    entries = [(kind, penalty.get(kind, words)) for kind, words in figures.phase_legend(run) if kind != "finetune"]
    parts.append({"kind": "legend", "entries": entries, "left": left - 10, "top": top - 20})
    return _picture("Training: scores and weights take turns", _of(run), parts, top)


def activations() -> str:
    """The four activations of scores, computed by the code, with the paper's threshold."""
    threshold = load_recipe("cifar10-resnet56-kq").target.threshold
    assert threshold is not None
    x, y = Axis(-REACH, REACH, count=10), Axis(0, 1.12)
    # Points are dense near zero, where the sharp sigmoid is steep.
    inputs = REACH * torch.linspace(-1, 1, 201, dtype=torch.float64) ** 3
    lines, starts = [], set()
    kinds = dict(zip(ACTIVATIONS, ("main", "second", "third", "fourth"), strict=True))
    for name, kind in kinds.items():
        values = zip(inputs.tolist(), ACTIVATIONS[name](inputs).tolist(), strict=True)
        lines.append(Line(kind, polyline((x.place(at), y.place(value)) for at, value in values)))
        starts.add(round(float(ACTIVATIONS[name](torch.zeros(1, dtype=torch.float64))), 6))
    marks = [Mark(x.place(0), round(100 - y.place(start), 2), "start", "", "start") for start in sorted(starts)]
    plot = Plot("pre-activation z", "score", x.ticks, y.ticks, lines, marks=marks)
    level = Mark(0, round(100 - y.place(threshold), 2), "theta", "", f"θ = {threshold:g}")
    part = _plot(plot, MARGIN + AXIS, 110, 700 - 2 * MARGIN - AXIS, 220) | {"level": level}
    entries = [(f"line {kind}", name) for name, kind in kinds.items()]
    legend = {"kind": "legend", "entries": entries, "left": MARGIN + AXIS, "top": 76}
    subtitle = "A filter stays where its score reaches θ; pre-activations start at 0."
    return _picture("The activations of scores", subtitle, [part, legend], 386, width=700)


def _of(run: Facts) -> str:
    return f"{run.name}: {run.recipe.get('description', '')}, {len(run.epochs)} epochs"


def _plot(plot: Plot, left: int, top: int, width: int, height: int) -> Part:
    return {"kind": "plot", "plot": plot, "left": left, "top": top, "width": width, "height": height, "level": None}


def _picture(title: str, subtitle: str, parts: list[Part], height: int, width: int = WIDTH) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = lambda value: f"{round(value, 1):g}"
    svg = environment.get_template("figure.svg.jinja").render(
        title=title, subtitle=subtitle, parts=parts, width=width, height=height, palette=_palette()
    )
    return re.sub(r"\n+", "\n", svg).lstrip()


def _palette() -> dict[str, str]:
    """The report's colours: the first declarations in its style sheet for the light and the dark scheme."""
    style = (Path(paam.report.__file__).parent / "templates" / "page.css").read_text()
    light, dark = re.findall(r"{\s*(--paper[^}]*?)\s*color-scheme", style)[:2]
    return {"light": " ".join(light.split()), "dark": " ".join(dark.split())}
