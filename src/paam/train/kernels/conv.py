"""3 x 3 convolutions of few channels in Triton, and those with a frozen norm, sum, ReLU and gate behind them.

Libraries tune for wide layers, and so these are for few channels (benchmarks/kernels.h200.txt). Weights' gradients are
computed beside the rest of the backward pass: nothing waits for them but the optimiser.

Shapes as in rows.py; weights are [F, 9, C], taps in row order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from paam.train.beside import beside, join
from paam.train.kernels.counting import check_countable
from paam.train.kernels.frozen_norm import affine
from paam.train.kernels.norm import channels_last, relu
from paam.train.kernels.rows import SIZES, SPAN, padded, place_row, read_row, unit
from paam.train.kernels.weight_gradient import weight_gradient

FORWARD = {16: (2, 64, 4, 16, 2), 32: (2, 64, 4, 4, 2), 64: (2, 64, 4, 1, 2)}
"""Widest side, padded -> positions that are computed together, groups of them, warps, rows, stages of reading.

Wider layers are left to the library.
"""

LARGEST = 32 * 32
"""Positions of an image, at most: larger ones are left to the library."""


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


@triton.jit
def _write_row(
    y, total, scale, shift, kept, other, m, groups, filters, row, first, stop,
    height: tl.constexpr, width: tl.constexpr, has_norm: tl.constexpr, has_other: tl.constexpr,
    group: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    """A row of sums; or of relu(scale * sum + shift + other) * kept, the norm, sum, ReLU and gate behind them."""
    where, inside = place_row(m, groups, filters, row, first, stop, height, width, group, block_f)
    if has_norm:
        total = total * scale[None, :] + shift[None, :]
        if has_other:
            total += tl.load(other + where, inside, 0.0).to(tl.float32)
        total = relu(total) * kept[None, :]
    tl.store(y + where, total.to(y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=SIZES)
def _convolve(
    x, weight, y, gain, bias, mean, var, other, gate, eps, groups, channels, filters,
    height: tl.constexpr, width: tl.constexpr, unit_c: tl.constexpr, unit_f: tl.constexpr,
    transposed: tl.constexpr, has_norm: tl.constexpr, has_other: tl.constexpr, has_gate: tl.constexpr,
    rows: tl.constexpr, stages: tl.constexpr,
    group: tl.constexpr, block_m: tl.constexpr, block_c: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    """y[m, f] = sum over taps and channels of x[m + tap, c] weight[f, tap, c], for columns of groups of neighbours m.

    A program goes down ``rows`` rows. Each row is read once, and added to the three rows of the output that it touches;
    three rows at a time, so that no sum changes its registers. ``transposed``: the gradient of the input. x is the
    output's gradient then, its channels are the weight's filters, and taps are mirrored.
    """
    channels, filters = channels * unit_c, filters * unit_f
    m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    first = tl.program_id(1) * rows
    stop = first + rows
    scale, shift, kept = 1.0, 0.0, 1.0
    if has_norm:
        f = tl.arange(0, group * block_f) % block_f
        scale, shift = affine(gain, bias, mean, var, eps, f, f < filters)
        kept = tl.load(gate + f, f < filters, 0.0) if has_gate else tl.full([group * block_f], 1.0, tl.float32)
    one = tl.zeros([block_m, group * block_f], tl.float32)
    if rows == 1:
        for down in tl.range(3, num_stages=stages):
            values = read_row(x, m, groups, channels, first + down - 1, height, width, group, block_c)
            one = tl.dot(values, _taps(weight, down, channels, filters, transposed, group, block_c, block_f), one)
        _write_row(
            y, one, scale, shift, kept, other, m, groups, filters, first, first, stop,
            height, width, has_norm, has_other, group, block_f,
        )  # fmt: skip
    else:
        top = _taps(weight, 0, channels, filters, transposed, group, block_c, block_f)
        middle = _taps(weight, 1, channels, filters, transposed, group, block_c, block_f)
        bottom = _taps(weight, 2, channels, filters, transposed, group, block_c, block_f)
        two = tl.zeros([block_m, group * block_f], tl.float32)
        for row in tl.range(first - 1, stop + 1, 3, num_stages=stages):  # one: of the row above, two: of this one
            values = read_row(x, m, groups, channels, row, height, width, group, block_c)
            one = tl.dot(values, bottom, one)
            two = tl.dot(values, middle, two)
            three = tl.dot(values, top)
            _write_row(
                y, one, scale, shift, kept, other, m, groups, filters, row - 1, first, stop,
                height, width, has_norm, has_other, group, block_f,
            )  # fmt: skip
            values = read_row(x, m, groups, channels, row + 1, height, width, group, block_c)
            two = tl.dot(values, bottom, two)
            three = tl.dot(values, middle, three)
            one = tl.dot(values, top)
            _write_row(
                y, two, scale, shift, kept, other, m, groups, filters, row, first, stop,
                height, width, has_norm, has_other, group, block_f,
            )  # fmt: skip
            values = read_row(x, m, groups, channels, row + 2, height, width, group, block_c)
            three = tl.dot(values, bottom, three)
            one = tl.dot(values, middle, one)
            two = tl.dot(values, top)
            _write_row(
                y, three, scale, shift, kept, other, m, groups, filters, row + 1, first, stop,
                height, width, has_norm, has_other, group, block_f,
            )  # fmt: skip


class Behind(NamedTuple):
    """What is done to a convolution's output: a frozen norm [F], then the sum, ReLU and gate [F]."""

    gain: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor
    eps: float
    other: Tensor | None
    gate: Tensor | None


