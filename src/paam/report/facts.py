"""The facts of a run that a report shows: plain data, None where nothing is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paam.record import SAME_EPOCHS, Event
from paam.report.values import mapping, share, text


@dataclass(frozen=True)
class Epoch:
    """One epoch, counted from 1. Accuracy in percent; kept shares from 0 to 1; None where nothing was recorded."""

    number: int
    phase: str
    cycle: int
    loss: float | None
    accuracy: float | None
    kept_params: float | None
    kept_macs: float | None
    seconds: float | None


@dataclass(frozen=True)
class Cycle:
    """One selection. ``accuracy`` in percent right after the cut; ``kept`` maps a group to (kept, width)."""

    number: int
    scores: dict[str, list[float]] = field(default_factory=dict)
    threshold: float | None = None
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)
    kept_params: float | None = None
    kept_macs: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class Change:
    """A key of the recipe, or of what a run depends on ("environment.hardware"), that a resumed run changed."""

    epoch: int
    """Epochs done by then."""
    key: str
    before: Any
    now: Any


@dataclass(frozen=True)
class Outcome:
    """What was measured of a network at the end: accuracy in percent, counts, milliseconds (median, low, high)."""

    accuracy: float | None = None
    params: int | None = None
    macs: int | None = None
    latency: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Facts:
    """Everything a report shows of one run."""

    name: str
    start: Event
    epochs: list[Epoch]
    cycles: list[Cycle]
    dense: Outcome
    pruned: Outcome
    trained: str
    """How long the dense network was trained, in the record's words; empty when not known."""
    latency_batch: int | None
    kept: dict[str, tuple[int, int]]
    streams: frozenset[str]
    finished: bool
    failure: str
    """Why the run ended early, if an error ended it."""
    problems: list[str]
    changes: list[Change]

    @property
    def recipe(self) -> Mapping[str, Any]:
        """As it was at the end, with what was changed on the way."""
        tree = {key: dict(value) if isinstance(value, dict) else value for key, value in self._begun_with.items()}
        for change in self.changes:
            section, _, key = change.key.partition(".")
            if isinstance(tree.get(section), dict) and key:
                tree[section][key] = change.now
            elif section in tree:
                tree[section] = change.now
        return tree

    @property
    def _begun_with(self) -> Mapping[str, Any]:
        return mapping(self.start.get("recipe"))

    @property
    def model(self) -> str:
        return text(mapping(self.recipe.get("model")).get("name")) or "unknown network"

    @property
    def data(self) -> str:
        return text(mapping(self.recipe.get("data")).get("name")) or "unknown data"

    @property
    def kept_macs(self) -> float | None:
        """Share of the dense network's MACs that the finished network needs."""
        return share(self.pruned.macs, self.dense.macs)

    @property
    def kept_params(self) -> float | None:
        return share(self.pruned.params, self.dense.params)

    @property
    def own_epochs(self) -> list[Epoch]:
        """Without those of the dense control, which is another network."""
        return [epoch for epoch in self.epochs if epoch.phase != "control"]

    @property
    def fair(self) -> bool:
        return self.trained == SAME_EPOCHS

    @property
    def seconds(self) -> float:
        return sum(epoch.seconds or 0 for epoch in self.epochs)

    @property
    def speed_up(self) -> float | None:
        dense, pruned = self.dense.latency, self.pruned.latency
        return dense[0] / pruned[0] if dense and pruned else None
