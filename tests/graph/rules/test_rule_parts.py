"""Channel rules case by case: the flow of one operation behind a convolution, worked by hand."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.parametrizations import weight_norm

from behind import Behind, fields
from paam.errors import GraphError
from paam.graph.channel_map import ChannelMap, ChannelOffset, OnesChannel
from paam.graph.flows import CONST, LIVE, ZERO, Flow, Mix, Pass, Source, Whole
from paam.graph.joins import Add, Concat, Flatten, Gather, Given, Ones, Part, Route, Stack, Stored, Zip
from paam.graph.network import Network, prepare
from paam.graph.rules.functions import (
    called,
    is_getter,
    is_method,
    is_setter,
    property_as_call,
    reads_mask,
    taken_apart,
)
from paam.graph.rules.layers import _padding, _trial_shape, kind_of
from paam.graph.rules.site import Op, size_of
from paam.graph.rules.sizes import decides_by_sizes
from paam.graph.rules.table import _is_torchs

UNEVEN, VARIES, NUMBER = Pass(zero=LIVE, const=LIVE), Pass(const=LIVE), Pass(zero=CONST)
ALL = slice(None)


def found(model: nn.Module, size: int = 8) -> Network:
    return prepare(model.eval(), torch.zeros(2, 3, size, size), check=False)


def route(*source: int) -> Route:
    return Route(8, np.array(source))


def part(count: int, *source: int) -> Part:
    return Part(8, np.array(source), count)


def tokens(x: Tensor) -> Tensor:
    """[N, H * W, C]"""
    return x.flatten(2).mT


def assigned(value: Any, *key: Any) -> Callable[[Tensor], Tensor]:
    def assign(x: Tensor) -> Tensor:
        x = x.clone()
        x[key] = value
        return x

    return assign


class Held(nn.Module):
    """A parameter, a buffer, and a function of both and the input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)
        self.scale = nn.Parameter(torch.ones(shape or (8, 1, 1)))
        self.register_buffer("places", torch.tensor([3, 1]))
        self.register_buffer("ones", torch.ones(8))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.conv(x))


