"""Layers cut to some of their channels compute what the whole ones do when the absent inputs are zero, or constants."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paam.graph.flows import Mix
from paam.graph.shrink import shrink_mix, shrink_per_channel, shrink_stored

GENERATOR = torch.Generator().manual_seed(0)


class Gained(nn.Conv2d):
    """A convolution with a gain and a mean of its own for each output, and a number for all of them."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, generator=GENERATOR) + 1)
        self.all = nn.Parameter(torch.rand(1, generator=GENERATOR) + 1)
        self.one = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.register_buffer("mean", torch.rand(self.out_channels, 1, 1, generator=GENERATOR))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain * self.all * self.one - self.mean


LAYERS = {
    "linear": nn.Linear(6, 4),
    "linear without bias": nn.Linear(6, 4, bias=False),
    "1-d": nn.Conv1d(6, 4, 3, stride=2),
    "2-d": nn.Conv2d(6, 4, (3, 2), padding=1, bias=False),
    "3-d": nn.Conv3d(6, 4, 2),
    "transposed": nn.ConvTranspose2d(6, 4, 3, stride=2),
    "transposed, 1-d": nn.ConvTranspose1d(6, 4, 2, bias=False),
    "depthwise": nn.Conv2d(6, 6, 3, padding=1, groups=6),
    "depthwise transposed": nn.ConvTranspose2d(6, 6, 2, groups=6),
    "grouped": nn.Conv2d(6, 9, 3, groups=3, padding=1),
    "grouped, two": nn.Conv2d(6, 4, 1, groups=2, bias=False),
    "grouped, transposed": nn.ConvTranspose2d(6, 9, 2, stride=2, groups=3),
    "grouped, transposed, two": nn.ConvTranspose1d(6, 4, 2, groups=2, bias=False),
    "with gains": Gained(6, 4, kernel_size=3),
    "grouped, with gains": Gained(6, 9, kernel_size=1, groups=3),
    "depthwise, with gains": Gained(6, 6, kernel_size=1, groups=6),
}


def flow_of(layer: Any, padded: bool = False) -> Mix:
    if isinstance(layer, nn.Linear):
        return Mix(layer.in_features, layer.out_features, 1, layer.bias is not None, padded)
    sizes = layer.in_channels, layer.out_channels, layer.groups
    return Mix(*sizes, layer.bias is not None, padded, transposed=layer.transposed)


def image(layer: Any, channels: int) -> Tensor:
    dims = 0 if isinstance(layer, nn.Linear) else len(layer.kernel_size)
    return torch.randn(2, channels, *[5] * dims, dtype=torch.float64, generator=GENERATOR)


def picked(x: Tensor, channels: list[int]) -> Tensor:
    """Channels by number, zeros for -1."""
    return torch.stack([torch.zeros_like(x[:, 0]) if c < 0 else x[:, c] for c in channels], 1)


def cut(layer: Any, made: list[int], wanted: list[int], constant: Tensor | None = None, padded: bool = False) -> Any:
    small = copy.deepcopy(layer)
    numbers = np.array(made, dtype=np.int64), np.array(wanted, dtype=np.int64)
    shrink_mix(small, flow_of(layer, padded), *numbers, constant)
    return small


def check(layer: nn.Module, made: list[int], wanted: list[int], places: list[int] | None = None) -> nn.Module:
    """``places``: which output, or -1, stands at each place of the small layer, where it is not just ``made``."""
    layer = layer.double()
    x = image(layer, 6)
    x[:, [channel for channel in range(6) if channel not in wanted]] = 0
    small = cut(layer, made, wanted)
    with torch.no_grad():
        found, truth = small(picked(x, wanted)), layer(x)
    places = places or made
    assert found.shape == (2, len(places), *truth.shape[2:])
    torch.testing.assert_close(found, picked(truth, places), rtol=1e-12, atol=1e-12)
    return small


@pytest.mark.parametrize("name", [name for name, layer in LAYERS.items() if getattr(layer, "groups", 1) == 1])
def test_plain_layers(name: str) -> None:
    for made, wanted in (([1, 3], [0, 2, 5]), ([0, 1, 2, 3], [4]), ([2], [0, 1, 2, 3, 4, 5])):
        small = check(LAYERS[name], made, wanted)
        sizes = ("in_features", "out_features") if isinstance(small, nn.Linear) else ("in_channels", "out_channels")
        assert [getattr(small, size) for size in sizes] == [len(wanted), len(made)]
        assert getattr(small, "groups", 1) == 1


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("depthwise")])
def test_depthwise_layers(name: str) -> None:
    for made in ([1, 3, 4], [5]):
        small: Any = check(LAYERS[name], made, made)
        assert (small.in_channels, small.out_channels, small.groups) == (len(made),) * 3


