"""The request for a run, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from paam.config.recipe import Recipe
from paam.events import Event
from paam.methods import phases_of
from paam.train.phase import Phase, place_of, total_epochs


@dataclass(frozen=True)
class Listener:
    """Callbacks of a run: for every event, for each step (step, steps), and to stop it after a step."""

    event: Callable[[Event], None] = lambda event: None
    step: Callable[[int, int], None] = lambda step, steps: None
    stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Job:
    """A recipe, its run directory, and how to start the run. ``command``: the command line that reproduces it."""

    recipe: Recipe
    out: Path
    seed: int
    device: str
    resume: bool = False
    overwrite: bool = False
    accept_changed_data: bool = False
    command: str = ""
    listener: Listener = field(default_factory=Listener)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        return phases_of(self.recipe)

    @property
    def epochs(self) -> int:
        return total_epochs(self.phases)

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def checkpoint_due(self, following: int) -> bool:
        """Whether a checkpoint is due before the ``following`` epoch."""
        ends_phase = following == self.epochs or place_of(self.phases, following).first
        return ends_phase or following % self.recipe.train.checkpoint_every == 0