FLOWS: dict[str, tuple[Callable[[Tensor], Tensor], Flow, int]] = {
    # Cuts
    "cut by a size": (lambda x: x[:, : x.shape[1] // 2], route(0, 1, 2, 3), 1),
    "cut in steps": (lambda x: x[:, 1::3], route(1, 4, 7), 1),
    "cut from behind": (lambda x: x[:, -3:], route(5, 6, 7), 1),
    "samples cut": (lambda x: x[:1], Pass(), 1),
    "all kept": (lambda x: x[:, :], Pass(), 1),
    "samples and channels cut": (lambda x: x[1:, 1:], Whole(7), 1),
    "an axis put in": (lambda x: x[:, None], Pass(), 2),
    "an axis taken out": (lambda x: x[:, :, 1], Pass(), 1),
    "a channel taken out": (lambda x: x[:, 1], Whole(8), 1),
    "largest places": (lambda x: x.max(2)[1], Whole(8), 1),
    "smallest of each row": (lambda x: torch.min(x, 3)[0], Pass(), 1),
    "largest of channels": (lambda x: x.max(1)[0], Whole(8), 1),
    "largest of channels, kept": (lambda x: x.max(1, keepdim=True)[0], Whole(1), 1),
    "median": (lambda x: x.median(2)[0], Whole(8), 1),
    "one sample": (lambda x: x.unbind(0)[1], Pass(), 0),
    "one row by name": (lambda x: torch.unbind(x, dim=3)[-1], Pass(), 1),
    "one channel": (lambda x: x.unbind(1)[0], Whole(8), 1),
    "chunks by name": (lambda x: x.chunk(chunks=4, dim=1)[3], part(4, 6, 7), 1),
    "chunks by a function": (lambda x: torch.chunk(x, 2, dim=1)[0], part(2, 0, 1, 2, 3), 1),
    "chunks from behind": (lambda x: x.chunk(2, -3)[-1], part(2, 4, 5, 6, 7), 1),
    "uneven chunks": (lambda x: x.chunk(3, 1)[2], route(6, 7), 1),
    "chunks of the map": (lambda x: x.chunk(2, 3)[1], Pass(), 1),
    "chunks of samples": (lambda x: x.chunk(2)[1], Pass(), 1),
    "split by a size": (lambda x: x.split(3, 1)[2], route(6, 7), 1),
    "split evenly": (lambda x: torch.split(x, 4, 1)[1], route(4, 5, 6, 7), 1),
    "split by names": (
        lambda x: torch.split(x, split_size_or_sections=[1, 7], dim=1)[1],
        route(1, 2, 3, 4, 5, 6, 7),
        1,
    ),
    "split by a method": (lambda x: x.split(split_size=6, dim=1)[1], route(6, 7), 1),
    "split by a number of channels": (lambda x: x.split(x.shape[1] // 4, 1)[1], route(2, 3), 1),
    # Borders
    "channels before": (lambda x: F.pad(x, (0, 0, 0, 0, 2, 0)), route(-1, -1, *range(8)), 1),
    "channels behind": (lambda x: F.pad(x, [0, 0, 0, 0, 0, 2]), route(*range(8), -1, -1), 1),
    "channels and samples": (lambda x: F.pad(x, (0, 0, 0, 0, 1, 1, 0, 1)), Whole(10), 1),
    "samples": (lambda x: F.pad(x, (0, 0, 0, 0, 0, 0, 0, 1)), VARIES, 1),
    "channels taken away": (lambda x: F.pad(x, (0, 0, 0, 0, -1, 2)), Whole(9), 1),
    "channels taken away behind": (lambda x: F.pad(x, (0, 0, 0, 0, 2, -1)), Whole(9), 1),
    "border of zeros, named": (lambda x: F.pad(x, pad=(1, 0), mode="constant", value=0), VARIES, 1),
    "border of ones, named": (lambda x: F.pad(x, pad=(1, 0), value=1.0), UNEVEN, 1),
    "repeated border": (lambda x: F.pad(x, (1, 1, 1, 1), "replicate"), Pass(), 1),
    "no border": (lambda x: F.pad(x, (0, 0, 0, 0)), VARIES, 1),
    "tokens padded": (lambda x: F.pad(tokens(x), (1, 1)), route(-1, *range(8), -1), 2),
    "more tokens": (lambda x: F.pad(tokens(x), (0, 0, 1, 0)), VARIES, 2),
    # Pixels
    "pixel shuffle by name": (lambda x: F.pixel_shuffle(x, upscale_factor=2), Gather(4), 1),
    "pixel unshuffle by name": (lambda x: F.pixel_unshuffle(x, downscale_factor=4), Flatten(16), 1),
    "pixel shuffle elsewhere": (lambda x: F.pixel_shuffle(x.movedim(1, 3), 2), Whole(16, True), 3),
    "pixel unshuffle elsewhere": (lambda x: F.pixel_unshuffle(x.movedim(1, 3), 2), Whole(4, True), 3),
    "pixel shuffle by threes": (lambda x: F.pixel_shuffle(F.pad(x, (0, 0, 0, 0, 0, 1)), 3), Gather(9), 1),
    # Written into
    "zeros along the map": (assigned(0.0, ALL, ALL, slice(2)), VARIES, 1),
    "numbers along the map": (assigned(2, ..., 0), Whole(8), 1),
    "numbers of two samples": (assigned(2, slice(2)), UNEVEN, 1),
    "some channels": (assigned(0, ALL, slice(2)), Whole(8), 1),
    # Over the map
    "largest of windows": (lambda x: F.max_pool2d(x, 2), Pass(), 1),
    "resized": (lambda x: F.interpolate(x, scale_factor=2), Pass(), 1),
    "windows of tokens": (lambda x: F.avg_pool1d(tokens(x), 2), Whole(4, True), 2),
    "windows of tokens, turned": (lambda x: F.avg_pool1d(x.flatten(2), 2), Pass(), 1),
    "averages, padded by name": (lambda x: F.avg_pool2d(x, 3, padding=1), VARIES, 1),
    "averages, padded by a pair": (lambda x: F.avg_pool2d(x, 3, 1, (0, 1)), VARIES, 1),
    "averages, padded by nothing": (lambda x: F.avg_pool2d(x, 3, 1, (0, 0)), Pass(), 1),
    "averages, not counted": (lambda x: F.avg_pool2d(x, 3, 1, 1, False, False), Pass(), 1),
    "averages, not counted, divided": (lambda x: F.avg_pool2d(x, 3, 1, 1, False, False, 2), VARIES, 1),
    "averages, divided": (lambda x: F.avg_pool2d(x, 3, 1, 0, False, True, 2), Pass(), 1),
    "mean": (lambda x: x.mean(), Whole(1), 0),
    "mean of rows": (lambda x: x.mean(-1), Pass(), 1),
    "mean of rows by name": (lambda x: torch.mean(x, dim=[2, 3]), Pass(), 1),
    "mean of samples": (lambda x: x.mean(0), Pass(), 0),
    "mean of samples, kept": (lambda x: x.mean(0, keepdim=True), Pass(), 1),
    "largest": (lambda x: x.amax((-2, -1)), Pass(), 1),
    "sum": (lambda x: torch.sum(x, 2), VARIES, 1),
    "length": (lambda x: x.norm(2, (2, 3)), VARIES, 1),
    "length by name": (lambda x: torch.norm(x, dim=2), VARIES, 1),
    "length of all": (lambda x: x.norm(), Whole(1), 0),
    "deviation": (lambda x: x.std((2, 3)), Pass(), 1),
    "variance": (lambda x: torch.var(x, (2, 3), keepdim=True), Pass(), 1),
    "unit length by name": (lambda x: F.normalize(x, 2.0, 3), VARIES, 1),
    "unit length": (lambda x: F.normalize(x, p=1.0, dim=-3), Whole(8), 1),
    "softmax by name": (lambda x: F.softmax(x, dim=1), Whole(8), 1),
    "softmax of rows": (lambda x: torch.softmax(x, 2), UNEVEN, 1),
    "softmax from behind": (lambda x: F.log_softmax(x, -3), Whole(8), 1),
    # Channel by channel
    "square": (lambda x: x**2, Pass(), 1),
    "two to the power of": (lambda x: 2**x, Pass(CONST, CONST), 1),
    "logarithm": (lambda x: x.log(), UNEVEN, 1),
    "inverse": (lambda x: 1 / x, UNEVEN, 1),
    "cosine": (lambda x: torch.cos(x), Pass(CONST, CONST), 1),
    "one more": (lambda x: 1 + x, Pass(CONST, CONST), 1),
    "one less": (lambda x: x - 1, Pass(CONST, CONST), 1),
    "nothing more": (lambda x: x + 0, Pass(), 1),
    "times a size": (lambda x: x * x.shape[2], VARIES, 1),
    "plus a size": (lambda x: x + x.shape[2], UNEVEN, 1),
    "at least a size": (lambda x: x.clamp(min=x.shape[2]), UNEVEN, 1),
    "sign": (lambda x: x > 0, Pass(), 1),
    "no sign": (lambda x: x >= 0, Pass(CONST, CONST), 1),
    "twice": (lambda x: x + x, Add(), 1),
    "twice by a factor": (lambda x: torch.add(x, x, alpha=2), Pass(), 1),
    "two by a factor": (lambda x: torch.add(x, x.tanh(), alpha=2), Zip((8, 8), False), 1),
    "differs by itself": (lambda x: x - x.relu(), Zip((8, 8), False), 1),
    "product": (lambda x: x * x.tanh(), Zip((8, 8), True), 1),
    "quotient": (lambda x: x / x.tanh(), Zip((8, 8), False, LIVE, LIVE), 1),
    "scaled by means": (lambda x: x * x.mean((2, 3), keepdim=True), Zip((8, 8), True), 1),
    "scaled by one channel": (lambda x: x.mean(1, keepdim=True) * x, Zip((8, 1), True), 1),
    "less one channel": (lambda x: x.mean(1, keepdim=True) - x, Zip((1, 8), False), 1),
    "larger": (lambda x: torch.maximum(x, x.tanh()), Zip((8, 8), False), 1),
    "larger cosine": (lambda x: torch.hypot(x.cos(), x), Zip((8, 8), False), 1),
    "chosen": (lambda x: torch.where(x > 0, x, 2 * x), Zip((8, 8, 8), False), 1),
    "chosen ones": (lambda x: torch.where(x > 0, x, 1.0), Zip((8, 8), False, CONST, CONST), 1),
    "positions": (lambda x: x + torch.arange(8.0), Whole(8), 1),
    "positions of channels": (lambda x: x + torch.arange(8.0)[:, None, None], Zip((8, 8), False), 1),
    "dropped by no one": (lambda x: F.dropout(x, 0.5, False), Pass(), 1),
    "dropped by no one, by torch": (lambda x: torch.dropout(x, 0.5, False), Pass(), 1),
    "products of single channels": (
        lambda x: x.mean(1, keepdim=True) * x.mean(1, keepdim=True).tanh(),
        Zip((1, 1), True),
        1,
    ),
    "less one of two": (lambda x: x[:, :1] - x[:, :2], Zip((1, 2), False), 1),
    "scaled by a number": (lambda x: x * x.mean(), Zip((8, 1), True), 1),
    "positions, channels last": (lambda x: x.movedim(1, 3) + torch.arange(8.0)[:, None, None], Whole(8), 3),
    "one channel turned": (lambda x: x.mean(1, keepdim=True).permute(0, 2, 3, 1), Pass(), 3),
    "one channel flat": (lambda x: x.mean(1, keepdim=True).flatten(2), Pass(), 1),
    "one channel, its rows flat": (lambda x: x.mean(1, keepdim=True).flatten(1), Whole(64), 1),
    "flattened by name": (lambda x: torch.flatten(input=x, start_dim=1), Flatten(64), 1),
    # Moved
    "side by side": (lambda x: torch.cat([x, x.relu()], 1), Concat((8, 8)), 1),
    "side by side from behind": (lambda x: torch.cat((x, x.relu()), dim=-3), Concat((8, 8)), 1),
    "one below the other": (lambda x: torch.cat([x, x.relu()], 2), Stack(), 1),
    "more samples": (lambda x: torch.cat([x, x.relu()]), Stack(), 1),
    "side by side, turned": (lambda x: torch.cat([x, x.relu().mT.transpose(1, 2)], 1), Whole(16), 1),
    "stacked before": (lambda x: torch.stack([x, x.relu()], 1), Stack(), 2),
    "stacked first": (lambda x: torch.stack([x, x.relu()]), Stack(), 2),
    "stacked behind": (lambda x: torch.stack([x, x.relu()], dim=2), Stack(), 1),
    "stacked last": (lambda x: torch.stack([x, x.relu()], -1), Stack(), 1),
    "stacked, turned": (lambda x: torch.stack([x, x.relu().transpose(1, 2)], 1), Whole(2), 1),
    "turned": (lambda x: x.transpose(1, 3), Pass(), 3),
    "tokens turned": (lambda x: tokens(x).mT, Pass(), 1),
    "rolled along the map": (lambda x: x.roll(1, 2), Pass(), 1),
    "rolled": (lambda x: x.roll(1, 1), route(7, 0, 1, 2, 3, 4, 5, 6), 1),
    "rows repeated": (lambda x: x.repeat_interleave(2, 2), Pass(), 1),
    "channels repeated": (lambda x: x.repeat_interleave(2, 1), Flatten(2), 1),
    "channels repeated all": (lambda x: x.repeat(1, 2, 1, 1), Whole(16), 1),
    "narrow": (lambda x: x.narrow(1, 2, 3), route(2, 3, 4), 1),
    "picked twice": (lambda x: x[:, [3, 3]], Whole(2), 1),
    "view": (lambda x: x.view(-1, 8, 64), Pass(), 1),
    "spread view": (lambda x: x.view(-1, 4, 16, 8), Whole(16), 2),
    "row by row": (lambda x: x.reshape(-1, 8), Whole(8), 1),
    "squeezed": (lambda x: x.mean(2, keepdim=True).squeeze(2), Pass(), 1),
    "more axes": (lambda x: x.unsqueeze(0), Pass(), 2),
    "expanded": (lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 3, 3), Pass(), 1),
    "filled": (lambda x: torch.full_like(x, 2.0), Pass(CONST, CONST), 1),
    "zeros": (lambda x: torch.zeros_like(x), Pass(), 1),
    "sorted": (lambda x: torch.cumsum(x, 2), Whole(8), 1),
    "all products": (lambda x: tokens(x) @ x.flatten(2), Whole(64), 1),
}


@pytest.mark.parametrize("name", FLOWS)
def test_flow_of(name: str) -> None:
    function, flow, axis = FLOWS[name]
    *_, op, _ = found(Behind(function)).ops
    assert (type(op.flow), fields(op.flow), op.axis) == (type(flow), fields(flow), axis)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Flow, int]] = {
    "zero border": (lambda: nn.ZeroPad2d(1), VARIES, 1),
    "constant border": (lambda: nn.ConstantPad2d((0, 1, 0, 0), 2.0), UNEVEN, 1),
    "constant border of zeros": (lambda: nn.ConstantPad2d(1, 0), VARIES, 1),
    "reflected": (lambda: nn.ReflectionPad2d(1), Pass(), 1),
    "channels": (lambda: nn.ConstantPad3d((0, 0, 0, 0, 1, 1), 0), route(-1, *range(8), -1), 1),
    "channels of ones": (lambda: nn.ConstantPad3d((0, 0, 0, 0, 1, 1), 1), Whole(10), 1),
    "averages": (lambda: nn.AvgPool2d(3, 2), Pass(), 1),
    "averages with a border": (lambda: nn.AvgPool2d(3, 2, 1), VARIES, 1),
    "averages without their border": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), Pass(), 1),
    "averages by a divisor": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False, divisor_override=2), VARIES, 1),
    "averages rounded up": (lambda: nn.AvgPool2d(3, 2, ceil_mode=True), Pass(), 1),
    "averages rounded up, divided": (lambda: nn.AvgPool2d(3, 2, ceil_mode=True, divisor_override=2), VARIES, 1),
    "average": (lambda: nn.AdaptiveAvgPool2d(1), Pass(), 1),
    "upsampled": (lambda: nn.Upsample(scale_factor=2), Pass(), 1),
    "one slope": (nn.PReLU, Pass(), 1),
    "slopes": (lambda: nn.PReLU(8), Pass(), 1),
    "softmax": (lambda: nn.Softmax(1), Whole(8), 1),
    "softmax of rows": (lambda: nn.LogSoftmax(-1), UNEVEN, 1),
    "shuffle": (lambda: nn.PixelShuffle(2), Gather(4), 1),
    "unshuffle": (lambda: nn.PixelUnshuffle(2), Flatten(4), 1),
    "batch norm": (lambda: nn.BatchNorm2d(8), NUMBER, 1),
    "instance norm": (lambda: nn.InstanceNorm2d(8, affine=True), NUMBER, 1),
    "group norm": (lambda: nn.GroupNorm(2, 8), Whole(8), 1),
    "layer norm": (lambda: nn.LayerNorm([8, 8, 8]), Whole(8), 1),
    "sigmoid": (nn.Sigmoid, Pass(CONST, CONST), 1),
    "dropout": (nn.Dropout, Pass(), 1),
    "nothing": (nn.Identity, Pass(), 1),
    "flat": (nn.Flatten, Flatten(64), 1),
    "tokens": (lambda: nn.Flatten(2), Pass(), 1),
    "index map": (lambda: ChannelMap([2, -1, 0], 8, 1), route(2, -1, 0), 1),
    "offset": (lambda: ChannelOffset(torch.ones(8), 1), NUMBER, 1),
    "ones": (lambda: OnesChannel(1), Ones(), 1),
    "convolution": (lambda: nn.Conv2d(8, 6, 3, groups=2), Mix(8, 6, 2, True, False), 1),
    "padded": (lambda: nn.Conv2d(8, 6, 3, padding=1, bias=False), Mix(8, 6, 1, False, True), 1),
    "weight norm": (lambda: weight_norm(nn.Conv2d(8, 6, 3)), Mix(8, 6, 1, True, False), 1),
    "transposed": (lambda: nn.ConvTranspose2d(8, 6, 3), Mix(8, 6, 1, True, True, True), 1),
    "transposed, weight norm": (lambda: weight_norm(nn.ConvTranspose2d(8, 6, 3)), Mix(8, 6, 1, True, True, True), 1),
    "transposed groups": (
        lambda: nn.ConvTranspose2d(8, 6, 3, groups=2, bias=False),
        Mix(8, 6, 2, False, True, True),
        1,
    ),
    "linear along the map": (lambda: nn.Linear(8, 5), Whole(8, True), 1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_flow_of_layer(name: str) -> None:
    make, flow, axis = LAYERS[name]
    *_, op, _ = found(Behind(make())).ops
    assert (type(op.flow), fields(op.flow), op.axis) == (type(flow), fields(flow), axis)


TOKENS: dict[str, tuple[Callable[[], nn.Module], Flow, int]] = {
    "linear": (lambda: nn.Linear(8, 5), Mix(8, 5, 1, True, False), 2),
    "linear without bias": (lambda: nn.Linear(8, 5, bias=False), Mix(8, 5, 1, False, False), 2),
    "weight norm": (lambda: weight_norm(nn.Linear(8, 5)), Mix(8, 5, 1, True, False), 2),
    "convolution": (lambda: nn.Conv1d(64, 5, 3), Whole(6, True), 2),
    "transposed": (lambda: nn.ConvTranspose1d(64, 5, 3), Whole(10, True), 2),
    "batch norm": (lambda: nn.BatchNorm1d(64), Whole(8, True), 2),
    "instance norm": (lambda: nn.InstanceNorm1d(64), Whole(8, True), 2),
    "layer norm": (lambda: nn.LayerNorm(8), Whole(8), 2),
    "averages": (lambda: nn.AvgPool1d(2), Whole(4, True), 2),
    "slopes": (lambda: nn.PReLU(64), Whole(8, True), 2),
    "one slope": (nn.PReLU, Pass(), 2),
    "softmax": (lambda: nn.Softmax(2), Whole(8), 2),
}


@pytest.mark.parametrize("name", TOKENS)
def test_flow_of_layer_behind_tokens(name: str) -> None:
    make, flow, axis = TOKENS[name]
    layer = make()
    model = Behind(lambda x: layer(tokens(x)))
    model.layer = layer
    *_, op, _ = found(model).ops
    assert (type(op.flow), fields(op.flow), op.axis) == (type(flow), fields(flow), axis)


HELD: dict[str, tuple[Callable[[Any, Tensor], Tensor], Flow, int]] = {
    "norm": (lambda m, x: F.layer_norm(tokens(x), (8,), m.scale[:, 0, 0], m.ones), Whole(8), 2),
    "batch norm": (lambda m, x: F.batch_norm(x, m.ones, m.ones, m.ones), Zip((8, 8), False), 1),
    "picked by a buffer": (lambda m, x: x[:, m.places], Whole(2), 1),
    "scale": (lambda m, x: x * m.scale, Zip((8, 8), True), 1),
    "offset": (lambda m, x: x + m.scale, Zip((8, 8), False), 1),
    "blur": (lambda m, x: F.conv2d(x, m.scale[:, None].expand(8, 1, 2, 2), groups=8), Zip((8, 8), False), 1),
    "mixture": (lambda m, x: F.conv2d(x, m.scale[None].expand(8, 8, 1, 1)), Whole(8), 1),
    "slopes": (lambda m, x: F.prelu(x, m.ones), Whole(8), 1),
    "written at some places": (lambda m, x: assigned(0.0, ALL, ALL, m.places)(x), Whole(8), 1),
    "scaled by sums": (lambda m, x: x * m.scale.cumsum(0), Whole(8), 1),
    "mixture of two": (lambda m, x: F.conv2d(x[:, :2], m.scale[:2, None].expand(2, 2, 1, 1)), Whole(2), 1),
    "mixture of one": (lambda m, x: F.conv2d(x[:, :1], m.scale[:1, None].expand(1, 1, 1, 1)), Whole(1), 1),
}


@pytest.mark.parametrize("name", HELD)
def test_flow_of_what_reads_a_parameter(name: str) -> None:
    function, flow, axis = HELD[name]
    *_, op, _ = found(Held(function)).ops
    assert (type(op.flow), fields(op.flow), op.axis) == (type(flow), fields(flow), axis)


def test_flows_of_small_parameters() -> None:
    *_, op, _ = found(Held(lambda m, x: m.scale * x[:, :2], 1, 1, 1)).ops
    assert (op.flow, op.axis) == (Zip((2, 1), True), 1)
    *_, op, _ = found(Held(lambda m, x: x[:, :2] + m.scale, 2, 1, 1)).ops
    assert (op.flow, op.axis) == (Zip((2, 2), False), 1)
    *_, op, _ = found(Behind(lambda x: x.mean(2, keepdim=True).squeeze())).ops
    assert (op.flow, op.axis, op.literal) == (Pass(), 1, True)
    made = next(
        op
        for op in found(Behind(lambda x: x * torch.ones((x.shape[2] // 8, 1)))).ops
        if not op.inputs and op.name != "x"
    )
    assert (made.flow, made.axis) == (Given(1), 1)
    made = next(op for op in found(Behind(lambda x: x * torch.ones((x.shape[2], 1, 1)))).ops if op.name == "ones")
    assert (made.flow, made.axis) == (Given(8), 0)


class ThreeInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)

    def forward(self, x: Tensor, i: Tensor, f: Tensor) -> Tensor:
        return self.conv(x) * i[:, None, None, None] + f[:, :1, None, None]


def test_channels_of_inputs() -> None:
    ops = prepare(ThreeInputs(), (torch.zeros(2, 3, 4, 4), torch.zeros(2), torch.zeros(2, 5)), check=False).ops
    assert {op.name: (op.flow, op.axis) for op in ops if op.node.op == "placeholder"} == {
        **{"x": (Source(3), 1), "i": (Source(3), 0), "f": (Source(5), 1)},  # one sample more than in the example
    }


def own_function(x: Tensor) -> Tensor:
    return x


def test_whose_functions_may_read_whole_values() -> None:
    theirs = (torch.relu, F.relu, operator.add, len, math.floor, "relu", Tensor.relu_, torch.ops.aten.relu)
    assert all(map(_is_torchs, theirs))
    assert _is_torchs(torch.ops.aten.relu.default)
    assert not any(map(_is_torchs, (own_function, np.linalg.norm)))


STRETCHED: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, set[str]]]] = {
    "nothing": (lambda x: x.relu().tanh(), {}),
    "flattened": (lambda x: x.flatten(1).relu().tanh(), {"relu": {"flatten"}, "tanh": {"relu"}, "output": {"tanh"}}),
    "tokens": (lambda x: x.flatten(2).relu(), {}),
    "joined": (
        lambda x: torch.cat([x.flatten(1), x.mean((2, 3))], 1).relu(),
        {"cat": {"flatten"}, "relu": {"cat"}, "output": {"relu"}},
    ),
    "pooled": (lambda x: x.mean((2, 3), keepdim=True).flatten(1).relu(), {"relu": {"flatten"}, "output": {"relu"}}),
    "softmax": (lambda x: x.softmax(1), {}),
    "numbered": (
        lambda x: x.flatten(1) + torch.arange(x.shape[1] * x.shape[2] * x.shape[3]),
        {"add": {"flatten", "arange"}, "output": {"add"}},
    ),
    "softmax of all": (lambda x: x.flatten(1).softmax(1), {"softmax": {"flatten"}, "output": {"softmax"}}),
    "summed": (lambda x: x.flatten(1) + x.tanh().flatten(1), {"add": {"flatten", "flatten_1"}, "output": {"add"}}),
}


@pytest.mark.parametrize("name", STRETCHED)
def test_values_that_are_longer_in_a_larger_image(name: str) -> None:
    function, stretched = STRETCHED[name]
    ops = found(Behind(function)).ops
    names = {op.node.name: {node.name for node in op.stretched} for op in ops if op.stretched}
    assert names == stretched


def test_behind_a_linear_layer_all_lengths_are_known() -> None:
    layers = (nn.Conv2d(3, 2, 1), nn.Flatten(), nn.ReLU(), nn.Linear(128, 5), nn.Flatten(), nn.ReLU())
    assert not any(op.stretched for op in found(nn.Sequential(*layers)).ops)


def test_who_counts_by_the_whole_shape() -> None:
    network = found(Behind(lambda x: x + torch.zeros(x.shape)))
    assert op_of(network, "conv").counted


class Resized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 4, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.conv(x), output_size=[17, 17])


