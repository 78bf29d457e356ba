"""The phases of a schedule, epoch by epoch: warm-up, [score, weight] cycles, fine-tune, dense control.

The engine knows nothing of graphs, files or terminals: it drives a Pruner and says what happened through ``emit``.
paam.train.state hands out and takes back its whole state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paam.pruner import Pruner
from paam.recipe import Recipe
from paam.schedule import Phase, PhaseName, is_over, learning_rate, phase_at, section_of
from paam.settings import OptimizerSettings
from paam.train.average import Average
from paam.train.batches import epoch_seed
from paam.train.capture import Step
from paam.train.divergence import LOSS_CHECK_EVERY, check_epoch, check_losses, check_scores, vanished_scales
from paam.train.events import scores_event, selection_event
from paam.train.flat import RoundedWeights
from paam.train.networks import Networks
from paam.train.optimizers import build_optimizer, set_learning_rate
from paam.train.pause import Pause, copies, differing, random_state
from paam.train.steps import Loss, compiled, make_loss, make_step

Emit = Callable[[dict[str, Any]], None]
Evaluate = Callable[[nn.Module, PhaseName], float]
"""A network and the phase that it is in -> its accuracy in percent."""

NOT_OF_THE_DATA = 1 << 60
"""Between the seeds of a network's own random numbers (dropout) and those of its images."""


class Batches(Protocol):
    """Training batches of any origin: ``steps`` per epoch, images and labels on the network's device.

    ``start``: steps of the epoch that are done already.
    """

    @property
    def steps(self) -> int: ...

    def epoch(self, epoch: int, start: int) -> Iterable[tuple[Tensor, Tensor]]: ...


