"""3 x 3 convolutions of few channels in Triton: one kernel forward, one for the input's gradient, two for the weight's.

Libraries tune for wide layers. With 16 to 64 channels, or with 11 of them after pruning, a convolution is limited by
how often its input is read; here it is read once, and any number of channels is padded in registers.

Shapes: activations are [M, C] with M = N * H * W positions, channels last; weights are [F, 9, C], taps in row order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

FORWARD = {16: (256, 4), 32: (128, 4), 64: (128, 4)}
"""Widest side, padded -> positions per program, warps. Wider layers are left to the library."""

WEIGHT = {16: (128, 4, 3, 176), 32: (64, 4, 3, 176), 64: (64, 4, 3, 88)}
"""Widest side, padded -> positions at a time, warps, taps per program (1 or 3), programs along the positions."""


@triton.jit
def _shifted(start, lane, stop, height, width, tap):
    """Positions of a block moved by a tap (0 to 8, row by row), and which of them lie in the image."""
    place = start + lane
    down, across = tap // 3 - 1, tap % 3 - 1
    row, column = (place // width) % height + down, place % width + across
    there = (place < stop) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    return place + down * width + across, there


@triton.jit
def _convolve(
    x, weight, y, positions, height, width, channels, filters,
    transposed: tl.constexpr, block_m: tl.constexpr, block_c: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    """y[m, f] = sum over taps and channels of x[m + tap, c] weight[f, tap, c].

    ``transposed``: the gradient of the input. x is the output's gradient then, its channels are the weight's filters,
    and taps are mirrored.
    """
    start = tl.program_id(0) * block_m
    lane, c, f = tl.arange(0, block_m), tl.arange(0, block_c), tl.arange(0, block_f)
    total = tl.zeros([block_m, block_f], tl.float32)
    for tap in tl.static_range(9):
        place, there = _shifted(start, lane, positions, height, width, tap)
        values = tl.load(x + place[:, None] * channels + c[None, :], there[:, None] & (c < channels)[None, :], 0.0)
        if transposed:
            where = c[:, None] * (9 * filters) + (8 - tap) * filters + f[None, :]
        else:
            where = f[None, :] * (9 * channels) + tap * channels + c[:, None]
        weights = tl.load(weight + where, (c < channels)[:, None] & (f < filters)[None, :], 0.0)
        total = tl.dot(values, weights, total)
    place = start + lane
    inside = (place < positions)[:, None] & (f < filters)[None, :]
    tl.store(y + place[:, None] * filters + f[None, :], total.to(y.dtype.element_ty), inside)


@triton.jit
def _weight_partial(
    x, dy, partial, positions, height, width, channels, filters, rows,
    taps: tl.constexpr, block_m: tl.constexpr, block_c: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    """Sums over this program's positions of dy[m, f] x[m + tap, c], for one tap, or for a row of three."""
    start = tl.program_id(0) * rows
    stop = tl.minimum(start + rows, positions)
    first_tap = tl.program_id(1) * taps
    lane, c, f = tl.arange(0, block_m), tl.arange(0, block_c), tl.arange(0, block_f)
    one = tl.zeros([block_f, block_c], tl.float32)
    two = tl.zeros([block_f, block_c], tl.float32)
    three = tl.zeros([block_f, block_c], tl.float32)
    for first in range(start, stop, block_m):
        place = first + lane
        mask = (place < stop)[:, None] & (f < filters)[None, :]
        grads = tl.trans(tl.load(dy + place[:, None] * filters + f[None, :], mask, 0.0))
        moved, there = _shifted(first, lane, stop, height, width, first_tap)
        values = tl.load(x + moved[:, None] * channels + c[None, :], there[:, None] & (c < channels)[None, :], 0.0)
        one = tl.dot(grads, values, one)
        if taps == 3:
            moved, there = _shifted(first, lane, stop, height, width, first_tap + 1)
            values = tl.load(x + moved[:, None] * channels + c[None, :], there[:, None] & (c < channels)[None, :], 0.0)
            two = tl.dot(grads, values, two)
            moved, there = _shifted(first, lane, stop, height, width, first_tap + 2)
            values = tl.load(x + moved[:, None] * channels + c[None, :], there[:, None] & (c < channels)[None, :], 0.0)
            three = tl.dot(grads, values, three)
    inside = (f < filters)[:, None] & (c < channels)[None, :]
    where = tl.program_id(0) * (9 * filters * channels) + f[:, None] * (9 * channels) + c[None, :]
    tl.store(partial + where + first_tap * channels, one, inside)
    if taps == 3:
        tl.store(partial + where + (first_tap + 1) * channels, two, inside)
        tl.store(partial + where + (first_tap + 2) * channels, three, inside)