def test_all_inputs_of_a_norm_are_read() -> None:
    *_, norm, _ = found(Held(HELD["norm"][0])).ops
    assert [node.op for node in norm.inputs] == ["call_function", "call_function", "get_attr"]
    *_, norm, _ = found(Held(HELD["batch norm"][0])).ops
    assert [node.name for node in norm.inputs] == ["conv", "ones"]


# Paddings and small shapes


@pytest.mark.parametrize(
    ("kernel", "options", "padded"),
    [
        *((3, {}, False), (3, {"padding": 1}, True), (3, {"padding": (0, 1)}, True), (3, {"padding": "valid"}, False)),
        *((3, {"padding": "same"}, True), (1, {"padding": "same"}, False), ((1, 2), {"padding": "same"}, True)),
        *((2, {"padding": "same", "dilation": 2}, True), (3, {"padding": 1, "padding_mode": "reflect"}, False)),
        *((3, {"padding": "same", "padding_mode": "zeros"}, True), (3, {"padding": 0, "padding_mode": "zeros"}, False)),
    ],
)
def test_zero_padding_is_noticed(kernel: Any, options: dict[str, Any], padded: bool) -> None:
    assert _padding(nn.Conv2d(2, 2, kernel, **options)) is padded


def test_the_smallest_shape_that_a_layer_takes() -> None:
    conv = nn.Conv2d(9, 4, (3, 5), dilation=(2, 1), stride=(2, 3))
    for shape, small in (((5, 9, 20, 20), (2, 9, 7, 8)), ((1, 9, 5, 8), (2, 9, 5, 8))):
        site: Any = SimpleNamespace(module=conv, x=None, shape=lambda x, shape=shape: shape)
        assert _trial_shape(site, Mix(9, 4, 1, True, False)) == small
    site = SimpleNamespace(module=nn.Linear(9, 4), x=None, shape=lambda x: (5, 2, 9))
    assert _trial_shape(site, Mix(9, 4, 1, True, False)) == (3, 2, 9)


