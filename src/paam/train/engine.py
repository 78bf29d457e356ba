"""Trains a network through the phases of a method, epoch by epoch.

The engine does not know methods or phases by name, nor graphs, files or terminals: it drives a Pruner as each phase
says, and emits events through ``emit``. paam.train.state saves and restores its whole state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paam.config.recipe import Recipe
from paam.config.schedule import learning_rate
from paam.config.settings import OptimizerSettings
from paam.data.batches import epoch_seed
from paam.errors import RecipeError
from paam.events import Epoch, Event
from paam.pruning.pruner import Pruner
from paam.pruning.select import Selection
from paam.train.cuda.capture import Step
from paam.train.divergence import LOSS_CHECK_EVERY, check_epoch, check_losses, check_scores, vanished_scales
from paam.train.ema import EMA
from paam.train.flat import RoundedWeights
from paam.train.losses import Losses
from paam.train.mid_epoch import MidEpochState, copies, differing, random_state
from paam.train.networks import Networks
from paam.train.optimizers import build_optimizer, set_learning_rate
from paam.train.phase import Phase, Place, check_phases, place_of
from paam.train.steps import make_step

Emit = Callable[[Event], None]
Evaluate = Callable[[nn.Module, str], float]
"""A network and the name of its phase (and of its gates, if not the phase's) -> accuracy in percent."""

NOT_OF_THE_DATA = 1 << 60
"""Offset between the seeds for a network's random numbers (dropout) and for its images."""


class Batches(Protocol):
    """Protocol of training batches: ``steps`` per epoch, images and labels on the network's device.

    ``start``: steps of the epoch to skip.
    """

    @property
    def steps(self) -> int: ...

    def epoch(self, epoch: int, start: int) -> Iterable[tuple[Tensor, Tensor]]: ...


class Engine:
    """Trains one network through its phases."""

    def __init__(
        self, pruner: Pruner, recipe: Recipe, phases: Sequence[Phase], batches: Batches, *, seed: int, emit: Emit
    ) -> None:
        self.pruner = pruner
        self.recipe = recipe
        self.phases = tuple(phases)
        check_phases(self.phases, recipe)
        self.batches = batches
        self.seed = seed
        self.emit = emit
        self.on_gpu = next(pruner.model.parameters()).is_cuda
        train = recipe.train
        bfloat16 = train.bfloat16 and self.on_gpu
        fused = train.fused and bfloat16 and not train.compile and find_spec("triton") is not None
        self.networks = Networks(pruner, masked=train.masked and self.on_gpu, bfloat16=bfloat16, fused=fused)
        self.losses = Losses(pruner, recipe, self.networks, self.phases)
        self.optimizers: dict[str, Optimizer] = {}
        self.steps: dict[str, Step] = {}
        self.emas: dict[str, EMA] = {}
        """By phase name, as the two above."""
        self.on_step: Callable[[int, int], None] = lambda step, steps: None
        self.stop: Callable[[], bool] = lambda: False
        """Called after every step; after returning True it must keep returning True."""
        self.mid_epoch: MidEpochState | None = None
        """Set if a stop left an epoch unfinished."""
        self.step = 0
        """The current step of the epoch, counted from 1; 0 outside of steps."""
        self.epoch = 0
        """The current epoch, counted from 0."""
        self.place: Place | None = None
        """Its position in the phases; None before the first."""
        self.evaluate: Evaluate | None = None
        """How accuracy is measured in the current epoch."""
        self._began: float | None = None
        """Loss of the first step of the phase, or of the first one since it was resumed."""
        if not any(phase.makes_dense for phase in self.phases):
            self.networks.remember_dense()

    def run_epoch(self, epoch: int, evaluate: Evaluate | None) -> bool:
        """Train one epoch and emit its event, with the accuracy in percent from ``evaluate``.

        False: stopped inside the epoch. :attr:`mid_epoch` has the position, and the next call continues.
        """
        self.epoch, self.place, self.evaluate = epoch, place_of(self.phases, epoch), evaluate
        phase = self.place.phase
        start = time.perf_counter()
        resumed, self.mid_epoch = self.mid_epoch, None
        if self.place.first:
            self._began = None
        if resumed is None:
            torch.manual_seed(epoch_seed(self.seed, epoch) + NOT_OF_THE_DATA)
            if self.place.first:
                self._enter(self.place)
        else:
            start -= resumed.seconds
        model = self.networks.of(phase)
        optimizer = self.optimizer(phase)
        rounded = self.networks.rounded(phase)
        losses = [] if resumed is None else list(resumed.losses)
        with self._mode(phase):
            model.train()
            if resumed is not None:
                resumed.restore(model)
            finished = self._train(optimizer, rounded, self.place, losses)
            inside = {} if finished else copies(model)
        self._began = float(losses[0]) if self._began is None else self._began
        trained = (*self.networks.trained(phase).blocks, *model.buffers())
        check_epoch(losses, trained, phase, epoch, self._began)
        if phase.trains == "scorers":
            check_scores(self.pruner.scores(), epoch)
        if not finished:
            spent = time.perf_counter() - start
            self.mid_epoch = MidEpochState(losses, random_state(model), differing(inside, model), spent)
            return False
        ema = self.ema(phase)
        with nullcontext() if ema is None else ema.in_place():
            accuracy = self.measure()
        if ema is not None and self.place.last:
            ema.apply()
            del self.emas[phase.name], self.steps[phase.name]  # the step updates that EMA
        if phase.after_epoch is not None:
            phase.after_epoch(self)
        if self.place.last and phase.leave is not None:
            phase.leave(self)
        self._emit_epoch(phase, losses, accuracy, time.perf_counter() - start)
        if self.place.last:
            self._leave(self.place)
        return True

    def measure(self) -> float | None:
        """Accuracy in percent of the current phase's network, with the current gates; None if nothing measures it."""
        assert self.place is not None
        if self.evaluate is None:
            return None
        phase, mode = self.place.phase, self.pruner.gate_mode
        own = self.networks.of(phase) is not self.pruner.model or mode == phase.gates
        return self.evaluate(self.networks.fast(phase), phase.name if own else f"{phase.name}, {mode} gates")

    def where(self) -> str:
        """How far training is, for a message."""
        if self.place is None:
            return "before the first epoch"
        place = f"epoch {self.epoch + 1} ({self.place.phase.name} phase)"
        return f"in step {self.step} of {place}" if self.step else f"in {place}, between steps"

    def selected(self) -> Selection:
        """The final selection."""
        if self.pruner.selection is None:
            raise RecipeError(f"The method '{self.recipe.prune.method}' made no selection in any of its phases.")
        return self.pruner.selection

    def result(self) -> nn.Module:
        """The current small network."""
        self.selected()
        return self.pruner.compact() if self.networks.small is None else self.networks.small

    def names_from(self, number: int) -> set[str]:
        """Names of the ``number``-th phase and all later ones."""
        return {phase.name for phase in self.phases[number:]}

    def optimizer(self, phase: Phase) -> Optimizer:
        if phase.name not in self.optimizers:
            settings, trained = self._settings(phase), self.networks.trained(phase)
            self.optimizers[phase.name] = build_optimizer(settings, self._initial_rate(phase), trained)
        return self.optimizers[phase.name]

    def ema(self, phase: Phase) -> EMA | None:
        decay = self._settings(phase).average
        if decay and phase.name not in self.emas:
            self.emas[phase.name] = EMA(self.networks.trained(phase), self.networks.of(phase), decay)
        return self.emas.get(phase.name)

    def _enter(self, place: Place) -> None:
        """Set up a phase, once at its start."""
        phase = place.phase
        self.networks.make(phase)
        if phase.enter is not None:
            phase.enter(self)
        self.losses.forget_before(place.number)
        over = [name for name in self.steps if name not in self.names_from(place.number)]
        for name in [*over, *([phase.name] if self._settings(phase).reset else [])]:
            self.optimizers.pop(name, None)
            self.steps.pop(name, None)  # a captured step holds GPU memory

    def _leave(self, place: Place) -> None:
        if place.phase.makes_dense:
            self.networks.remember_dense()
            if (event := vanished_scales(self.networks.of(place.phase), self.epoch)) is not None:
                self.emit(event)
        if place.phase.network == "small" and not any(p.network == "small" for p in self.phases[place.number + 1 :]):
            self.networks.cut_out()

    def _emit_epoch(self, phase: Phase, losses: list[Tensor], accuracy: float | None, seconds: float) -> None:
        chosen = None if phase.gates == "open" else self.pruner.selection
        self.emit(
            Epoch(
                epoch=self.epoch,
                phase=phase.name,
                cycle=phase.cycle,
                loss=float(torch.stack(losses).mean()),
                lr=self._rate(len(losses) - 1),
                accuracy=accuracy,
                kept_params=1.0 if chosen is None else chosen.kept_params,
                kept_macs=1.0 if chosen is None else chosen.kept_macs,
                seconds=seconds,
                role=phase.role,
                label=phase.label,
            )
        )

    def _mode(self, phase: Phase) -> AbstractContextManager[None]:
        if self.networks.of(phase) is not self.pruner.model:
            return nullcontext()
        return {"open": self.pruner.dense, "analog": self.pruner.scoring, "binary": self.pruner.weighting}[
            phase.gates
        ]()

    def _settings(self, phase: Phase) -> OptimizerSettings:
        settings: OptimizerSettings = getattr(self.recipe, phase.settings)
        return settings

    def _initial_rate(self, phase: Phase) -> float:
        lr = self._settings(phase).lr
        return self.pruner.score_lr if lr is None else lr

    def _rate(self, step: int) -> float:
        """The learning rate of a step of the current epoch, counted from 0."""
        assert self.place is not None
        phase, epochs = self.place.phase, self.place.index + step / self.batches.steps
        settings = self._settings(phase)
        return learning_rate(self._initial_rate(phase), settings.decay, settings.ramp, epochs, phase.epochs)

    def _train(self, optimizer: Optimizer, rounded: RoundedWeights | None, place: Place, losses: list[Tensor]) -> bool:
        """Continue after the steps whose losses are given, and append to them; False if asked to stop."""
        phase, scores = place.phase, place.phase.trains == "scorers"
        if phase.name not in self.steps:
            self.steps[phase.name] = make_step(
                self.losses.of(phase, self.batches.steps),
                optimizer,
                self.networks.trained(phase),
                None if scores else rounded,
                self.ema(phase),
                capture=self.on_gpu and self.recipe.train.capture,
            )
        take_step = self.steps[phase.name]
        stopped = False
        with nullcontext() if rounded is None else rounded.in_place(trained=not scores):
            self.step = len(losses) + 1
            for images, labels in self.batches.epoch(self.epoch, len(losses)):
                set_learning_rate(optimizer, self._rate(len(losses)))
                losses.append(take_step(images, labels))
                if phase.after_step is not None:
                    phase.after_step(self)
                self.step = len(losses) + 1
                if len(losses) % LOSS_CHECK_EVERY == 0:
                    check_losses(losses, phase, self.epoch)
                self.on_step(len(losses), self.batches.steps)
                if stopped := self.stop():
                    break
        self.step = 0
        check_losses(losses, phase, self.epoch)
        return not stopped
