"""paam.prune: the whole method in one call, on the user's loaders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paam.config.recipe import Recipe
from paam.config.schedule import Schedule
from paam.config.target import MODIFIERS, Target
from paam.errors import DataError, TargetError
from paam.events import Event
from paam.graph.copies import deep_copy
from paam.graph.modes import evaluating
from paam.graph.plan import Plan
from paam.methods import phases_of
from paam.pruning.select import check_reachable
from paam.runs.setup import check_recipe, make_pruner, teacher_state
from paam.train.device import find_device, on_device
from paam.train.engine import Engine
from paam.train.evaluation import accuracy
from paam.train.phase import total_epochs


class Loader(Protocol):
    """Anything like a DataLoader: batches of (images, labels), with a length."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Pruned:
    """``model``: the small network, fine-tuned.

    ``history``: what happened, oldest first: Epoch, Scores, Selected and Vanished of :mod:`paam.events`.
    """

    model: nn.Module
    plan: Plan
    history: list[Event]


@dataclass
class _LoaderBatches:
    """Adapts a loader to the engine; shuffling is up to the loader."""

    loader: Loader
    device: str

    @property
    def steps(self) -> int:
        return len(self.loader)

    def epoch(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        return islice(_moved(self.loader, self.device), start, None)


def _moved(batches: Iterable[Any], device: str) -> Iterator[tuple[Tensor, Tensor]]:
    for images, labels in batches:
        yield images.to(device), labels.to(device)


def _check_labels(model: nn.Module, image: Tensor, labels: Tensor) -> None:
    """Check the first batch: for a label out of range torch has no clear error, and a GPU's context is lost."""
    with evaluating(model), torch.no_grad():
        outputs = model(image)
    if isinstance(outputs, Tensor) and not labels.is_floating_point() and int(labels.max()) >= outputs.shape[1]:
        raise DataError(
            f"A label of the training loader is {int(labels.max())}, but the network has {outputs.shape[1]} outputs,"
            f" for labels from 0 to {outputs.shape[1] - 1}."
        )


def prune(
    model: nn.Module,
    train: Loader,
    val: Iterable[tuple[Tensor, Tensor]] | None = None,
    *,
    keep_macs: float | None = None,
    keep_params: float | None = None,
    keep_filters: float | None = None,
    threshold: float | None = None,
    round_to: int | None = None,
    schedule: Schedule | None = None,
    recipe: Recipe | None = None,
    seed: int = 0,
    device: str = "auto",
    on_event: Callable[[Event], None] = lambda event: None,
) -> Pruned:
    """Train, prune and fine-tune a classifier. ``model`` is copied, not changed.

    train, val: batches of images and labels. Give one target (default: the recipe's): the share of the dense network
    to keep, or a threshold on scores; keep_macs and keep_params may be combined. ``round_to``: round widths to a
    multiple of this. The recipe's other target settings (floor, uniform) still apply.
    ``schedule``: epochs of each phase; start with ``Schedule(warmup=0, ...)`` from a trained network. ``recipe``:
    everything else (optimisers, scorer, penalty, ...). ``on_event`` is called with every event as it happens; the
    same events are in ``Pruned.history``.
    """
    asked = {"threshold": threshold, "keep_filters": keep_filters, "keep_macs": keep_macs, "keep_params": keep_params}
    limits: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if recipe is None and not limits:
        raise TargetError("No target given: pass one, for example keep_macs=0.5, or a recipe that has one.")
    recipe = recipe or Recipe()
    shape = {key: getattr(recipe.target, key) for key in MODIFIERS} | (
        {} if round_to is None else {"round_to": round_to}
    )
    target = Target(**limits, **shape) if limits else dataclasses.replace(recipe.target, **shape)
    recipe = dataclasses.replace(recipe, target=target, schedule=schedule or recipe.schedule)
    if not hasattr(train, "__len__"):
        raise DataError("The training loader has no length; pass a DataLoader or a list of batches.")
    recipe = check_recipe(recipe)
    device = find_device(device)
    first = next(iter(train), None)
    if first is None:
        raise DataError("The training loader yields no batch.")
    torch.manual_seed(seed)
    image = first[0][:1].to(device)
    own = on_device(deep_copy(model), image, device)
    pruner = make_pruner(own, image, recipe)
    check_reachable(pruner.network, recipe.target)
    _check_labels(own, image, first[1])
    history: list[Event] = []

    def emit(event: Event) -> None:
        history.append(event)
        on_event(event)

    phases = phases_of(recipe)
    engine = Engine(pruner, recipe, phases, _LoaderBatches(train, device), seed=seed, emit=emit)
    engine.networks.teacher_state = teacher_state(recipe, pruner)
    evaluate = None if val is None else lambda network, phase: accuracy(network, _moved(val, device))
    for epoch in range(total_epochs(phases)):
        engine.run_epoch(epoch, evaluate)
    return Pruned(engine.result().eval(), engine.selected().plan, history)
