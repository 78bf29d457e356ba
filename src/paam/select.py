"""Scores and a target -> the filters that stay.

One global order decides: filters fall in the order of their scores, whatever their layer. A target says where to stop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import numpy as np
from torch import Tensor

from paam.errors import TargetError
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
    most = _first(order.removable, lambda k: not network.connected(order.choice(k))) - 1
    if target.threshold is not None:
        removed = order.below(target.threshold)
        if removed > most:
            raise TargetError(
                f"threshold = {target.threshold:g} leaves no path from input to output;"
                f" with these scores it can be at most {order.threshold(most):.4g}."
            )
    elif target.keep_filters is not None:
        removed = order.total - int(np.floor(target.keep_filters * order.total + 1e-9))
        if removed > most:
            raise _unreachable("keep_filters", target.keep_filters, (order.total - most) / order.total)
    else:
        removed = _fit_budget(network, order, target, most)
    choice = order.choice(removed)
    cost = network.cost(choice)
    shares = cost.params / network.dense.params, cost.macs / network.dense.macs
    threshold = order.threshold(removed) if target.threshold is None else target.threshold
    return Selection(network.plan(choice), threshold, *shares)


def _fit_budget(network: Network, order: _Order, target: Target, most: int) -> int:
    """The fewest filters to remove so that the cost fits; the cost never rises as more are removed."""
    name = "macs" if target.keep_macs is not None else "params"
    share = target.keep_macs if target.keep_macs is not None else target.keep_params
    assert share is not None
    dense: int = getattr(network.dense, name)

    def cost(removed: int) -> int:
        value: int = getattr(network.cost(order.choice(removed)), name)
        return value

    if cost(most) > share * dense:
        raise _unreachable(f"keep_{name}", share, cost(most) / dense)
    return _first(most, lambda k: cost(k) <= share * dense)


def _first(last: int, holds: Callable[[int], bool]) -> int:
    """The smallest k in 0..last for which a condition holds that stays true once it is; last + 1 when it never does."""
    return bisect_left(range(last + 1), True, key=holds)


def _unreachable(name: str, share: float, least: float) -> TargetError:
    return TargetError(
        f"{name} = {share:g} cannot be reached: this network can be pruned to between {least:.4f} and 1 of its size."
    )


class _Order:
    """All removable filters in one line, lowest score first; those that a group must keep stand outside."""

    def __init__(self, network: Network, scores: Mapping[str, Tensor]) -> None:
        self.groups = network.groups
        values, owners, numbers = [], [], []
        for place, group in enumerate(network.groups):
            score = scores[group.name].detach().double().cpu().numpy()
            if score.shape != (group.width,):
                raise TargetError(f"'{group.name}' needs {group.width} scores, not {score.shape}.")
            if not np.isfinite(score).all():
                raise TargetError(f"A score of '{group.name}' is not finite: training has diverged.")
            removable = np.argsort(score, kind="stable")[: group.width - group.least]
            values.append(score[removable])
            owners.append(np.full(len(removable), place))
            numbers.append(removable)
        value = np.concatenate(values)
        line = np.argsort(value, kind="stable")
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
