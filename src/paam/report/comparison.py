"""Comparison of runs: group seeds of one recipe, a table, and accuracy against MACs."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paam.report.control import control_of
from paam.report.facts import Facts
from paam.report.figures import Line, Mark, Plot, polyline
from paam.report.headline import against_dense, gain, recipe_rows
from paam.report.scales import linear
from paam.views.format import NOTHING, TIMES, signed

PUBLISHED = {  # accuracy, parameters removed, FLOPs removed, in percent: arXiv 2210.11114
    "resnet56": {
        "Vanilla, medium": (94.28, 52.3, 49.3),
        "Vanilla, high": (92.42, 83.0, 70.5),
        "KQ, medium": (94.01, 54.0, 52.3),
        "KQ, high": (93.10, 70.0, 74.7),
    },
    "resnet110": {
        "Vanilla, medium": (94.69, 54.9, 51.3),
        "Vanilla, high": (93.68, 79.3, 74.8),
        "KQ, medium": (94.63, 48.3, 40.9),
        "KQ, high": (93.99, 66.5, 77.2),
    },
}

NAMED = 12
"""With more table rows than this, points in the plot are labelled by number only."""
LONGEST_NAME = 32
MANY = 6
"""From this many seeds on, not all are numbered in the plot."""
LETTER, LINE = 0.85, 4.2
"""Width and height of a letter in percent of the plot."""
HUES, SHAPES = 6, ("", "square", "bar")
"""Number of colours in the style sheet; further rows get another shape."""
NEAR = (0.7, 1.6)
"""Points closer than this in percent of the plot, horizontally and vertically, count as overlapping."""
RINGS = 3
POINT, GAP = 0.9, 1.2
"""Half the width of a point, and the distance of a label from its centre, in percent of the plot."""


@dataclass(frozen=True)
class Cell:
    """``value`` is the sort key; None sorts last."""

    shown: str
    value: float | str | None


@dataclass(frozen=True)
class Family:
    """Finished runs of one recipe with distinct seeds, or a single run.

    ``numbers``: positions of the runs on the page, from 1. ``differs``: the recipe's keys whose values at most half of
    the recipes share. ``note``: why a run is not grouped with others of its recipe.
    """

    label: str
    numbers: list[int]
    runs: list[Facts]
    differs: str
    note: str


COLUMNS = ("seeds", "test accuracy", "against dense", "parameters", "MACs", "speed", "epochs")


def families(runs: Sequence[Facts]) -> list[Family]:
    """Rows of the table in the order of the runs, with the keys that distinguish a recipe from the others."""
    found: dict[str, list[tuple[int, Facts]]] = {}
    for number, run in enumerate(runs, 1):
        # A run is not grouped if its recipe is unknown or was changed during the run.
        changed = any(not change.key.startswith("environment.") for change in run.changes)
        key = json.dumps(run.recipe, sort_keys=True) if run.recipe and not changed else f"run {number}"
        found.setdefault(key, []).append((number, run))
    flat = [_flat(members[0][1].recipe) for members in found.values()]
    shared = Counter(pair for keys in flat for pair in keys.items())
    half = sum(map(bool, flat)) / 2  # of the recipes that are known
    named = []
    for members, keys in zip(found.values(), flat, strict=True):
        apart = ", ".join(f"{key} = {value}" for key, value in keys.items() if shared[key, value] <= half)
        for seeds, note in _by_seed(members):
            numbers, together = [number for number, _ in seeds], [run for _, run in seeds]
            named.append(Family(_together(together), numbers, together, apart, note))
    taken = Counter(family.label for family in named)
    named = [family if taken[family.label] == 1 else replace(family, label=_listed(family.runs)) for family in named]
    return sorted(named, key=lambda family: family.numbers[0])


def _together(seeds: Sequence[Facts]) -> str:
    """One name for seeds of a recipe: "medium" for "medium-seed0" and "medium-seed1"."""
    bare = {re.sub(r"[\W_]*seed[\W_]*\d+$", "", run.name) for run in seeds}
    return bare.pop() if len(seeds) > 1 and len(bare) == 1 and "" not in bare else _listed(seeds)


def _listed(seeds: Sequence[Facts]) -> str:
    return seeds[0].name if len(seeds) == 1 else f"{seeds[0].name} and {len(seeds) - 1} more"


def _by_seed(members: Sequence[tuple[int, Facts]]) -> list[tuple[list[tuple[int, Facts]], str]]:
    """Group runs of one recipe: its finished seeds together, then every other run alone."""
    seeds: dict[str, tuple[int, Facts]] = {}
    for number, run in members:
        if run.finished:
            seeds.setdefault(_seed(run), (number, run))
    rows = [(list(seeds.values()), "")] if seeds else []
    taken = {number for number, _ in seeds.values()}
    for number, run in members:
        if number in taken:
            continue
        notes = [] if run.finished else [f"failed: {run.failure}" if run.failure else "not finished"]
        if same := seeds.get(_seed(run)):
            notes.append(f"the same recipe and seed as {same[1].name}")
        rows.append(([(number, run)], ", ".join(notes)))
    return rows


def _seed(run: Facts) -> str:
    """ "?" if the start event is missing; such a run is never grouped with others."""
    return "?" if run.start is None else str(run.start.seed)


def _flat(recipe: Any) -> dict[str, str]:
    """ "section.key" -> value, without unset keys and without the description, which only rephrases the settings."""
    sections = recipe_rows(recipe)
    return {
        f"{section}.{key}" if section else key: value
        for section, values in sections.items()
        for key, value in values.items()
        if (section, key) != ("", "description") and value != NOTHING
    }


def row(family: Family, page: Sequence[Facts]) -> list[Cell]:
    """One row of the table, in the order of COLUMNS; several seeds give mean ± standard deviation.

    ``page``: all runs to compare with.
    """
    runs = family.runs
    gains = [(run, gain(run, control_of(run, page))) for run in runs]
    fair = [points for _, points in gains if points is not None]
    epochs = [len(run.own_epochs) for run in runs]
    against = Cell(against_dense(runs[0]), None)
    if fair:
        against = spread(fair, lambda mean: f"{signed(mean)} points")
    if 0 < len(fair) < len(runs):
        seeds = ", ".join(_seed(run) for run, points in gains if points is not None)
        against = replace(against, shown=f"{against.shown} (seed {seeds})")
    return [
        Cell(", ".join(map(_seed, runs)), float(len(runs))),
        spread([run.end.pruned.accuracy if run.end else None for run in runs], lambda mean: f"{mean:.2f} %"),
        against,
        spread([_removed(run.kept_params) for run in runs], lambda mean: f"{signed(mean, 1)} %", 1),
        spread([_removed(run.kept_macs) for run in runs], lambda mean: f"{signed(mean, 1)} %", 1),
        spread([run.speed_up for run in runs], lambda mean: f"{mean:.2f} {TIMES}"),
        Cell(", ".join(dict.fromkeys(map(str, epochs))), float(epochs[0])),
    ]


def _removed(kept: float | None) -> float | None:
    return None if kept is None else 100 * (kept - 1)


def spread(values: Sequence[float | None], show: Any, digits: int = 2) -> Cell:
    known = [value for value in values if value is not None]
    if not known:
        return Cell(NOTHING, None)
    mean = statistics.fmean(known)
    if len(known) == 1:
        return Cell(show(mean), round(mean, 6))
    return Cell(f"{show(mean)} ± {statistics.stdev(known):.{digits}f}", round(mean, 6))


def published(runs: Sequence[Facts]) -> dict[str, tuple[float, float]]:
    """The paper's points for the networks shown, CIFAR-10 only: label -> (share of MACs kept, accuracy)."""
    shown = {run.model for run in runs if run.data == "cifar10" and run.finished}
    models = [model for model in PUBLISHED if model in shown]
    points = {}
    for model in models:
        for label, (accuracy, _, removed) in PUBLISHED[model].items():
            name = f"{model}, {label}" if len(models) > 1 else label
            points[name] = (round(100 - removed, 1), accuracy)
    return points


