"""3 x 3 convolutions of few channels in Triton: one kernel forward, one for the input's gradient, two for the weight's.

Libraries tune for wide layers. At 16 channels these kernels are faster, at 32 and 64 about as fast
(benchmarks/kernels.h200.txt). Weights' gradients are computed beside the rest of the backward pass: nothing waits for
them but the optimiser.

Shapes: activations are [M, C] with M = N * H * W positions, channels last; weights are [F, 9, C], taps in row order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from paam.train.beside import beside, join
from paam.train.kernels.counting import check_countable

FORWARD = {16: (2, 128, 8, 2), 32: (2, 128, 4, 2), 64: (2, 64, 4, 2)}
"""Widest side, padded -> positions that are computed together, groups of them per program, warps, stages of reading.

Wider layers are left to the library.
"""

WEIGHT = {16: (2, 64, 4, 3, 132), 32: (2, 64, 4, 1, 44), 64: (1, 32, 8, 1, 44)}
"""Widest side, padded -> positions together, groups at a time, warps, rows of taps per program (1 or 3), programs."""

LARGEST = 32 * 32
"""Positions of an image, at most: larger ones are left to the library.

Measured are 16 channels at 32 x 32, 32 at 16 x 16 and 64 at 8 x 8.
"""

SPAN: tl.constexpr = tl.constexpr(4)
"""Positions of a row that are read together. A group of one or two neighbours reads that much in each of three rows."""

SIZES = ["groups", "channels", "filters", "share", "programs", "size"]
"""Numbers that a kernel is not compiled anew for: pruned networks have dozens of them.

