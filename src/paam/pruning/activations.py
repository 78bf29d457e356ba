"""Activations that turn an attention network's output into a score.

The two leaky ones equal exactly 1 at zero, so that pruning starts from the dense network, and keep a gradient
everywhere. The two sigmoids are the paper's ablations: they start at 1/2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paam.errors import RecipeError, nearest

LEAK = 0.01
"""Slope of both leaky activations above zero."""

SHARPNESS = 100.0
"""b of sigmoid(b x)."""


def leaky_exponential(x: Tensor) -> Tensor:
    """exp(x) below zero, 1 + LEAK x from zero on."""
    # The clamp keeps the untaken exp branch finite: inf * 0 in the backward pass of where() would be NaN.
    return torch.where(x < 0, x.clamp(max=0).exp(), 1 + LEAK * x)


def leaky_2sigmoid(x: Tensor) -> Tensor:
    """2 sigmoid(x) below zero, 1 + LEAK x from zero on."""
    return torch.where(x < 0, 2 * x.sigmoid(), 1 + LEAK * x)


def sharp_sigmoid(x: Tensor) -> Tensor:
    """sigmoid(SHARPNESS x)."""
    return (SHARPNESS * x).sigmoid()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky-exponential": leaky_exponential,
    "leaky-2sigmoid": leaky_2sigmoid,
    "sigmoid": torch.sigmoid,
    "sharp-sigmoid": sharp_sigmoid,
}


def activation(name: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """An activation by its name; a function is returned unchanged."""
    if not isinstance(name, str):
        return name
    if name not in ACTIVATIONS:
        raise RecipeError(f"There is no activation '{name}'.{nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]
