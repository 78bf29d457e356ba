"""The loss or gain in accuracy at each stage of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from paam.events import Epoch
from paam.report.facts import Cycle, Facts
from paam.report.figures import Line, Mark, Plot, monitor, polyline
from paam.report.scales import Axis, Tick, linear
from paam.views.format import signed

WORDS = {
    "warmup": ("end of warm-up", "warm-up"),
    "weight": ("weights trained", "weights"),
    "finetune": ("after fine-tune", "tuned"),
    "control": ("dense control", "dense"),
}
"""Labels for the end of a phase by its role: in the table, and below the plot."""
APART = 0.18
"""Distance of the dense control from the other stages, as a share of their number."""


@dataclass(frozen=True)
class Stage:
    """Accuracy in percent at a point of the pipeline, and the change in points since the previous stage.

    ``kind``: the role of the phase that ended, "other" if unknown, or "cut".
    """

    label: str
    short: str
    kind: str
    accuracy: float
    kept_macs: float | None
    cycle: int = 0
    change: float | None = None


def stages(facts: Facts) -> list[Stage]:
    """The end of each phase that trained the network, and each cut; last the dense control, without a change."""
    ends = [list(run)[-1] for _, run in groupby(facts.epochs, key=lambda epoch: (epoch.phase, epoch.cycle))]
    points = [(_time(cut, facts), stage) for cut in facts.cycles if (stage := _after_cut(cut))]
    points += [((end.epoch, 1), stage) for end in ends if (stage := _after_phase(end, facts))]
    found: list[Stage] = []
    controls = []
    for _, stage in sorted(points, key=lambda point: point[0]):
        if stage.kind == "control":
            controls.append(stage)
        else:
            change = stage.accuracy - found[-1].accuracy if found else None
            found.append(replace(stage, change=change))
    return found + controls[-1:]


def _time(cut: Cycle, facts: Facts) -> tuple[int, int]:
    """When a cut was made: before the training in its epoch (with the kept filters only) or after it."""
    at = cut.epoch or 0
    without = any(epoch.epoch == at and epoch.kept_macs != cut.kept_macs for epoch in facts.epochs)
    return at, 2 if without else 0


def _after_cut(cut: Cycle) -> Stage | None:
    if cut.accuracy is None:
        return None
    label, short = f"{_of(cut.number)}right after the cut", f"cut {cut.number}"
    return Stage(label, short, "cut", cut.accuracy, cut.kept_macs, cut.number)


def _after_phase(end: Epoch, facts: Facts) -> Stage | None:
    """From the last epoch of a phase; score phases train no weights."""
    if end.accuracy is None or end.does == "score":
        return None
    label, short = WORDS.get(end.does, (f"after {end.phase}", end.phase))
    if end.label and end.does == "control":
        label = end.label
    elif end.label:
        label, short = f"after {end.label}", end.label
    label, short = f"{_of(end.cycle)}{label}", str(end.cycle or short)
    last = max([end.cycle, *(cut.number for cut in facts.cycles), *(epoch.cycle for epoch in facts.epochs)])
    alternates = any(epoch.does == "score" for epoch in facts.epochs)
    if end.does == "weight" and end.cycle == last and alternates and not end.label:
        label = "end of the alternation"
    under_way = not facts.finished and (end is facts.epochs[-1] or end.does == "control")
    label += " (so far)" if under_way else ""
    return Stage(label, short, end.does or "other", end.accuracy, end.kept_macs, end.cycle)


def _of(cycle: int) -> str:
    return f"cycle {cycle}: " if cycle else ""


def cuts_unmeasured(facts: Facts) -> bool:
    """Whether the record predates the measurement right after a cut."""
    cuts = [cycle for cycle in facts.cycles if cycle.kept]
    return bool(cuts) and all(cycle.accuracy is None for cycle in cuts)


def stage_plot(facts: Facts, found: list[Stage]) -> Plot | None:
    """The accuracies in order: down at a cut, up again by training."""
    if len(found) < 2:
        return None
    steps = [float(i) for i in range(len(found))]
    if found[-1].kind == "control":  # with a gap, so that its label has room next to the previous one
        steps[-1] = steps[-2] + max(1.0, APART * len(found))
    x = Axis(-0.8, steps[-1] + 0.6)
    y = linear((stage.accuracy for stage in found), least=1)
    places = [(x.place(step), y.place(stage.accuracy)) for step, stage in zip(steps, found, strict=True)]
    line = [place for place, stage in zip(places, found, strict=True) if stage.kind != "control"]
    marks = [
        Mark(place[0], round(100 - place[1], 2), stage.kind, f"{stage.label}: {stage.accuracy:.2f} %{_change(stage)}")
        for place, stage in zip(places, found, strict=True)
    ]
    ends = {stage.short: stage for stage in found if stage.kind != "cut"}  # one label for a cycle: at its end
    cycles = [short for short, stage in ends.items() if stage.cycle]
    hidden = set(cycles) - set(cycles[:: max(1, -(-len(cycles) // 5))])
    ticks = [
        Tick(place[0], stage.short)
        for place, stage in zip(places, found, strict=True)
        if stage is ends.get(stage.short) and stage.short not in hidden
    ]
    label = f"accuracy, % ({monitor(facts)})"
    return Plot(
        "end of warm-up, of each cycle, of fine-tune",
        label,
        ticks,
        y.ticks,
        [Line("main", polyline(line))],
        marks=marks,
    )


def _change(stage: Stage) -> str:
    return "" if stage.change is None else f" ({signed(stage.change)} points)"