def plane(found: Sequence[Family]) -> Plot | None:
    """Test accuracy against the share of MACs kept; the paper's points have another mark."""
    runs = [run for family in found for run in family.runs]
    points: list[tuple[float, float, str, str, str, str, str]] = []  # x, y, kind, tip, label, name, look
    few = len(found) <= NAMED
    lines = []
    for family, look in zip(found, looks(found), strict=True):
        ours = [
            (100 * run.end.pruned.macs / run.end.dense.macs, run.end.pruned.accuracy, number, run, run.end)
            for number, run in zip(family.numbers, family.runs, strict=True)
            if run.end is not None
        ]
        numbers = [str(number) for _, _, number, *_ in ours]
        label = ", ".join(numbers if len(numbers) < MANY else [*numbers[:2], "…", numbers[-1]])
        name = family.label if few and len(family.label) <= LONGEST_NAME else ""
        for place, (x, y, _, run, end) in enumerate(sorted(ours, key=lambda one: -one[1])):
            told = ("", "") if place else (label, name)  # seeds share a label, at the best of them
            points.append((x, y, "ours", f"{run.name}: {y:.2f} % at {x:.1f} % of MACs", *told, look))
            if run.fair:
                tip = f"dense control of {run.name}: {end.dense.accuracy:.2f} %, trained for the same epochs"
                points.append((100.0, end.dense.accuracy, "control", tip, "", "", ""))
        if len(ours) > 1:
            lines.append((f"seeds {look}", sorted((x, y) for x, y, *_ in ours)))
    if not points:
        return None
    points += [
        (x, y, "paper", f"paper, {label}: {y:.2f} % at {x:.1f} % of FLOPs", "", label, "")
        for label, (x, y) in published(runs).items()
    ]
    x_axis = linear((p[0] for p in points), least=10)
    y_axis = linear((p[1] for p in points), least=1)
    marks = [
        Mark(x_axis.place(x), round(100 - y_axis.place(y), 2), kind, tip, label, name, look=look)
        for x, y, kind, tip, label, name, look in points
    ]
    drawn = [Line(kind, polyline((x_axis.place(x), y_axis.place(y)) for x, y in line)) for kind, line in lines]
    return Plot(
        "MACs kept, % of dense", "test accuracy, %", x_axis.ticks, y_axis.ticks, drawn, marks=_clear(_ringed(marks))
    )


