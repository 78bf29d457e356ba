"""Selection against a slow twin that tries every number of filters in turn; paths against all paths there are."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paam import count
from paam.config.target import Target
from paam.errors import TargetError
from paam.graph.network import Network, prepare
from paam.pruning.select import select

IMAGE = torch.zeros(1, 3, 8, 8)


class Ways(nn.Module):
    """A residual block, and two ways that are joined side by side: groups of 4, 5, 3, 6 and 4 filters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 3, padding=1)
        self.outer, self.cheap = nn.Conv2d(5, 4, 3, padding=1), nn.Conv2d(4, 3, 1)
        self.dear, self.head = nn.Conv2d(4, 6, 5, padding=2), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (x + self.outer(self.inner(x).relu())).relu()
        return self.head(torch.cat([self.cheap(x).relu(), self.dear(x).relu()], 1).mean((2, 3)))


NETWORK = prepare(Ways(), IMAGE)
TIED = prepare(Ways(), IMAGE, streams="tied")


def some_scores(network: Network, seed: int) -> dict[str, Tensor]:
    """Scores in tenths, so that many are equal, at a level that differs from group to group."""
    rng = np.random.default_rng(seed)
    level = {group.name: rng.uniform(0, 0.5) for group in network.groups}
    return {g.name: torch.from_numpy((level[g.name] + rng.random(g.width) / 2).round(1)) for g in network.groups}


def arrays(scores: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: score.double().numpy() for name, score in scores.items()}


def shares(network: Network, kept: dict[str, set[int]], *, build: bool = True) -> dict[str, float]:
    """What is left of the whole network: what is left of it is built and run, or its cost predicted."""
    choice = {group.name: np.isin(np.arange(group.width), list(kept[group.name])) for group in network.groups}
    dense = count(network.traced.model, IMAGE)
    small = count(network.compact(network.plan(choice)), IMAGE) if build else network.cost(choice)
    return {
        "keep_filters": sum(map(len, kept.values())) / sum(group.width for group in network.groups),
        "keep_macs": small.macs / dense.macs,
        "keep_params": small.params / dense.params,
    }


class Twin:
    """The same selection, step by step: one filter after the other falls until the network fits."""

    def __init__(self, network: Network, scores: dict[str, Tensor], target: Target) -> None:
        self.network, self.target, self.scores = network, target, arrays(scores)
        self.set_aside(network.strongest_path(self.scores))
        if target.limits.keys() - {"threshold"} and not self.fits(self.last()):
            equal = {group.name: np.ones(group.width) for group in network.groups}
            self.set_aside(network.strongest_path(equal))
            if not self.fits(self.last()):
                self.set_aside(Twin(network, {name: torch.ones(len(s)) for name, s in equal.items()}, target).last())

    def set_aside(self, path: dict[str, set[int]]) -> None:
        """Set these filters aside, and put all others in the order in which they fall."""
        self.going: dict[str, list[int]] = {}
        line = []
        for place, (name, score) in enumerate(self.scores.items()):
            others = [number for number in range(len(score)) if number not in path[name]]
            self.going[name] = sorted(others, key=lambda number, score=score: score[number])
            for rank, number in enumerate(self.going[name]):
                value = 0.0 if self.target.uniform else score[number]
                line.append((value, rank / len(score), place, rank, name))
        self.line = sorted(line)

    def kept(self, removed: int) -> dict[str, set[int]]:
        """What stays when so many have fallen: at least the floor, and whole steps."""
        kept = {}
        for name, score in self.scores.items():
            width = len(score)
            number = width - sum(entry[-1] == name for entry in self.line[:removed])
            while number < self.target.floor * width - 1e-12 or (number % self.target.round_to and number < width):
                number += 1
            kept[name] = self.best(name, number)
        return kept

    def best(self, name: str, number: int) -> set[int]:
        width = len(self.scores[name])
        return set(range(width)) - set(self.going[name][: max(width - number, 0)])

    def last(self) -> dict[str, set[int]]:
        """What stays when all that may fall has fallen."""
        return self.kept(len(self.line))

    def fits(self, kept: dict[str, set[int]]) -> bool:
        found = shares(self.network, kept, build=False)
        return all(found[name] <= share + 1e-12 for name, share in self.target.limits.items())

    def select(self) -> tuple[dict[str, set[int]], float | None]:
        if self.target.threshold is not None:
            return self.kept(sum(entry[0] < self.target.threshold for entry in self.line)), self.target.threshold
        removed = next(removed for removed in range(len(self.line) + 1) if self.fits(self.kept(removed)))
        kept = self.kept(removed)
        if self.target.round_to > 1:
            kept = self.with_steps_back(kept)
        last = float(np.nextafter(self.line[-1][0], math.inf))
        threshold = self.line[removed][0] if removed < len(self.line) else last
        return kept, None if self.target.uniform else threshold

    def best_gone(self, name: str, kept: dict[str, set[int]]) -> float:
        return max((s for number, s in enumerate(self.scores[name]) if number not in kept[name]), default=-math.inf)

    def with_steps_back(self, kept: dict[str, set[int]]) -> dict[str, set[int]]:
        """Group by group, that with the best removed filter first, whole steps come back as long as they fit."""
        for name in sorted(kept, key=lambda name: -self.best_gone(name, kept)):
            while len(kept[name]) < len(self.scores[name]):
                more = {**kept, name: self.best(name, len(kept[name]) + self.target.round_to)}
                if not self.fits(more):
                    break
                kept = more
        return kept


