"""Pruning by active attention manipulation: score and weight phases alternate, and an attention network learns scores.

Score phases train the attention networks alone, their scores multiplying the feature maps, under an l1 penalty; weight
phases train the network alone, cut by a threshold on the scores, or to a budget.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from paam.config.recipe import Recipe
from paam.errors import RecipeError
from paam.methods.base import Method, register_method
from paam.methods.parts import cut_by, needs_score_epochs, pipeline
from paam.pruning.pruner import Pruner
from paam.pruning.scorers import MakeScorer, scorer_of
from paam.train.engine import Engine
from paam.train.events import scores_event
from paam.train.phase import Phase

LABELS = {"kq": "KQ", "vanilla": "Vanilla"}


def phases(recipe: Recipe) -> tuple[Phase, ...]:
    schedule, between = recipe.schedule, []
    score = Phase(
        "score", schedule.score, "score", gates="analog", trains="scorers", extra_loss=penalty, leave=emit_scores
    )
    weight = Phase("weight", schedule.weight, "weight", gates="binary", taught=True, enter=cut_by())
    for cycle in range(1, schedule.cycles + 1):
        between += [dataclasses.replace(score, cycle=cycle), dataclasses.replace(weight, cycle=cycle)]
    return pipeline(recipe, *between)


def penalty(pruner: Pruner, images: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
    """The l1 norm of the scores, weighted."""
    return pruner.penalty()


def emit_scores(engine: Engine) -> None:
    """Emit the scores at the end of a score phase."""
    assert engine.place is not None
    engine.emit(scores_event(engine.pruner.scores(), engine.epoch, engine.place.phase.cycle))


def check(recipe: Recipe) -> None:
    needs_score_epochs(recipe)
    if recipe.prune.scorer == "free":
        raise RecipeError("prune.scorer: free logits are a separate method; set prune.method to 'free'.")


def scorer(recipe: Recipe) -> MakeScorer:
    return scorer_of(recipe.prune.scorer, **recipe.prune.options)


register_method(
    Method(
        "paam",
        label=lambda recipe: f"PAAM ({LABELS.get(recipe.prune.scorer, recipe.prune.scorer)})",
        phases=phases,
        scorer=scorer,
        check=check,
    )
)
