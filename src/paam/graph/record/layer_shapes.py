"""Output shapes of torch's common layers without computing them: all that recording needs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}
"""Layers, and the numbers of input axes that they accept."""
UNCHANGED = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Softsign),
)


def returned(layer: nn.Module, x: Tensor) -> tuple[tuple[int, ...], int] | None:
    """Shape and multiply-accumulates of ``layer(x)``; None if it must be computed, or would raise an error."""
    kind = type(layer)
    if kind in UNCHANGED:
        return tuple(x.shape), 0
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.dtype != x.dtype or weight.device != x.device:
        return None
    if kind in BATCH_NORMS:
        fits = x.dim() in BATCH_NORMS[kind] and x.shape[1] == len(weight)
        return (tuple(x.shape), 0) if fits else None
    if kind is nn.Linear:
        shape = (*x.shape[:-1], weight.shape[0])
        return (shape, math.prod(shape) * weight.shape[1]) if x.dim() and x.shape[-1] == weight.shape[1] else None
    return _convolved(layer, x) if kind in CONVOLUTIONS else None


def _convolved(conv: Any, x: Tensor) -> tuple[tuple[int, ...], int] | None:
    weight: Tensor = conv.weight
    if x.dim() != weight.dim() or x.shape[1] != weight.shape[1] * conv.groups:
        return None
    settings = zip(x.shape[2:], conv.kernel_size, conv.stride, conv.dilation, _paddings(conv), strict=True)
    sizes = tuple((size + both - d * (k - 1) - 1) // s + 1 for size, k, s, d, both in settings)
    if min(sizes) < 1:
        return None
    shape = (x.shape[0], weight.shape[0], *sizes)
    return shape, math.prod(shape) * math.prod(weight.shape[1:])


def _paddings(conv: Any) -> list[int]:
    """The total padding of both sides, for each axis of the map."""
    if conv.padding == "same":
        return [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    return [0] * len(conv.kernel_size) if conv.padding == "valid" else [2 * p for p in conv.padding]


def uncomputed(x: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """An uninitialised tensor of a given shape, in the memory format of ``x``."""
    if x.is_contiguous():
        return x.new_empty(shape)
    if x.dim() == len(shape) == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    return None
