"""What is settled about a network before anything is built: groups, streams, index maps, costs; worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from networks import random_choice
from paam.graph.cost import count
from paam.graph.network import Network, prepare
from paam.graph.solve import Settled, Solution, solve

X = torch.zeros(2, 3, 8, 8)


def kept(*numbers: int, width: int = 8) -> Any:
    mask = np.zeros(width, dtype=bool)
    mask[list(numbers)] = True
    return mask


class Chunked(nn.Module):
    """Reads a value in parts, as a gated unit does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.conv, self.head = nn.Conv2d(3, 8, 1), nn.LazyConv2d(3, 1)
        self.one, self.four = nn.Conv2d(8, 1, 1), nn.Conv2d(8, 4, 1)
        self.scale = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.how == "halves":
            first, second = y.chunk(2, 1)
            y = first * second.sigmoid()
        if self.how == "halves and quarters":
            first, second = y.chunk(2, 1)
            parts = y.chunk(4, 1)
            return self.head(torch.cat([first * second, parts[0] * parts[1] * parts[2] * parts[3]], 1))
        if self.how == "halves of halves":
            first, second = y.chunk(2, 1)
            third, fourth = (first * second).chunk(2, 1)
            y = third * fourth
        if self.how == "whole":
            (only,) = y.chunk(1, 1)
            y = only + y
        if self.how == "half and another":
            first, second = y.chunk(2, 1)
            y = first * second + self.four(y.relu())
        if self.how == "product":
            y = y * self.conv(x.flip(2)).tanh()
        if self.how == "gate":
            y = y * self.one(y.relu())
        return self.head(y)


def chunked(how: str, streams: str) -> Network:
    model = Chunked(how)
    model(X)
    return prepare(model, X, streams=streams, check=False)


@pytest.mark.parametrize(
    ("how", "tied", "independent"),
    [
        ("", {"conv": 8}, {"conv": 8}),
        ("halves", {"conv": 4}, {"conv": 8}),
        ("halves and quarters", {"conv": 8}, {"conv": 8}),
        ("halves of halves", {"conv": 8}, {"conv": 8}),
        ("whole", {"conv": 8}, {"conv": 8}),
        ("half and another", {"conv": 4}, {"conv": 8, "four": 4}),
        ("gate", {"conv": 8, "one": 1}, {"conv": 8, "one": 1}),
    ],
)
def test_widths_of_groups(how: str, tied: dict[str, int], independent: dict[str, int]) -> None:
    assert {group.name: group.width for group in chunked(how, "tied").groups} == tied
    assert {group.name: group.width for group in chunked(how, "independent").groups} == independent


class TwoWays(nn.Module):
    """Reads one value in halves and in quarters, and adds something to a quarter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.two, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(2, 2, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        first, second = y.chunk(2, 1)
        product = first * second
        parts = y.chunk(4, 1)
        return self.head(torch.cat([product, parts[0] + self.two(parts[1])], 1))


def test_a_value_may_be_read_in_parts_in_two_ways() -> None:
    network = prepare(TwoWays(), X, streams="tied")
    assert {group.name: group.width for group in network.groups} == {"conv": 8, "two": 2}
    for seed in range(4):
        choice = random_choice(network, seed)
        small = network.compact(network.plan(choice))
        assert sum(p.numel() for p in small.parameters()) == network.cost(choice).params


class Stream(nn.Module):
    """A branch that is scaled by a parameter before it is added, and read before that, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.aside = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)
        self.scale, self.head = nn.Parameter(torch.ones(8, 1, 1)), nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        z = self.branch(x)
        return self.head(torch.cat([x + z * self.scale, self.aside(z)], 1))


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.gate = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((x + self.branch(x)) * self.gate(x))


def test_streams_go_through_scales() -> None:
    groups = {group.name: group for group in prepare(Stream(), X, check=False).groups}
    assert {name: group.stream for name, group in groups.items()} == {"stem": "stem", "branch": "stem", "aside": None}
    assert groups["branch"].sites == ("branch",)
    assert {group.area for group in groups.values()} == {64}


@pytest.mark.parametrize(
    ("placement", "streams", "layers"),
    [
        ("sum", "independent", [("stem",), ("branch",), ("gate",)]),
        ("branch", "independent", [("stem",), ("branch",), ("gate",)]),
        ("sum", "tied", [("stem", "branch", "gate")]),
        ("branch", "tied", [("stem", "branch", "gate")]),
    ],
)
def test_what_is_tied_is_one_group(placement: str, streams: str, layers: list[Any]) -> None:
    network = prepare(Products(), X, placement=placement, streams=streams, check=False)
    assert [group.layers for group in network.groups] == layers


