"""What is found in a network, against what is worked out by hand: flows, axes, groups, who counts channels.

A rule that sees too little makes values whole: the small network is right, only larger than it need be, which the
comparisons of outputs do not show.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from behind import Behind, fields
from networks import compacted, lively, relative_error
from paam import Pruner
from paam.errors import GraphError
from paam.graph.channel_map import ChannelMap
from paam.graph.checks.inputs import random_inputs
from paam.graph.checks.perturb import Noise, perturb
from paam.graph.copies import light_copy
from paam.graph.cost import count
from paam.graph.flows import CONST, LIVE, Flow, Mix, Pass, Whole
from paam.graph.joins import Flatten, Gather, Part, Route, Zip
from paam.graph.modes import copying
from paam.graph.network import Network, prepare
from paam.graph.record.as_found import AsFound
from paam.graph.record.layer_shapes import returned, uncomputed
from paam.graph.rules.functions import property_as_call
from paam.graph.rules.site import Op

ALL = slice(None)
UNEVEN = Pass(zero=LIVE, const=LIVE)
VARIES = Pass(const=LIVE)


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def assigned(value: float, *key: Any) -> Callable[[Tensor], Tensor]:
    def assign(x: Tensor) -> Tensor:
        x = x.clone()
        x[key] = value
        return x

    return assign


def route(*source: int) -> Route:
    return Route(8, np.array(source))


FLOWS: dict[str, tuple[Callable[[Tensor], Tensor], Flow, int]] = {
    "channels padded": (lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)), route(-1, *range(8), -1, -1), 1),
    "zero border": (lambda x: F.pad(x, (1, 1)), VARIES, 1),
    "constant border": (lambda x: F.pad(x, (1, 1, 1, 1), value=0.5), UNEVEN, 1),
    "reflected border": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), Pass(), 1),
    "padded all around": (lambda x: F.pad(x, (1, 1, 0, 0, 2, 0)), Whole(10), 1),
    "channels of ones": (lambda x: F.pad(x, (0, 0, 0, 0, 2, 0), value=1.0), Whole(10), 1),
    "channels cut": (lambda x: x[:, 2:7], route(2, 3, 4, 5, 6), 1),
    "map cut": (lambda x: x[:, :, 1:3], Pass(), 1),
    "both cut": (lambda x: x[:, 1:3, 1:], Whole(2), 1),
    "a row of ones": (assigned(1.0, ALL, ALL, 0), UNEVEN, 1),
    "a row of zeros": (assigned(0, ALL, ALL, 0), VARIES, 1),
    "a sample of zeros": (assigned(0, 0), VARIES, 1),
    "a channel of zeros": (assigned(0, ALL, 0), Whole(8), 1),
    "unit length over channels": (F.normalize, Whole(8), 1),
    "unit length along the map": (lambda x: F.normalize(x, dim=2), VARIES, 1),
    "softmax over channels": (lambda x: x.softmax(1), Whole(8), 1),
    "softmax along the map": (lambda x: x.softmax(-1), UNEVEN, 1),
    "mean over the map": (lambda x: x.mean((2, 3)), Pass(), 1),
    "sum over the map": (lambda x: x.sum((2, 3), keepdim=True), VARIES, 1),
    "mean over channels": (lambda x: x.mean(1, keepdim=True), Whole(1), 1),
    "mean over channels that are last": (lambda x: x.permute(0, 2, 3, 1).mean(3, keepdim=True), Whole(1), 3),
    "chunk": (lambda x: x.chunk(2, 1)[1], Part(8, np.array([4, 5, 6, 7]), 2), 1),
    "split": (lambda x: x.split([3, 5], 1)[1], route(3, 4, 5, 6, 7), 1),
    "map split": (lambda x: x.split(4, 2)[0], Pass(), 1),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), Gather(4), 1),
    "pixel unshuffle": (lambda x: F.pixel_unshuffle(x, 2), Flatten(4), 1),
    "largest of each row": (lambda x: x.max(2)[0], Pass(), 1),
    "one row": (lambda x: x.unbind(2)[1], Pass(), 1),
    "flipped": (lambda x: x.flip(1), route(7, 6, 5, 4, 3, 2, 1, 0), 1),
    "filled with a number": (lambda x: x.clone().fill_(2.0), Pass(CONST, CONST), 1),
    "filled with a named number": (lambda x: x.clone().fill_(value=2.0), Pass(CONST, CONST), 1),
    "blurred": (lambda x: F.conv2d(x, torch.ones(8, 1, 3, 3), None, 1, 1, 1, 8), Zip((8, 8), False), 1),
    "mixed": (lambda x: F.conv2d(x, torch.ones(8, 2, 3, 3), None, 1, 1, 1, 4), Whole(8), 1),
    "averages": (lambda x: F.avg_pool2d(x, 3), Pass(), 1),
    "averages by a divisor": (lambda x: F.avg_pool2d(x, 2, divisor_override=3), Pass(), 1),
    "averages rounded up": (lambda x: F.avg_pool2d(x, 3, ceil_mode=True), Pass(), 1),
    "averages with a border": (lambda x: F.avg_pool2d(x, 3, 1, 1), VARIES, 1),
    "averages without their border": (lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False), Pass(), 1),
    "averages rounded up, by a divisor": (lambda x: F.avg_pool2d(x, 3, None, 0, True, True, 4), VARIES, 1),
    "grouped to as many": (lambda x: F.conv2d(x, torch.ones(4, 2, 3, 3), None, 1, 1, 1, 4), Whole(4), 1),
    "channels pooled": (lambda x: F.max_pool1d(x.flatten(2).mT, 2), Whole(4, True), 2),
    "no channel": (lambda x: x[:, :0], route(), 1),
    "one value": (lambda x: x.amax((0, 2, 3))[0], Whole(1), 0),
    "channels interpolated": (lambda x: F.interpolate(x.flatten(2).mT, scale_factor=2), Whole(16, True), 2),
    "a number": (lambda x: x.sum().reshape(()), Whole(1), 0),
    "channels last": (lambda x: x.permute(0, 2, 3, 1), Pass(), 3),
    "tokens": (lambda x: x.flatten(2).mT, Pass(), 2),
    "flattened": (lambda x: x.flatten(1), Flatten(64), 1),
    "chosen": (lambda x: x[:, [3, 1, 2]], route(3, 1, 2), 1),
    "shuffled": (
        lambda x: x.view(-1, 2, 4, 8, 8).transpose(1, 2).reshape(-1, 8, 8, 8),
        route(0, 4, 1, 5, 2, 6, 3, 7),
        1,
    ),
}


def found(model: nn.Module, size: int = 8) -> Network:
    return prepare(model.eval(), torch.zeros(2, 3, size, size))


@pytest.mark.parametrize("name", FLOWS)
def test_flow_of(name: str) -> None:
    function, flow, axis = FLOWS[name]
    *_, op, _ = found(Behind(function)).ops
    assert (type(op.flow), fields(op.flow), op.axis) == (type(flow), fields(flow), axis)


class OwnConv(nn.Conv2d):
    pass


class OwnLinear(nn.Linear):
    pass


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Turned(nn.Conv2d):
    """What it makes depends on how many outputs there are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(1)