def test_kinds_of_layers() -> None:
    assert kind_of(nn.Conv2d(2, 2, 1)) is nn.Conv2d
    assert kind_of(weight_norm(nn.Conv2d(2, 2, 1))) is nn.Conv2d


# What is refused


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


@pytest.mark.filterwarnings("ignore")
def test_refusals_say_what_and_where() -> None:
    with pytest.raises(GraphError, match="through BatchNorm2d at 'norm': without running statistics.*ignore=..norm"):
        found(Statistics())
    with pytest.raises(
        GraphError, match=r"at node '\w+' \(`.*rand_like.*`\): it draws random numbers in evaluation mode"
    ):
        found(Behind(lambda x: x + torch.rand_like(x)))
    with pytest.raises(GraphError, match="random numbers in evaluation"):
        found(Behind(lambda x: F.dropout(x, 0.5)))
    with pytest.raises(GraphError, match="random numbers in evaluation"):
        found(Behind(lambda x: torch.dropout(x, 0.5, True)))
    with pytest.raises(GraphError, match="at 'up': it is called with more than one tensor"):
        found(Resized())
    with pytest.raises(GraphError, match="its dim is not given"):
        found(Behind(lambda x: F.softmax(x.mean((2, 3)))))


# What functions are called


def test_calls_as_the_graph_has_them() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    for func, args, kwargs, op, target, given, in_place in (
        (Tensor.add_, (x, y), {}, "call_function", torch.add, (x, y), True),
        (torch.relu_, (x,), {}, "call_function", torch.relu, (x,), True),
        (Tensor.relu, (x,), {}, "call_method", "relu", (x,), False),
        (Tensor.__rsub__, (x, 1), {}, "call_function", torch.sub, (1, x), False),
        (Tensor.clamp_, (x, 1), {}, "call_method", "clamp", (x, 1), True),
        (Tensor.copy_, (x, y), {}, "call_function", None, (y, x), True),
        (Tensor.fill_, (x, 3), {}, "call_function", torch.full_like, (x, 3), True),
        (Tensor.fill_, (x,), {"value": 3}, "call_function", torch.full_like, (x, 3), True),
        (Tensor.zero_, (x,), {}, "call_function", torch.zeros_like, (x,), True),
    ):
        found_call = called(func, args, kwargs)
        assert (found_call.op, found_call.in_place) == (op, in_place)
        assert all(one is other for one, other in zip(found_call.args, given, strict=True))
        name = getattr(found_call.target, "__name__", found_call.target)
        if target is not None:
            assert name == getattr(target, "__name__", target)
    assert called(F.relu, (x,), {"inplace": True}).kwargs == {"inplace": False}
    assert called(F.relu, (x,), {"inplace": True}).in_place
    assert not called(F.relu, (x,), {"inplace": False}).in_place
    assert called(Tensor.add, (x, y), {"alpha": 2})[:2] == ("call_method", "add")
    with pytest.raises(GraphError, match=r"^normal_\(\) has no copying form"):
        called(Tensor.normal_, (x,), {})


