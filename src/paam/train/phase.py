"""A phase: a stretch of epochs that are trained alike. Of a method, the engine knows its phases and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from paam.config.recipe import Recipe
from paam.config.settings import OptimizerSettings
from paam.errors import RecipeError
from paam.pruning.gates import Mode

if TYPE_CHECKING:
    from paam.pruning.pruner import Pruner
    from paam.train.engine import Engine

Hook = Callable[["Engine"], None]
"""What a method does at a point of a phase: select, emit events, change weights of ``engine.pruner``.

A run may be resumed at any epoch: what a hook remembers must follow from the pruner's state, and what it does must be
to that state and the record. Then each call counts once, wherever a run is stopped or killed: a checkpoint holds the
state either before a call or after it. ``enter`` and the first step belong to one epoch, ``after_epoch`` and ``leave``
to the epoch that they end. A stop inside of an epoch saves what ``enter`` did, and it is not called again; a run that
is killed goes on from its last checkpoint, with the record cut back to it, and the calls since then are repeated on
the state of before. Random numbers that a hook draws from torch's generators are the same again.
"""

ExtraLoss = Callable[["Pruner", Tensor, Tensor, Tensor], Tensor]
"""Pruner, images, labels (or shares of classes) and logits of a step -> what is added to the loss, with its gradient.

Called in every step on a CPU. On a GPU it is recorded once with the rest of the step and replayed: it must be made of
tensor operations of fixed shapes, without a look at their values, and all that changes between steps must be tensors
that keep their memory. It is called as the network is, under autocast and with the phase's gates set, so that it may
run ``pruner.model`` again; that is the network that is trained in phases of the "gated" one.
"""


@dataclass(frozen=True)
class Phase:
    """``name``: as records and reports have it; phases of one name share an optimiser, its state and captured steps.

    settings     section of the recipe with the optimiser's settings
    network      what is trained: the "gated" network; the "small" one, cut out of it at the first such phase; or the
                 dense "control", which goes on from the weights that ``makes_dense`` left
    gates        of the gated network: "open" (no gate), "analog" (scores), "binary" (the current selection)
    trains       the "network", or the "scorers", the network frozen
    cycle        counted from 1; 0 outside of cycles
    taught       drawn to the teacher, if the recipe has one
    makes_dense  what it leaves is the dense network: teacher, control and dense.safetensors begin with it
    extra_loss   added to the cross-entropy, behind what a teacher makes of it
    enter        called before the first epoch
    after_step   called after every step of the optimiser, with the phase's gates and modes set; it must not change
                 weights, of which a GPU may train rounded copies
    after_epoch  called after every epoch, before its event is emitted
    leave        called once, after the last epoch's ``after_epoch``, before its event is emitted
    """

    name: str
    epochs: int
    settings: str
    network: Literal["gated", "small", "control"] = "gated"
    gates: Mode = "open"
    trains: Literal["network", "scorers"] = "network"
    cycle: int = 0
    taught: bool = False
    makes_dense: bool = False
    extra_loss: ExtraLoss | None = None
    enter: Hook | None = None
    after_step: Hook | None = None
    after_epoch: Hook | None = None
    leave: Hook | None = None


@dataclass(frozen=True)
class Place:
    """Where an epoch stands: the ``index``-th of ``phase``'s epochs, which is ``number``-th of all phases."""

    number: int
    phase: Phase
    index: int

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.phase.epochs - 1


def check_phases(phases: Sequence[Phase], recipe: Recipe) -> None:
    """Refuse phases that a run could not go through: a method's mistake, said before any training."""
    first: dict[str, Phase] = {}
    small: Phase | None = None
    for phase in phases:
        if not isinstance(getattr(recipe, phase.settings, None), OptimizerSettings):
            raise RecipeError(f"The phase '{phase.name}' has settings '{phase.settings}', which no recipe has.")
        known = first.setdefault(phase.name, phase)
        for what in ("settings", "network", "gates", "trains", "taught", "extra_loss"):
            if getattr(known, what) != getattr(phase, what):
                raise RecipeError(f"Two phases are called '{phase.name}', but differ in {what}; name them apart.")
        if phase.network == "gated" and small is not None:
            raise RecipeError(f"The phase '{phase.name}' trains the gated network after '{small.name}' has cut it.")
        small = phase if phase.network == "small" else small


def place_of(phases: Sequence[Phase], epoch: int) -> Place:
    """The place of an epoch, 0 <= epoch < total_epochs(phases): a pure function, so that one number tells where."""
    rest = epoch
    for number, phase in enumerate(phases):
        if 0 <= rest < phase.epochs:
            return Place(number, phase, rest)
        rest -= phase.epochs
    raise ValueError(f"epoch {epoch} is outside of the {total_epochs(phases)} epochs of all phases")


def total_epochs(phases: Sequence[Phase]) -> int:
    return sum(phase.epochs for phase in phases)
