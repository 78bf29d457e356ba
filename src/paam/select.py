"""Scores and a target -> the filters that stay.

One global order decides: filters fall in the order of their scores, whatever their layer. A target says where to stop.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paam.errors import TargetError
from paam.graph.attach import Group
from paam.network import Choice, Network
from paam.plan import Plan


@dataclass(frozen=True)
class Target:
    """Where to stop: exactly one of these. Shares are of the dense network, 0 to 1, and are never exceeded."""

    threshold: float | None = None
    keep_filters: float | None = None
    keep_macs: float | None = None
    keep_params: float | None = None

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if len(given) != 1:
            what = " and ".join(given) if given else "none"
            raise TargetError(
                f"Give exactly one target of threshold, keep_filters, keep_macs, keep_params; {what} given."
            )
        name, value = next(iter(given.items()))
        if not math.isfinite(value):
            raise TargetError(f"{name} must be a finite number; {value} was given.")
        if name != "threshold" and not 0 < value <= 1:
            raise TargetError(f"{name} is the share that may remain, above 0 and up to 1; {value:g} was given.")

    def __str__(self) -> str:
        name = next(f.name for f in fields(self) if getattr(self, f.name) is not None)
        return f"{name} = {getattr(self, name):g}"


@dataclass(frozen=True)
class Selection:
    """A plan, the threshold that it amounts to (filters scored below it fall), and its share of the dense network."""

    plan: Plan
    threshold: float
    kept_params: float
    kept_macs: float


def select(network: Network, scores: Mapping[str, Tensor], target: Target) -> Selection:
    """Choose the filters that stay. ``scores``: group name -> [width]."""
    order = _Order(network, scores)
    if target.threshold is not None:
        removed = order.below(target.threshold)
    elif target.keep_filters is not None:
        removed = order.total - int(np.floor(target.keep_filters * order.total + 1e-9))
        if removed > order.removable:
            least = (order.total - order.removable) / order.total
            raise _unreachable("keep_filters", target.keep_filters, least)
    else:
        removed = _fit_budget(network, order, target)
    choice = order.choice(removed)
    cost = network.cost(choice)
    shares = cost.params / network.dense.params, cost.macs / network.dense.macs
    threshold = order.threshold(removed) if target.threshold is None else target.threshold
    return Selection(network.plan(choice), threshold, *shares)


def _fit_budget(network: Network, order: _Order, target: Target) -> int:
    """How many filters to remove so that the cost just fits: with one fewer it does not."""
    name = "macs" if target.keep_macs is not None else "params"
    share = target.keep_macs if target.keep_macs is not None else target.keep_params
    assert share is not None
    dense: int = getattr(network.dense, name)

    def cost(removed: int) -> int:
        value: int = getattr(network.cost(order.choice(removed)), name)
        return value

    if (least := cost(order.removable)) > share * dense:
        raise _unreachable(f"keep_{name}", share, least / dense)
    return bisect_left(range(order.removable + 1), True, key=lambda removed: cost(removed) <= share * dense)


def _unreachable(name: str, share: float, least: float) -> TargetError:
    return TargetError(
        f"{name} = {share:g} cannot be reached: with these scores the network can be pruned to between {least:.4f}"
        " and 1 of its size."
    )


class _Order:
    """All removable filters in one line, lowest score first; those of the strongest path stand outside."""

    def __init__(self, network: Network, scores: Mapping[str, Tensor]) -> None:
        self.groups = network.groups
        plain = {group.name: _checked(group, scores[group.name]) for group in network.groups}
        protected = network.strongest_path(plain)
        values, ranks, owners, numbers = [], [], [], []
        for place, group in enumerate(network.groups):
            score = plain[group.name]
            ascending = np.argsort(score, kind="stable")
            removable = ascending[~np.isin(ascending, list(protected[group.name]))]
            values.append(score[removable])
            ranks.append(np.arange(len(removable)) / group.width)
            owners.append(np.full(len(removable), place))
            numbers.append(removable)
        value = np.concatenate(values)
        # Equal scores fall evenly over the layers, so that untrained scorers prune uniformly.
        line = np.lexsort((np.concatenate(ranks), value))
        self.values = value[line]
        self.owners = np.concatenate(owners)[line]
        self.numbers = np.concatenate(numbers)[line]
        self.removable = len(line)
        self.total = sum(group.width for group in network.groups)

    def below(self, threshold: float) -> int:
        return int(np.searchsorted(self.values, threshold, side="left"))

    def threshold(self, removed: int) -> float:
        """The lowest score that stays among the removable ones; above all of them when none stays."""
        if removed < self.removable:
            return float(self.values[removed])
        return float(np.nextafter(self.values[-1], np.inf)) if self.removable else 0.0

    def choice(self, removed: int) -> Choice:
        masks = [np.ones(group.width, dtype=bool) for group in self.groups]
        for owner, number in zip(self.owners[:removed], self.numbers[:removed], strict=True):
            masks[owner][number] = False
        return {group.name: mask for group, mask in zip(self.groups, masks, strict=True)}


def _checked(group: Group, scores: Tensor) -> NDArray[np.float64]:
    plain: NDArray[np.float64] = scores.detach().double().cpu().numpy()
    if plain.shape != (group.width,):
        raise TargetError(f"'{group.name}' needs {group.width} scores, not {plain.shape}.")
    if not np.isfinite(plain).all():
        raise TargetError(f"A score of '{group.name}' is not finite: training has diverged.")
    return plain