OWN: dict[str, tuple[Callable[[], nn.Module], Flow]] = {
    "bias": (lambda: OwnConv(8, 4, 3), Mix(8, 4, 1, True, False, own=True, dead=LIVE)),
    "no bias": (lambda: OwnConv(8, 4, 3, padding=1, bias=False), Mix(8, 4, 1, False, False, own=True)),
    "groups": (lambda: OwnConv(8, 4, 3, groups=2, bias=False), Mix(8, 4, 2, False, False, own=True)),
    "depthwise": (lambda: OwnConv(8, 8, 3, groups=8, bias=False), Mix(8, 8, 8, False, False, own=True)),
    "standardised": (lambda: Standardised(8, 4, 3, bias=False), Mix(8, 4, 1, False, False, own=True, whole=True)),
    "standardised depthwise": (
        lambda: Standardised(8, 8, 3, groups=8, bias=False),
        Mix(8, 8, 8, False, False, own=True),
    ),
    "turned": (lambda: Turned(8, 4, 3), Whole(4, True)),
}


@pytest.mark.parametrize("name", OWN)
def test_flow_of_a_layer_of_ones_own(name: str) -> None:
    make, flow = OWN[name]
    *_, op, _ = found(Behind(make())).ops
    assert op.flow == flow


def test_flow_of_a_linear_layer_of_ones_own() -> None:
    layer = OwnLinear(8, 4, bias=False)
    *_, op, _ = found(nn.Sequential(nn.Conv2d(3, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), layer)).ops
    assert op.flow == Mix(8, 4, 1, False, False, own=True)


