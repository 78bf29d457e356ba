"""Scores and a target -> the filters to keep.

One global order decides: filters are removed by ascending score, across layers, until the target is met.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paam.config.target import Target
from paam.errors import TargetError
from paam.graph.groups import Group
from paam.graph.network import Choice, Network
from paam.graph.plan import Plan


@dataclass(frozen=True)
class Selection:
    """A plan, its effective threshold, and its share of the dense network.

    Filters scored below the threshold are removed, except those kept by a floor, rounding or the strongest path.
    None if scores do not decide between groups (uniform, widths).
    """

    plan: Plan
    threshold: float | None
    kept_params: float
    kept_macs: float

    def __str__(self) -> str:
        by_score = "" if self.threshold is None else f" (scores from {self.threshold:.3g})"
        return (
            f"{self.plan.kept_filters} of {self.plan.all_filters} filters stay{by_score},"
            f" {self.kept_macs:.1%} of MACs, {self.kept_params:.1%} of parameters"
        )


def check_reachable(network: Network, target: Target) -> None:
    """Refuse an unreachable target before training. A target that passes is reachable for any scores."""
    select(network, _equal_scores(network), target)


def select(network: Network, scores: Mapping[str, Tensor], target: Target) -> Selection:
    """Choose the filters to keep. ``scores``: group name -> [width]."""
    limited = target.threshold is None and target.widths is None
    order = _within_reach(network, scores, target) if limited else _Order(network, scores, target)
    threshold = target.threshold
    if target.widths is not None:
        choice = order.with_widths(_widths(network, Path(target.widths)))
    elif threshold is not None:
        choice = order.choice(order.below(threshold))
    else:
        removed = _fit_budget(network, order, target)
        choice = order.choice(removed)
        threshold = None if target.uniform else order.threshold(removed)
    if target.round_to > 1 and target.threshold is None and target.widths is None:
        choice = _filled(network, order, target, choice)
    cost = network.cost(choice)
    shares = cost.params / network.dense.params, cost.macs / network.dense.macs
    return Selection(network.plan(choice), threshold, *shares)


def _within_reach(network: Network, scores: Mapping[str, Tensor], target: Target) -> _Order:
    """The order in which filters are removed until the limits are met.

    Whether a budget is reachable must not depend on the scores. If keeping their strongest path misses it, the path
    for equal scores is kept instead; if that misses it too, everything that equal scores keep last: on a stream,
    rounding and floors of its groups may keep different filters, which together are more channels.
    """
    order = _Order(network, scores, target)
    if not (missed := _missed(network, order, target)):
        return order
    equal = _Order(network, _equal_scores(network), target)
    for protected in (equal.protected, equal.choice(equal.removable)):
        order = _Order(network, scores, target, protected)
        if not (lacking := _missed(network, order, target)):
            return order
    name = next(iter(lacking))
    raise _unreachable(name, min(lacking[name], missed.get(name, 1.0)), target)


def _widths(network: Network, path: Path) -> dict[str, int]:
    plan = Plan.read(path)
    network.choice(plan)  # refuses the plan of another network
    return {name: len(kept.filters) for name, kept in plan.groups.items()}


def _fit_budget(network: Network, order: _Order, target: Target) -> int:
    """The minimum number of filters to remove so that the cost fits."""
    counts = range(order.removable + 1)
    return bisect_left(counts, True, key=lambda removed: _fits(network, order.choice(removed), target))


def _missed(network: Network, order: _Order, target: Target) -> dict[str, float]:
    """The limits that no selection in this order can meet, and the share that they would have to allow."""
    least = _shares(network, order.choice(order.removable), target)
    return {name: least[name] for name, share in target.limits.items() if least[name] > share + ROUNDING}


def _filled(network: Network, order: _Order, target: Target, choice: Choice) -> Choice:
    """Add back steps of filters that still fit the budget, those of the best removed filters first."""
    indices = range(len(order.groups))
    best = {index: order.best_removed(index, choice) for index in indices}
    for index in sorted(indices, key=lambda index: -best[index]):
        while best[index] > -np.inf:
            larger = order.with_one_more_step(index, choice)
            if not _fits(network, larger, target):
                break
            choice = larger
            best[index] = order.best_removed(index, choice)
    return choice


def _fits(network: Network, choice: Choice, target: Target) -> bool:
    shares = _shares(network, choice, target)
    return all(shares[name] <= share + ROUNDING for name, share in target.limits.items())


def _shares(network: Network, choice: Choice, target: Target) -> dict[str, float]:
    """The share that remains of the dense network, by each measure that the target limits."""
    if target.limits.keys() == {"keep_filters"}:  # counting filters is much cheaper than computing the cost
        kept, total = sum(int(mask.sum()) for mask in choice.values()), sum(len(mask) for mask in choice.values())
        return {"keep_filters": kept / total}
    cost = network.cost(choice)
    return {"keep_macs": cost.macs / network.dense.macs, "keep_params": cost.params / network.dense.params}


ROUNDING = 1e-12
"""Shares are quotients: 7 of 10 filters may round to above 0.7."""


def _unreachable(name: str, least: float, target: Target) -> TargetError:
    steps = f"widths in steps of {target.round_to}" if target.round_to > 1 else ""
    floor = f"a floor of {target.floor:g}" if target.floor else ""
    shaped = " and ".join(filter(None, [steps, floor]))
    given = f" with {shaped}" if shaped else ""
    what = {"keep_filters": "filters", "keep_macs": "MACs", "keep_params": "parameters"}[name]
    return TargetError(
        f"{name} = {target.limits[name]:g} cannot be reached: the network can be pruned to between {least:.4f} and 1 of"
        f" its {what}{given}."
    )


def _equal_scores(network: Network) -> dict[str, Tensor]:
    return {group.name: torch.ones(group.width) for group in network.groups}


class _Order:
    """All removable filters in one order, lowest score first, without those of a protected path to each output.

    That is the strongest path of the scores, or the given filters.
    """

    def __init__(
        self,
        network: Network,
        scores: Mapping[str, Tensor],
        target: Target,
        protected: Choice | None = None,
    ) -> None:
        """``protected``: the filters that are never removed; default: those of the strongest path."""
        self.groups = network.groups
        self.round_to, self.floor = target.round_to, target.floor
        self.least = 1 if network.keep_class else 0  # filters of each group
        plain = _plain(network, scores)
        if protected is None:
            path = network.strongest_path(plain)
            protected = {group.name: np.isin(np.arange(group.width), list(path[group.name])) for group in self.groups}
        self.protected = protected
        values, ranks, owners, numbers = [], [], [], []
        for index, group in enumerate(network.groups):
            score = plain[group.name]
            ascending = np.argsort(score, kind="stable")
            removable = ascending[~protected[group.name][ascending]]
            # Filters of equal score are removed evenly over the groups, as a uniform target needs.
            values.append(np.zeros(len(removable)) if target.uniform else score[removable])
            ranks.append(np.arange(len(removable)) / group.width)
            owners.append(np.full(len(removable), index))
            numbers.append(removable)
        value = np.concatenate(values)
        line = np.lexsort((np.concatenate(ranks), value))
        self.values = value[line]
        self.owners = np.concatenate(owners)[line]
        self.numbers_of = numbers  # of each group, lowest score first
        self.scores_of = [plain[group.name] for group in network.groups]
        self.removable = len(line)

    def below(self, threshold: float) -> int:
        return int(np.searchsorted(self.values, threshold, side="left"))

    def threshold(self, removed: int) -> float:
        """The lowest score that is kept when the first ``removed`` are removed; above all scores if none is kept."""
        if removed < self.removable:
            return float(self.values[removed])
        return float(np.nextafter(self.values[-1], np.inf)) if self.removable else 0.0

    def choice(self, removed: int) -> Choice:
        """The filters to keep when the first ``removed`` are removed; rounding adds back those removed last.

        Removing more never adds a filter back, so costs can be searched by bisection.
        """
        counts = np.bincount(self.owners[:removed], minlength=len(self.groups))
        choice = {}
        for owner, group in enumerate(self.groups):
            kept = max(group.width - int(counts[owner]), math.ceil(self.floor * group.width - ROUNDING), self.least)
            rounded = min(-(-kept // self.round_to) * self.round_to, group.width)
            choice[group.name] = self._best(owner, rounded)
        return choice

    def with_widths(self, widths: Mapping[str, int]) -> Choice:
        """The best filters of each group, up to its width; those of the strongest path are always kept."""
        return {group.name: self._best(index, widths[group.name]) for index, group in enumerate(self.groups)}

    def _best(self, index: int, kept: int) -> NDArray[np.bool_]:
        width = self.groups[index].width
        mask = np.ones(width, dtype=bool)
        mask[self.numbers_of[index][: width - kept]] = False
        return mask

    def best_removed(self, index: int, choice: Choice) -> float:
        """The highest score among a group's removed filters; -inf if none is removed."""
        gone = ~choice[self.groups[index].name]
        return float(self.scores_of[index][gone].max()) if gone.any() else -math.inf

    def with_one_more_step(self, index: int, choice: Choice) -> Choice:
        group = self.groups[index]
        kept = min(int(choice[group.name].sum()) + self.round_to, group.width)
        return {**choice, group.name: self._best(index, kept)}


def _plain(network: Network, scores: Mapping[str, Tensor]) -> dict[str, NDArray[np.float64]]:
    return {group.name: _checked(group, scores[group.name]) for group in network.groups}


def _checked(group: Group, scores: Tensor) -> NDArray[np.float64]:
    plain: NDArray[np.float64] = scores.detach().double().cpu().numpy()
    if plain.shape != (group.width,):
        raise TargetError(f"'{group.name}' needs {group.width} scores, not {plain.shape}.")
    if not np.isfinite(plain).all():
        raise TargetError(f"A score of '{group.name}' is not finite: training has diverged.")
    return plain