# Index maps


def settled(network: Network, **masks: Any) -> Solution:
    return solve(
        network.ops, network._masks({**{g.name: kept(*range(g.width), width=g.width) for g in network.groups}, **masks})
    )


def step(solution: Solution, name: str) -> Settled:
    return next(step for step in solution.settled if step.op.name == name)


def test_parts_stay_parts_where_all_keep_as_many() -> None:
    network = chunked("halves", "independent")
    names = [op.name for op in network.ops if op.name.startswith("getitem")]
    even, whole, uneven = (settled(network, conv=mask) for mask in (kept(0, 2, 4, 6), kept(*range(8)), kept(0, 1, 4)))
    for solution, picked in ((even, False), (whole, False), (uneven, True)):
        assert [step(solution, name).picked for name in names] == [picked] * 2
        assert [step(solution, name).rewires for name in names] == [picked] * 2
        assert solution.rewired is picked
    assert [step(even, name).out.tolist() for name in names] == [[0, 2], [0, 2]]


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 1, groups=2), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


def test_groups_of_a_convolution_are_filled_up_and_picked_from() -> None:
    network = prepare(Grouped(), X, check=False)
    for mask, places in (
        *((kept(0, 2, 4, 5, width=6), None), (kept(0, 1, 2, 3, width=6), [0, 1, 2, 3]), (kept(1, 2, width=6), None)),
        *((kept(1, 3, 5, width=6), [0, 2, 3]), (kept(*range(6), width=6), None)),
    ):
        picks = step(settled(network, second=mask), "second").picks
        assert (picks is None) if places is None else picks.tolist() == places


class PairsInGroups(nn.Module):
    """Each group of a convolution makes two channels: one of them alone cannot go without an index map."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 1, groups=4), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


def test_what_would_be_filled_up_is_no_group_of_a_class_of_the_models_own() -> None:
    assert [group.name for group in prepare(PairsInGroups(), X, check=False).groups] == ["first", "second"]
    left = prepare(PairsInGroups(), X, check=False, keep_class=True).groups
    assert [group.name for group in left] == ["first"]


# Costs, against those of what is built


class Gained(nn.Conv2d):
    """Holds a gain for each output, and one number for all."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.gain, self.all = nn.Parameter(torch.ones(self.out_channels, 1, 1)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain * self.all


def parametrized() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Conv2d(6, 6, 1)), nn.BatchNorm2d(6))


MODELS: dict[str, Any] = {
    "gains": (lambda: nn.Sequential(nn.Conv2d(3, 6, 1), Gained(6, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1)), ()),
    "left alone": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 1), parametrized(), nn.Conv2d(6, 8, 1), nn.Conv2d(8, 2, 1)),
        ["1"],
    ),
    "weight norm": (lambda: nn.Sequential(weight_norm(nn.Conv2d(3, 6, 1)), nn.ReLU(), nn.Conv2d(6, 2, 1)), ()),
    "groups": (Grouped, ()),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 2, 1)), ()),
    "transposed": (lambda: nn.Sequential(nn.Conv2d(3, 6, 1), nn.ConvTranspose2d(6, 5, 2, 2), nn.Conv2d(5, 2, 1)), ()),
    "padded behind a norm": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.Sigmoid(), nn.Conv2d(6, 5, 3, padding=1), nn.Conv2d(5, 2, 1)
        ),
        (),
    ),
    "scaled": (Stream, ()),
}


@pytest.mark.parametrize("name", MODELS)
def test_costs_are_those_of_the_small_network(name: str) -> None:
    make, ignore = MODELS[name]
    model = make().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean)
    network = prepare(model, X, ignore=ignore, check=False)
    assert network.cost(random_choice(network, 0, whole=1.0)).macs == network.dense.macs == count(model, X).macs
    for seed in range(4):
        choice = random_choice(network, seed, whole=0, empty=0.1)
        small = network.compact(network.plan(choice), check=False)
        truth = count(small, X)
        cost = network.cost(choice)
        assert (cost.params, cost.macs) == (truth.params, truth.macs)


class Sized(nn.Module):
    """Takes another way for larger images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.head(x) if x.shape[2] > 7 else -self.head(x)


def test_what_decides_by_sizes_needs_a_graph_unless_it_keeps_its_class() -> None:
    network = prepare(Sized(), X, check=False)
    smaller, whole = settled(network, conv=kept(1, 2)), settled(network)
    found = [s.needs_graph(network.traced, keep) for s in (smaller, whole) for keep in (False, True)]
    assert found == [True, False, False, False]