GROUPED = {
    2: [
        ([0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3]),
        ([1, 2, 3], [1, -1, 4, 5], [1, -1, 2, 3]),
        ([2], [3, 5], [2]),
        ([0, 3], [0, 2, -1, 3, 4, 5], [0, 3]),
        ([0, 3], [2, 4], [0, 3]),
    ],
    3: [
        ([1, 3, 4, 8], [0, -1, 2, 3, 5, -1], [1, -1, 3, 4, 8, -1]),
        ([0, 7, 8], [1, 4], [0, -1, 7, 8]),
        ([6, 8], [4, 5], [6, 8]),
        ([4], [3], [4]),
    ],
}
"""By the number of groups: outputs that stay, inputs that are held, and what stands where in the small layer."""


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("grouped") and "gains" not in name])
def test_grouped_layers_fill_up_their_groups(name: str) -> None:
    layer: Any = LAYERS[name]
    for made, wanted, places in GROUPED[layer.groups]:
        small: Any = check(layer, made, wanted, places)
        groups = len({output // (layer.out_channels // layer.groups) for output in made})
        assert (small.in_channels, small.out_channels, small.groups) == (len(wanted), len(places), groups)


def test_what_is_filled_up_has_neither_gain_nor_mean() -> None:
    for made, wanted, places in GROUPED[3]:
        small: Any = check(LAYERS["grouped, with gains"], made, wanted, places)
        filled = [place for place, output in enumerate(places) if output < 0]
        assert not small.gain[filled].any()
        assert not small.mean[filled].any()


def test_what_a_layer_holds_stays_what_it_was() -> None:
    """Parameters with and without gradients, buffers, single numbers; weights, biases, gains alike."""
    layer = Gained(6, 4, kernel_size=3)
    layer.gain.requires_grad = False
    small = cut(layer, [1, 3], [0, 2])
    assert {name: (p.shape[0] if p.dim() else 0, p.requires_grad) for name, p in small.named_parameters()} == {
        "weight": (2, True),
        "bias": (2, True),
        "gain": (2, False),
        "all": (1, True),
        "one": (0, False),
    }
    assert [name for name, _ in small.named_buffers()] == ["mean"]
    assert torch.equal(small.gain, layer.gain[[1, 3]])
    assert torch.equal(small.mean, layer.mean[[1, 3]])
    layer.weight.requires_grad = layer.bias.requires_grad = False
    frozen = cut(layer, [1, 3], [0, 2])
    assert not frozen.weight.requires_grad
    assert not frozen.bias.requires_grad


def test_layers_inside_a_layer_are_left_alone() -> None:
    """Their numbers mean something else, though there may be as many of them."""
    layer = nn.Conv2d(6, 4, 3)
    layer.inner = nn.BatchNorm2d(4)
    small = cut(layer, [1, 3], [0, 2])
    assert {name: value.shape for name, value in small.inner.state_dict().items()} == {
        name: value.shape for name, value in layer.inner.state_dict().items()
    }


@pytest.mark.parametrize("name", ["linear", "linear without bias", "1-d", "3-d", "with gains"])
def test_constants_move_into_the_bias(name: str) -> None:
    """Absent inputs that are one number each, everywhere: without padding the layer adds one number to each output."""
    layer: Any = LAYERS[name].double()
    made, wanted, absent = [0, 3], [1, 2, 5], [0, 3, 4]
    x = image(layer, 6)
    values = torch.tensor([0.7, -0.3, 1.9], dtype=torch.float64)
    x[:, absent] = values.view(1, 3, *[1] * (x.dim() - 2)).expand_as(x[:, absent])
    weight = layer.weight.detach()
    constant = sum(weight[made, channel] * value for channel, value in zip(absent, values, strict=True)).unsqueeze(1)
    small = cut(layer, made, wanted, constant)
    with torch.no_grad():
        torch.testing.assert_close(small(x[:, wanted]), layer(x)[:, made], rtol=1e-12, atol=1e-12)
    assert small.bias is not None


@pytest.mark.parametrize("name", ["2-d", "transposed"])
def test_where_padding_makes_them_uneven_constants_are_read_from_a_channel_of_ones(name: str) -> None:
    layer: Any = LAYERS[name].double()
    made, wanted, absent = [0, 3], [1, 2, 5], [0, 3, 4]
    x = image(layer, 6)
    values = torch.tensor([0.7, -0.3, 1.9], dtype=torch.float64)
    x[:, absent] = values.view(1, 3, 1, 1).expand_as(x[:, absent])
    weight = layer.weight.detach().transpose(0, 1) if layer.transposed else layer.weight.detach()
    constant = sum(weight[made, channel] * value for channel, value in zip(absent, values, strict=True)).unsqueeze(1)
    small = cut(layer, made, wanted, constant, padded=True)
    with torch.no_grad():
        found = small(torch.cat([x[:, wanted], torch.ones_like(x[:, :1])], 1))
        torch.testing.assert_close(found, layer(x)[:, made], rtol=1e-12, atol=1e-12)
    assert (small.in_channels, small.out_channels) == (4, 2)
    assert (small.bias is None) == (layer.bias is None)


def test_constants_take_the_type_of_the_weights() -> None:
    constant = torch.ones(2, 1, 3, 3, dtype=torch.float64)
    for padded in (False, True):
        small = cut(nn.Conv2d(6, 4, 3).float(), [0, 3], [1, 2], constant, padded=padded)
        assert {p.dtype for p in small.parameters()} == {torch.float32}


def test_weights_keep_their_order_in_memory() -> None:
    flat, deep = nn.Conv2d(6, 4, 3), nn.Conv3d(6, 4, 3)
    assert cut(flat, [0, 1], [1, 2]).weight.is_contiguous()
    last, last_3d = torch.channels_last, torch.channels_last_3d
    assert cut(flat.to(memory_format=last), [0, 1], [1, 2]).weight.is_contiguous(memory_format=last)
    assert cut(deep.to(memory_format=last_3d), [0, 1], [1, 2]).weight.is_contiguous(memory_format=last_3d)
    line = nn.Linear(6, 4)
    line.weight = nn.Parameter(torch.randn(6, 4).t())
    assert cut(line, [0, 1], [1, 2]).weight.is_contiguous()
    wave = nn.Conv1d(6, 4, 3)
    wave.weight = nn.Parameter(torch.randn(3, 6, 4).transpose(0, 2))
    assert cut(wave, [0, 1], [1, 2]).weight.is_contiguous()


def test_tensors_of_the_model_are_cut_along_their_axis() -> None:
    root = nn.Module()
    root.inner = nn.Module()
    root.inner.scale = nn.Parameter(torch.arange(12.0).view(1, 4, 3))
    root.frozen = nn.Parameter(torch.arange(5.0), requires_grad=False)
    root.register_buffer("shift", torch.arange(8.0).view(4, 2))
    layout = np.array([1, 3])
    shrink_stored(root, "inner.scale", 1, layout)
    shrink_stored(root, "frozen", 0, layout)
    shrink_stored(root, "shift", 0, layout)
    assert root.inner.scale.tolist() == [[[3, 4, 5], [9, 10, 11]]]
    assert root.frozen.tolist() == [1, 3]
    assert root.shift.tolist() == [[2, 3], [6, 7]]
    assert {name: p.requires_grad for name, p in root.named_parameters()} == {"inner.scale": True, "frozen": False}
    assert [name for name, _ in root.named_buffers()] == ["shift"]


def test_what_a_layer_holds_for_each_channel() -> None:
    layout = np.array([1, 4])
    norm = nn.BatchNorm2d(5)
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        nn.init.uniform_(tensor, 0.5, 1.5)
    norm.weight.requires_grad = False
    whole = copy.deepcopy(norm).eval()
    shrink_per_channel(norm, 5, layout)
    assert norm.num_features == 2
    assert norm.num_batches_tracked.shape == ()
    assert {name: p.requires_grad for name, p in norm.named_parameters()} == {"weight": False, "bias": True}
    assert {name for name, _ in norm.named_buffers()} == {"running_mean", "running_var", "num_batches_tracked"}
    x = torch.randn(2, 5, 3, 3)
    torch.testing.assert_close(norm.eval()(x[:, [1, 4]]), whole(x)[:, [1, 4]])
    slopes = nn.PReLU(5)
    nn.init.uniform_(slopes.weight)
    expected = slopes.weight.detach()[[1, 4]]
    shrink_per_channel(slopes, 5, layout)
    assert (slopes.num_parameters, slopes.weight.tolist()) == (2, expected.tolist())
    norm = nn.BatchNorm2d(5)
    norm.inner = nn.BatchNorm2d(5)
    shrink_per_channel(norm, 5, layout)
    assert (norm.weight.shape, norm.inner.weight.shape, norm.inner.running_var.shape) == ((2,), (5,), (5,))
    one = nn.PReLU()
    shrink_per_channel(one, 5, layout)
    assert (one.num_parameters, one.weight.shape) == (1, (1,))
