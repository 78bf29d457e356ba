"""paam.prune: the whole method in one call, on anyone's own loaders."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paam.errors import DataError
from paam.plan import Plan
from paam.pruner import Pruner
from paam.recipe import Recipe
from paam.schedule import Schedule
from paam.select import Target
from paam.train.engine import Engine
from paam.train.evaluation import accuracy
from paam.train.run import find_device


class Loader(Protocol):
    """Anything like a DataLoader: batches of (images, labels), and how many."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Pruned:
    """``model``: the small network, fine-tuned. ``history``: the events of the run, oldest first."""

    model: nn.Module
    plan: Plan
    history: list[dict[str, Any]]


@dataclass
class _LoaderBatches:
    """A loader as the engine wants it: the loader itself decides how epochs differ."""

    loader: Loader
    device: str

    @property
    def steps(self) -> int:
        return len(self.loader)

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        return _moved(self.loader, self.device)


def _moved(batches: Iterable[Any], device: str) -> Iterator[tuple[Tensor, Tensor]]:
    for images, labels in batches:
        yield images.to(device), labels.to(device)


def prune(
    model: nn.Module,
    train: Loader,
    val: Iterable[tuple[Tensor, Tensor]] | None = None,
    *,
    keep_macs: float | None = None,
    keep_params: float | None = None,
    keep_filters: float | None = None,
    threshold: float | None = None,
    round_to: int = 1,
    schedule: Schedule | None = None,
    recipe: Recipe | None = None,
    seed: int = 0,
    device: str = "auto",
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
) -> Pruned:
    """Train, prune and fine-tune a classifier. ``model`` is copied, not changed.

    train, val: batches of images and labels. Exactly one target (or the recipe's own), as a share of the dense
    network that may remain, or a threshold on scores; ``round_to``: widths in steps of so many filters.
    ``schedule``: epochs of each phase; start with ``Schedule(warmup=0, ...)`` from a trained network. ``recipe``:
    everything else (optimisers, scorer, penalty, ...). ``on_event`` is told of every epoch.
    """
    given = (threshold, keep_filters, keep_macs, keep_params)
    target = recipe.target if recipe is not None and given == (None,) * 4 else Target(*given, round_to=round_to)
    recipe = recipe or Recipe()
    recipe = dataclasses.replace(recipe, target=target, schedule=schedule or recipe.schedule)
    if not hasattr(train, "__len__"):
        raise DataError("The training loader must know its length, as a DataLoader or a list of batches does.")
    device = find_device(device)
    first = next(iter(train), None)
    if first is None:
        raise DataError("The training loader yields no batch.")
    torch.manual_seed(seed)
    options = dataclasses.asdict(recipe.prune)
    own = copy.deepcopy(model).to(device)
    pruner = Pruner(own, first[0][:1].to(device), score_lr=recipe.score_lr, inplace=True, **options)
    history: list[dict[str, Any]] = []

    def emit(event: dict[str, Any]) -> None:
        history.append(event)
        on_event(event)

    engine = Engine(pruner, recipe, _LoaderBatches(train, device), seed=seed, emit=emit)
    evaluate = None if val is None else lambda network, phase: accuracy(network, _moved(val, device))
    for epoch in range(recipe.schedule.total):
        engine.run_epoch(epoch, evaluate)
    assert pruner.selection is not None  # every schedule has at least one cycle
    return Pruned(engine.result().eval(), pruner.selection.plan, history)
