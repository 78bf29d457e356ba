"""The phases of a schedule, epoch by epoch: warm-up, [score, weight] cycles, fine-tune, dense control.

The engine knows nothing of graphs, files or terminals: it drives a Pruner, says what happened through ``emit``, and can
hand out and take back its whole state at any epoch boundary, and behind any step where it was asked to stop.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from itertools import islice
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from paam.errors import DivergedError
from paam.plan import Plan
from paam.pruner import Pruner
from paam.recipe import OptimizerSettings, Recipe
from paam.schedule import Phase, learning_rate, phase_at
from paam.select import Selection
from paam.train.batches import epoch_seed
from paam.train.capture import CapturedStep, Step
from paam.train.optimizers import build_optimizer, load_optimizer_tensors, optimizer_tensors, set_learning_rate
from paam.train.pause import Pause, copies, differing, random_state

Emit = Callable[[dict[str, Any]], None]
Evaluate = Callable[[nn.Module], float]
"""Accuracy of a network in percent."""
LOSS_CHECK_EVERY = 50
"""Steps between looks at the losses: often enough to stop early, rarely enough not to stall a GPU."""
NO_SCORE = 1e-3
"""A filter scored below this hardly passes anything on: where all are, scores tell filters apart no more."""


class Batches(Protocol):
    """Training batches of any origin: ``steps`` per epoch, images and labels on the network's device."""

    @property
    def steps(self) -> int: ...

    def epoch(self, epoch: int) -> Iterable[tuple[Tensor, Tensor]]: ...


