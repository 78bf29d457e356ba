"""How layers of somebody's own are tried: what is picked, cut, made extreme, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paam.graph.checks import norm_trials, trials
from paam.graph.checks.norm_trials import is_by_channel
from paam.graph.checks.trials import flow_by_trying
from paam.graph.flows import LIVE, ZERO, Mix

DOUBLE = torch.float64


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def ascending(numbers: np.ndarray[Any, Any]) -> bool:
    return bool((np.diff(numbers) > 0).all())


# What is picked


@pytest.mark.parametrize(
    ("flow", "groups", "made", "read"),
    [
        (Mix(20, 30, 1, False, False), 1, 6, 7),
        (Mix(20, 20, 1, False, False), 1, 6, 6),
        (Mix(5, 20, 1, False, False), 1, 6, 5),
        (Mix(20, 4, 1, False, False), 1, 4, 7),
        (Mix(4, 4, 1, False, False), 1, 4, 4),
        (Mix(12, 20, 4, False, False), 3, 5, 3),
        (Mix(36, 36, 2, False, False), 2, 6, 6),
        (Mix(20, 30, 1, False, False, whole=True), 1, 6, 20),
        (Mix(20, 20, 2, False, False, whole=True), 2, 6, 10),
    ],
)
def test_a_tiny_layer_has_a_few_channels_of_each_group(flow: Mix, groups: int, made: int, read: int) -> None:
    for seed in range(5):
        rows, columns = trials._few(flow, rng(seed))
        assert ascending(rows)
        assert ascending(columns)
        for numbers, size, each in ((rows, flow.outputs, made), (columns, flow.inputs, read)):
            _, counts = np.unique(numbers // (size // flow.groups), return_counts=True)
            assert numbers.min() >= 0
            assert numbers.max() < size
            assert counts.tolist() == [each] * groups
        assert set(rows // (flow.outputs // flow.groups)) == set(columns // (flow.inputs // flow.groups))
        small = trials._flow_of_few(flow, (rows, columns))
        assert (small.inputs, small.outputs, small.groups) == (groups * read, groups * made, groups)


def test_a_tiny_depthwise_layer() -> None:
    for width, count in ((20, 6), (6, 6), (4, 4)):
        flow = Mix(width, width, width, False, False)
        rows, columns = few = trials._few(flow, rng())
        assert rows.tolist() == columns.tolist()
        assert len(rows) == count
        assert ascending(rows)
        small = trials._flow_of_few(flow, few)
        assert (small.inputs, small.outputs, small.groups) == (count, count, count)


def test_some_are_from_one_to_all() -> None:
    for some, counts in ((trials._some, {1, 2, 3, 4}), (norm_trials._some, {1, 2, 3})):  # of a norm some are to go
        found = [some(4, rng(seed)) for seed in range(60)]
        assert all(map(ascending, found))
        assert {len(one) for one in found} == counts
    assert trials._some(1, rng()).tolist() == [0]
    assert norm_trials._some(1, rng()).tolist() == [0]


def test_channels_are_scattered_over_the_groups() -> None:
    flow, uneven = Mix(12, 8, 4, False, False), 0
    for seed in range(40):
        rows, columns = trials._scattered(flow, rng(seed))
        assert ascending(rows)
        groups = np.unique(rows // 2)
        parts = columns.reshape(len(groups), -1)
        for group, part in zip(groups, parts, strict=True):
            held = part[part >= 0]
            assert len(held) > 0
            assert ascending(held)
            assert set(held // 3) == {group}
            assert (part[len(held) :] == -1).all()
        assert (parts >= 0).sum(1).max() == parts.shape[1]
        uneven += bool((columns < 0).any())
    assert uneven > 10
    rows, columns = trials._scattered(Mix(12, 8, 4, False, False, whole=True), rng(1))
    assert columns.tolist() == [c for group in np.unique(rows // 2) for c in range(3 * group, 3 * group + 3)]
    rows, columns = trials._scattered(Mix(5, 5, 5, False, False), rng(1))
    assert rows is columns


def test_places_in_a_small_layer_whose_groups_are_filled_up() -> None:
    flow = Mix(6, 6, 3, False, False)
    for rows, places in (
        *(([0, 2, 3, 5], [0, 2, 3, 4]), ([2, 3, 5], [0, 1, 2]), ([1, 3, 5], [0, 1, 2])),
        ([0, 1, 5], [0, 1, 2]),
    ):
        assert trials._places(flow, np.array(rows)).tolist() == places
    assert trials._places(Mix(6, 6, 1, False, False), np.array([1, 5])).tolist() == [0, 1]
    assert trials._places(Mix(6, 6, 2, False, False), np.array([0, 3, 4])).tolist() == [0, 2, 3]
    assert trials._places(Mix(6, 6, 6, False, False), np.array([1, 5])).tolist() == [0, 1]


# What is made extreme


class Gained(nn.Conv2d):
    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1))
        self.one = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("mean", torch.ones(self.out_channels))
        self.register_buffer("other", torch.ones(self.out_channels + 1))
        self.register_buffer("index", torch.ones(self.out_channels, dtype=torch.int64))
        self.register_buffer("none", None)


def factors(layer: Any) -> Tensor:
    """What a layer of ones has been multiplied by, [first axis, second axis]."""
    assert (layer.weight == layer.weight[:, :, :1, :1]).all()
    return layer.weight.detach()[:, :, 0, 0]


def of_ones(layer: nn.Module) -> Any:
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    return layer


ROWS, COLUMNS = np.array([0, 3]), np.array([1, -1, 2, 3])
MADE, READ = torch.tensor([1.0, 7, 7, 1]), torch.tensor([7.0, 1, 1, 1])


def test_what_is_absent_is_scaled() -> None:
    layer = of_ones(Gained(4, 4, 2))
    trials._scale_absent(layer, Mix(4, 4, 1, True, False), ROWS, COLUMNS, 7.0)
    assert torch.equal(factors(layer), MADE[:, None] * READ)
    for values in (layer.bias, layer.gain[:, 0, 0], layer.mean):
        assert torch.equal(values, MADE)
    assert (layer.one, layer.other.tolist(), layer.index.tolist()) == (1, [1] * 5, [1] * 4)


def test_what_is_absent_of_groups_is_scaled() -> None:
    layer = of_ones(nn.Conv2d(4, 4, 2, groups=2))
    trials._scale_absent(layer, Mix(4, 4, 2, True, False), ROWS, COLUMNS, 7.0)
    assert torch.equal(factors(layer), MADE[:, None] * torch.tensor([[7.0, 1], [7, 1], [1, 1], [1, 1]]))
    layer = of_ones(nn.ConvTranspose2d(4, 6, 2, groups=2, bias=False))
    trials._scale_absent(layer, Mix(4, 6, 2, False, True, True), np.array([0, 4]), COLUMNS, 7.0)
    made = torch.tensor([[1.0, 7, 7], [1, 7, 7], [7, 1, 7], [7, 1, 7]])
    assert torch.equal(factors(layer), READ[:, None] * made)
    layer = of_ones(nn.Conv2d(4, 4, 2, groups=4))
    trials._scale_absent(layer, Mix(4, 4, 4, True, False), ROWS, ROWS, 7.0)
    assert torch.equal(factors(layer), MADE[:, None])
    linear: Any = of_ones(nn.Linear(4, 4))
    trials._scale_absent(linear, Mix(4, 4, 1, True, False), ROWS, COLUMNS, 7.0)
    assert torch.equal(linear.weight, MADE[:, None] * READ)


def test_inputs_that_are_absent_are_zero() -> None:
    x = torch.ones(2, 4, 3)
    found = trials._without(x, Mix(4, 4, 1, False, False), COLUMNS, 1)
    assert torch.equal(found, torch.tensor([0.0, 1, 1, 1])[:, None].expand(2, 4, 3))


def test_what_a_norm_is_tried_with() -> None:
    x = norm_trials._values(4, 5)
    assert (x.shape, x.dtype) == ((3, 4, 2, 2, 2), DOUBLE)
    truth = torch.randn(3, 4, 2, 2, 2, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    truth[:, 0] = 0.25
    assert torch.equal(x, truth)
    assert norm_trials._values(4, 2).shape == (3, 4)
    kept = np.array([1, 3])
    assert torch.equal(norm_trials._of(x, kept), x[:, [1, 3]])
    changed = norm_trials._elsewhere(x, kept)
    truth[:, [0, 2]] = 1e5 * (truth.flip(0)[:, [0, 2]] + 1)
    assert torch.equal(changed, truth)


def test_norms_are_made_extreme() -> None:
    norm = nn.BatchNorm1d(4)
    norm.register_buffer("index", torch.ones(4, dtype=torch.int64))
    norm.inner = nn.BatchNorm1d(4)
    norm_trials._make_extreme(norm, 4, np.array([0, 2]))
    for values, factor in ((norm.weight, 1), (norm.running_var, 1), (norm.bias, 0), (norm.running_mean, 0)):
        assert values.tolist() == [factor, factor * 1e5, factor, factor * 1e5]
    assert norm.index.tolist() == norm.inner.weight.tolist() == norm.inner.running_var.tolist() == [1] * 4
    assert norm.num_batches_tracked == 0


# What is found out about norms


class Scaled(nn.BatchNorm2d):
    """``how`` it may be no norm by channel."""

    def __init__(self, how: str, width: int = 8) -> None:
        super().__init__(width)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.how == "largest":
            return y * x.abs().amax(1, keepdim=True)
        if self.how == "trained" and self.training:
            return y + x.mean(1, keepdim=True)
        if self.how == "place":
            return y + torch.arange(x.shape[3])
        if self.how == "count":
            return y * x.shape[1]
        if self.how == "weights":
            return y * self.weight.max()
        if self.how == "statistics":
            return y / self.running_var.max()
        if self.how == "some weights" and self.weight.abs().max() > 10:
            return y.roll(1, 1)
        if self.how == "stores" and self.training:
            self.running_mean[:] = self.running_mean.mean()
        if self.how == "drops":
            return F.dropout(y, 0.5, self.training)
        if self.how == "fails in training" and self.training:
            raise RuntimeError
        if self.how == "nothing":
            return y * float("nan")
        if self.how == "logarithm":
            return y * self.weight.log()[:, None, None]
        if self.how == "several":
            return y, y
        if self.how == "first":
            return y + (torch.arange(x.shape[1]) == 0)[:, None, None]
        return y


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("how", ["", "drops", "fails in training"])
def test_norms_by_channel(how: str, width: int) -> None:
    assert is_by_channel(Scaled(how, width).double(), width, 4, {})


def test_norms_that_some_weights_make_no_number_of() -> None:
    """All weights of a draw may be negative: then there is nothing to be seen of it, and no harm in it."""
    assert is_by_channel(Scaled("logarithm").double(), 8, 4, {})


@pytest.mark.parametrize(
    "how",
    [
        *("largest", "trained", "place", "count", "weights", "statistics", "some weights", "stores", "nothing"),
        *("several", "first"),
    ],
)
def test_what_is_no_norm_by_channel(how: str) -> None:
    tried: dict[Any, Any] = {}
    norm = Scaled(how).double()
    assert not is_by_channel(norm, 8, 4, tried)
    before = len(tried)
    assert not is_by_channel(norm, 8, 4, tried)
    assert len(tried) == before
    holder: Any = Scaled("").double()
    holder.inner = nn.Linear(1, 1)
    assert not is_by_channel(holder, 8, 4, {})


def test_what_was_found_out_is_kept() -> None:
    tried: dict[Any, Any] = {}
    norm = Scaled("").double()
    assert is_by_channel(norm, 8, 4, tried)
    assert sorted(key[:3] for key in tried) == [("by channel", 8, 4), ("few by channel", 6, 4)]
    assert set(tried.values()) == {True}
    for key in tried:
        tried[key] = key[0] != "by channel"
    assert not is_by_channel(norm, 8, 4, tried)


# What is found out about convolutions and linear layers


class Own(nn.Conv2d):
    """``how`` it may not be cut as torch's are."""

    def __init__(self, how: str, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        how, weight = self.how, self.weight
        if how == "mean":
            weight = weight - weight.mean((1, 2, 3), keepdim=True)
        if how == "mean of inputs":
            x = x - x.mean(1, keepdim=True)
        if how == "limited":
            weight = weight.clamp(-0.2, 0.2)
        if how == "norm":
            weight = weight / weight.norm()
        if how == "even" and self.in_channels == self.out_channels:
            return super().forward(x) + x[:, :, 1:-1, 1:-1]
        if how == "small maps" and x.shape[-1] == 1:
            return F.conv2d(F.pad(x, (1, 1, 1, 1)), weight.flip(0), self.bias)
        if how == "trained" and self.training:
            weight = weight.flip(0)
        if how == "drops":
            x = F.dropout(x, 0.5, self.training)
        if how == "fails in training" and self.training:
            raise RuntimeError
        if how == "fails":
            raise RuntimeError
        if how == "of nothing":
            x = x + 1
        if how == "of nothing in training" and self.training:
            x = x + 1
        if how == "of nothing in evaluation" and not self.training:
            x = x + 1
        if how == "two":
            return x, x
        if how == "zeros" and (weight == 0).any():
            weight = weight.flip(0)
        if how == "sums":
            sums = x[:, :, 1:-1, 1:-1].unflatten(1, (self.groups, -1)).sum(2)
            return super().forward(x) + sums.repeat_interleave(self.out_channels // self.groups, 1)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def tried(how: str, *sizes: int, side: int = 4, **options: Any) -> Mix | None:
    layer = Own(how, *sizes, **options)
    flow = Mix(layer.in_channels, layer.out_channels, layer.groups, layer.bias is not None, False, own=True)
    return flow_by_trying(layer, flow, (2, layer.in_channels, side, side), {})


def test_layers_that_are_cut_as_torchs_are() -> None:
    for sizes, groups in (((9, 8), 1), ((8, 8), 8), ((8, 12), 4)):
        for how in ("", "limited", "drops", "fails in training"):
            plain = Mix(*sizes, groups, False, False, own=True, dead=ZERO)
            assert tried(how, *sizes, 3, groups=groups, bias=False) == plain
        assert tried("", *sizes, 3, groups=groups) == Mix(*sizes, groups, True, False, own=True, dead=LIVE)


def test_layers_that_make_something_of_nothing_or_need_all_inputs() -> None:
    # Which inputs are missing shows where each counts as 1: these are needed.
    whole = Mix(9, 8, 1, False, False, own=True, whole=True, dead=LIVE)
    assert tried("of nothing", 9, 8, 3, bias=False) == whole
    kept = Mix(9, 8, 1, False, False, own=True, whole=True)
    assert tried("mean", 9, 8, 3, bias=False) == kept
    assert tried("mean of inputs", 9, 8, 3, bias=False) == kept
    assert tried("mean", 8, 8, 3, groups=8, bias=False) == Mix(8, 8, 8, False, False, own=True)
    for mode in ("training", "evaluation"):
        dead = Mix(8, 8, 8, False, False, own=True, dead=LIVE)
        assert tried(f"of nothing in {mode}", 8, 8, 3, groups=8, bias=False) == dead
    assert tried("sums", 8, 12, 3, groups=4, bias=False) == Mix(8, 12, 4, False, False, own=True)


@pytest.mark.parametrize("how", ["norm", "even", "trained", "fails", "two", "zeros"])
def test_layers_of_which_nothing_can_be_cut(how: str) -> None:
    assert tried(how, 8, 9, 3, bias=False) is None
    if how == "even":  # with all of its inputs it never has as many outputs
        assert tried(how, 9, 8, 3, bias=False) == Mix(9, 8, 1, False, False, own=True, whole=True)


class OwnLinear(nn.Linear):
    pass


@pytest.mark.parametrize("shape", [(2, 9), (2, 3, 9)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers_that_are_cut_as_torchs_are(shape: tuple[int, ...], bias: bool) -> None:
    flow = Mix(9, 8, 1, bias, False, own=True)
    dead = LIVE if bias else ZERO
    assert flow_by_trying(OwnLinear(9, 8, bias), flow, shape, {}) == Mix(9, 8, 1, bias, False, own=True, dead=dead)


class Dropping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


@pytest.mark.parametrize("shape", [(2, 9), (2, 3, 9)])
def test_linear_layers_may_drop_in_training(shape: tuple[int, ...]) -> None:
    flow = Mix(9, 8, 1, False, False, own=True)
    assert flow_by_trying(Dropping(9, 8, bias=False), flow, shape, {}) == flow


class Rounded(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (4 * self.weight).floor())


def test_what_hardly_different_weights_do() -> None:
    for kind, steady in ((nn.Linear, True), (Rounded, False)):
        layer = kind(4, 50, bias=False).double()
        nn.init.constant_(layer.weight, 0.25)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            assert trials._is_steady(layer, torch.ones(1, 4, dtype=DOUBLE)) is steady
        assert layer.weight.unique().tolist() == [0.25]


def test_what_a_layer_does_on_small_maps_counts() -> None:
    assert tried("small maps", 9, 8, 3, bias=False) is None
