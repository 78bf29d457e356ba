"""Random numbers to try and to compare with: weights of many kinds, inputs of many sizes."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor, nn

from paam.graph.channel_map import ChannelMap
from paam.graph.checks import draws
from paam.graph.checks.inputs import inputs_of_other_sides, random_inputs, tame_inputs
from paam.graph.checks.perturb import Noise, perturb, perturbed
from paam.graph.network import prepare
from paam.graph.trace import Traced

CPU = torch.device("cpu")
TABLE = 65521


@functools.cache
def table(seed: int) -> Tensor:
    return torch.rand(TABLE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# The noise


def test_noise_is_torchs_generators_number_by_number() -> None:
    noise = Noise(CPU, seed=3)
    assert torch.equal(noise.like(torch.zeros(2, 3)), table(3)[:6].view(2, 3))
    assert torch.equal(noise.like(torch.zeros(4), -1, 3), table(3)[6:10] * 4 - 1)
    assert torch.equal(Noise(CPU).like(torch.zeros(5)), table(0)[:5])
    assert Noise(CPU, dtype=torch.float32).like(torch.zeros(5, dtype=torch.float64)).dtype == torch.float32


@pytest.mark.parametrize("rest", [0, 1, 2])
def test_noise_begins_anew_where_it_ends(rest: int) -> None:
    noise = Noise(CPU)
    noise.like(torch.zeros(TABLE - rest))
    assert torch.equal(noise.like(torch.zeros(3), 1, 3), torch.cat([table(0)[TABLE - rest :], table(0)])[:3] * 2 + 1)
    assert torch.equal(noise.like(torch.zeros(2)), table(0)[3 - rest : 5 - rest])


@pytest.mark.parametrize(("rows", "row", "step"), [(300, 400, 217), (3, 32760, 10920), (65520, 2, 1)])
def test_rows_that_may_overlap_begin_a_few_places_on(rows: int, row: int, step: int) -> None:
    found = Noise(CPU).like(torch.zeros(rows, row // 2, 2), -1, 1, overlapping=True)
    assert found.shape == (rows, row // 2, 2)
    for place in (0, 1, 2, rows - 1):
        assert torch.equal(found[place].flatten(), table(0)[place * step : place * step + row] * 2 - 1)


def test_few_rows_follow_each_other() -> None:
    noise = Noise(CPU)
    assert torch.equal(noise.like(torch.zeros(1), overlapping=True), table(0)[:1])
    assert torch.equal(noise.like(torch.zeros(180, 364), overlapping=True).flatten(), table(0)[1:])


@pytest.mark.parametrize(("rows", "row"), [(3, 32762), (70000, 2), (2, 60000), (65521, 2)])
def test_rows_that_do_not_fit_follow_each_other(rows: int, row: int) -> None:
    found = Noise(CPU).like(torch.zeros(rows, row), overlapping=True).flatten()
    assert torch.equal(found, table(0).repeat(3)[: rows * row])


# Other weights


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(1000))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.narrow = nn.Parameter(torch.zeros(4, 0))
        self.one = nn.Parameter(torch.zeros(1, 900))
        self.long, self.flat = nn.Parameter(torch.zeros(1000, 1)), nn.Parameter(torch.zeros(100, 25))
        self.places = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_parameter("none", None)
        self.register_buffer("index", torch.arange(3))
        self.register_buffer("twice", self.index)
        self.register_buffer("grid", torch.ones(1000))
        self.register_buffer("mask", torch.tensor([1.0, float("-inf"), float("nan")]))
        self.register_buffer("running_mean", torch.zeros(1000))
        self.register_buffer("running_var", torch.zeros(1000))
        self.register_buffer("nothing", None)


def lies_between(values: Tensor, low: float, high: float) -> bool:
    """Whether numbers fill a range."""
    edge = 0.02 * (high - low)
    return low <= values.min() < low + edge and high - edge < values.max() <= high


@pytest.mark.parametrize("gentle", [False, True])
def test_other_weights_keep_what_is_no_number(gentle: bool) -> None:
    model = Holds()
    index, places = model.index, model.places
    perturb(model, Noise(CPU), gentle=gentle)
    assert model.index is model.twice
    assert model.index is not index
    assert model.places is not places
    model.index.add_(1)
    model.places.add_(1)
    assert (index.tolist(), places.tolist()) == ([0, 1, 2], [0, 1, 2])
    assert (model.index.tolist(), model.places.tolist()) == ([1, 2, 3], [1, 2, 3])
    assert (model.empty.shape, model.narrow.shape, model.none, model.nothing) == ((0, 3), (4, 0), None, None)
    assert 1.0 <= model.mask[0] < 1.25
    assert [str(float(x)) for x in model.mask[1:]] == ["-inf", "nan"]
    assert lies_between(model.grid, 1.0, 1.25)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert lies_between(model.weight, *((0.0, 0.05) if gentle else (0.6, 1.4)))
    assert lies_between(model.bias, *((0.0, 0.05) if gentle else (-0.4, 0.6)))
    assert lies_between(model.one, *((0.0, 0.05) if gentle else (-2 / 30, 2 / 30)))
    assert lies_between(model.long, *((0.0, 0.05) if gentle else (-2, 2)))
    assert lies_between(model.flat, *((0.0, 0.05) if gentle else (-0.4, 0.4)))
    assert lies_between(model.running_mean, *((0.0, 0.05) if gentle else (-0.4, 0.6)))
    assert lies_between(model.running_var, *((0.0, 0.05) if gentle else (0.5, 1.5)))


def test_other_weights_of_layers_that_share_them() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), ChannelMap([0, -1], 1, 1))
    model[1].weight = model[0].weight
    before = model[2].index_mask.clone()
    perturb(model, Noise(CPU))
    assert model[0].weight.max() > 1  # of 2 / sqrt(3)
    assert model[0].weight is model[1].weight
    assert model[0].bias is not model[1].bias
    assert torch.equal(model[2].index_mask, before)


def test_weights_of_ones_own_layers_hold_their_own_memory() -> None:
    class OwnLinear(nn.Linear):
        pass

    for kind, own in ((nn.Linear, False), (OwnLinear, True)):
        value = nn.Parameter(torch.zeros(300, 400))
        assert perturbed("weight", value, Noise(CPU), kind(2, 2)).is_contiguous() is own


# Weights to try a layer with


U = torch.tensor([-0.9, -0.5, 0.0, 0.25, 0.5, 0.6, 1.0], dtype=torch.float64)
STEPS = [10**-1.5, 10.0, 1.0, 0.1, 10**1.5, 10**0.5, 10**-0.5]
BY_HAND = {
    "plain": [-0.9, -0.5, 0.0, 0.25, 0.5, 0.6, 1.0],
    "_small": [-0.045, -0.025, 0.0, 0.0125, 0.025, 0.03, 0.05],
    "_large": [-18.0, -10.0, 0.0, 5.0, 10.0, 12.0, 20.0],
    "_heavy_tailed": [-7.5, -0.5 / 0.52, 0.0, 0.25 / 0.77, 0.5 / 0.52, 0.6 / 0.42, 50.0],
    "_uneven_filters": [x * step for x, step in zip(U.tolist(), STEPS, strict=True)],
    "_positive": [2.8, 1.6, 0.1, 0.85, 1.6, 1.9, 3.1],
    "_negative": [-0.28, -0.16, -0.01, -0.085, -0.16, -0.19, -0.31],
    "_sparse": [-1.8, 0.0, 0.0, 0.0, 0.0, 1.2, 2.0],
    "_few_values": [-2.0, -1.0, 0.0, 1.0, 1.0, 2.0, 2.0],
}


@pytest.mark.parametrize("name", BY_HAND)
def test_draws_by_hand(name: str) -> None:
    draw = getattr(draws, name)
    assert draw in draws.DRAWS
    assert draw(U).tolist() == pytest.approx(BY_HAND[name])


def test_filters_are_uneven_along_the_first_axis() -> None:
    u = torch.arange(1.0, 15.0, dtype=torch.float64).view(7, 1, 2)
    truth = u * torch.tensor(STEPS, dtype=torch.float64).view(7, 1, 1)
    assert torch.allclose(draws._uneven_filters(u), truth)
    assert float(draws._uneven_filters(torch.tensor(2.0))) == pytest.approx(2 * 10**-1.5)


class Norm(Holds):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 40, 3)
        self.again = self.weight
        self.scalar = nn.Parameter(torch.tensor(1.0))


def test_weights_that_are_tried_are_as_large_as_usual() -> None:
    norm = Norm()
    twin = draws.with_weights(norm, draws.plain, Noise(CPU))
    assert norm.weight.sum() == 0
    assert lies_between(twin.conv.weight, -2 / 45**0.5, 2 / 45**0.5)
    assert lies_between(twin.weight, -1, 1)
    assert lies_between(twin.one, -2 / 30, 2 / 30)
    assert lies_between(twin.running_mean, -1, 1)
    assert lies_between(twin.running_var, 0.51, 1.01)
    assert lies_between(twin.grid, 1.0, 1.25)
    assert twin.again is twin.weight
    assert abs(twin.scalar) <= 1
    assert (twin.places.tolist(), twin.index.tolist()) == ([0, 1, 2], [0, 1, 2])
    assert (twin.empty.shape, twin.narrow.shape, twin.none, twin.nothing) == ((0, 3), (4, 0), None, None)
    assert not any(parameter.requires_grad for parameter in twin.parameters())
    assert draws.with_weights(norm, draws._negative, Noise(CPU)).running_var.min() > 0


def test_weights_that_are_tried_are_drawn() -> None:
    found = draws.with_weights(nn.Linear(4, 4, bias=False), lambda u: u.sign() * 8, Noise(CPU)).weight
    assert found.abs().tolist() == [[8.0] * 4] * 4  # 2 / sqrt(4) is 1
    assert 0 < (found > 0).sum() < 16


# Inputs


class Indexed(nn.Module):
    """Reads images, and one whole number for each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return self.conv(x) + i[:, None, None, None]