def looks(found: Sequence[Family]) -> list[str]:
    """The colour and shape of each row's points; empty if it has no point in the plot."""
    numbers = itertools.count()
    shown = [next(numbers) if any(run.finished for run in family.runs) else None for family in found]
    return ["" if n is None else f"hue-{n % HUES} {SHAPES[n // HUES % len(SHAPES)]}".strip() for n in shown]


def _ringed(marks: Sequence[Mark]) -> list[Mark]:
    """Draw overlapping runs as concentric rings: count how many are on top of each, up to RINGS."""
    ringed: list[Mark] = []
    for mark in marks:
        over = [
            other.ring + 1
            for other in ringed
            if mark.kind == other.kind == "ours"
            and abs(mark.left - other.left) < NEAR[0]
            and abs(mark.top - other.top) < NEAR[1]
        ]
        ringed.append(replace(mark, ring=min(max(over, default=0), RINGS)))
    return ringed


def _clear(marks: list[Mark]) -> list[Mark]:
    """Place labels as near to their points as possible without overlap: right or left of them, shifted up or down.

    Of points that are close together, the higher one gets the higher label.
    """
    steps = [LINE / 4 * number for number in range(round(4 * 100 / LINE))]
    # Moving the label to the left costs as much as shifting it by a quarter of a line.
    tries = sorted(
        ((shift, before) for step in steps for shift in {step, -step} for before in (False, True)),
        key=lambda place: (abs(place[0]) + place[1] * LINE / 4, place[1], -place[0]),
    )
    ordered = sorted(marks, key=lambda mark: (mark.top, mark.left))
    for number, mark in enumerate(ordered):
        if mark.label or mark.name:
            places = (replace(mark, before=before, shift=round(shift, 2)) for shift, before in tries)
            others = [*ordered[:number], *(replace(other, label="", name="") for other in ordered[number + 1 :])]
            ordered[number] = next((place for place in places if _is_free(place, others)), mark)
    for low in range(len(ordered)):
        for high in range(low):
            one, other = ordered[high], ordered[low]
            if (
                one.top + one.shift > other.top + other.shift
                and (one.label or one.name)
                and (other.label or other.name)
            ):
                up = replace(one, before=other.before, shift=round(other.top + other.shift - one.top, 2))
                down = replace(other, before=one.before, shift=round(one.top + one.shift - other.top, 2))
                rest = [mark for number, mark in enumerate(ordered) if number not in (low, high)]
                if _is_free(up, [*rest, down]) and _is_free(down, [*rest, up]):
                    ordered[high], ordered[low] = up, down
    return ordered


def _is_free(mark: Mark, others: Sequence[Mark]) -> bool:
    """Whether a mark's label is inside the plot and overlaps no other point or label."""
    left, right, top = _box(mark)
    if left < 0 or right > 100 or not 0 <= top <= 100 - LINE:
        return False
    taken = [(other.left - POINT, other.left + POINT, other.top) for other in others]
    taken += [_box(other) for other in others if other.label or other.name]
    return not any(left < end and start < right and abs(top - place) < LINE for start, end, place in taken)


def _box(mark: Mark) -> tuple[float, float, float]:
    """Left edge, right edge and vertical centre of a label."""
    length = LETTER * len(f"{mark.label} {mark.name}") + 2
    left, right = (mark.left - length, mark.left - GAP) if mark.before else (mark.left + GAP, mark.left + length)
    return left, right, mark.top + mark.shift
