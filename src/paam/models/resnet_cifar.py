"""CIFAR ResNets with parameter-free shortcuts (option A): depth 6n + 2, widths 16, 32, 64.

Parameter names are those of the public checkpoints (conv1, bn1, layer1.0.conv1, ..., linear).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class PadShortcut(nn.Module):
    """Every second pixel, and zero channels on both sides: [N, C, H, W] -> [N, C + 2 pad, H/2, W/2]."""

    def __init__(self, pad: int) -> None:
        super().__init__()
        self.pad = pad

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = PadShortcut((outputs - inputs) // 2) if stride != 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(self.shortcut(x) + out)


class CifarResNet(nn.Module):
    """Three stages of n basic blocks; images [N, in_channels, H, W] to logits [N, num_classes]."""

    def __init__(self, depth: int, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"a CIFAR ResNet has 6n + 2 layers, not {depth}")
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(in_channels, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, 1)
        self.layer2 = _stage(16, 32, blocks, 2)
        self.layer3 = _stage(32, 64, blocks, 2)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))  # type: ignore[no-any-return]


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1)))


def resnet20(num_classes: int = 10, in_channels: int = 3) -> CifarResNet:
    """269,722 parameters on CIFAR-10."""
    return CifarResNet(20, num_classes, in_channels)


def resnet32(num_classes: int = 10, in_channels: int = 3) -> CifarResNet:
    """464,154 parameters on CIFAR-10."""
    return CifarResNet(32, num_classes, in_channels)


def resnet44(num_classes: int = 10, in_channels: int = 3) -> CifarResNet:
    """658,586 parameters on CIFAR-10."""
    return CifarResNet(44, num_classes, in_channels)


def resnet56(num_classes: int = 10, in_channels: int = 3) -> CifarResNet:
    """853,018 parameters on CIFAR-10."""
    return CifarResNet(56, num_classes, in_channels)


def resnet110(num_classes: int = 10, in_channels: int = 3) -> CifarResNet:
    """1,727,962 parameters on CIFAR-10."""
    return CifarResNet(110, num_classes, in_channels)
