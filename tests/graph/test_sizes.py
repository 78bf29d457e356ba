"""Small networks at other image and batch sizes than the example's: exact, or refused in words."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paam
from networks import compacted, lively, random_choice, relative_error
from paam import Pruner
from paam.errors import GraphError
from paam.graph.channel_map import ChannelMap, ChannelOffset
from paam.graph.network import Choice

GENERATOR = torch.Generator().manual_seed(0)


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def images(batch: int, size: int) -> Tensor:
    return torch.randn(batch, 3, size, size, dtype=torch.float64, generator=GENERATOR)


def kept(pruner: Pruner, **filters: list[int]) -> Choice:
    """All filters, but of some groups these alone."""
    choice = {}
    for group in pruner.network.groups:
        choice[group.name] = np.isin(np.arange(group.width), filters.get(group.name, range(group.width)))
    return choice


class Between(nn.Module):
    """Two convolutions, what is in question, and a classifier."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.head = conv(3, 8), conv(8, 8), conv(8, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(8))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.stem(x))
        return self.head(F.relu(self.b(self.function(self, y, self.a(y)))).mean((2, 3)))


def per_sample(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def layer_norm(m: Between, y: Tensor, z: Tensor) -> Tensor:
    flat = z.flatten(1)
    return (z - per_sample(flat.mean(1))) / per_sample(flat.std(1))


def by_view(m: Between, y: Tensor, z: Tensor) -> Tensor:
    return z / per_sample(z.view(z.shape[0], -1).norm(dim=1))


def by_computed_size(m: Between, y: Tensor, z: Tensor) -> Tensor:
    n, c, h, w = z.shape
    return z.reshape(n, c * h * w).softmax(1).view(n, c, h, w)


def twice_flattened(m: Between, y: Tensor, z: Tensor) -> Tensor:
    return z * per_sample(z.flatten(2).flatten(1).logsumexp(1))


def similar(m: Between, y: Tensor, z: Tensor) -> Tensor:
    return z * per_sample(F.cosine_similarity(y.flatten(1), z.flatten(1)))


def summed(m: Between, y: Tensor, z: Tensor) -> Tensor:
    return z * per_sample((y.flatten(1) + z.flatten(1)).amax(1))


def multiplied(m: Between, y: Tensor, z: Tensor) -> Tensor:
    return z + per_sample((y.flatten(1) * z.flatten(1)).sum(1)) / 64


def joined(m: Between, y: Tensor, z: Tensor) -> Tensor:
    both = torch.cat([y.mean((2, 3)), z.flatten(1)], 1)
    return z * per_sample(both.std(1))


def first_half(m: Between, y: Tensor, z: Tensor) -> Tensor:
    return z * per_sample(z.flatten(1).chunk(2, 1)[0].std(1))


def from_behind(m: Between, y: Tensor, z: Tensor) -> Tensor:
    return z * z.flatten(1).flip(1).view_as(z)


def over_a_pixel(m: Between, y: Tensor, z: Tensor) -> Tensor:
    """Where the example leaves a single pixel: flattened, a larger image has more."""
    return z * per_sample(F.avg_pool2d(z, 8).flatten(1).softmax(1)[:, 0])


@pytest.mark.parametrize("streams", ["independent", "tied"])
@pytest.mark.parametrize(
    "function",
    [
        *(layer_norm, by_view, by_computed_size, twice_flattened, similar, summed, multiplied, joined, first_half),
        *(from_behind, over_a_pixel),
    ],
)
def test_what_reads_a_flattened_map_is_exact_at_every_size(function, streams: str) -> None:
    pruner = Pruner(lively(Between(function)), images(2, 8), scorer="free", streams=streams)
    for seed in range(4):
        choice = random_choice(pruner.network, seed, empty=0)
        for mask in choice.values():
            mask[0] = True
        small, cost = compacted(pruner, choice), pruner.network.cost(choice)
        for size in (8, 12, 16, 9):
            x = images(3, size)
            with torch.no_grad():
                assert relative_error(small(x), pruner.model.eval()(x)) < 1e-9
        counted = paam.count(small, images(2, 8))
        assert (counted.params, counted.macs) == (cost.params, cost.macs)


class Classifier(nn.Module):
    """Its linear layer wants one image size."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.stem, self.a, self.b = conv(3, 8), conv(8, 8), conv(8, 8)
        self.norm, self.head = nn.BatchNorm1d(8 * 16), nn.Linear(8 * 16, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.stem(x)), 2)
        return self.head(self.function(self, self.a(y).flatten(1), self.b(y).flatten(1)))


@pytest.mark.parametrize(
    "function", [lambda m, y, z: y + z, lambda m, y, z: torch.sigmoid(y) * z, lambda m, y, z: F.relu(m.norm(y) + z)]
)
def test_behind_a_flattening_whose_length_a_layer_fixes_filters_are_cut(function) -> None:
    pruner = Pruner(lively(Classifier(function)), images(2, 8), scorer="free")
    choice = kept(pruner, a=[0, 1, 5], b=[1, 5, 6])
    small = compacted(pruner, choice)
    x = images(3, 8)
    with torch.no_grad():
        assert relative_error(small(x), pruner.model(x)) < 1e-9
    assert small.get_submodule("head").in_features < 8 * 16


def test_an_index_map_refuses_a_longer_axis() -> None:
    for layer in (ChannelMap([0, 2], 4, 1), ChannelOffset(torch.ones(4), 1)):
        layer(torch.ones(2, 4))
        with pytest.raises(GraphError, match="4 values in a row where this input gives it 9"):
            layer(torch.ones(2, 9))


@pytest.mark.parametrize("size", [8, 16])  # smaller images tell, or, where there are none, larger ones
@pytest.mark.parametrize("silent", [False, True])
def test_a_network_that_is_right_for_one_size_alone_is_noticed(size: int, silent: bool, monkeypatch) -> None:
    pruner = Pruner(lively(Between(layer_norm)), images(2, size), scorer="free")
    monkeypatch.setattr(paam.graph.solve, "filled_before", lambda settled: None)
    if silent:
        monkeypatch.setattr(paam.graph.channel_map, "_check_length", lambda *arguments: None)
    with pytest.raises(GraphError, match="would compute something else than the gated one"):
        compacted(pruner, kept(pruner, a=[0, 2]))