Channels and filters are given in units of 8 where that can be: so their rows are known to be readable in whole pieces.
"""


@triton.jit
def _places(m, height: tl.constexpr, width: tl.constexpr, group: tl.constexpr):
    """Of groups: the line (counted through all images), its row in the image, and the column where the group begins."""
    across = (width + group - 1) // group
    line = m // across
    return line, line % height, (m % across) * group


@triton.jit
def _neighbours(
    x, m, groups, channels, down, height: tl.constexpr, width: tl.constexpr, group: tl.constexpr, block_c: tl.constexpr
):
    """[groups, SPAN * block_c]: what a group reads in the row ``down`` - 1 below its own; 0 outside of the image."""
    line, row, column = _places(m, height, width, group)
    k = tl.arange(0, SPAN * block_c)
    j, c = k // block_c, k % block_c
    there = (m < groups) & (row + down >= 1) & (row + down <= height)
    place = (column - 1)[:, None] + j[None, :]
    inside = there[:, None] & (place >= 0) & (place < width) & ((j < group + 2) & (c < channels))[None, :]
    start = ((line + down - 1) * width + column - 1) * channels
    return tl.load(x + start[:, None] + (j * channels + c)[None, :], inside, 0.0)


@triton.jit
def _taps(
    weight, down, channels, filters,
    transposed: tl.constexpr, group: tl.constexpr, block_c: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    """[SPAN * block_c, group * block_f]: the row ``down`` of taps, for every member of a group at its place."""
    k, n = tl.arange(0, SPAN * block_c), tl.arange(0, group * block_f)
    j, c, g, f = k // block_c, k % block_c, n // block_f, n % block_f
    if transposed:
        tap = j[:, None] - g[None, :]
        mask = (tap >= 0) & (tap < 3) & (c < channels)[:, None] & (f < filters)[None, :]
        where = c[:, None] * (9 * filters) + (8 - down * 3 - tap) * filters + f[None, :]
        result = tl.load(weight + where, mask, 0.0)
    else:
        tap = j[None, :] - g[:, None]
        mask = (tap >= 0) & (tap < 3) & (c < channels)[None, :] & (f < filters)[:, None]
        where = f[:, None] * (9 * channels) + (down * 3 + tap) * channels + c[None, :]
        result = tl.trans(tl.load(weight + where, mask, 0.0))
    return result


@triton.jit(do_not_specialize=SIZES)
def _convolve(
    x, weight, y, groups, channels, filters, height: tl.constexpr, width: tl.constexpr,
    unit_c: tl.constexpr, unit_f: tl.constexpr, transposed: tl.constexpr, stages: tl.constexpr,
    group: tl.constexpr, block_m: tl.constexpr, block_c: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    """y[m, f] = sum over taps and channels of x[m + tap, c] weight[f, tap, c], for groups of neighbours m.

    ``transposed``: the gradient of the input. x is the output's gradient then, its channels are the weight's filters,
    and taps are mirrored.
    """
    channels, filters = channels * unit_c, filters * unit_f
    m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    total = tl.zeros([block_m, group * block_f], tl.float32)
    for down in tl.range(3, num_stages=stages):  # the next row is asked for while one is multiplied
        values = _neighbours(x, m, groups, channels, down, height, width, group, block_c)
        weights = _taps(weight, down, channels, filters, transposed, group, block_c, block_f)
        total = tl.dot(values, weights, total)
    line, _, column = _places(m, height, width, group)
    n = tl.arange(0, group * block_f)
    g, f = n // block_f, n % block_f
    inside = (m < groups)[:, None] & (column[:, None] + g[None, :] < width) & (f < filters)[None, :]
    where = ((line * width + column) * filters)[:, None] + (g * filters + f)[None, :]
    tl.store(y + where, total.to(y.dtype.element_ty), inside)


@triton.jit
def _store_taps(
    parts, total, down, channels, filters, group: tl.constexpr, block_c: tl.constexpr, block_f: tl.constexpr
):
    """One row of taps out of products of all that was read together: parts [programs, group, F, 9, C]."""
    k, n = tl.arange(0, SPAN * block_c), tl.arange(0, group * block_f)
    j, c, g, f = k // block_c, k % block_c, n // block_f, n % block_f
    tap = j[:, None] - g[None, :]
    mask = (tap >= 0) & (tap < 3) & (c < channels)[:, None] & (f < filters)[None, :]
    part = (tl.program_id(0) * group + g) * filters + f
    tl.store(parts + (part * 9 + down * 3)[None, :] * channels + tap * channels + c[:, None], total, mask)


@triton.jit(do_not_specialize=SIZES)
def _weight_partial(
    x, dy, parts, groups, channels, filters, share,
    height: tl.constexpr, width: tl.constexpr, unit_c: tl.constexpr, unit_f: tl.constexpr, downs: tl.constexpr,
    group: tl.constexpr, block_m: tl.constexpr, block_c: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    """Sums over this program's ``share`` of groups of x[m + tap, c] dy[m, f], for one row of taps, or for all three."""
    channels, filters = channels * unit_c, filters * unit_f
    start = tl.program_id(0) * share
    stop = tl.minimum(start + share, groups)
    first = tl.program_id(1)
    n = tl.arange(0, group * block_f)
    g, f = n // block_f, n % block_f
    one = tl.zeros([SPAN * block_c, group * block_f], tl.float32)
    if downs == 3:
        two = tl.zeros([SPAN * block_c, group * block_f], tl.float32)
        three = tl.zeros([SPAN * block_c, group * block_f], tl.float32)
    for begin in range(start, stop, block_m):
        m = begin + tl.arange(0, block_m)
        line, _, column = _places(m, height, width, group)
        mask = (m < stop)[:, None] & (column[:, None] + g[None, :] < width) & (f < filters)[None, :]
        where = ((line * width + column) * filters)[:, None] + (g * filters + f)[None, :]
        grads = tl.load(dy + where, mask, 0.0)
        values = _neighbours(x, m, stop, channels, first, height, width, group, block_c)
        one = tl.dot(tl.trans(values), grads, one)
        if downs == 3:
            values = _neighbours(x, m, stop, channels, 1, height, width, group, block_c)
            two = tl.dot(tl.trans(values), grads, two)
            values = _neighbours(x, m, stop, channels, 2, height, width, group, block_c)
            three = tl.dot(tl.trans(values), grads, three)
    _store_taps(parts, one, first, channels, filters, group, block_c, block_f)
    if downs == 3:
        _store_taps(parts, two, 1, channels, filters, group, block_c, block_f)
        _store_taps(parts, three, 2, channels, filters, group, block_c, block_f)


@triton.jit(do_not_specialize=SIZES)
def _sum_parts(parts, total, programs, size, block_p: tl.constexpr, block: tl.constexpr):
    place = tl.program_id(0) * block + tl.arange(0, block)
    result = tl.zeros([block], tl.float32)
    for first in range(0, programs, block_p):
        row = first + tl.arange(0, block_p)
        mask = (row < programs)[:, None] & (place < size)[None, :]
        result += tl.sum(tl.load(parts + row[:, None] * size + place[None, :], mask, 0.0), 0)
    tl.store(total + place, result.to(total.dtype.element_ty), place < size)


def _padded(channels: int) -> int:
    return max(16, triton.next_power_of_2(channels))


def _unit(width: int) -> int:
    return 1 if width % 8 else 8


