"""Building blocks of methods: phases that most of them share, and hooks that select."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from typing import Any

from torch import Tensor

from paam.config.recipe import Recipe
from paam.errors import RecipeError
from paam.pruning.criterion import Criterion
from paam.train.engine import Engine
from paam.train.events import selection_event
from paam.train.phase import Hook, Phase

CALIBRATION = 640
"""Training images for a criterion that reads feature maps, as many as in the HRank paper."""


def pipeline(recipe: Recipe, *between: Phase) -> tuple[Phase, ...]:
    """Warm-up of the dense network, the method's own phases, fine-tune of the small network, and the dense control."""
    schedule = recipe.schedule
    trained_on = sum(phase.epochs for phase in between) + schedule.finetune
    phases = [
        Phase("warmup", schedule.warmup, "warmup", makes_dense=True),
        *between,
        Phase("finetune", schedule.finetune, "finetune", network="small", gates="binary", taught=True),
        Phase("control", trained_on * schedule.control, "finetune", network="control", taught=True),
    ]
    return tuple(phase for phase in phases if phase.epochs)


def weight_cycles(recipe: Recipe, criterion: Criterion) -> tuple[Phase, ...]:
    """Cycles of weight phases, each with a selection by a criterion at its start."""
    weight = Phase("weight", recipe.schedule.weight, "weight", gates="binary", taught=True, enter=cut_by(criterion))
    return pipeline(recipe, *(dataclasses.replace(weight, cycle=cycle + 1) for cycle in range(recipe.schedule.cycles)))


def cut_by(criterion: Criterion | None = None) -> Hook:
    """Select by a criterion or by the learned scores, and emit the accuracy before the weights adapt."""

    def cut(engine: Engine) -> None:
        assert engine.place is not None
        batches = calibration(engine) if criterion is not None and criterion.reads == "maps" else None
        selection = engine.pruner.select(criterion=criterion, batches=batches, seed=engine.seed, **target_of(engine))
        with engine.pruner.weighting():
            accuracy = engine.measure()
        engine.emit(selection_event(selection, engine.epoch, engine.place.phase.cycle, accuracy))

    return cut


def target_of(engine: Engine) -> dict[str, Any]:
    return asdict(engine.recipe.target)


def calibration(engine: Engine) -> list[Tensor]:
    """Training images, augmented as in the current epoch: a pure function of seed and epoch."""
    batches: list[Tensor] = []
    images = 0
    for inputs, _ in engine.batches.epoch(engine.epoch, 0):
        batches.append(inputs[: CALIBRATION - images])
        images += len(batches[-1])
        if images >= CALIBRATION:
            break
    return batches


def needs_no_score_epochs(recipe: Recipe) -> None:
    if recipe.schedule.score:
        raise RecipeError(f"The method '{recipe.prune.method}' does not learn scores: set schedule.score to 0.")


def needs_score_epochs(recipe: Recipe) -> None:
    if not recipe.schedule.score:
        raise RecipeError(
            f"The method '{recipe.prune.method}' learns in score phases: set schedule.score to 1 or more, or use a"
            " method without learned scores, such as l1."
        )
