"""Fused batch norm, residual sum, ReLU and gate: two kernels forward, two backward, instead of a dozen in eager mode.

Shapes: activations are [M, C], M = N * H * W positions of C channels each, channels last.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
"""Values per tile of a program."""

WARPS = 4

PROGRAMS = 256
"""Maximum programs over the positions of a layer: two per multiprocessor of a large GPU."""


@triton.jit
def tile(rows, positions, channels, block_c: tl.constexpr):
    """This program's part of a layer: first position, end position, channels and their mask."""
    start = tl.program_id(0) * rows
    column = tl.program_id(1) * block_c + tl.arange(0, block_c)
    return start, tl.minimum(start + rows, positions), column, column < channels


@triton.jit
def block(first, stop, channels, column, inside, block_m: tl.constexpr):
    """[block_m, channels]: offsets of the values of some positions, and their mask."""
    row = first + tl.arange(0, block_m)
    return row[:, None] * channels + column[None, :], (row < stop)[:, None] & inside[None, :]


@triton.jit
def relu(value):
    """ReLU that propagates NaN: training must see it in order to stop."""
    return tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _totals(partial, programs, channels, column, inside, block_p: tl.constexpr):
    """Reduce the partial sums of all programs to two sums per channel of this block."""
    one = tl.zeros(column.shape, tl.float32)
    two = tl.zeros(column.shape, tl.float32)
    for first in range(0, programs, block_p):
        row = first + tl.arange(0, block_p)
        there = (row < programs)[:, None] & inside[None, :]
        place = partial + row[:, None] * 2 * channels + column[None, :]
        first_sums, second_sums = tl.load(place, there, 0.0), tl.load(place + channels, there, 0.0)
        one += tl.sum(first_sums, 0)
        two += tl.sum(second_sums, 0)
    return one, two


@triton.jit
def _statistics(x, partial, positions, channels, rows, block_m: tl.constexpr, block_c: tl.constexpr):
    """Sums of x and of its square, shifted by the channel's first value, against cancellation for a large mean."""
    start, stop, column, inside = tile(rows, positions, channels, block_c)
    origin = tl.load(x + column, inside, 0.0).to(tl.float32)
    one = tl.zeros([block_c], tl.float32)
    two = tl.zeros([block_c], tl.float32)
    for first in range(start, stop, block_m):
        place, there = block(first, stop, channels, column, inside, block_m)
        value = tl.load(x + place, there, 0.0).to(tl.float32)
        value = tl.where(there, value - origin[None, :], 0.0)
        one += tl.sum(value, 0)
        two += tl.sum(value * value, 0)
    place = tl.program_id(0) * 2 * channels + column
    tl.store(partial + place, one, inside)
    tl.store(partial + place + channels, two, inside)


@triton.jit
def _forward(
    x, other, gate, weight, bias, y, partial, saved, running_mean, running_var, tracked,
    positions, channels, rows, programs, momentum, eps,
    has_other: tl.constexpr, has_gate: tl.constexpr,
    block_m: tl.constexpr, block_c: tl.constexpr, block_p: tl.constexpr,
):  # fmt: skip
    """relu(bn(x) + other) * gate, with the statistics of this batch; ``saved``: mean and inverse standard deviation."""
    start, stop, column, inside = tile(rows, positions, channels, block_c)
    one, two = _totals(partial, programs, channels, column, inside, block_p)
    away = one / positions
    mean = tl.load(x + column, inside, 0.0).to(tl.float32) + away
    variance = tl.maximum(two / positions - away * away, 0.0)
    inverse = 1 / tl.sqrt(variance + eps)
    scale = tl.load(weight + column, inside, 0.0) * inverse
    shift = tl.load(bias + column, inside, 0.0) - mean * scale
    if tl.program_id(0) == 0:
        tl.store(saved + column, mean, inside)
        tl.store(saved + channels + column, inverse, inside)
        old_mean, old_var = tl.load(running_mean + column, inside, 0.0), tl.load(running_var + column, inside, 0.0)
        unbiased = variance * (positions / tl.maximum(positions - 1, 1))
        tl.store(running_mean + column, old_mean + momentum * (mean - old_mean), inside)
        tl.store(running_var + column, old_var + momentum * (unbiased - old_var), inside)
        if tl.program_id(1) == 0:
            tl.store(tracked, tl.load(tracked) + 1)
    for first in range(start, stop, block_m):
        place, there = block(first, stop, channels, column, inside, block_m)
        value = tl.load(x + place, there, 0.0).to(tl.float32) * scale[None, :] + shift[None, :]
        if has_other:
            value += tl.load(other + place, there, 0.0).to(tl.float32)
        value = relu(value)
        if has_gate:
            value *= tl.load(gate + column, inside, 0.0)[None, :]
        tl.store(y + place, value.to(y.dtype.element_ty), there)


@triton.jit
def _output_gradient(
    x, y, dy, place, there, scale, shift, gate, column, inside, has_other: tl.constexpr, has_gate: tl.constexpr
):
    """x, and the gradient after gate and ReLU. ReLU's mask comes from y, or from x if nothing was added."""
    value = tl.load(x + place, there, 0.0).to(tl.float32)
    grad = tl.load(dy + place, there, 0.0).to(tl.float32)
    passed = tl.load(y + place, there, 0.0).to(tl.float32) if has_other else value * scale[None, :] + shift[None, :]
    grad = tl.where(passed <= 0, 0.0, grad)
    if has_gate:
        grad *= tl.load(gate + column, inside, 0.0)[None, :]
    return value, grad