class Transposed(nn.Module):
    """A convolution, its rows and columns exchanged, and an offset of some shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)
        self.offset = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mT + self.offset


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((), 0), ((1,), 0), ((8,), 0), ((8, 1, 1), 0), ((1, 1, 1), 2), ((1, 8, 1, 1), 1), ((1, 8, 8, 8), 1)],
)
def test_channels_of_a_parameter_lie_along(shape: tuple[int, ...], axis: int) -> None:
    ops = found(Transposed(shape)).ops
    assert [(op.axis, op.flow.width) for op in ops if op.node.op == "get_attr"] == [(axis, (*shape, 1)[axis])]


class Scaled(nn.Module):
    """A branch scaled by a parameter, in front of the sum and behind it another value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(i, 4, 1) for i in (3, 4, 4))
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head((self.second(x) * self.scale).relu() * self.third(x))


def test_gates_stand_behind_scales_and_before_products() -> None:
    groups = found(Scaled()).groups
    assert {group.name: group.sites for group in groups} == {
        "first": ("first",),
        "second": ("relu",),
        "third": ("third",),
    }


COUNTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "nobody": (lambda x: x.relu(), False),
    "a view": (lambda x: x.view(x.shape[0], x.shape[1], -1), False),
    "a view, by method": (lambda x: x.view(x.size(0), x.size(1), -1), False),
    "a scale": (lambda x: x / x.shape[1], True),
    "a scale, by method": (lambda x: x / x.size(1), True),
    "a scale by the length of the map": (lambda x: x / x.size(2), False),
    "a scale by the height of the map": (lambda x: x / x.shape[2], False),
    "a view and a scale": (lambda x: x.view(x.shape[0], x.shape[1], -1) / x.shape[1], True),
    "the number of all elements": (lambda x: x / x.numel(), True),
}


@pytest.mark.parametrize("name", COUNTS)
def test_channels_are_counted_by(name: str) -> None:
    function, counted = COUNTS[name]
    assert named(found(Behind(function)), "conv").counted == counted


def named(network: Network, name: str) -> Op:
    return next(op for op in network.ops if op.name == name)


class Narrow(nn.Module):
    """A residual stream of two channels: its writers may keep different ones, which takes an index map."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.outer = nn.Conv2d(3, 2, 1), nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
        self.head = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x.tanh() + self.outer(self.inner(x).relu()))


def test_groups_of_two_that_need_an_index_map_leave_no_class_of_the_models_own() -> None:
    x = torch.zeros(1, 3, 4, 4)
    assert [group.name for group in prepare(Narrow(), x, placement="branch").groups] == ["stem", "inner", "outer"]
    assert [group.name for group in prepare(Narrow(), x, placement="branch", keep_class=True).groups] == ["inner"]


def test_a_single_channel_is_no_group_of_a_class_of_the_models_own() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 1, 1), nn.ReLU(), nn.Conv2d(1, 2, 1)), torch.zeros(1, 3, 4, 4)
    assert [group.width for group in prepare(model, x).groups] == [1]
    assert not prepare(model, x, keep_class=True).groups


def test_random_inputs_grow_to_the_size_of_the_example() -> None:
    sizes = [x.shape[2:] for (x,) in random_inputs(found(Behind(torch.relu), 32).traced)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(sizes) > 1
    assert sizes[-1] == (32, 32)


class Decides(nn.Module):
    """Decides by values behind its first block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.second, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.conv(x).relu()).relu()
        return self.head(x) if x.sum() > 1e9 else -self.head(x)


def test_gates_in_a_models_own_code() -> None:
    model = lively(Decides())
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    pruner = Pruner(model, x, scorer="free", on_decision="stop")
    gate = torch.tensor([True, False, True, False])
    small = compacted(pruner, {group.name: gate.numpy() for group in pruner.network.groups})
    assert [group.name for group in pruner.network.groups] == ["conv"]  # what decides is left alone
    with torch.no_grad():
        hidden = model.conv(x).relu() * gate[:, None, None]
        truth = -model.head(model.second(hidden).relu())
        assert relative_error(pruner.model.eval()(x), truth) < 1e-12
        assert relative_error(small(x), truth) < 1e-12
    assert small.second.weight.shape == (4, 2, 1, 1)