TARGETS = [
    *(Target(**{kind: share}) for kind in ("keep_macs", "keep_params", "keep_filters") for share in (0.35, 0.7, 1.0)),
    *(Target(keep_macs=0.5, keep_params=0.45), Target(keep_macs=0.35, keep_params=0.9)),
    *(Target(keep_macs=0.6, floor=0.25), Target(keep_filters=0.6, floor=0.5), Target(keep_params=0.7, floor=0.6)),
    *(Target(keep_macs=0.4, uniform=True), Target(keep_filters=0.5, uniform=True), Target(keep_filters=7 / 22)),
    *(Target(keep_macs=0.6, round_to=2), Target(keep_params=0.5, round_to=3), Target(keep_filters=0.7, round_to=4)),
    *(Target(keep_macs=0.7, round_to=2, floor=0.3), Target(keep_params=0.6, round_to=2, uniform=True)),
    *(Target(threshold=0.5), Target(threshold=0.3, floor=0.5), Target(threshold=0.4, round_to=2), Target(threshold=9)),
]


@pytest.mark.parametrize("network", [NETWORK, TIED], ids=["independent", "tied"])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_selection_is_that_of_the_twin(network: Network, target: Target) -> None:
    for seed in range(3):
        scores = some_scores(network, seed)
        chosen = select(network, scores, target)
        kept, threshold = Twin(network, scores, target).select()
        assert {name: set(stays.filters) for name, stays in chosen.plan.groups.items()} == kept
        assert chosen.threshold == threshold
        found = shares(network, kept)
        assert (chosen.kept_macs, chosen.kept_params) == (found["keep_macs"], found["keep_params"])


def test_a_network_without_a_choice_keeps_its_path() -> None:
    """One filter per layer: nothing may fall, and no score is above all that do."""
    network = prepare(
        nn.Sequential(nn.Conv2d(3, 1, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)), torch.zeros(1, 3, 2, 2)
    )
    chosen = select(network, {"0": torch.tensor([0.5])}, Target(keep_macs=1.0))
    assert (chosen.plan.groups["0"].filters, chosen.threshold) == ((0,), 0.0)


def filters_of(network: Network, scores: dict[str, Tensor], target: Target) -> dict[str, tuple[int, ...]]:
    return {name: kept.filters for name, kept in select(network, scores, target).plan.groups.items()}


