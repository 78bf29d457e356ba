"""Layers that users derive from torch's, with unusual behaviour, in one, two and three dimensions."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CONVOLVE = (F.conv1d, F.conv2d, F.conv3d)


def convolve(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    function = CONVOLVE[weight.dim() - 3]
    return function(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)


def per_filter(weight: Tensor) -> tuple[int, ...]:
    """The shape of one number per filter."""
    return weight.shape[0], *[1] * (weight.dim() - 1)


class Standardised:
    """Weights of mean 0 and variance 1 for each filter, and a gain."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(per_filter(self.weight)))

    def forward(self, x: Tensor) -> Tensor:
        axes = tuple(range(1, self.weight.dim()))
        var, mean = torch.var_mean(self.weight, dim=axes, keepdim=True, correction=0)
        return convolve(self, x, self.gain * (self.weight - mean) / torch.sqrt(var + 1e-3), self.bias)


class StandardisedByNorm:
    """The same by a batch norm of the weights, scaled by the number of inputs, as in normaliser-free networks."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(per_filter(self.weight)))
        self.scale = 1.7 * self.weight[0].numel() ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1),
            None,
            None,
            weight=(self.gain * self.scale).view(-1),
            training=True,
            momentum=0.0,
            eps=1e-3,
        ).reshape_as(self.weight)
        return convolve(self, x, weight, self.bias)


class Halved:
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class HalvedWeights:
    def forward(self, x: Tensor) -> Tensor:
        return convolve(self, x, self.weight * 0.5, self.bias)


class Equalised:
    """Weights divided by the square root of the number of inputs, read from the layer's attribute."""

    def forward(self, x: Tensor) -> Tensor:
        return convolve(self, x, self.weight * self.in_channels**-0.5, self.bias)


class EqualisedByShape:
    def forward(self, x: Tensor) -> Tensor:
        return convolve(self, x, self.weight / self.weight.shape[1], self.bias)


class Squashed:
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x))


class OwnPadding:
    """Pads inside forward(), with zeros on one side only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 0) * (x.dim() - 2)))


class BrightPadding:
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 1) * (x.dim() - 2), value=1.0))


class WithoutBias:
    """Has a bias, and ignores it."""

    def forward(self, x: Tensor) -> Tensor:
        return convolve(self, x, self.weight, None)


class Demodulated:
    def forward(self, x: Tensor) -> Tensor:
        axes = tuple(range(1, self.weight.dim()))
        return convolve(self, x, self.weight * torch.rsqrt(self.weight.square().sum(axes, keepdim=True) + 0.1), None)


class Spectral:
    """All weights divided by their common norm."""

    def forward(self, x: Tensor) -> Tensor:
        return convolve(self, x, self.weight / (1 + self.weight.norm()), self.bias)


class Masked:
    """A buffer of the weight's shape that is multiplied with it."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("pattern", torch.ones_like(self.weight.detach()))

    def forward(self, x: Tensor) -> Tensor:
        return convolve(self, x, self.weight * self.pattern, self.bias)


class ScaledByWidth:
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.out_channels**-0.5


class Skipping:
    """Adds its input if that has as many channels as its output."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + x if self.in_channels == self.out_channels and y.shape == x.shape else y


class Reversed:
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(1)


class Centred:
    """Subtracts the mean over channels from its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


class ScaledFilters:
    """One number per filter, as a vector, multiplied with the output."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.scale = nn.Parameter(torch.ones(self.out_channels))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.view(1, -1, *[1] * (x.dim() - 2))


class Shifted:
    """An offset with its channels on the second axis."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.offset = nn.Parameter(torch.zeros(1, self.out_channels, *[1] * (self.weight.dim() - 2)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.offset


class SoftWeights:
    def forward(self, x: Tensor) -> Tensor:
        return convolve(self, x, F.softmax(self.weight, 1), self.bias)


class SoftFilters:
    """A softmax of the weights over the filters: they depend on each other."""

    def forward(self, x: Tensor) -> Tensor:
        return convolve(self, x, F.softmax(self.weight, 0), self.bias)


class LowRank:
    """A low-rank correction of the weights."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.up = nn.Parameter(torch.randn(self.out_channels, 2))
        self.down = nn.Parameter(torch.randn(2, self.weight[0].numel()))

    def forward(self, x: Tensor) -> Tensor:
        return convolve(self, x, self.weight + (self.up @ self.down).view_as(self.weight), self.bias)


class Dropping:
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.3, self.training))


class PlainConv:
    """A subclass of torch's convolution that changes only its name."""


CONV_HABITS = (
    *(Standardised, StandardisedByNorm, Halved, HalvedWeights, Equalised, EqualisedByShape, Squashed, OwnPadding),
    *(BrightPadding, WithoutBias, Demodulated, Spectral, Masked, ScaledByWidth, Skipping, Reversed, Centred),
    *(ScaledFilters, Shifted, SoftWeights, SoftFilters, LowRank, Dropping, PlainConv),
)


class Activated:
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class Sigmoided:
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x))


class Unshifted:
    """Has an offset, and ignores it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, None, self.training, 0.1, self.eps)


class GainAboveOne:
    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight + 1
        return F.batch_norm(x, self.running_mean, self.running_var, gain, self.bias, self.training, 0.1, self.eps)


class WithSlope:
    """A batch norm with an additional slope for each channel."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.slope = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return F.prelu(super().forward(x), self.slope)


class MixingNorm:
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(1)


NORM_HABITS = (Activated, Sigmoided, Unshifted, GainAboveOne, WithSlope, MixingNorm)


for _habits, _bases in ((CONV_HABITS, CONVOLUTIONS), (NORM_HABITS, NORMS)):
    for _habit, (_number, _base) in itertools.product(_habits, enumerate(_bases, 1)):
        _name = f"{_habit.__name__}{_number}d"
        globals()[_name] = type(_name, (_habit, _base), {"__module__": __name__, "__doc__": _habit.__doc__})
