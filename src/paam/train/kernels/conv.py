"""3 x 3 convolutions of few channels in Triton: one kernel forward, one for the input's gradient, two for the weight's.

Libraries tune for wide layers. With 16 channels, or with 11 of them after pruning, these kernels are faster; where the
library is (benchmarks/kernels.py), it computes the output and the input's gradient. Weights' gradients are always
computed here, and beside the rest of the backward pass: nothing waits for them but the optimiser.

Shapes: activations are [M, C] with M = N * H * W positions, channels last; weights are [F, 9, C], taps in row order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

FORWARD = {16: (128, 2), 32: (256, 8), 64: (128, 8)}
"""Widest side, padded -> positions per program, warps. Wider layers are left to the library."""

WEIGHT = {16: (128, 4, 3, 176), 32: (128, 4, 3, 88), 64: (32, 4, 3, 44)}
"""Widest side, padded -> positions at a time, warps, taps per program (1 or 3), programs along the positions."""

SIZES = ["positions", "height", "width", "channels", "filters", "rows", "programs", "size"]
"""Numbers that a kernel is not compiled anew for: pruned networks have dozens of them."""


@triton.jit
def _known(number, whole: tl.constexpr):
    """A number of channels; if it is known to be in steps of 8, rows are read in whole pieces."""
    return tl.multiple_of(number, 8) if whole else number


@triton.jit
def _shifted(start, lane, stop, height, width, tap):
    """Positions of a block moved by a tap (0 to 8, row by row), and which of them lie in the image."""
    place = start + lane
    down, across = tap // 3 - 1, tap % 3 - 1
    row, column = (place // width) % height + down, place % width + across
    there = (place < stop) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    return place + down * width + across, there


@triton.jit(do_not_specialize=SIZES)
def _convolve(
    x, weight, y, positions, height, width, channels, filters,
    whole: tl.constexpr, transposed: tl.constexpr, block_m: tl.constexpr, block_c: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    """y[m, f] = sum over taps and channels of x[m + tap, c] weight[f, tap, c].

    ``transposed``: the gradient of the input. x is the output's gradient then, its channels are the weight's filters,
    and taps are mirrored.
    """
    channels, filters = _known(channels, whole), _known(filters, whole)
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


@triton.jit(do_not_specialize=SIZES)
def _weight_partial(
    x, dy, partial, positions, height, width, channels, filters, rows,
    whole: tl.constexpr, taps: tl.constexpr, block_m: tl.constexpr, block_c: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    """Sums over this program's positions of dy[m, f] x[m + tap, c], for one tap, or for a row of three."""
    channels, filters = _known(channels, whole), _known(filters, whole)
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


@triton.jit(do_not_specialize=SIZES)
def _sum_partial(parts, total, programs, size, block_p: tl.constexpr, block: tl.constexpr):
    place = tl.program_id(0) * block + tl.arange(0, block)
    result = tl.zeros([block], tl.float32)
    for first in range(0, programs, block_p):
        row = first + tl.arange(0, block_p)
        mask = (row < programs)[:, None] & (place < size)[None, :]
        result += tl.sum(tl.load(parts + row[:, None] * size + place[None, :], mask, 0.0), 0)
    tl.store(total + place, result.to(total.dtype.element_ty), place < size)


def _padded(channels: int) -> int:
    return max(16, triton.next_power_of_2(channels))


def _whole(*widths: int) -> bool:
    return all(width % 8 == 0 for width in widths)


def _ours(weight: Tensor) -> bool:
    """Whether these kernels are faster than the library's."""
    filters, channels = weight.shape[:2]
    return max(filters, channels) <= 16 or not _whole(filters, channels)


def convolve(x: Tensor, weight: Tensor, *, transposed: bool) -> Tensor:
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
        whole=_whole(channels, filters), transposed=transposed,
        block_m=block_m, block_c=block_c, block_f=block_f, num_warps=warps,
    )  # fmt: skip
    return y


def weight_gradient(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    number, channels, height, width = x.shape
    filters = dy.shape[1]
    positions = number * height * width
    block_c, block_f = _padded(channels), _padded(filters)
    block_m, warps, taps, wanted = WEIGHT[max(block_c, block_f)]
    rows = triton.cdiv(triton.cdiv(positions, wanted), block_m) * block_m
    programs = triton.cdiv(positions, rows)
    parts = torch.empty(programs, filters * 9 * channels, device=x.device)
    _weight_partial[(programs, 9 // taps)](
        x, dy, parts, positions, height, width, channels, filters, rows,
        whole=_whole(channels, filters), taps=taps, block_m=block_m, block_c=block_c, block_f=block_f, num_warps=warps,
    )  # fmt: skip
    total = torch.empty_like(weight)
    size = weight.numel()
    _sum_partial[(triton.cdiv(size, 128),)](parts, total, programs, size, block_p=32, block=128, num_warps=4)
    return total


@functools.cache
def _second_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _beside(*read: Tensor) -> Iterator[None]:
    """Work of a backward pass on a second stream, which is waited for at the end of the pass. ``read``: its inputs."""
    first, second = torch.cuda.current_stream(), _second_stream(read[0].device)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        yield
    for tensor in read:
        tensor.record_stream(second)
    torch.autograd.Variable._execution_engine.queue_callback(functools.partial(first.wait_stream, second))


class Convolution(torch.autograd.Function):
    """x [N, C, H, W] and weight [F, C, 3, 3], both channels last and of one dtype.

    ``beside``: the gradient of the weight is ready at the end of the backward pass, and not before.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, beside: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.beside = beside
        return convolve(x, weight, transposed=False) if _ours(weight) else F.conv2d(x, weight, padding=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grads[0].contiguous(memory_format=torch.channels_last)
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            with _beside(x, dy) if ctx.beside else nullcontext():
                dweight = weight_gradient(x, dy, weight)
        if ctx.needs_input_grad[0]:
            dx = convolve(dy, weight, transposed=True) if _ours(weight) else _library_input_gradient(dy, x, weight)
        return dx, dweight, None


def _library_input_gradient(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    ones, wanted = [1, 1], [True, False, False]
    found = torch.ops.aten.convolution_backward(dy, x, weight, [0], ones, ones, ones, False, [0, 0], 1, wanted)
    gradient: Tensor = found[0]
    return gradient


class FastConv(nn.Module):
    """A convolution that it shares with the network, in bfloat16. ``alone``: nothing else reads its weight."""

    def __init__(self, conv: nn.Conv2d, *, alone: bool) -> None:
        super().__init__()
        self.conv = conv
        self.alone = alone

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
        weight = self.conv.weight.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
        # Only a gradient that goes straight to the optimiser may be late: not one that is cast or added up on its way.
        beside = self.alone and weight is self.conv.weight and weight.is_cuda
        result: Tensor = Convolution.apply(x, weight, beside)  # type: ignore[no-untyped-call]
        return result


def is_fast(module: nn.Conv2d) -> bool:
    """Whether these kernels know a layer."""
    return (
        type(module) is nn.Conv2d
        and (module.kernel_size, module.stride, module.padding, module.dilation) == ((3, 3), (1, 1), (1, 1), (1, 1))
        and (module.groups, module.bias, module.padding_mode) == (1, None, "zeros")
        and _padded(max(module.in_channels, module.out_channels)) in FORWARD
    )
