"""Soft filter pruning (He et al., IJCAI 2018): after every epoch the filters to remove are set to zero.

They are trained like all others, so they may recover; the selection after the last epoch is final.
"""

from __future__ import annotations

import dataclasses

from paam.config.recipe import Recipe
from paam.methods.base import Method, register_method
from paam.methods.parts import needs_no_score_epochs, pipeline, target_of
from paam.pruning.criteria import L2
from paam.train.engine import Engine
from paam.train.events import selection_event
from paam.train.phase import Phase


def phases(recipe: Recipe) -> tuple[Phase, ...]:
    soft = Phase(
        "soft",
        recipe.schedule.weight,
        "weight",
        taught=True,
        label="soft pruning",
        after_epoch=set_to_zero,
        leave=emit_selection,
    )
    cycles = (dataclasses.replace(soft, cycle=cycle + 1) for cycle in range(recipe.schedule.cycles))
    return pipeline(recipe, *cycles)


def set_to_zero(engine: Engine) -> None:
    """Select by l2 norms and zero the other filters in convolutions and linear layers; norms are unchanged."""
    engine.pruner.select(criterion=L2, **target_of(engine))
    engine.pruner.zero_closed_filters()


def emit_selection(engine: Engine) -> None:
    """Say what stays, and what the cut costs."""
    assert engine.place is not None
    with engine.pruner.weighting():
        accuracy = engine.measure()
    engine.emit(selection_event(engine.selected(), engine.epoch, engine.place.phase.cycle, accuracy))


register_method(Method("sfp", label=lambda recipe: "SFP", phases=phases, check=needs_no_score_epochs))
