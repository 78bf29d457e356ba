"""Generic weights: decisions and checks made with them do not depend on special values of a model's weights.

A zero gain hides what it multiplies, a fresh batch norm maps zero to zero, equal weights look alike.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from paam.graph.channel_map import ADDED_LAYERS

_TABLE = 65521
"""Size of the table of random numbers, a prime: rows of a weight repeat them at different offsets."""


PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
"""Layers that use their weights directly."""


class Noise:
    """Pseudo-random numbers between 0 and 1, generated at memory speed."""

    def __init__(self, device: torch.device, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        self.table = _table(device, seed).to(dtype)
        self.place = 0

    def like(self, tensor: Tensor, low: float = 0.0, high: float = 1.0, overlapping: bool = False) -> Tensor:
        """Numbers between ``low`` and ``high``, in a tensor's shape.

        ``overlapping``: rows may share memory, each shifted by a few elements, which saves most of the time.
        """
        count = tensor.numel()
        place = self.place % _TABLE
        self.place += count
        if place + count <= _TABLE:
            return (self.table[place : place + count] * (high - low) + low).view(tensor.shape)
        scaled = self.table * (high - low) + low
        if overlapping and (row := count // tensor.shape[0]) <= _TABLE // 2:
            step = max((_TABLE - row) // tensor.shape[0], 1)
            if row + step * (tensor.shape[0] - 1) <= _TABLE:
                strides = (step, *torch.empty(tensor.shape[1:], device="meta").stride())
                return scaled.as_strided(tensor.shape, strides)
        return scaled.repeat(-(-(place + count) // _TABLE))[place : place + count].view(tensor.shape)


@functools.cache
def _table(device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(_TABLE, generator=generator, dtype=torch.float64).to(device)


def perturbed(name: str, value: Tensor, noise: Noise, module: nn.Module) -> Tensor:
    """New values of the noise's dtype for a tensor, in the usual range of such a tensor."""
    if not value.is_floating_point():
        return value.to(noise.table.device, copy=True)
    if name == "running_var":
        return noise.like(value, 0.5, 1.5)
    if value.dim() > 1 and isinstance(value, nn.Parameter):
        reach = 2.0 / math.sqrt(max(value.numel() // max(value.shape[0], 1), 1))
        return noise.like(value, -reach, reach, overlapping=type(module) in PLAIN)
    if isinstance(value, nn.Parameter) and name.endswith("weight"):
        return noise.like(value, 0.6, 1.4)
    if isinstance(value, nn.Parameter) or name == "running_mean":
        return noise.like(value, -0.4, 0.6)
    return _nudged(name, value, noise, module)


def _nudged(name: str, value: Tensor, noise: Noise, module: nn.Module) -> Tensor:
    if not value.is_floating_point():
        return value.to(noise.table.device, copy=True)
    wide, drawn = value.detach().to(noise.table), noise.like(value)
    return torch.where(wide.isfinite(), wide * (1 + 0.2 * drawn) + 0.05 * drawn, wide)


def perturb(model: nn.Module, noise: Noise, *, gentle: bool = False) -> nn.Module:
    """Replace a model's tensors, in place, by new values of the noise's dtype. Shared tensors stay shared.

    ``gentle``: close to the current values, for networks whose output is not finite with any others.
    """
    change = _nudged if gentle else perturbed
    made: dict[int, Tensor] = {}
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in made:
                        made[id(parameter)] = nn.Parameter(change(name, parameter, noise, module), False)
                    module._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
            for name, buffer in module._buffers.items():
                if buffer is not None and not isinstance(module, ADDED_LAYERS):  # their masks must not change
                    if id(buffer) not in made:
                        made[id(buffer)] = change(name, buffer, noise, module)
                    module._buffers[name] = made[id(buffer)]
    return model
