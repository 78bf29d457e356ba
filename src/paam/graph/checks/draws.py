"""Weights of many magnitudes and distributions for trials of a layer.

A norm limit, a threshold or a rounding step affects some weights only: weights from one narrow range would never
reveal it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from paam.graph.checks.perturb import Noise, perturb
from paam.graph.copies import light_copy

Draw = Callable[[Tensor], Tensor]
"""Maps numbers uniform in [-1, 1] to another distribution."""


def plain(u: Tensor) -> Tensor:
    return u


def _small(u: Tensor) -> Tensor:
    return 0.05 * u


def _large(u: Tensor) -> Tensor:
    return 20 * u


def _heavy_tailed(u: Tensor) -> Tensor:
    return u / (1.02 - u.abs())


def _uneven_filters(u: Tensor) -> Tensor:
    """Some filters a thousand times as large as others."""
    filters = u if u.dim() else u[None]
    steps = 10.0 ** (torch.arange(len(filters), dtype=u.dtype) * 5 % 7 / 2 - 1.5)
    return (filters.movedim(0, -1) * steps).movedim(-1, 0).reshape(u.shape)


def _positive(u: Tensor) -> Tensor:
    return 3 * u.abs() + 0.1


def _negative(u: Tensor) -> Tensor:
    return -0.3 * u.abs() - 0.01


def _sparse(u: Tensor) -> Tensor:
    return torch.where(u.abs() > 0.5, 2 * u, 0)


def _few_values(u: Tensor) -> Tensor:
    return (2.5 * u).round()


DRAWS = (plain, _large, _small, _heavy_tailed, _uneven_filters, _positive, _negative, _sparse, _few_values)
SPECIAL = (_sparse, _few_values)
"""Draws where a layer may be discontinuous: rounding decides which of several equal weights comes first."""


def with_weights(layer: nn.Module, draw: Draw, noise: Noise) -> nn.Module:
    """A copy of a layer with new weights. Statistics stay in their valid range."""
    twin = perturb(light_copy(layer), noise)
    made: dict[int, nn.Parameter] = {}
    for module in twin.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(draw(noise.like(parameter, -1, 1)) * _reach(parameter), False)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and name == "running_mean":
                module._buffers[name] = draw(noise.like(buffer, -1, 1))
            elif buffer is not None and name == "running_var":
                module._buffers[name] = draw(noise.like(buffer, 0.5, 1)).abs() + 0.01
    return twin


def _reach(parameter: Tensor) -> float:
    """The usual magnitude of weights of this shape."""
    return 2.0 / math.sqrt(parameter[0].numel()) if parameter.dim() > 1 and parameter.numel() else 1.0