def test_selection_by_hand() -> None:
    """Two layers of four filters on single values, and two answers: 3 a + a b + 2 b MACs when a and b filters stay."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    network = prepare(model, torch.zeros(1, 3, 1, 1))
    scores = {"0": torch.tensor([0.4, 0.1, 0.8, 0.3]), "2": torch.tensor([0.2, 0.7, 0.5, 0.6])}
    assert network.dense.macs == 12 + 16 + 8
    # The path 2 -> 1 stays; the others fall as 0.1, 0.2, 0.3, 0.4, 0.5, 0.6.
    assert filters_of(network, scores, Target(keep_filters=0.75)) == {"0": (0, 2, 3), "2": (1, 2, 3)}
    assert filters_of(network, scores, Target(keep_macs=24 / 36)) == {"0": (0, 2, 3), "2": (1, 2, 3)}
    assert filters_of(network, scores, Target(keep_macs=23 / 36)) == {"0": (0, 2), "2": (1, 2, 3)}  # 6 + 6 + 6
    assert select(network, scores, Target(keep_macs=23 / 36)).threshold == pytest.approx(0.4)
    assert select(network, scores, Target(keep_macs=23 / 36)).kept_macs == 18 / 36
    assert filters_of(network, scores, Target(keep_macs=9 / 36)) == {"0": (2,), "2": (1, 3)}  # 3 + 2 + 4
    assert filters_of(network, scores, Target(keep_macs=8 / 36)) == {"0": (2,), "2": (1,)}
    least = select(network, scores, Target(keep_macs=6 / 36))
    assert least.plan.counts == {"0": (1, 4), "2": (1, 4)}
    assert least.threshold == np.nextafter(np.float64(scores["2"][3]), 1)  # above the last that may fall
    assert filters_of(network, scores, Target(threshold=0.55)) == {"0": (2,), "2": (1, 3)}
    assert filters_of(network, scores, Target(keep_filters=0.5, floor=0.5)) == {"0": (0, 2), "2": (1, 3)}
    assert filters_of(network, scores, Target(keep_filters=0.5, uniform=True)) == {"0": (0, 2), "2": (1, 3)}
    assert select(network, scores, Target(keep_filters=0.5, uniform=True)).threshold is None


def test_scores_are_checked() -> None:
    scores = some_scores(NETWORK, 0)
    for bad in (math.nan, math.inf, -math.inf):
        one = scores["inner"].clone()
        one[2] = bad
        with pytest.raises(TargetError, match="A score of 'inner' is not finite"):
            select(NETWORK, {**scores, "inner": one}, Target(keep_macs=0.5))
    with pytest.raises(TargetError, match=r"'inner' needs 5 scores, not \(4,\)"):
        select(NETWORK, {**scores, "inner": torch.ones(4)}, Target(keep_macs=0.5))
    with pytest.raises(TargetError, match=r"not \(5, 1\)"):
        select(NETWORK, {**scores, "inner": torch.ones(5, 1)}, Target(keep_macs=0.5))


ONE = r"Give one of threshold.* or keep_macs and keep_params together \(got {}\)"
BAD_TARGETS = [
    ({}, ONE.format("none")),
    ({"keep_macs": 0.5, "keep_filters": 0.5}, ONE.format("keep_filters and keep_macs")),
    ({"keep_macs": 0.5, "keep_params": 0.5, "threshold": 0.5}, ONE.format("threshold and keep_macs and keep_params")),
    ({"keep_macs": 0.5, "widths": "plan.json"}, ONE.format("keep_macs and widths")),
    ({"threshold": math.nan}, r"threshold must be a finite number \(got nan\)"),
    ({"keep_macs": math.inf}, r"keep_macs must be above 0 and at most 1 \(got inf\)"),
    ({"keep_macs": 0.0}, r"keep_macs must be above 0 and at most 1 \(got 0.0\)"),
    ({"keep_params": 1.01}, r"keep_params must be above 0 and at most 1 \(got 1.01\)"),
    ({"keep_filters": -0.5}, "keep_filters must be above 0"),
    ({"keep_macs": 0.5, "round_to": 0}, r"round_to must be from 1 to 4096 \(got 0\)"),
    ({"keep_macs": 0.5, "round_to": 1.5}, r"round_to must be a whole number \(got 1.5\)"),
    ({"keep_macs": 0.5, "floor": -0.1}, "floor must be from 0 to 1 .got -0.1"),
    ({"keep_macs": 0.5, "floor": 1.1}, "floor must be from 0 to 1 .got 1.1"),
    ({"widths": "plan.json", "round_to": 2}, "leave out round_to, floor and uniform"),
    ({"widths": "plan.json", "floor": 0.1}, "leave out round_to, floor and uniform"),
    ({"widths": "plan.json", "uniform": True}, "leave out round_to, floor and uniform"),
    ({"threshold": 0.5, "uniform": True}, "uniform needs a share or a budget instead"),
]


@pytest.mark.parametrize(("options", "message"), BAD_TARGETS)
def test_what_is_no_target_is_refused(options: dict, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        Target(**options)


def test_targets_at_their_bounds_are_targets_and_say_what_they_are() -> None:
    said = {
        Target(threshold=-3.0): "threshold = -3",
        Target(keep_macs=1.0, floor=1.0): "keep_macs = 1, at least 1 of each group",
        Target(keep_macs=0.5, keep_params=0.25): "keep_macs = 0.5, keep_params = 0.25",
        Target(keep_filters=0.5, uniform=True): "keep_filters = 0.5, the same share of every group",
        Target(keep_macs=0.5, floor=0.0, round_to=1): "keep_macs = 0.5",
        Target(
            keep_macs=0.5, floor=0.1, round_to=2
        ): "keep_macs = 0.5, at least 0.1 of each group, widths in steps of 2",
        Target(widths="plan.json"): "widths of plan.json",
    }
    assert {target: str(target) for target in said} == said
    assert Target(keep_macs=0.5, keep_params=0.25).limits == {"keep_macs": 0.5, "keep_params": 0.25}


def test_what_cannot_be_reached_is_said_with_the_reason() -> None:
    """The least that can remain: one path, as wide as floor and steps want it; of two limits the one that is missed."""
    scores = some_scores(NETWORK, 0)
    equal = NETWORK.strongest_path({group.name: np.ones(group.width) for group in NETWORK.groups})
    own = NETWORK.strongest_path(arrays(scores))
    least = {kind: min(shares(NETWORK, equal)[kind], shares(NETWORK, own)[kind]) for kind in shares(NETWORK, own)}
    for kind, what in (("keep_macs", "MACs"), ("keep_params", "parameters"), ("keep_filters", "filters")):
        expected = f"{kind} = 0.001 cannot be reached: .* between {least[kind]:.4f} and 1 of its {what}[.]$"
        with pytest.raises(TargetError, match=expected):
            select(NETWORK, scores, Target(**{kind: 0.001}))
    for shape, said in (
        ({"floor": 0.5}, " with a floor of 0.5"),
        ({"round_to": 2}, " with widths in steps of 2"),
        ({"round_to": 2, "floor": 0.5}, " with widths in steps of 2 and a floor of 0.5"),
    ):
        with pytest.raises(TargetError, match=f"of its MACs{said}[.]$"):
            select(NETWORK, scores, Target(keep_macs=0.001, **shape))
    for limits, missed in (
        ({"keep_macs": 0.9, "keep_params": 0.001}, "keep_params = 0.001"),
        ({"keep_macs": 0.001, "keep_params": 0.9}, "keep_macs = 0.001"),
    ):
        with pytest.raises(TargetError, match=f"{missed} cannot be reached"):
            select(NETWORK, scores, Target(**limits))


# ---------------------------------------------------------------- the strongest path


def all_paths(network: Network) -> list[set[tuple[str, int]]]:
    """Every way from the input to each output, as the gated channels on it, found by walking them all."""
    paths: dict[str, list[list[frozenset[tuple[str, int]]]]] = {}
    gated = {site: group.name for group in network.groups for site in group.sites}
    outputs = []
    for op in network.ops:
        before = [paths[node.name] for node in op.inputs]
        width = len(op.flow.forward([np.zeros(len(value), dtype=np.int8) for value in before]))
        here: list[list[frozenset[tuple[str, int]]]] = []
        for channel in range(width):
            need = np.arange(width) == channel
            if not before:
                here.append([frozenset()])
                continue
            needs = op.flow.backward(need, [np.zeros(len(value), dtype=np.int8) for value in before])
            if op.node.op == "output":
                needs = [need]
            ways = {
                way for value, read in zip(before, needs, strict=True) for i in np.flatnonzero(read) for way in value[i]
            }
            own = {(gated[op.name], channel)} if op.name in gated else set()
            here.append([way | own for way in ways])
        if op.node.op == "output":
            outputs.append({way for ways in here for way in ways})
        else:
            paths[op.name] = here
    return outputs


class Heads(nn.Module):
    """Answers from two layers, each with a filter of its own per answer: some are connected better than others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 2, 1), nn.Conv2d(2, 3, 1), nn.Conv2d(2, 4, 1, groups=2)
        self.left, self.right = nn.Conv2d(3, 1, 1), nn.Conv2d(4, 2, 1, groups=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.a(x).relu()
        left, right = self.b(x).relu(), self.c(x).relu()
        return torch.cat([self.left(left), self.right(right)], 1), self.right(right)


def test_of_paths_whose_weakest_gates_are_equal_the_strongest_together_is_kept() -> None:
    """No filter of the first layer scores above 0.3, so that every way through it has this as its weakest gate."""
    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.ReLU(), nn.Conv2d(5, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.ReLU())
    network = prepare(nn.Sequential(*model, nn.Conv2d(4, 2, 1)), torch.zeros(1, 3, 2, 2))
    a, b, c = [0.3, 0.2, 0.1, 0.1, 0.1], [0.31, 0.95, 0.9, 0.85, 0.8, 0.1], [0.4, 0.99, 0.2, 0.1]
    scores = {name: torch.tensor(values) for name, values in zip("024", (a, b, c), strict=True)}
    assert network.strongest_path(arrays(scores)) == {"0": {0}, "2": {1}, "4": {1}}
    assert filters_of(network, scores, Target(threshold=0.96)) == {"0": (0,), "2": (1,), "4": (1,)}


@pytest.mark.parametrize("streams", ["independent", "tied"])
@pytest.mark.parametrize("model", [Ways, Heads])
def test_no_path_is_stronger_than_the_strongest(model: type[nn.Module], streams: str) -> None:
    network = prepare(model(), IMAGE, streams=streams)
    outputs = all_paths(network)
    assert len(outputs) == (2 if model is Heads else 1)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        scores = {group.name: rng.random(group.width) for group in network.groups}
        found = {(name, number) for name, numbers in network.strongest_path(scores).items() for number in numbers}

        def weakest(way, scores=scores) -> float:
            return min((scores[name][number] for name, number in way), default=math.inf)

        inside = [[way for way in ways if way <= found] for ways in outputs]
        for ways, within in zip(outputs, inside, strict=True):
            assert within
            assert max(map(weakest, within)) == max(map(weakest, ways))
        # Nothing is kept beside one way to each output.
        assert any(frozenset().union(*ways) == found for ways in itertools.product(*inside))