@functools.cache
def traced(*sizes: int, numbers: bool = False) -> Traced:
    if numbers:
        return prepare(Indexed(), (torch.full((2, 3, *sizes), 0.5), torch.tensor([5, 6])), check=False).traced
    return prepare(nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU()), torch.zeros(2, 3, *sizes), check=False).traced


@pytest.mark.parametrize(
    ("size", "sizes"),
    [
        *((224, [32, 64, 128, 224]), (100, [12, 32, 64, 100]), (48, [8, 12, 32, 48]), (46, [8, 11, 23, 46])),
        *((6, [6]), (64, [8, 16, 32, 64]), (20, [8, 10, 20]), (8, [8]), (9, [8, 9])),
    ],
)
def test_sizes_of_smaller_images(size: int, sizes: list[int]) -> None:
    found = [*random_inputs(traced(size, size))]
    assert [x.shape[2] for (x,) in found] == sizes
    assert all(x.shape[:2] == (3, 3) and x.dtype == torch.float64 for (x,) in found)
    assert all(abs(float(x.mean())) < 0.5 < float(x.std()) for (x,) in found)
    smaller = [x.shape[2] for (x,) in random_inputs(traced(size, size), also_examples=False)]
    assert smaller == sizes[:-1]


def test_sizes_of_larger_images_and_batches() -> None:
    (larger,) = random_inputs(traced(10, 7), (0.5,), more=4, also_examples=False)
    assert larger[0].shape == (7, 3, 20, 14)
    first, second = random_inputs(traced(16, 16), (2.0, 1.0))
    for (x,), seed in ((larger, 4), (first, 16), (second, 8)):
        assert torch.equal(x, torch.randn(x.shape, generator=seeded(seed), dtype=torch.float64))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_sides_one_by_one() -> None:
    found = [tuple(x.shape) for (x,) in inputs_of_other_sides(traced(5, 7))]
    assert found == [(3, 3, 4, 7), (3, 3, 6, 7), (3, 3, 5, 6), (3, 3, 5, 8)]
    found = [tuple(x.shape) for (x,) in inputs_of_other_sides(traced(1, 7))]
    assert found == [(3, 3, 2, 7), (3, 3, 1, 6), (3, 3, 1, 8)]
    for (x,), seed in zip(inputs_of_other_sides(traced(5, 7)), (2, 2, 3, 3), strict=True):
        assert torch.equal(x, torch.randn(x.shape, generator=seeded(seed), dtype=torch.float64))


