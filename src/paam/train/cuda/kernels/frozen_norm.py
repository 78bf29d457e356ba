"""Fused batch norm with running statistics, residual sum, ReLU and gate: one kernel forward, one backward.

For score phases (frozen network, analog gates), teachers and evaluation. Shapes as in norm.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paam.train.cuda.kernels.norm import Sizes, block, channels_last, relu, tile


@triton.jit
def affine(weight, bias, running_mean, running_var, eps, column, inside):
    """The norm with running statistics as scale and shift."""
    scale = tl.load(weight + column, inside, 0.0) / tl.sqrt(tl.load(running_var + column, inside, 1.0) + eps)
    return scale, tl.load(bias + column, inside, 0.0) - tl.load(running_mean + column, inside, 0.0) * scale


@triton.jit
def _summed(x, other, place, there, scale, shift, has_other: tl.constexpr):
    """bn(x) + other"""
    value = tl.load(x + place, there, 0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    if has_other:
        value += tl.load(other + place, there, 0.0).to(tl.float32)
    return value


@triton.jit
def _forward(
    x, other, gate, weight, bias, running_mean, running_var, y, positions, channels, rows, eps,
    has_other: tl.constexpr, has_gate: tl.constexpr, block_m: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """relu(bn(x) + other) * gate with running statistics."""
    start, stop, column, inside = tile(rows, positions, channels, block_c)
    scale, shift = affine(weight, bias, running_mean, running_var, eps, column, inside)
    for first in range(start, stop, block_m):
        place, there = block(first, stop, channels, column, inside, block_m)
        value = _summed(x, other, place, there, scale, shift, has_other)
        value = relu(value)
        if has_gate:
            value *= tl.load(gate + column, inside, 0.0)[None, :]
        tl.store(y + place, value.to(y.dtype.element_ty), there)


@triton.jit
def _backward(
    x, other, gate, weight, bias, running_mean, running_var, dy, dx, dother, partial, positions, channels, rows, eps,
    has_other: tl.constexpr, has_gate: tl.constexpr, block_m: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Gradients of x and other, and partial sums of the gate's gradient."""
    start, stop, column, inside = tile(rows, positions, channels, block_c)
    scale, shift = affine(weight, bias, running_mean, running_var, eps, column, inside)
    total = tl.zeros([block_c], tl.float32)
    for first in range(start, stop, block_m):
        place, there = block(first, stop, channels, column, inside, block_m)
        value = _summed(x, other, place, there, scale, shift, has_other)
        grad = tl.where(value <= 0, 0.0, tl.load(dy + place, there, 0.0).to(tl.float32))
        if has_gate:
            total += tl.sum(grad * value, 0)
            grad *= tl.load(gate + column, inside, 0.0)[None, :]
        if has_other:
            tl.store(dother + place, grad.to(dother.dtype.element_ty), there)
        tl.store(dx + place, (grad * scale[None, :]).to(dx.dtype.element_ty), there)
    if has_gate:
        tl.store(partial + tl.program_id(0) * channels + column, total, inside)


class FrozenNorm(torch.autograd.Function):
    """With running statistics and a gradient for analog gates, but none for the norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor | None, gate: Tensor | None, *norm: Any) -> Tensor:
        weight, bias, running_mean, running_var, eps = norm
        x, other = channels_last(x), None if other is None else channels_last(other)
        size = Sizes(x)
        y = torch.empty_like(x)
        ctx.flags = {"has_other": other is not None, "has_gate": gate is not None, **size.blocks}
        ctx.size, ctx.eps = size, eps
        affine = (weight, bias, running_mean, running_var)
        shape = (size.positions, size.channels, size.rows)
        _forward[size.grid](x, other, gate, *affine, y, *shape, eps, **ctx.flags)
        ctx.save_for_backward(x, *affine, *(t for t in (other, gate) if t is not None))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, running_mean, running_var, *rest = ctx.saved_tensors
        other = rest.pop(0) if ctx.flags["has_other"] else None
        gate = rest.pop(0) if ctx.flags["has_gate"] else None
        size, dy = ctx.size, channels_last(grads[0])
        dx = torch.empty_like(x)
        dother = None if other is None else torch.empty_like(x)
        partial = None if gate is None else torch.empty(size.programs, size.channels, device=x.device)
        shape = (size.positions, size.channels, size.rows)
        affine = (weight, bias, running_mean, running_var)
        _backward[size.grid](x, other, gate, *affine, dy, dx, dother, partial, *shape, ctx.eps, **ctx.flags)
        return dx, dother, None if partial is None else partial.sum(0), None, None, None, None, None