class CountsSometimes(Decides):
    """Reads how many channels there are, but not for every image."""

    def forward(self, x: Tensor) -> Tensor:
        large = x.sum() > 1e9
        x = self.second(self.conv(x).relu()).relu()
        return self.head(x) if large else self.head(x) * self.conv.out_channels


def test_a_models_own_code_is_compared_on_other_images_than_the_examples() -> None:
    x = torch.full((2, 3, 4, 4), 1e9, dtype=torch.float64)
    model = lively(CountsSometimes())
    with torch.no_grad():
        model.conv.weight.abs_()
    pruner = Pruner(model, x, scorer="free", on_decision="stop")
    pruner.select(keep_filters=0.5)
    with pytest.raises(GraphError, match="something else than the gated one"):
        pruner.compact()


def test_an_answer_may_be_a_single_number() -> None:
    model = lively(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1), Function(torch.sum)))
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    pruner = Pruner(model, x, scorer="free")
    small = compacted(pruner, {"0": np.array([True, False, False, True])})
    with torch.no_grad():
        truth = model[2](model[0](x).relu() * torch.tensor([1, 0, 0, 1])[:, None, None]).sum()
        assert relative_error(small(x), truth) < 1e-12


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("name", ["T", "mT", "H", "mH", "real", "imag", "data", "dtype", "shape"])
def test_attributes_as_calls(name: str, dims: int) -> None:
    x = torch.randn([2, 3, 4][:dims], dtype=torch.complex64)
    if (name in ("mT", "mH") and dims < 2) or (name in ("T", "H") and dims != 2):
        return
    call = property_as_call(name, x)
    if name in ("dtype", "shape"):
        assert call is None
        return
    assert call is not None
    kind, target, args = call
    result = target(*args) if kind == "call_function" else getattr(args[0], target)(*args[1:])
    assert torch.equal(result, getattr(x, name))
    assert (target is torch.transpose) == (name in ("T", "mT"))


def test_gradients_of_an_index_map_are_those_of_indexing() -> None:
    index = [2, -1, 0, 4]
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 4, 3, dtype=torch.float64)
    (ChannelMap(index, 5, 1)(x) * weight).sum().backward()
    expected = torch.zeros(2, 5, 3, dtype=torch.float64)
    for place, channel in enumerate(index):
        if channel >= 0:
            expected[:, channel] += weight[:, place]
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_uncomputed_values_have_the_order_of_their_input() -> None:
    x = torch.zeros(2, 3, 8, 8)
    plain, last = uncomputed(x, (2, 4, 6, 6)), uncomputed(x.to(memory_format=torch.channels_last), (2, 4, 6, 6))
    assert plain is not None
    assert last is not None
    assert plain.shape == last.shape == (2, 4, 6, 6)
    assert plain.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert uncomputed(x.mT, (2, 4, 6, 6)) is None
    assert uncomputed(x.to(memory_format=torch.channels_last), (2, 4)) is None


def test_nothing_works_in_place_for_a_while() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True), nn.ReLU())
    before = [dict(vars(module)) for module in model.modules()]
    with copying(model):
        assert not any(getattr(module, "inplace", False) for module in model.modules())
    assert [vars(module) for module in model.modules()] == before


def test_gentle_changes_are_small() -> None:
    layer = nn.Linear(30, 40).double()
    before = layer.weight.detach().clone()
    with torch.no_grad():
        before[0, 0] = layer.weight[0, 0] = np.inf
    after = perturb(layer, Noise(torch.device("cpu")), gentle=True).weight
    change = (after - before)[before.isfinite()]
    assert after[0, 0] == np.inf
    assert 0.04 < change.max() <= 0.05 + 0.2 * before[before.isfinite()].max()
    assert change.abs().max() <= 0.05 + 0.2 * before[before.isfinite()].abs().max()