@triton.jit
def _affine(saved, weight, bias, channels, column, inside):
    """Mean and inverse standard deviation of a batch, and the norm's scale and shift."""
    mean, inverse = tl.load(saved + column, inside, 0.0), tl.load(saved + channels + column, inside, 0.0)
    scale = tl.load(weight + column, inside, 0.0) * inverse
    return mean, inverse, scale, tl.load(bias + column, inside, 0.0) - mean * scale


@triton.jit
def _backward_sums(
    x, y, dy, saved, gate, weight, bias, partial, positions, channels, rows,
    has_other: tl.constexpr, has_gate: tl.constexpr, block_m: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Sums of the norm's output gradient, and of its product with the normalised value."""
    start, stop, column, inside = tile(rows, positions, channels, block_c)
    mean, inverse, scale, shift = _affine(saved, weight, bias, channels, column, inside)
    one = tl.zeros([block_c], tl.float32)
    two = tl.zeros([block_c], tl.float32)
    for first in range(start, stop, block_m):
        place, there = block(first, stop, channels, column, inside, block_m)
        value, grad = _output_gradient(x, y, dy, place, there, scale, shift, gate, column, inside, has_other, has_gate)
        one += tl.sum(grad, 0)
        two += tl.sum(grad * (value - mean[None, :]) * inverse[None, :], 0)
    place = tl.program_id(0) * 2 * channels + column
    tl.store(partial + place, one, inside)
    tl.store(partial + place + channels, two, inside)


@triton.jit
def _backward(
    x, y, dy, saved, gate, weight, bias, partial, dx, dother, dweight, dbias, positions, channels, rows, programs,
    has_other: tl.constexpr, has_gate: tl.constexpr,
    block_m: tl.constexpr, block_c: tl.constexpr, block_p: tl.constexpr,
):  # fmt: skip
    start, stop, column, inside = tile(rows, positions, channels, block_c)
    mean, inverse, scale, shift = _affine(saved, weight, bias, channels, column, inside)
    sum_grad, sum_normal = _totals(partial, programs, channels, column, inside, block_p)
    if tl.program_id(0) == 0:
        tl.store(dweight + column, sum_normal, inside)
        tl.store(dbias + column, sum_grad, inside)
    for first in range(start, stop, block_m):
        place, there = block(first, stop, channels, column, inside, block_m)
        value, grad = _output_gradient(x, y, dy, place, there, scale, shift, gate, column, inside, has_other, has_gate)
        if has_other:
            tl.store(dother + place, grad.to(dother.dtype.element_ty), there)
        normal = (value - mean[None, :]) * inverse[None, :]
        value = scale[None, :] * (grad - (sum_grad[None, :] + normal * sum_normal[None, :]) / positions)
        tl.store(dx + place, value.to(dx.dtype.element_ty), there)


class Sizes:
    """The grid for a layer of [N, C, H, W]."""

    def __init__(self, x: Tensor) -> None:
        self.channels = x.shape[1]
        self.positions = x.numel() // self.channels
        self.block_c = min(triton.next_power_of_2(self.channels), 128)
        self.block_m = max(BLOCK // self.block_c, 16)
        blocks = triton.cdiv(self.positions, self.block_m)
        self.rows = triton.cdiv(blocks, PROGRAMS) * self.block_m
        self.programs = triton.cdiv(self.positions, self.rows)
        self.grid = (self.programs, triton.cdiv(self.channels, self.block_c))
        self.block_p = min(triton.next_power_of_2(self.programs), max(BLOCK // self.block_c, 16))

    @property
    def blocks(self) -> dict[str, int]:
        return {"block_m": self.block_m, "block_c": self.block_c, "num_warps": WARPS}


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


class TrainedNorm(torch.autograd.Function):
    """With batch statistics: x [N, C, H, W], other like x or None, gate [C] of zeros and ones or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor | None, gate: Tensor | None, *norm: Any) -> Tensor:
        weight, bias, running_mean, running_var, tracked, momentum, eps = norm
        x, other = channels_last(x), None if other is None else channels_last(other)
        size = Sizes(x)
        partial = torch.empty(size.programs, 2, size.channels, device=x.device)
        saved = torch.empty(2, size.channels, device=x.device)
        y = torch.empty_like(x)
        shape = (size.positions, size.channels, size.rows)
        _statistics[size.grid](x, partial, *shape, **size.blocks)
        _forward[size.grid](
            x, other, gate, weight, bias, y, partial, saved, running_mean, running_var, tracked,
            *shape, size.programs, momentum, eps,
            has_other=other is not None, has_gate=gate is not None, block_p=size.block_p, **size.blocks,
        )  # fmt: skip
        ctx.save_for_backward(x, None if other is None else y, saved, weight, bias, gate)
        ctx.size, ctx.has_other, ctx.has_gate = size, other is not None, gate is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, y, saved, weight, bias, gate = ctx.saved_tensors
        size = ctx.size
        dy = channels_last(grads[0])
        partial = torch.empty(size.programs, 2, size.channels, device=x.device)
        dx = torch.empty_like(x)
        dother = torch.empty_like(x) if ctx.has_other else None
        dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
        shape = (size.positions, size.channels, size.rows)
        flags = {"has_other": ctx.has_other, "has_gate": ctx.has_gate, **size.blocks}
        _backward_sums[size.grid](x, y, dy, saved, gate, weight, bias, partial, *shape, **flags)
        _backward[size.grid](
            x, y, dy, saved, gate, weight, bias, partial, dx, dother, dweight, dbias, *shape, size.programs,
            block_p=size.block_p, **flags,
        )  # fmt: skip
        return dx, dother, None, dweight, dbias, None, None, None, None, None