def test_kinds_of_functions() -> None:
    getter, setter = Tensor.shape.__get__, Tensor.data.__set__
    assert (is_getter(getter), is_getter(setter), is_getter(torch.relu)) == (True, False, False)
    assert (is_setter(getter), is_setter(setter), is_setter(torch.relu)) == (False, True, False)
    functions = (Tensor.relu, Tensor.__add__, Tensor.norm, torch.relu, F.relu)
    assert [is_method(function) for function in functions] == [True, True, True, False, False]


def test_masks_among_keys() -> None:
    mask, places = torch.tensor([True]), torch.tensor([0])
    for key, expected in (
        *((mask, True), (places, False), ((0, mask), True), ((0, places), False), ([mask], True), (0, False)),
        *((mask.to(torch.uint8), True), ((places, slice(None)), False), ((places, mask), True)),
    ):
        assert reads_mask(key) is expected


def test_what_is_taken_apart() -> None:
    x = torch.zeros(4, 6)
    for found_parts, parts in (
        *((taken_apart("chunk", x, 3, 1), (3, 1)), (taken_apart("chunk", x, chunks=3), (3, 0))),
        *((taken_apart("split", x, split_size=2, dim=1), (2, 1)), (taken_apart("split", x, [1, 3]), ([1, 3], 0))),
        *((taken_apart("split", x, split_size_or_sections=2), (2, 0)), (taken_apart("unbind", x), (1, 0))),
        *((taken_apart("unbind", x, 1), (1, 1)), (taken_apart("unbind", x, dim=1), (1, 1))),
    ):
        assert found_parts[0] is x
        assert found_parts[1:] == parts