RETURNED = {
    **{str(layer): (layer, (2, 3, 6, 6)) for layer in (nn.ReLU(), nn.GELU(), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1))},
    "wide": (nn.Conv2d(4, 6, (3, 1), 2, (1, 2), (1, 3), 2), (2, 4, 9, 7)),
    "same": (nn.Conv2d(3, 4, 4, padding="same", dilation=2), (2, 3, 7, 8)),
    "valid": (nn.Conv1d(3, 4, 2, padding="valid"), (2, 3, 7)),
    "as large as the map": (nn.Conv3d(2, 3, 3), (1, 2, 3, 3, 3)),
    "tokens": (nn.Linear(5, 7), (2, 4, 5)),
    "one vector": (nn.Linear(5, 7), (5,)),
    "norm of vectors": (nn.BatchNorm1d(3), (2, 3)),
    "norm of sequences": (nn.BatchNorm1d(3), (2, 3, 5)),
}


@pytest.mark.parametrize("name", RETURNED)
def test_shapes_of_layers_are_those_that_they_return(name: str) -> None:
    layer, shape = RETURNED[name]
    x = torch.zeros(shape)
    counted = count(layer, x)
    assert returned(layer, x) == (tuple(layer.eval()(x).shape), counted.macs * len(x))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.MaxPool2d(2), (2, 3, 6, 6)),
        (nn.Conv2d(3, 4, 3), (2, 4, 6, 6)),
        (nn.Conv2d(3, 4, 3), (3, 6, 6)),
        (nn.Conv2d(3, 4, 3), (2, 3, 2, 6)),
        (nn.BatchNorm2d(3), (2, 4, 6, 6)),
        (nn.BatchNorm2d(3), (2, 3)),
        (nn.Linear(5, 7), (2, 4)),
        (nn.Linear(5, 7), ()),
        (nn.Linear(5, 7).double(), (2, 5)),
        (nn.LayerNorm(5), (2, 5)),
    ],
    ids=str,
)
def test_what_is_no_plain_layer_or_would_be_an_error_is_computed(layer: nn.Module, shape: tuple[int, ...]) -> None:
    assert returned(layer, torch.zeros(shape)) is None


class Ways(nn.Module):
    """Two ways of two layers, summed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 2, 1)
        self.b, self.d = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
        self.head = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)) + self.d(self.c(x)))


def test_of_ways_whose_weakest_gates_are_equal_the_stronger_one_is_the_path() -> None:
    network = prepare(Ways(), torch.zeros(1, 3, 4, 4), placement="branch")
    for a, b, c, d, path in [(0.5, 0.1, 0.1, 0.9, "cd"), (0.1, 0.9, 0.1, 0.5, "ab"), (0.3, 0.2, 0.1, 0.9, "ab")]:
        scores = {name: np.array([0.05, score]) for name, score in zip("abcd", (a, b, c, d), strict=True)}
        assert network.strongest_path(scores) == {name: {1} if name in path else set() for name in "abcd"}


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.head(x * (x.shape[2] * self.scale) * (x.shape[2] > 5 * self.scale))


def test_a_size_times_a_tensor_follows_the_map() -> None:
    model = lively(Sized())
    model.scale.data.fill_(1)  # for the example the second factor is 0
    network = prepare(model, torch.zeros(1, 3, 4, 4, dtype=torch.float64))
    gate = torch.tensor([True, False, False, True])
    small = network.compact(network.plan({"conv": gate.numpy()}))
    x = torch.randn(2, 3, 7, 5, dtype=torch.float64)
    with torch.no_grad():
        truth = model.head(model.conv(x) * gate[:, None, None] * 7 * model.scale * (5 * model.scale < 7))
        assert relative_error(small(x), truth) < 1e-12


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 1, 1))
        self.conv, self.head = nn.Conv2d(3, 64, 1), nn.Conv2d(64, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.conv(self.scale.exp() * x), 0.5, self.training))


def test_a_parameter_that_is_read_first_does_not_say_whether_it_is_training() -> None:
    model = lively(Drops())
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    network = prepare(model, x)
    small = network.compact(network.plan({"conv": np.arange(64) < 32}))
    with torch.no_grad():
        truth = model.head(model.conv(model.scale.exp() * x) * (torch.arange(64) < 32)[:, None, None])
        assert relative_error(small.eval()(x), truth) < 1e-12
        assert not torch.equal(small.train()(x), small(x))


class Trains(nn.Module):
    """In training it adds another value, and asks for the size of that."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1, 2), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.training:
            y = self.other(x)
            x = x + (y if y.shape[2] > 3 else -y).mean((2, 3), keepdim=True)
        return self.head(x)


