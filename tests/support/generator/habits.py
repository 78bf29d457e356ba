"""Modules with unusual differences between training and evaluation, and modules with memory."""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def batch_norm(dims: int, channels: int) -> nn.Module:
    return (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](channels)


def conv(dims: int, channels: int) -> nn.Module:
    return (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](channels, channels, 3, padding=1)


class NeverTraining(nn.Module):
    """A batch norm that always stays in evaluation mode, even after train()."""

    def __init__(self, dims: int, channels: int) -> None:
        super().__init__()
        self.norm = batch_norm(dims, channels)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class PartlyFrozen(nn.Module):
    """Convolutions with batch norms, the first of which is frozen with its norm, as in fine-tuning."""

    def __init__(self, dims: int, channels: int) -> None:
        super().__init__()
        self.a, self.b = conv(dims, channels), conv(dims, channels)
        self.first, self.second = batch_norm(dims, channels), batch_norm(dims, channels)
        for parameter in (*self.a.parameters(), *self.first.parameters()):
            parameter.requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for module in self.modules():
            if module is self.first or isinstance(module, nn.Dropout):
                module.training = False
        return self

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.b(F.relu(self.first(self.a(x))))))


class FrozenByForward(nn.Module):
    """Uses the running statistics by a call of the functional batch norm."""

    def __init__(self, dims: int, channels: int) -> None:
        super().__init__()
        self.norm = batch_norm(dims, channels)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.1, norm.eps)


class OwnNorm(nn.Module):
    """A handwritten batch norm."""

    def __init__(self, dims: int, channels: int) -> None:
        super().__init__()
        shape = (1, channels, *[1] * dims)
        self.weight, self.bias = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))
        self.register_buffer("running_mean", torch.zeros(shape))
        self.register_buffer("running_var", torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        if self.training:
            axes = (0, *range(2, x.dim()))
            mean, var = x.mean(axes, keepdim=True), x.var(axes, unbiased=False, keepdim=True)
            with torch.no_grad():
                self.remember(mean, var)
        return (x - mean) * (var + 0.1).rsqrt() * self.weight + self.bias

    def remember(self, mean: Tensor, var: Tensor) -> None:
        self.running_mean.mul_(0.9).add_(mean, alpha=0.1)
        self.running_var.lerp_(var, 0.1)


class AssigningNorm(OwnNorm):
    def remember(self, mean: Tensor, var: Tensor) -> None:
        self.running_mean = 0.9 * self.running_mean + 0.1 * mean
        self.running_var = 0.9 * self.running_var + 0.1 * var


class CopyingNorm(OwnNorm):
    def remember(self, mean: Tensor, var: Tensor) -> None:
        self.running_mean.copy_(0.9 * self.running_mean + 0.1 * mean)
        self.running_var.data = self.running_var.data * 0.9 + var.data * 0.1


class Remembering(nn.Module):
    """Keeps its last input, counts its calls, and has tables that are neither parameters nor in its state_dict."""

    def __init__(self, dims: int, channels: int) -> None:
        super().__init__()
        self.calls, self.seen = 0, {"shapes": []}
        self.table = torch.linspace(0.5, 1.5, channels, dtype=torch.float64).view(-1, *[1] * dims)
        self.register_buffer("shift", torch.full((channels, *[1] * dims), 0.1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.detach()
        self.seen["shapes"] = [tuple(x.shape)]
        return x * self.table + self.shift


class Counting(nn.Module):
    """Records the largest inputs in training in a non-persistent buffer."""

    def __init__(self, dims: int, channels: int) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.largest.copy_(torch.maximum(self.largest, x.detach().abs().amax()))
        return x / (1 + self.largest)


FROZEN = (NeverTraining, PartlyFrozen, FrozenByForward)
BY_HAND = (OwnNorm, AssigningNorm, CopyingNorm)
REMEMBERING = (Remembering, Remembering, Counting)
