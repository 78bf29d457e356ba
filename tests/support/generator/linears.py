"""Custom linear layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HalvedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class CosineLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=1), self.bias)


class StandardisedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(x, weight / (weight.std(1, keepdim=True) + 0.1), self.bias)


class SquashedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x))


class EqualisedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.in_features**-0.5, self.bias)


class LinearWithoutBias(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class GainedLinear(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.gain = nn.Parameter(torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class NormedLinear(nn.Linear):
    """Applies a layer norm to its inputs first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.layer_norm(x, (x.shape[-1],), eps=0.1))


LINEARS = (
    *(HalvedLinear, CosineLinear, StandardisedLinear, SquashedLinear, EqualisedLinear, LinearWithoutBias),
    *(GainedLinear, NormedLinear),
)