def test_what_only_training_computes_is_asked_for_its_size_in_training_alone() -> None:
    model = lively(Trains())
    gated = Pruner(model, torch.zeros(2, 3, 8, 8, dtype=torch.float64), scorer="free").model
    large, little = (torch.randn(2, 3, size, size, dtype=torch.float64) for size in (8, 5))
    with torch.no_grad():
        for x in (large, little):
            assert relative_error(gated.eval()(x), model.eval()(x)) < 1e-12
        assert relative_error(gated.train()(large), model.train()(large)) < 1e-12
        with pytest.raises(GraphError, match=r"y\.shape"):
            gated(little)


class Named(Narrow):
    """The larger of two values, one of them given by name."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.maximum(x.tanh(), other=self.outer(self.inner(x).relu())))


def test_rewired_networks_are_pickled_with_named_arguments() -> None:
    model = lively(Named())
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    network = prepare(model, x)
    kept = {"stem": [True, False], "inner": [True, True], "outer": [False, True]}
    small = network.compact(network.plan({name: np.array(mask) for name, mask in kept.items()}))
    with torch.no_grad():
        stem = model.stem(x) * torch.tensor([1, 0])[:, None, None]
        outer = model.outer(model.inner(stem).relu()) * torch.tensor([0, 1])[:, None, None]
        truth = model.head(torch.maximum(stem.tanh(), outer))
        assert relative_error(small(x), truth) < 1e-12
        assert torch.equal(pickle.loads(pickle.dumps(small))(x), small(x))


def test_attributes_of_modules_are_kept() -> None:
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    model.seen = 1
    before = [dict(vars(module)) for module in model.modules()]
    found = AsFound(model)
    with found:
        model.seen = 2  # the same names
        model[0].made = 3  # and another one
    assert [vars(module) for module in model.modules()] == before


def test_other_weights_are_in_the_usual_range() -> None:
    model = nn.Sequential(nn.Conv2d(4, 200, 3), nn.BatchNorm2d(200))
    model[1].running_var.fill_(9)
    model[1].running_mean.fill_(9)
    perturb(model, Noise(torch.device("cpu")))
    norm, reach = model[1], 2 / (4 * 9) ** 0.5
    bounds = [(norm.running_var, 0.5, 1.5), (norm.running_mean, -0.4, 0.6), (norm.weight, 0.6, 1.4)]
    for values, low, high in [*bounds, (norm.bias, -0.4, 0.6), (model[0].weight, -reach, reach)]:
        span = high - low
        assert low <= values.min() < low + 0.1 * span < high - 0.1 * span < values.max() <= high


def test_light_copies_share_tensors_and_nothing_else() -> None:
    class Own(nn.Module):
        def __deepcopy__(self, memo: dict[int, Any]) -> Own:
            twin = Own()
            twin.told = True
            return twin

    model = nn.Sequential(nn.Linear(2, 2), Own())
    twin = light_copy(model)
    fired = []
    twin[0].register_forward_hook(lambda *_: fired.append("twin"))
    model[0](torch.zeros(1, 2))
    assert not fired
    assert twin[0].weight is model[0].weight
    assert twin[1].told
    twin[0].bias = None
    assert model[0].bias is not None


class Asks(Trains):
    """Both ways ask how many numbers there are."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.training:
            x = x + self.other(x).mean((2, 3), keepdim=True)
        return self.head(x) if x.numel() > 300 else -self.head(x)


def test_what_is_computed_is_asked_for_its_size_in_both_modes() -> None:
    model = lively(Asks())
    gated = Pruner(model, torch.zeros(2, 3, 8, 8, dtype=torch.float64), scorer="free").model
    large, little = (torch.randn(2, 3, size, size, dtype=torch.float64) for size in (8, 6))
    with torch.no_grad():
        for mode in (False, True):
            assert relative_error(gated.train(mode)(large), model.train(mode)(large)) < 1e-12
            with pytest.raises(GraphError, match="numel"):
                gated(little)
