"""What each stage of the pipeline cost, or gained, in accuracy."""

from __future__ import annotations

from dataclasses import dataclass

from paam.report.facts import Facts
from paam.report.figures import Line, Mark, Plot, monitor, polyline
from paam.report.scales import Axis, Tick, linear
from paam.views.format import signed

APART = 0.18
"""How far the dense control stands from the other stages, as a share of their number."""


@dataclass(frozen=True)
class Stage:
    """Accuracy in percent at a point of the pipeline, and the change in points since the stage before it."""

    label: str
    short: str
    kind: str
    accuracy: float
    kept_macs: float | None
    change: float | None


def stages(facts: Facts) -> list[Stage]:
    """Warm-up, each cut, the training after each cut, fine-tune; and the dense control, which stands apart."""
    last = facts.epochs[-1] if facts.epochs else None
    ends = {(epoch.phase, epoch.cycle): epoch for epoch in facts.epochs}  # the last epoch of each phase wins
    points: list[tuple[str, str, str, float | None, float | None]] = []

    def end_of(phase: str, cycle: int, label: str, short: str) -> None:
        if epoch := ends.get((phase, cycle)):
            going_on = " (so far)" if epoch is last and not facts.finished else ""
            points.append((label + going_on, short, phase, epoch.accuracy, epoch.kept_macs))

    end_of("warmup", 0, "end of warm-up", "warm-up")
    numbers = sorted({cycle.number for cycle in facts.cycles} | {c for phase, c in ends if phase == "weight"})
    cuts = {cycle.number: cycle for cycle in facts.cycles}
    for number in numbers:
        if (cut := cuts.get(number)) and cut.accuracy is not None:
            label = f"cycle {number}: right after the cut"
            points.append((label, f"cut {number}", "cut", cut.accuracy, cut.kept_macs))
        label = "end of the alternation" if number == numbers[-1] else f"cycle {number}: weights trained"
        end_of("weight", number, label, f"{number}")
    end_of("finetune", 0, "after fine-tune", "tuned")
    found: list[Stage] = []
    for label, short, kind, accuracy, kept in points:
        if accuracy is not None:
            before = found[-1].accuracy if found else None
            found.append(Stage(label, short, kind, accuracy, kept, None if before is None else accuracy - before))
    if (control := ends.get(("control", 0))) and control.accuracy is not None:
        going_on = "" if facts.finished else " (so far)"
        found.append(Stage(f"dense control{going_on}", "dense", "control", control.accuracy, 1.0, None))
    return found


def cuts_unmeasured(facts: Facts) -> bool:
    """Whether the record is older than the measurement right after a cut."""
    cuts = [cycle for cycle in facts.cycles if cycle.kept]
    return bool(cuts) and all(cycle.accuracy is None for cycle in cuts)


def stage_plot(facts: Facts, found: list[Stage]) -> Plot | None:
    """The accuracies one after another: down at a cut, up again by training."""
    if len(found) < 2:
        return None
    steps = [float(i) for i in range(len(found))]
    if found[-1].kind == "control":  # apart from the others, so that its label has room next to the one before
        steps[-1] = steps[-2] + max(1.0, APART * len(found))
    x = Axis(-0.8, steps[-1] + 0.6)
    y = linear((stage.accuracy for stage in found), least=1)
    places = [(x.place(step), y.place(stage.accuracy)) for step, stage in zip(steps, found, strict=True)]
    line = [place for place, stage in zip(places, found, strict=True) if stage.kind != "control"]
    marks = [
        Mark(place[0], round(100 - place[1], 2), stage.kind, f"{stage.label}: {stage.accuracy:.2f} %{_change(stage)}")
        for place, stage in zip(places, found, strict=True)
    ]
    cycles = [stage.short for stage in found if stage.kind == "weight"]
    shown = set(cycles[:: max(1, -(-len(cycles) // 5))])
    ticks = [
        Tick(place[0], stage.short)
        for place, stage in zip(places, found, strict=True)
        if stage.kind in ("warmup", "finetune", "control") or (stage.kind == "weight" and stage.short in shown)
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
