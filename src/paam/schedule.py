"""The schedule: which phase an epoch belongs to, and the learning rate at a point of it. Pure functions, no state.

warm-up -> cycles of [score, weight] -> fine-tune of the small network -> (optional) the dense control
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from paam.errors import RecipeError

PhaseName = Literal["warmup", "score", "weight", "finetune", "control"]
BEFORE_FINETUNE: tuple[PhaseName, ...] = ("warmup", "score", "weight")


def is_over(earlier: PhaseName, phase: PhaseName) -> bool:
    """Whether none of an earlier phase's epochs follows, once another phase has begun."""
    return earlier != phase and (earlier == "warmup" or phase not in BEFORE_FINETUNE)


def section_of(phase: PhaseName) -> PhaseName:
    """The recipe's section for a phase: the dense control is trained as the small network is."""
    return "finetune" if phase == "control" else phase


LONGEST = 10**6
"""Epochs of a whole schedule."""
LENGTHS = {
    "warmup": (0, LONGEST),
    "cycles": (1, LONGEST),
    "score": (0, LONGEST),
    "weight": (1, LONGEST),
    "finetune": (0, LONGEST),
}


@dataclass(frozen=True)
class Schedule:
    """Lengths in epochs. ``control``: also train the dense warm-up network on for as long, as the fair comparison."""

    warmup: int = 50
    cycles: int = 10
    score: int = 3
    weight: int = 6
    finetune: int = 300
    control: bool = False

    def __post_init__(self) -> None:
        for name, (least, most) in LENGTHS.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise RecipeError(f"schedule.{name} is a whole number from {least} to {most}; {value} was given.")
        if self.total > LONGEST:
            raise RecipeError(f"The schedule has {self.total:,} epochs in all; at most {LONGEST:,} make a run.")

    @property
    def alternation(self) -> int:
        return self.cycles * (self.score + self.weight)

    @property
    def total(self) -> int:
        return self.warmup + (self.alternation + self.finetune) * (2 if self.control else 1)


@dataclass(frozen=True)
class Phase:
    """Where an epoch stands: the ``index``-th of ``length`` epochs of this phase; cycles count from 1, 0 is outside."""

    name: PhaseName
    cycle: int
    index: int
    length: int

    @property
    def first(self) -> bool:
        return self.index == 0


def phase_at(schedule: Schedule, epoch: int) -> Phase:
    """The phase of an epoch, 0 <= epoch < schedule.total."""
    if not 0 <= epoch < schedule.total:
        raise ValueError(f"epoch {epoch} is outside of the schedule of {schedule.total} epochs")
    if epoch < schedule.warmup:
        return Phase("warmup", 0, epoch, schedule.warmup)
    epoch -= schedule.warmup
    if epoch < schedule.alternation:
        cycle, inside = divmod(epoch, schedule.score + schedule.weight)
        if inside < schedule.score:
            return Phase("score", cycle + 1, inside, schedule.score)
        return Phase("weight", cycle + 1, inside - schedule.score, schedule.weight)
    epoch -= schedule.alternation
    if epoch < schedule.finetune:
        return Phase("finetune", 0, epoch, schedule.finetune)
    return Phase("control", 0, epoch - schedule.finetune, schedule.alternation + schedule.finetune)


DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "step": lambda progress: 0.1 ** ((progress >= 0.5) + (progress >= 0.75)),
}
"""Share of the initial learning rate at a progress from 0 to 1 through the phase."""


def learning_rate(initial: float, decay: str, ramp: int, phase: Phase, done: float) -> float:
    """The rate after ``done`` (0 to 1) of the current epoch; it rises linearly over the first ``ramp`` epochs."""
    epochs = phase.index + done
    if epochs < ramp:
        return initial * max(epochs, 1e-3) / ramp
    return initial * DECAYS[decay]((epochs - ramp) / max(phase.length - ramp, 1))