def test_properties_as_calls() -> None:
    flat, deep = torch.zeros(2, 3), torch.zeros(1, 2, 3)
    assert property_as_call("T", flat) == ("call_function", torch.transpose, (flat, -2, -1))
    kind, function, arguments = property_as_call("T", deep) or ("", None, ())
    assert (kind, function) == ("call_function", getattr)
    assert arguments[1] == "T"
    assert (property_as_call("mT", deep) or ())[1] is torch.transpose
    assert property_as_call("dtype", deep) is None


# Sizes


def test_the_tensor_of_a_size() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    shape = graph.call_function(getattr, (x, "shape"))
    size = graph.call_function(operator.getitem, (shape, 1))
    kind = graph.call_function(getattr, (x, "dtype"))
    other = graph.call_function(operator.getitem, (x, 1))
    double = graph.call_function(operator.mul, (size, 2))
    assert [size_of(node) for node in (shape, size, kind, other, double)] == [x, x, None, None, None]
    parts = graph.call_function(operator.getitem, ((1, 2), 1))
    assert size_of(parts) is None


class Asks(nn.Module):
    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.head, self.ask = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1), ask

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.head(x) if self.ask(x) else -self.head(x)


@pytest.mark.parametrize(
    ("ask", "by_sizes"),
    [
        (lambda x: x.shape[1] > 3, False),
        (lambda x: x.shape[1] * 2 + 1 > 3, False),
        (lambda x: x.shape[2] > 3, True),
        (lambda x: x.shape[1] * x.shape[2] > 3, True),
        (lambda x: x.shape[0] > 0, True),
        (lambda x: x.numel() > 3, True),
        (lambda x: True, False),
    ],
)
def test_decisions_by_sizes_of_images(ask: Callable[[Tensor], Any], by_sizes: bool) -> None:
    network = found(Asks(ask))
    assert decides_by_sizes(network.traced.graph, {op.node: op.axis for op in network.ops}) is by_sizes