class Engine:
    """Trains one network through its schedule. ``model`` is the network of the current phase."""

    def __init__(self, pruner: Pruner, recipe: Recipe, batches: Batches, *, seed: int, emit: Emit) -> None:
        self.pruner = pruner
        self.recipe = recipe
        self.batches = batches
        self.seed = seed
        self.emit = emit
        self.small: nn.Module | None = None
        self.control: nn.Module | None = None
        self.dense_state: dict[str, Tensor] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.steps: dict[str, Step] = {}
        self.on_step: Callable[[int, int], None] = lambda step, steps: None
        self.stop: Callable[[], bool] = lambda: False
        """Asked behind every step; once it says yes it must go on doing so."""
        self.pause: Pause | None = None
        """Set when a stop left an epoch unfinished."""
        if recipe.schedule.warmup == 0:
            self._remember_dense()

    def run_epoch(self, epoch: int, evaluate: Evaluate | None) -> bool:
        """Train one epoch and emit its event, with the accuracy in percent that ``evaluate`` finds.

        False: stopped inside of it. :attr:`pause` says where, :meth:`state` is the state there, and the next call goes
        on.
        """
        phase = phase_at(self.recipe.schedule, epoch)
        start = time.perf_counter()
        pause, self.pause = self.pause, None
        if pause is None:
            torch.manual_seed(epoch_seed(self.seed, epoch))
            if phase.first:
                self._enter(phase, epoch, evaluate)
        else:
            start -= pause.seconds
        model = self.model_of(phase)
        optimizer = self._optimizer(phase)
        losses = [] if pause is None else list(pause.losses)
        with self._mode(phase):
            model.train()
            if pause is not None:
                pause.take_up(model)
            finished = self._train(model, optimizer, phase, epoch, losses)
            inside = {} if finished else copies(model)
        self._check_values(model, phase, epoch)
        if not finished:
            spent = time.perf_counter() - start
            self.pause = Pause(losses, random_state(model), differing(inside, model), spent)
            return False
        accuracy = None if evaluate is None else evaluate(model)
        last = phase.index == phase.length - 1
        if phase.name == "score" and last:
            scores = {name: [round(s, 4) for s in v.tolist()] for name, v in self.pruner.scores().items()}
            self.emit({"event": "scores", "epoch": epoch, "cycle": phase.cycle, "scores": scores})
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
            self._remember_dense()
        return True

    def model_of(self, phase: Phase) -> nn.Module:
        if phase.name == "finetune":
            assert self.small is not None
            return self.small
        if phase.name == "control":
            assert self.control is not None
            return self.control
        return self.pruner.model

    def _enter(self, phase: Phase, epoch: int, evaluate: Evaluate | None) -> None:
        """What happens once, at the start of a phase."""
        if phase.name == "weight":
            selection = self.pruner.select(**asdict(self.recipe.target))
            with self.pruner.weighting():
                accuracy = None if evaluate is None else evaluate(self.pruner.model)
            kept = {name: [len(k.filters), k.width] for name, k in selection.plan.groups.items()}
            event = {"event": "selection", "epoch": epoch, "cycle": phase.cycle, "threshold": selection.threshold}
            event |= {"kept_params": selection.kept_params, "kept_macs": selection.kept_macs, "kept_filters": kept}
            event |= {"accuracy": accuracy}  # before the weights adapt: what the cut itself costs
            self.emit(event)
        elif phase.name == "finetune":
            self.small = self.pruner.compact()
        elif phase.name == "control":
            self.control = self.dense_model()
        if self._settings(phase).reset:
            self.optimizers.pop(phase.name, None)
            self.steps.pop(phase.name, None)

    def _mode(self, phase: Phase) -> AbstractContextManager[None]:
        if phase.name == "warmup":
            return self.pruner.dense()
        if phase.name == "score":
            return self.pruner.scoring()
        return self.pruner.weighting() if phase.name == "weight" else nullcontext()

    def _settings(self, phase: Phase) -> OptimizerSettings:
        settings: OptimizerSettings = getattr(self.recipe, _section(phase))
        return settings

    def _optimizer(self, phase: Phase) -> Optimizer:
        if phase.name not in self.optimizers:
            settings = self._settings(phase)
            if phase.name == "score":
                parameters = self.pruner.scorer_parameters()
            elif phase.name in ("warmup", "weight"):
                parameters = self.pruner.network_parameters()
            else:
                parameters = list(self.model_of(phase).parameters())
            self.optimizers[phase.name] = build_optimizer(settings, self._initial_rate(phase), parameters)
        return self.optimizers[phase.name]

    def _initial_rate(self, phase: Phase) -> float:
        if phase.name == "score":
            return self.recipe.score_lr
        lr = self._settings(phase).lr
        assert lr is not None
        return lr

    def _rate(self, phase: Phase, step: int) -> float:
        """The learning rate of a step of the current epoch, counted from 0."""
        settings = self._settings(phase)
        done = step / self.batches.steps
        return learning_rate(self._initial_rate(phase), settings.decay, settings.ramp, phase, done)

    def _train(self, model: nn.Module, optimizer: Optimizer, phase: Phase, epoch: int, losses: list[Tensor]) -> bool:
        """Go on behind the steps whose losses are given, and add to them; False when stopped before the last."""
        if phase.name not in self.steps:
            self.steps[phase.name] = self._make_step(model, optimizer, phase)
        take_step = self.steps[phase.name]
        stopped = False
        for images, labels in islice(self.batches.epoch(epoch), len(losses), None):
            set_learning_rate(optimizer, self._rate(phase, len(losses)))
            losses.append(take_step(images, labels))
            if len(losses) % LOSS_CHECK_EVERY == 0:
                self._check(losses, phase, epoch)
            self.on_step(len(losses), self.batches.steps)
            if stopped := self.stop():
                break
        self._check(losses, phase, epoch)
        return not stopped

    def _make_step(self, model: nn.Module, optimizer: Optimizer, phase: Phase) -> Step:
        """One step of a phase; on a GPU compiled and captured as the recipe says, and in bfloat16."""
        settings = self.recipe.train
        on_gpu = next(model.parameters()).is_cuda
        network = torch.compile(model) if on_gpu and settings.compile else model

        def step(images: Tensor, labels: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            # Casts cached by autocast would outlive a captured graph.
            with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu and settings.bfloat16, cache_enabled=False):
                loss = F.cross_entropy(network(images), labels)
            if phase.name == "score":
                loss = loss + self.pruner.penalty()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.detach()

        return CapturedStep(step) if on_gpu and settings.capture else step

    def _check(self, losses: list[Tensor], phase: Phase, epoch: int) -> None:
        finite = torch.stack(losses[-LOSS_CHECK_EVERY:]).isfinite()
        if not finite.all():
            step = max(len(losses) - LOSS_CHECK_EVERY, 0) + int((~finite).nonzero()[0]) + 1
            raise DivergedError(
                f"The loss is not finite at step {step} of epoch {epoch + 1} ({phase.name} phase)."
                f" Lower {_section(phase)}.lr, or look for broken values in the data."
            )

    def _check_values(self, model: nn.Module, phase: Phase, epoch: int) -> None:
        """Nobody can go on from a value that is not finite, or from scores under which no filter matters."""
        where = f"epoch {epoch + 1} ({phase.name} phase)"
        if not torch.stack([value.isfinite().all() for value in model.state_dict().values()]).all():
            raise DivergedError(f"A weight is not finite in {where}. Lower {_section(phase)}.lr.")
        if phase.name == "score" and torch.cat(list(self.pruner.scores().values())).max() < NO_SCORE:
            raise DivergedError(
                f"Every score has fallen below {NO_SCORE} in {where}: they no longer tell filters apart."
                " Lower prune.penalty or score.lr."
            )

    def _remember_dense(self) -> None:
        model = self.pruner.network.traced.model
        self.dense_state = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def dense_model(self) -> nn.Module:
        model = copy.deepcopy(self.pruner.network.traced.model)
        model.load_state_dict(self.dense_state)
        return model

    # --- the whole state, at an epoch boundary or where a stop left an epoch ---------------------------------------

    def state(self, epoch: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain data that :meth:`restore` needs to go on with ``epoch``, or in it after a stop."""
        parts: dict[str, dict[str, Tensor]] = {"dense": self.dense_state}
        if self.small is None:
            parts["gated"] = self.pruner.model.state_dict()
        else:
            parts["small"] = self.small.state_dict()
        if self.control is not None:
            parts["control"] = self.control.state_dict()
        current = phase_at(self.recipe.schedule, epoch - (self.pause is None))
        alternating = current.name in ("warmup", "score", "weight")
        for name, optimizer in self.optimizers.items():
            if name == current.name or (alternating and name in ("score", "weight")):
                parts[f"optimizer/{name}"] = optimizer_tensors(optimizer)
        chosen = self.pruner.selection
        header: dict[str, Any] = {
            "selection": None if chosen is None else {**asdict(chosen), "plan": chosen.plan.to_json()}
        }
        if self.pause is not None:
            parts["pause"] = self.pause.tensors()
            header["seconds"] = self.pause.seconds
        tensors = {f"{part}/{key}": value for part, values in parts.items() for key, value in values.items()}
        return tensors, header

    def restore(self, epoch: int, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        """Take up a state that :meth:`state` handed out, in a fresh process."""
        if header["selection"] is not None:
            stored = header["selection"]
            self.pruner.use(Selection(**{**stored, "plan": Plan.from_json(stored["plan"])}))
        self.dense_state = _part(tensors, "dense")
        if gated := _part(tensors, "gated"):
            self.pruner.model.load_state_dict(gated)
        if small := _part(tensors, "small"):
            self.small = self.pruner.compact()
            self.small.load_state_dict(small)
        if control := _part(tensors, "control"):
            self.control = self.dense_model()
            self.control.load_state_dict(control)
        if inside := _part(tensors, "pause"):
            device = next(self.pruner.model.parameters()).device
            self.pause = Pause.from_tensors(inside, header["seconds"], device)
        begun = epoch + (self.pause is not None)
        passed = {phase.name: phase for phase in (phase_at(self.recipe.schedule, e) for e in range(begun))}
        for phase in passed.values():
            if state := _part(tensors, f"optimizer/{phase.name}"):
                load_optimizer_tensors(self._optimizer(phase), state)


def _section(phase: Phase) -> str:
    """The recipe's section for a phase: the dense control is trained as the small network is."""
    return "finetune" if phase.name == "control" else phase.name


def _part(tensors: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{part}/"): value for key, value in tensors.items() if key.startswith(f"{part}/")}
