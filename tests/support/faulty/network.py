"""The network of the runs with faults: a stream, an inner layer, and a use of random numbers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Tiny(nn.Module):
    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 6, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, 1, 1, bias=False)
        self.conv3 = nn.Conv2d(8, 6, 3, 1, 1, bias=False)
        self.drop = nn.Dropout(0.1)
        self.linear = nn.Linear(6, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(x + self.conv3(F.relu(self.conv2(x))))
        return self.linear(self.drop(F.adaptive_avg_pool2d(x, 1).flatten(1)))


def tiny(num_classes: int, in_channels: int) -> Tiny:
    return Tiny(num_classes, in_channels)
