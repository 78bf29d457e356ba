"""The schedule: epochs per phase, and the learning rate within a phase.

warm-up -> cycles of [score, weight] -> fine-tune of the small network -> (optional) the dense control. Methods turn
these lengths into phases (paam.methods).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from paam.config.schema import InvalidError, Range, check
from paam.errors import RecipeError

LONGEST = 10**6
"""Maximum epochs of a whole schedule."""


@dataclass(frozen=True)
class Schedule:
    """Lengths in epochs. ``control``: also train the dense network for as long, as a fair baseline."""

    warmup: Annotated[int, Range(0, LONGEST)] = 50
    cycles: Annotated[int, Range(1, LONGEST)] = 10
    score: Annotated[int, Range(0, LONGEST)] = 3
    weight: Annotated[int, Range(1, LONGEST)] = 6
    finetune: Annotated[int, Range(0, LONGEST)] = 300
    control: bool = False

    def __post_init__(self) -> None:
        try:
            check(self, "schedule")
        except InvalidError as error:
            raise RecipeError(f"Invalid schedule: {error}") from error
        if self.total > LONGEST:
            raise RecipeError(f"The schedule has {self.total:,} epochs in all; the maximum is {LONGEST:,}.")

    @property
    def alternation(self) -> int:
        return self.cycles * (self.score + self.weight)

    @property
    def total(self) -> int:
        return self.warmup + (self.alternation + self.finetune) * (2 if self.control else 1)


DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "step": lambda progress: 0.1 ** ((progress >= 0.5) + (progress >= 0.75)),
}
"""Factor on the initial learning rate at a progress from 0 to 1 through the phase."""


def learning_rate(initial: float, decay: str, ramp: int, epochs: float, length: int) -> float:
    """The learning rate at an epoch of a phase of ``length`` epochs, with linear warm-up over the first ``ramp``."""
    if epochs < ramp:
        return initial * max(epochs, 1e-3) / ramp
    return initial * DECAYS[decay]((epochs - ramp) / max(length - ramp, 1))
