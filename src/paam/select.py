"""Scores and a target -> the filters that stay.

One global order decides: filters fall in the order of their scores, whatever their layer. A target says where to stop.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paam.errors import TargetError
from paam.graph.attach import Group
from paam.network import Choice, Network
from paam.plan import Plan


@dataclass(frozen=True)
class Target:
    """Where to stop: exactly one of the first four. Shares are of the dense network, 0 to 1, and are never exceeded.

    ``round_to``: every group keeps a multiple of so many filters (or all of them, or none): widths that hardware likes.
    """

    threshold: float | None = None
    keep_filters: float | None = None
    keep_macs: float | None = None
    keep_params: float | None = None
    round_to: int = 1

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in TARGETS if getattr(self, name) is not None}
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
        if not isinstance(self.round_to, int) or self.round_to < 1:
            raise TargetError(f"round_to is a whole number of filters, 1 or more; {self.round_to} was given.")

    def __str__(self) -> str:
        name = next(name for name in TARGETS if getattr(self, name) is not None)
        rounded = f", widths in steps of {self.round_to}" if self.round_to > 1 else ""
        return f"{name} = {getattr(self, name):g}{rounded}"


TARGETS = ("threshold", "keep_filters", "keep_macs", "keep_params")


@dataclass(frozen=True)
class Selection:
    """A plan, the threshold that it amounts to (filters scored below it fall), and its share of the dense network."""

    plan: Plan
    threshold: float
    kept_params: float
    kept_macs: float


def select(network: Network, scores: Mapping[str, Tensor], target: Target) -> Selection:
    """Choose the filters that stay. ``scores``: group name -> [width]."""
    order = _Order(network, scores, target.round_to)
    removed = order.below(target.threshold) if target.threshold is not None else _fit_budget(network, order, target)
    choice = order.choice(removed)
    if target.round_to > 1 and target.threshold is None:
        choice = _filled(network, order, target, choice)
    cost = network.cost(choice)
    shares = cost.params / network.dense.params, cost.macs / network.dense.macs
    threshold = order.threshold(removed) if target.threshold is None else target.threshold
    return Selection(network.plan(choice), threshold, *shares)


def _fit_budget(network: Network, order: _Order, target: Target) -> int:
    """How many filters to remove so that the cost just fits: with one fewer it does not."""
    if (excess := _excess(network, order, target, order.choice(order.removable))) > 0:
        name, share, whole = _budget(network, order, target)
        raise _unreachable(name, share, share + excess / whole)
    counts = range(order.removable + 1)
    return bisect_left(counts, True, key=lambda removed: _excess(network, order, target, order.choice(removed)) <= 0)


def _filled(network: Network, order: _Order, target: Target, choice: Choice) -> Choice:
    """Steps of filters that still fit the budget come back, those of the best removed filters first."""
    places = range(len(order.groups))
    best = {place: order.best_removed(place, choice) for place in places}
    for place in sorted(places, key=lambda place: -best[place]):
        while best[place] > -np.inf:
            larger = order.with_one_more_step(place, choice)
            if _excess(network, order, target, larger) > 0:
                break
            choice = larger
            best[place] = order.best_removed(place, choice)
    return choice


def _budget(network: Network, order: _Order, target: Target) -> tuple[str, float, int]:
    """What is limited, to which share, of how much."""
    name = next(name for name in TARGETS if getattr(target, name) is not None)
    whole = {"keep_filters": order.total, "keep_macs": network.dense.macs, "keep_params": network.dense.params}[name]
    return name, getattr(target, name), whole


def _excess(network: Network, order: _Order, target: Target, choice: Choice) -> float:
    """By how much a choice exceeds the budget; 0 or less if it fits."""
    name, share, whole = _budget(network, order, target)
    if name == "keep_filters":
        return sum(int(mask.sum()) for mask in choice.values()) - share * whole - 1e-9  # 0.7 * 10 may be below 7
    predicted = network.cost(choice)
    return (predicted.macs if name == "keep_macs" else predicted.params) - share * whole


def _unreachable(name: str, share: float, least: float) -> TargetError:
    return TargetError(
        f"{name} = {share:g} cannot be reached: with these scores the network can be pruned to between {least:.4f}"
        " and 1 of its size."
    )


class _Order:
    """All removable filters in one line, lowest score first; those of the strongest path stand outside."""

    def __init__(self, network: Network, scores: Mapping[str, Tensor], round_to: int) -> None:
        self.groups = network.groups
        self.round_to = round_to
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
        self.numbers_of = numbers  # of each group, lowest score first
        self.scores_of = [plain[group.name] for group in network.groups]
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
        """The filters that stay when the first ``removed`` of the line fall; rounding brings back those that fell last.

        Removing more never brings a filter back, so that costs can be searched by bisection.
        """
        counts = np.bincount(self.owners[:removed], minlength=len(self.groups))
        choice = {}
        for owner, group in enumerate(self.groups):
            kept = group.width - int(counts[owner])
            rounded = min(-(-kept // self.round_to) * self.round_to, group.width)
            mask = np.ones(group.width, dtype=bool)
            mask[self.numbers_of[owner][: group.width - rounded]] = False
            choice[group.name] = mask
        return choice

    def best_removed(self, place: int, choice: Choice) -> float:
        """The highest score among a group's filters that are removed; -inf if all stay."""
        gone = ~choice[self.groups[place].name]
        return float(self.scores_of[place][gone].max()) if gone.any() else -math.inf

    def with_one_more_step(self, place: int, choice: Choice) -> Choice:
        group = self.groups[place]
        kept = min(int(choice[group.name].sum()) + self.round_to, group.width)
        mask = np.ones(group.width, dtype=bool)
        mask[self.numbers_of[place][: group.width - kept]] = False
        return {**choice, group.name: mask}


def _checked(group: Group, scores: Tensor) -> NDArray[np.float64]:
    plain: NDArray[np.float64] = scores.detach().double().cpu().numpy()
    if plain.shape != (group.width,):
        raise TargetError(f"'{group.name}' needs {group.width} scores, not {plain.shape}.")
    if not np.isfinite(plain).all():
        raise TargetError(f"A score of '{group.name}' is not finite: training has diverged.")
    return plain