def test_whole_numbers_are_the_examples() -> None:
    graph = traced(4, 4, numbers=True)
    for x, i in (*random_inputs(graph), *inputs_of_other_sides(graph), *tame_inputs(graph)):
        assert i.tolist() == [5, 6, 5]
        assert x.shape[:2] == (3, 3)
    assert len([*inputs_of_other_sides(graph)]) == 4
    assert len([*inputs_of_other_sides(traced(1, 4, numbers=True))]) == 3
    ((_, more),) = random_inputs(graph, (1,), more=2)
    assert more.tolist() == [5, 6, 5, 6, 5]
    (x, _), (example, _) = tame_inputs(graph)
    assert torch.equal(x, torch.rand(x.shape, generator=seeded(0), dtype=torch.float64))
    assert example.tolist() == torch.full((3, 3, 4, 4), 0.5).tolist()
    assert (x.dtype, example.dtype) == (torch.float64, torch.float64)


def test_samples_of_the_example_come_by_turns() -> None:
    x = torch.arange(2.0).view(2, 1, 1, 1).expand(2, 3, 4, 4)
    model = prepare(nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU()), x, check=False).traced
    _, (found,) = tame_inputs(model)
    assert found[:, 0, 0, 0].tolist() == [0, 1, 0]


def test_a_models_own_code_has_no_example_for_its_graph() -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.head(self.conv(x).relu())
            return y if y.sum() > math.pi else -y

    graph = prepare(Decides(), torch.zeros(2, 3, 4, 4), on_decision="stop", check=False).traced
    assert [x.shape for (x,) in tame_inputs(graph)] == [(2, 3, 4, 4)]
