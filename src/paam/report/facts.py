"""The facts of a run that a report shows: plain data, None if unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paam.events import Cost, End, Epoch, Outcome, Start, Widths, setting


@dataclass(frozen=True)
class Cycle:
    """One selection. ``accuracy`` in percent right after the cut; ``threshold``: None also if it is infinite."""

    number: int
    scores: dict[str, list[float]] = field(default_factory=dict)
    threshold: float | None = None
    kept: Widths = field(default_factory=dict)
    kept_params: float | None = None
    kept_macs: float | None = None
    accuracy: float | None = None
    epoch: int | None = None
    """The epoch of the selection."""


@dataclass(frozen=True)
class Change:
    """A key of the recipe or of the environment ("environment.hardware") that changed when a run was resumed."""

    epoch: int
    """Finished epochs at that point."""
    key: str
    before: Any
    now: Any


@dataclass(frozen=True)
class Facts:
    """Everything a report shows of one run. ``start``: None if it is missing from a corrupt record."""

    name: str
    start: Start | None
    epochs: list[Epoch]
    """In order, without duplicates."""
    cycles: list[Cycle]
    end: End | None
    failure: str
    """The error that ended the run early, if any."""
    problems: list[str]
    changes: list[Change]

    @property
    def finished(self) -> bool:
        return self.end is not None

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe at the end of the run, including changes on resume; empty if unknown."""
        begun_with = {} if self.start is None else self.start.recipe
        tree = {key: dict(value) if isinstance(value, dict) else value for key, value in begun_with.items()}
        for change in self.changes:
            section, _, key = change.key.partition(".")
            if isinstance(tree.get(section), dict) and key:
                tree[section][key] = change.now
            elif section in tree:
                tree[section] = change.now
        return tree

    def setting(self, key: str) -> Any:
        """A value of the recipe by a key such as "model.name"; None if it is not set."""
        return setting(self.recipe, key)

    @property
    def model(self) -> str:
        return str(self.setting("model.name") or "unknown network")

    @property
    def data(self) -> str:
        return str(self.setting("data.name") or "unknown data")

    @property
    def dense(self) -> Outcome | None:
        return None if self.end is None else self.end.dense

    @property
    def pruned(self) -> Outcome | None:
        return None if self.end is None else self.end.pruned

    @property
    def dense_cost(self) -> Cost | None:
        """Known from the start of the run."""
        return None if self.start is None else self.start.dense

    @property
    def kept_macs(self) -> float | None:
        """Share of the dense network's MACs that the pruned network needs."""
        return None if self.end is None else self.end.pruned.macs / self.end.dense.macs

    @property
    def kept_params(self) -> float | None:
        return None if self.end is None else self.end.pruned.params / self.end.dense.params

    @property
    def kept(self) -> Widths:
        """What the layers keep at the end, or after the last selection."""
        widths = [cycle.kept for cycle in self.cycles] + ([] if self.end is None else [self.end.kept_filters])
        return next((kept for kept in reversed(widths) if kept), {})

    @property
    def layer_macs(self) -> Widths:
        """MACs of each layer, as (kept, dense); empty unless recorded for both networks."""
        if self.end is None:
            return {}
        dense, pruned = self.end.dense.layers, self.end.pruned.layers
        alike = all(macs <= dense.get(name, 0) for name, macs in pruned.items())
        known = alike and pruned
        return {name: (pruned.get(name, 0), macs) for name, macs in dense.items() if macs} if known else {}

    @property
    def streams(self) -> frozenset[str]:
        """Groups that write into a residual stream."""
        groups = {} if self.start is None else self.start.groups
        return frozenset(name for name, group in groups.items() if group.stream)

    @property
    def own_epochs(self) -> list[Epoch]:
        """Without those of the dense control, which is another network."""
        return [epoch for epoch in self.epochs if epoch.does != "control"]

    @property
    def fair(self) -> bool:
        """Whether the dense network was trained for as many epochs."""
        return self.end is not None and self.end.dense.trained == "as long"

    @property
    def seconds(self) -> float:
        return sum(epoch.seconds for epoch in self.epochs)

    @property
    def speed_up(self) -> float | None:
        return None if self.end is None else self.end.dense.latency_ms.median / self.end.pruned.latency_ms.median