def _groups(x: Tensor, group: int) -> int:
    number, _, height, width = x.shape
    return number * height * triton.cdiv(width, group)


def convolve(x: Tensor, weight: Tensor, *, transposed: bool) -> Tensor:
    """The convolution, or the gradient of its input."""
    number, channels, height, width = x.shape
    filters = weight.shape[1] if transposed else weight.shape[0]
    y = x.new_empty((number, height, width, filters)).permute(0, 3, 1, 2)
    block_c, block_f = _padded(channels), _padded(filters)
    group, block_m, warps, stages = FORWARD[max(block_c, block_f)]
    groups = _groups(x, group)
    _convolve[(triton.cdiv(groups, block_m),)](
        x, weight, y, groups, channels // _unit(channels), filters // _unit(filters), height=height, width=width,
        unit_c=_unit(channels), unit_f=_unit(filters), transposed=transposed, stages=stages,
        group=group, block_m=block_m, block_c=block_c, block_f=block_f, num_warps=warps,
    )  # fmt: skip
    return y


def weight_gradient(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    _, channels, height, width = x.shape
    filters = dy.shape[1]
    block_c, block_f = _padded(channels), _padded(filters)
    group, block_m, warps, downs, wanted = WEIGHT[max(block_c, block_f)]
    groups = _groups(x, group)
    share = triton.cdiv(triton.cdiv(groups, wanted), block_m) * block_m
    programs = triton.cdiv(groups, share)
    parts = torch.empty(programs * group, weight.numel(), device=x.device)
    _weight_partial[(programs, 3 // downs)](
        x, dy, parts, groups, channels // _unit(channels), filters // _unit(filters), share, height=height, width=width,
        unit_c=_unit(channels), unit_f=_unit(filters), downs=downs,
        group=group, block_m=block_m, block_c=block_c, block_f=block_f, num_warps=warps,
    )  # fmt: skip
    total = torch.empty_like(weight)
    blocks = triton.cdiv(weight.numel(), 32)
    _sum_parts[(blocks,)](parts, total, len(parts), weight.numel(), block_p=128, block=32, num_warps=4)
    return total


@contextmanager
def _beside_the_pass(*read: Tensor) -> Iterator[None]:
    """Work beside a backward pass, which is waited for at its end. ``read``: its inputs."""
    first = torch.cuda.current_stream()
    with beside(read[0].device):
        yield
    # Held until then, so that autograd neither frees them nor adds another gradient into them.
    torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_join, first, read))


def _join(first: Any, held: tuple[Tensor, ...]) -> None:
    with torch.cuda.stream(first):
        join(held[0].device)


class Convolution(torch.autograd.Function):
    """x [N, C, H, W] and weight [F, C, 3, 3], both channels last and of one dtype.

    ``late``: the gradient of the weight is ready at the end of the backward pass, and not before.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, late: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.late = late
        return convolve(x, weight, transposed=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grads[0].contiguous(memory_format=torch.channels_last)
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            with _beside_the_pass(x, dy) if ctx.late else nullcontext():
                dweight = weight_gradient(x, dy, weight)
        if ctx.needs_input_grad[0]:
            dx = convolve(dy, weight, transposed=True)
        return dx, dweight, None


class FastConv(nn.Module):
    """A convolution that it shares with the network. ``alone``: nothing else reads its weight."""

    def __init__(self, conv: nn.Conv2d, *, alone: bool) -> None:
        super().__init__()
        self.conv = conv
        self.alone = alone

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2] * x.shape[3] > LARGEST:
            plain: Tensor = self.conv(x)
            return plain
        check_countable(x.numel() // x.shape[1] * max(self.conv.weight.shape[:2]))
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        x = x.to(dtype).contiguous(memory_format=torch.channels_last)
        weight = self.conv.weight.to(dtype).contiguous(memory_format=torch.channels_last)
        # Only a gradient that goes straight to the optimiser may be late: not one that is cast or added up on its way.
        late = self.alone and weight is self.conv.weight and weight.is_cuda
        result: Tensor = Convolution.apply(x, weight, late)  # type: ignore[no-untyped-call]
        return result


def is_fast(module: nn.Conv2d) -> bool:
    """Whether these kernels know a layer."""
    return (
        type(module) is nn.Conv2d
        and (module.kernel_size, module.stride, module.padding, module.dilation) == ((3, 3), (1, 1), (1, 1), (1, 1))
        and (module.groups, module.bias, module.padding_mode) == (1, None, "zeros")
        and _padded(max(module.in_channels, module.out_channels)) in FORWARD
    )
