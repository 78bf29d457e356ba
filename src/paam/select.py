"""Scores and a target -> the filters that stay.

One global order decides: filters fall in the order of their scores, whatever their layer. A target says where to stop.
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

from paam.errors import TargetError
from paam.graph.attach import Group
from paam.network import Choice, Network
from paam.plan import Plan


@dataclass(frozen=True)
class Target:
    """Where to stop: one of the first five, or keep_macs and keep_params together.

    Shares are of the dense network, 0 to 1, and are never exceeded.

    ``threshold``: filters scored below it fall. ``widths``: a plan file; every group keeps as many filters as there.
    ``round_to``: every group keeps a multiple of so many filters (or all of them, or none): widths that hardware likes.
    ``floor``: the share of its filters that every group keeps at least.
    ``uniform``: the same share of every group falls; scores decide within a group only.
    """

    threshold: float | None = None
    keep_filters: float | None = None
    keep_macs: float | None = None
    keep_params: float | None = None
    widths: str | None = None
    round_to: int = 1
    floor: float = 0.0
    uniform: bool = False

    def __post_init__(self) -> None:
        given = self.limits
        chosen = [*given, *["widths"] * (self.widths is not None)]
        if len(chosen) != 1 and chosen != ["keep_macs", "keep_params"]:
            what = " and ".join(chosen) or "none"
            raise TargetError(
                "Give one target of threshold, keep_filters, keep_macs, keep_params, widths,"
                f" or keep_macs and keep_params together; {what} given."
            )
        for name, value in given.items():
            if not math.isfinite(value):
                raise TargetError(f"{name} must be a finite number; {value} was given.")
            if name != "threshold" and not 0 < value <= 1:
                raise TargetError(f"{name} is the share that may remain, above 0 and up to 1; {value:g} was given.")
        if not isinstance(self.round_to, int) or self.round_to < 1:
            raise TargetError(f"round_to is a whole number of filters, 1 or more; {self.round_to} was given.")
        if not 0 <= self.floor <= 1:
            raise TargetError(f"floor is the share of filters that every group keeps, 0 to 1; {self.floor} was given.")
        if self.widths is not None and (self.round_to > 1 or self.floor or self.uniform):
            raise TargetError("widths say how many filters each group keeps; leave out round_to, floor and uniform.")
        if self.uniform and self.threshold is not None:
            raise TargetError("A threshold compares scores of all groups; uniform needs a share or a budget instead.")

    @property
    def limits(self) -> dict[str, float]:
        """What is given of threshold and shares."""
        return {name: getattr(self, name) for name in LIMITS if getattr(self, name) is not None}

    def __str__(self) -> str:
        parts = [f"{name} = {value:g}" for name, value in self.limits.items()]
        parts += [f"widths of {self.widths}"] if self.widths else []
        parts += ["the same share of every group"] if self.uniform else []
        parts += [f"at least {self.floor:g} of each group"] if self.floor else []
        parts += [f"widths in steps of {self.round_to}"] if self.round_to > 1 else []
        return ", ".join(parts)


LIMITS = ("threshold", "keep_filters", "keep_macs", "keep_params")
MODIFIERS = ("round_to", "floor", "uniform")
"""Keys of a target that shape it, whatever its limit."""


@dataclass(frozen=True)
class Selection:
    """A plan, the threshold that it amounts to, and its share of the dense network.

    Filters scored below the threshold fall, but for those that a floor, steps of widths or the strongest path keep.
    None where no score decides between groups (uniform, widths).
    """

    plan: Plan
    threshold: float | None
    kept_params: float
    kept_macs: float


def check_reachable(network: Network, target: Target) -> None:
    """Refuse, before any training is spent on it, what scores might not reach. What passes, all scores reach."""
    select(network, _equal_scores(network), target)


def select(network: Network, scores: Mapping[str, Tensor], target: Target) -> Selection:
    """Choose the filters that stay. ``scores``: group name -> [width]."""
    order = _Order(network, scores, target)
    if target.threshold is None and target.widths is None and (missed := _missed(network, order, target)):
        # A budget must not become impossible by what the scores turn out to be: the path of equal scores stays then.
        order = _Order(network, scores, target, path_of=_equal_scores(network))
        if lacking := _missed(network, order, target):
            name = next(iter(lacking))
            raise _unreachable(name, min(lacking[name], missed.get(name, 1.0)), target)
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


def _widths(network: Network, path: Path) -> dict[str, int]:
    plan = Plan.read(path)
    network.choice(plan)  # refuses the plan of another network
    return {name: len(kept.filters) for name, kept in plan.groups.items()}


def _fit_budget(network: Network, order: _Order, target: Target) -> int:
    """How many filters to remove so that the cost just fits: with one fewer it does not."""
    counts = range(order.removable + 1)
    return bisect_left(counts, True, key=lambda removed: _fits(network, order.choice(removed), target))


def _missed(network: Network, order: _Order, target: Target) -> dict[str, float]:
    """The limits that no selection in this order can keep, and the share that they would have to allow."""
    least = _shares(network, order.choice(order.removable))
    return {name: least[name] for name, share in target.limits.items() if least[name] > share + ROUNDING}


def _filled(network: Network, order: _Order, target: Target, choice: Choice) -> Choice:
    """Steps of filters that still fit the budget come back, those of the best removed filters first."""
    places = range(len(order.groups))
    best = {place: order.best_removed(place, choice) for place in places}
    for place in sorted(places, key=lambda place: -best[place]):
        while best[place] > -np.inf:
            larger = order.with_one_more_step(place, choice)
            if not _fits(network, larger, target):
                break
            choice = larger
            best[place] = order.best_removed(place, choice)
    return choice


def _fits(network: Network, choice: Choice, target: Target) -> bool:
    shares = _shares(network, choice)
    return all(shares[name] <= share + ROUNDING for name, share in target.limits.items())


def _shares(network: Network, choice: Choice) -> dict[str, float]:
    """What remains of the dense network, by each measure."""
    cost = network.cost(choice)
    kept, total = sum(int(mask.sum()) for mask in choice.values()), sum(len(mask) for mask in choice.values())
    return {
        "keep_filters": kept / total,
        "keep_macs": cost.macs / network.dense.macs,
        "keep_params": cost.params / network.dense.params,
    }


ROUNDING = 1e-12
"""Shares are quotients: 7 of 10 filters may come out above 0.7."""


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
    """All removable filters in one line, lowest score first; those of one path to each output stand outside.

    That is the strongest path of the scores, or of others.
    """

    def __init__(
        self,
        network: Network,
        scores: Mapping[str, Tensor],
        target: Target,
        path_of: Mapping[str, Tensor] | None = None,
    ) -> None:
        """``path_of``: scores whose strongest path it is, if not these."""
        self.groups = network.groups
        self.round_to, self.floor = target.round_to, target.floor
        plain = _plain(network, scores)
        protected = network.strongest_path(plain if path_of is None else _plain(network, path_of))
        values, ranks, owners, numbers = [], [], [], []
        for place, group in enumerate(network.groups):
            score = plain[group.name]
            ascending = np.argsort(score, kind="stable")
            removable = ascending[~np.isin(ascending, list(protected[group.name]))]
            # Equal scores fall evenly over the groups: that is also what a uniform target wants.
            values.append(np.zeros(len(removable)) if target.uniform else score[removable])
            ranks.append(np.arange(len(removable)) / group.width)
            owners.append(np.full(len(removable), place))
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
        """The lowest score of the line that stays when the first ``removed`` fall; above all when none stays."""
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
            kept = max(group.width - int(counts[owner]), math.ceil(self.floor * group.width - ROUNDING))
            rounded = min(-(-kept // self.round_to) * self.round_to, group.width)
            choice[group.name] = self._best(owner, rounded)
        return choice

    def with_widths(self, widths: Mapping[str, int]) -> Choice:
        """The best filters of each group, so many; those of the strongest path stay in any case."""
        return {group.name: self._best(place, widths[group.name]) for place, group in enumerate(self.groups)}

    def _best(self, place: int, kept: int) -> NDArray[np.bool_]:
        width = self.groups[place].width
        mask = np.ones(width, dtype=bool)
        mask[self.numbers_of[place][: width - kept]] = False
        return mask

    def best_removed(self, place: int, choice: Choice) -> float:
        """The highest score among a group's filters that are removed; -inf if all stay."""
        gone = ~choice[self.groups[place].name]
        return float(self.scores_of[place][gone].max()) if gone.any() else -math.inf

    def with_one_more_step(self, place: int, choice: Choice) -> Choice:
        group = self.groups[place]
        kept = min(int(choice[group.name].sum()) + self.round_to, group.width)
        return {**choice, group.name: self._best(place, kept)}


def _plain(network: Network, scores: Mapping[str, Tensor]) -> dict[str, NDArray[np.float64]]:
    return {group.name: _checked(group, scores[group.name]) for group in network.groups}


def _checked(group: Group, scores: Tensor) -> NDArray[np.float64]:
    plain: NDArray[np.float64] = scores.detach().double().cpu().numpy()
    if plain.shape != (group.width,):
        raise TargetError(f"'{group.name}' needs {group.width} scores, not {plain.shape}.")
    if not np.isfinite(plain).all():
        raise TargetError(f"A score of '{group.name}' is not finite: training has diverged.")
    return plain