def op_of(network: Network, name: str) -> Op:
    return next(op for op in network.ops if op.name == name)


SIZED: dict[str, tuple[Callable[[Tensor], Tensor], bool, bool, bool]] = {
    # sized, literal, the number of channels read off another value
    "a number": (lambda x: x.view(-1, 8, 64), True, True, False),
    "the rest": (lambda x: x.view(x.shape[0], -1, 64), False, False, False),
    "its own size": (lambda x: x.view(-1, x.shape[1], 64), True, False, True),
    "all of another": (lambda x: x.relu().view(x.shape), True, False, True),
    "computed": (lambda x: x.view(-1, x.shape[1] * 2 // 2, 64), True, True, False),
    "no view": (lambda x: x.permute(0, 2, 3, 1), False, False, False),
    "by a function": (lambda x: torch.reshape(x, (-1, 8, 64)), True, True, False),
    "another type": (lambda x: x.double().view(torch.int64), False, False, False),
    "by keyword": (lambda x: torch.reshape(x, [x.shape[0], -1, 64]), False, False, False),
}


@pytest.mark.parametrize("name", SIZED)
def test_numbers_of_channels_that_views_are_given(name: str) -> None:
    function, sized, literal, read = SIZED[name]
    *_, op, _ = found(Behind(function)).ops
    assert (op.sized, op.literal, op.size_of is not None) == (sized, literal, read)
    assert type(op.flow) is Pass


def test_flows_of_what_is_made() -> None:
    network = found(Behind(lambda x: x + torch.arange(x.shape[2]).view(1, 1, -1, 1)))
    assert any(isinstance(op.flow, Given) for op in network.ops)
    stored = [op for op in found(Held(HELD["scale"][0])).ops if op.node.op == "get_attr"]
    assert [(op.flow, op.axis, op.literal) for op in stored] == [(Stored(8), 0, False)]
    assert ZERO != LIVE


def test_plain_operations_are_given_no_numbers() -> None:
    for op in found(Behind(lambda x: x.relu() + torch.arange(x.shape[2]))).ops:
        assert [op.sized, op.literal, op.counted] == [False] * 3
        assert (op.size_of, op.shared) == (None, None)