def convolve(x: Tensor, weight: Tensor, *, transposed: bool = False, behind: Behind | None = None) -> Tensor:
    """The convolution, with what is behind it; or the gradient of its input."""
    number, channels, height, width = x.shape
    filters = weight.shape[1] if transposed else weight.shape[0]
    y = x.new_empty((number, height, width, filters)).permute(0, 3, 1, 2)
    block_c, block_f = padded(channels), padded(filters)
    group, block_m, warps, rows, stages = FORWARD[max(block_c, block_f)]
    groups = number * triton.cdiv(width, group)
    norm = (None,) * 4 if behind is None else behind[:4]
    eps, other, gate = (1.0, None, None) if behind is None else behind[4:]
    _convolve[(triton.cdiv(groups, block_m), triton.cdiv(height, rows))](
        x, weight, y, *norm, other, gate, eps, groups, channels // unit(channels), filters // unit(filters),
        height=height, width=width, unit_c=unit(channels), unit_f=unit(filters), transposed=transposed,
        has_norm=behind is not None, has_other=other is not None, has_gate=gate is not None, rows=rows, stages=stages,
        group=group, block_m=block_m, block_c=block_c, block_f=block_f, num_warps=warps,
    )  # fmt: skip
    return y


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
        return convolve(x, weight)

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
        if not self.knows(x):
            plain: Tensor = self.conv(x)
            return plain
        x, weight = self._read(x)
        # Only a gradient that goes straight to the optimiser may be late: not one that is cast or added up on its way.
        late = self.alone and weight is self.conv.weight and weight.is_cuda
        result: Tensor = Convolution.apply(x, weight, late)  # type: ignore[no-untyped-call]
        return result

    def with_norm(self, x: Tensor, behind: Behind) -> Tensor:
        """Without a gradient: the convolution and what is behind it at once."""
        other = None if behind.other is None else channels_last(behind.other)
        return convolve(*self._read(x), behind=behind._replace(other=other))

    def knows(self, x: Tensor) -> bool:
        return x.shape[2] * x.shape[3] <= LARGEST

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Input and weight as the kernels read them."""
        check_countable(x.numel() // x.shape[1] * max(self.conv.weight.shape[:2]))
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        return channels_last(x.to(dtype)), channels_last(self.conv.weight.to(dtype))


def is_fast(module: nn.Conv2d) -> bool:
    """Whether these kernels know a layer."""
    return (
        type(module) is nn.Conv2d
        and (module.kernel_size, module.stride, module.padding, module.dilation) == ((3, 3), (1, 1), (1, 1), (1, 1))
        and (module.groups, module.bias, module.padding_mode) == (1, None, "zeros")
        and padded(max(module.in_channels, module.out_channels)) in FORWARD
    )