@triton.jit
def _sum_partial(partial, total, programs, size, block_p: tl.constexpr, block: tl.constexpr):
    place = tl.program_id(0) * block + tl.arange(0, block)
    result = tl.zeros([block], tl.float32)
    for first in range(0, programs, block_p):
        row = first + tl.arange(0, block_p)
        mask = (row < programs)[:, None] & (place < size)[None, :]
        result += tl.sum(tl.load(partial + row[:, None] * size + place[None, :], mask, 0.0), 0)
    tl.store(total + place, result.to(total.dtype.element_ty), place < size)


def _padded(channels: int) -> int:
    return max(16, triton.next_power_of_2(channels))


def _run(x: Tensor, weight: Tensor, *, transposed: bool) -> Tensor:
    """The convolution, or the gradient of its input."""
    number, channels, height, width = x.shape
    filters = weight.shape[1] if transposed else weight.shape[0]
    y = torch.empty((number, filters, height, width), dtype=x.dtype, device=x.device)
    y = y.to(memory_format=torch.channels_last)
    positions = number * height * width
    block_c, block_f = _padded(channels), _padded(filters)
    block_m, warps = FORWARD[max(block_c, block_f)]
    _convolve[(triton.cdiv(positions, block_m),)](
        x, weight, y, positions, height, width, channels, filters,
        transposed=transposed, block_m=block_m, block_c=block_c, block_f=block_f, num_warps=warps,
    )  # fmt: skip
    return y


def _weight_gradient(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    number, channels, height, width = x.shape
    filters = dy.shape[1]
    positions = number * height * width
    block_c, block_f = _padded(channels), _padded(filters)
    block_m, warps, taps, wanted = WEIGHT[max(block_c, block_f)]
    rows = triton.cdiv(triton.cdiv(positions, wanted), block_m) * block_m
    programs = triton.cdiv(positions, rows)
    partial = torch.empty(programs, filters * 9 * channels, device=x.device)
    _weight_partial[(programs, 9 // taps)](
        x, dy, partial, positions, height, width, channels, filters, rows,
        taps=taps, block_m=block_m, block_c=block_c, block_f=block_f, num_warps=warps,
    )  # fmt: skip
    total = torch.empty_like(weight)
    size = weight.numel()
    _sum_partial[(triton.cdiv(size, 128),)](partial, total, programs, size, block_p=32, block=128, num_warps=4)
    return total


class _Convolution(torch.autograd.Function):
    """x [N, C, H, W] and weight [F, C, 3, 3], both channels last and of one dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        weight = weight.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        return _run(x, weight, transposed=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grads[0].contiguous(memory_format=torch.channels_last)
        dx = _run(dy, weight, transposed=True) if ctx.needs_input_grad[0] else None
        dweight = _weight_gradient(x, dy, weight) if ctx.needs_input_grad[1] else None
        return dx, dweight


class FastConv(nn.Module):
    """A convolution that it shares with the network, in bfloat16."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        pair = x.to(torch.bfloat16), self.conv.weight.to(torch.bfloat16)
        result: Tensor = _Convolution.apply(*pair)  # type: ignore[no-untyped-call]
        return result


def is_fast(module: nn.Module) -> bool:
    """Whether these kernels know a layer."""
    return (
        type(module) is nn.Conv2d
        and (module.kernel_size, module.stride, module.padding, module.dilation) == ((3, 3), (1, 1), (1, 1), (1, 1))
        and (module.groups, module.bias, module.padding_mode) == (1, None, "zeros")
        and _padded(max(module.in_channels, module.out_channels)) in FORWARD
    )