class Engine:
    """Trains one network through its schedule."""

    def __init__(self, pruner: Pruner, recipe: Recipe, batches: Batches, *, seed: int, emit: Emit) -> None:
        self.pruner = pruner
        self.recipe = recipe
        self.batches = batches
        self.seed = seed
        self.emit = emit
        self.on_gpu = next(pruner.model.parameters()).is_cuda
        train = recipe.train
        bfloat16 = train.bfloat16 and self.on_gpu
        fused = train.fused and bfloat16 and not train.compile and find_spec("triton") is not None
        self.networks = Networks(pruner, masked=train.masked and self.on_gpu, bfloat16=bfloat16, fused=fused)
        self.losses: dict[str, Loss] = {}
        self.optimizers: dict[PhaseName, Optimizer] = {}
        self.steps: dict[PhaseName, Step] = {}
        self.averages: dict[PhaseName, Average] = {}
        self.on_step: Callable[[int, int], None] = lambda step, steps: None
        self.stop: Callable[[], bool] = lambda: False
        """Asked after every step; once it says yes it must go on doing so."""
        self.pause: Pause | None = None
        """Set when a stop left an epoch unfinished."""
        if recipe.schedule.warmup == 0:
            self.networks.remember_dense()

    def run_epoch(self, epoch: int, evaluate: Evaluate | None) -> bool:
        """Train one epoch and emit its event, with the accuracy in percent that ``evaluate`` finds.

        False: stopped inside of it. :attr:`pause` says where, and the next call goes on.
        """
        phase = phase_at(self.recipe.schedule, epoch)
        start = time.perf_counter()
        pause, self.pause = self.pause, None
        if pause is None:
            torch.manual_seed(epoch_seed(self.seed, epoch) + NOT_OF_THE_DATA)
            if phase.first:
                self._enter(phase, epoch, evaluate)
        else:
            start -= pause.seconds
        model = self.networks.of(phase.name)
        optimizer = self.optimizer(phase.name)
        rounded = self.networks.rounded(phase.name)
        losses = [] if pause is None else list(pause.losses)
        with self._mode(phase.name):
            model.train()
            if pause is not None:
                pause.take_up(model)
            finished = self._train(optimizer, rounded, phase, epoch, losses)
            inside = {} if finished else copies(model)
        check_epoch(losses, (*self.networks.trained(phase.name).blocks, *model.buffers()), phase.name, epoch)
        if phase.name == "score":
            check_scores(self.pruner.scores(), epoch)
        if not finished:
            spent = time.perf_counter() - start
            self.pause = Pause(losses, random_state(model), differing(inside, model), spent)
            return False
        average = self.average(phase.name)
        with nullcontext() if average is None else average.in_place():
            accuracy = None if evaluate is None else evaluate(self.networks.quick(phase.name), phase.name)
        last = phase.index == phase.length - 1
        if average is not None and last:
            average.settle()
            del self.averages[phase.name]
        if phase.name == "score" and last:
            self.emit(scores_event(self.pruner.scores(), epoch, phase.cycle))
        chosen = self.pruner.selection if phase.name not in ("warmup", "control") else None
        self.emit(
            {
                "event": "epoch",
                "epoch": epoch,
                "phase": phase.name,
                "cycle": phase.cycle,
                "loss": float(torch.stack(losses).mean()),
                "lr": self._rate(phase, len(losses) - 1),
                "accuracy": accuracy,
                "kept_params": 1.0 if chosen is None else chosen.kept_params,
                "kept_macs": 1.0 if chosen is None else chosen.kept_macs,
                "seconds": time.perf_counter() - start,
            }
        )
        if phase.name == "warmup" and last:
            self.networks.remember_dense()
            if (event := vanished_scales(model, epoch)) is not None:
                self.emit(event)
        elif phase.name == "finetune" and last and self.networks.small is None:
            self.networks.small = self.pruner.compact()
        return True

    def result(self) -> nn.Module:
        """The small network as it is now."""
        return self.pruner.compact() if self.networks.small is None else self.networks.small

    def _enter(self, phase: Phase, epoch: int, evaluate: Evaluate | None) -> None:
        """What happens once, at the start of a phase."""
        if phase.name == "weight":
            selection = self.pruner.select(**asdict(self.recipe.target))
            with self.pruner.weighting():
                accuracy = None if evaluate is None else evaluate(self.networks.quick("weight"), "weight")
            self.emit(selection_event(selection, epoch, phase.cycle, accuracy))
        elif phase.name == "finetune" and not self.networks.masked:
            self.networks.small = self.pruner.compact()
            self.losses.clear()  # and their teachers: another network is trained from here on
        elif phase.name == "control":
            self.networks.control = self.networks.dense()
            self.losses.clear()
        over = [name for name in self.steps if is_over(name, phase.name)]
        for name in [*over, *([phase.name] if self._settings(phase.name).reset else [])]:
            self.optimizers.pop(name, None)
            self.steps.pop(name, None)  # a captured step holds a GPU's memory

    def _mode(self, phase: PhaseName) -> AbstractContextManager[None]:
        if phase == "warmup":
            return self.pruner.dense()
        if phase == "score":
            return self.pruner.scoring()
        gated = self.networks.of(phase) is self.pruner.model
        return self.pruner.weighting() if gated else nullcontext()

    def _settings(self, phase: PhaseName) -> OptimizerSettings:
        settings: OptimizerSettings = getattr(self.recipe, section_of(phase))
        return settings

    def optimizer(self, phase: PhaseName) -> Optimizer:
        if phase not in self.optimizers:
            trained = self.networks.trained(phase)
            self.optimizers[phase] = build_optimizer(self._settings(phase), self._initial_rate(phase), trained)
        return self.optimizers[phase]

    def average(self, phase: PhaseName) -> Average | None:
        decay = self._settings(phase).average
        if decay and phase not in self.averages:
            self.averages[phase] = Average(self.networks.trained(phase), self.networks.of(phase), decay)
        return self.averages.get(phase)

    def _initial_rate(self, phase: PhaseName) -> float:
        if phase == "score":
            return self.recipe.score_lr
        lr = self._settings(phase).lr
        assert lr is not None
        return lr

    def _rate(self, phase: Phase, step: int) -> float:
        """The learning rate of a step of the current epoch, counted from 0."""
        settings = self._settings(phase.name)
        done = step / self.batches.steps
        return learning_rate(self._initial_rate(phase.name), settings.decay, settings.ramp, phase, done)

    def _train(
        self, optimizer: Optimizer, rounded: RoundedWeights | None, phase: Phase, epoch: int, losses: list[Tensor]
    ) -> bool:
        """Go on behind the steps whose losses are given, and add to them; False when asked to stop."""
        scores = phase.name == "score"
        if phase.name not in self.steps:
            self.steps[phase.name] = make_step(
                self._loss(phase.name),
                optimizer,
                self.networks.trained(phase.name),
                None if scores else rounded,
                self.average(phase.name),
                capture=self.on_gpu and self.recipe.train.capture,
            )
        take_step = self.steps[phase.name]
        stopped = False
        with nullcontext() if rounded is None else rounded.in_place(trained=not scores):
            for images, labels in self.batches.epoch(epoch, len(losses)):
                set_learning_rate(optimizer, self._rate(phase, len(losses)))
                losses.append(take_step(images, labels))
                if len(losses) % LOSS_CHECK_EVERY == 0:
                    check_losses(losses, phase.name, epoch)
                self.on_step(len(losses), self.batches.steps)
                if stopped := self.stop():
                    break
        check_losses(losses, phase.name, epoch)
        return not stopped

    def _loss(self, phase: PhaseName) -> Loss:
        """The loss of a phase. A network fine-tuned inside the gated one has that of weight phases: compiled once."""
        kind: PhaseName = "weight" if phase == "finetune" and self.networks.masked else phase
        if kind not in self.losses:
            recipe = self.recipe
            taught = recipe.distill.weight > 0 and kind in ("weight", "finetune", "control")
            plain, network = self.networks.of(phase), self.networks.quick(phase)
            loss_of = make_loss(
                network,
                bfloat16=self.networks.bfloat16,
                penalty=self.pruner.penalty if kind == "score" else None,
                teacher=self.networks.teacher(fused=network is not plain) if taught else None,
                distill=recipe.distill,
                at_once=network is not plain,
            )
            if self.on_gpu and network is plain:
                loss_of = compiled(loss_of, recipe.train, self._epochs(kind) * self.batches.steps)
            self.losses[kind] = loss_of
        return self.losses[kind]

    def _epochs(self, kind: PhaseName) -> int:
        """Epochs of the whole run that are trained by a kind of loss."""
        schedule = self.recipe.schedule
        return {
            "warmup": schedule.warmup,
            "score": schedule.cycles * schedule.score,
            "weight": schedule.cycles * schedule.weight + schedule.finetune * self.networks.masked,
            "finetune": schedule.finetune,
            "control": schedule.alternation + schedule.finetune,
        }[kind]
