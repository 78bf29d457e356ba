"""The losses of a run's phases: phases with the same computation share one, which may be compiled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from paam.config.recipe import Recipe
from paam.pruning.pruner import Pruner
from paam.train.networks import Networks
from paam.train.phase import ExtraLoss, Phase
from paam.train.steps import Loss, compiled, make_loss

Key = tuple[str, str, str, bool, ExtraLoss | None]


class Losses:
    """Built lazily, and dropped with their teachers when no later phase needs them."""

    def __init__(self, pruner: Pruner, recipe: Recipe, networks: Networks, phases: Sequence[Phase]) -> None:
        self.pruner, self.recipe, self.networks, self.phases = pruner, recipe, networks, phases
        self._made: dict[Key, Loss] = {}

    def of(self, phase: Phase, steps: int) -> Loss:
        """``steps``: per epoch."""
        key = self._key(phase)
        if key not in self._made:
            fused = self.networks.is_fused(phase)
            taught = phase.taught and self.recipe.distill.weight > 0
            loss_of = make_loss(
                self.networks.fast(phase),
                bfloat16=self.networks.bfloat16,
                extra=None if phase.extra_loss is None else partial(phase.extra_loss, self.pruner),
                teacher=self.networks.teacher(fused=fused) if taught else None,
                distill=self.recipe.distill,
                concurrent=fused,
            )
            if self.networks.on_gpu and not fused:
                epochs = sum(other.epochs for other in self.phases if self._key(other) == key)
                loss_of = compiled(loss_of, self.recipe.train, epochs * steps)
            self._made[key] = loss_of
        return self._made[key]

    def forget_before(self, number: int) -> None:
        """Drop the losses that only phases before the ``number``-th need."""
        needed = {self._key(phase) for phase in self.phases[number:]}
        self._made = {key: loss for key, loss in self._made.items() if key in needed}

    def _key(self, phase: Phase) -> Key:
        return self.networks.kind(phase), phase.gates, phase.trains, phase.taught, phase.extra_loss
