"""A phase: consecutive epochs with the same training. The engine knows a method only by its phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from paam.config.recipe import Recipe
from paam.config.settings import OptimizerSettings
from paam.errors import RecipeError
from paam.events import Role
from paam.pruning.gates import Mode

if TYPE_CHECKING:
    from paam.pruning.pruner import Pruner
    from paam.train.engine import Engine

Hook = Callable[["Engine"], None]
"""A method's action at a point of a phase: select, emit events, change weights of ``engine.pruner``.

A run may be resumed at any epoch, so a hook must not keep state that the pruner's state does not determine, and must
change nothing but that state and the record. Then each call counts once, however often a run is stopped or killed: a
checkpoint holds the state before a call or after it. ``enter`` and the first step belong to one epoch, ``after_epoch``
and ``leave`` to the epoch that they end. A stop inside an epoch saves the effect of ``enter``, which is not repeated;
a killed run resumes from its last checkpoint, with the record cut back to it, and repeats the calls since then on the
state before them. Random numbers drawn from torch's generators are the same again.
"""

ExtraLoss = Callable[["Pruner", Tensor, Tensor, Tensor], Tensor]
"""Pruner, images, labels (or soft labels) and logits of a step -> a term to add to the loss.

On a CPU it is called in every step. On a GPU it is captured with the rest of the step and replayed: it must consist of
tensor operations of fixed shapes that do not read values, and what changes between steps must be a tensor that keeps
its memory. The phase's gates are set, and autocast is off: to run ``pruner.model`` again, which phases of the "gated"
network train, turn it on as the engine does.
"""


@dataclass(frozen=True)
class Phase:
    """``name``: for records and reports; phases with the same name share an optimiser, its state and captured steps.

    settings     section of the recipe with the optimiser's settings
    network      what is trained: the "gated" network; the "small" one, cut out of it at the first such phase; or the
                 dense "control", which continues from the weights of the ``makes_dense`` phase
    gates        of the gated network: "open" (no gate), "analog" (scores), "binary" (the current selection)
    trains       the "network", or the "scorers", the network frozen; the penalty on scores is an ``extra_loss``
    cycle        counted from 1; 0 outside of cycles
    taught       with distillation, if the recipe has a teacher
    makes_dense  its result is the dense network, from which teacher, control and dense.safetensors are made
    label        what the phase does, in words, as views show it; if empty they describe its role
    extra_loss   added to the cross-entropy (and to the distillation, if there is a teacher)
    enter        called before the first epoch
    after_step   called after every optimiser step, with the phase's gates and modes set; it must not change
                 weights, since a GPU may train rounded copies
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
    label: str = ""
    extra_loss: ExtraLoss | None = None
    enter: Hook | None = None
    after_step: Hook | None = None
    after_epoch: Hook | None = None
    leave: Hook | None = None

    @property
    def role(self) -> Role:
        """What the phase does, for those who know no method."""
        if self.network != "gated":
            return "finetune" if self.network == "small" else "control"
        if self.makes_dense:
            return "warmup"
        return "score" if self.trains == "scorers" else "weight"


@dataclass(frozen=True)
class Place:
    """Position of an epoch: the ``index``-th epoch of ``phase``, the ``number``-th of all phases."""

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
    """Refuse invalid phases before any training: an error in a method."""
    first: dict[str, Phase] = {}
    small: Phase | None = None
    for phase in phases:
        if not isinstance(getattr(recipe, phase.settings, None), OptimizerSettings):
            raise RecipeError(f"The phase '{phase.name}' has settings '{phase.settings}', which no recipe has.")
        known = first.setdefault(phase.name, phase)
        for what in ("settings", "network", "gates", "trains", "taught", "extra_loss"):
            if getattr(known, what) != getattr(phase, what):
                cure = "use one function for all of them" if what == "extra_loss" else "rename one"
                raise RecipeError(f"Two phases are called '{phase.name}', but differ in {what}; {cure}.")
        if phase.network == "gated" and small is not None:
            raise RecipeError(f"The phase '{phase.name}' trains the gated network after '{small.name}' compacted it.")
        small = phase if phase.network == "small" else small


def place_of(phases: Sequence[Phase], epoch: int) -> Place:
    """The position of an epoch, 0 <= epoch < total_epochs(phases): a pure function of one number."""
    rest = epoch
    for number, phase in enumerate(phases):
        if 0 <= rest < phase.epochs:
            return Place(number, phase, rest)
        rest -= phase.epochs
    raise ValueError(f"epoch {epoch} is outside of the {total_epochs(phases)} epochs of all phases")


def total_epochs(phases: Sequence[Phase]) -> int:
    return sum(phase.epochs for phase in phases)
