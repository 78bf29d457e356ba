"""3 x 3 convolutions of few channels in Triton, with an optional epilogue of frozen norm, sum, ReLU and gate.

cuDNN is tuned for wide layers; these are for few channels (benchmarks/kernels.h200.txt).

Shapes as in rows.py; weights are [F, 9, C], taps in row order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paam.train.cuda.kernels.frozen_norm import affine
from paam.train.cuda.kernels.norm import relu
from paam.train.cuda.kernels.rows import SIZES, SPAN, padded, place_row, read_row, unit

FORWARD = {16: (2, 64, 4, 16, 3), 32: (2, 128, 4, 1, 2), 64: (2, 64, 4, 1, 2)}
"""Larger of C and F, padded -> positions per group, groups per program, warps, rows, pipeline stages.

Wider layers use cuDNN.
"""


@triton.jit
def _taps(
    weight, down, channels, filters,
    transposed: tl.constexpr, group: tl.constexpr, block_c: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    """[SPAN * block_c, group * block_f]: row ``down`` of taps, shifted for every member of a group."""
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
    height: tl.constexpr, width: tl.constexpr,
    has_norm: tl.constexpr, has_other: tl.constexpr, group: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    """Store a row of products, or with the epilogue: relu(scale * product + shift + other) * kept."""
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
    height: tl.constexpr, width: tl.constexpr, unit_c: tl.constexpr, unit_f: tl.constexpr, transposed: tl.constexpr,
    has_norm: tl.constexpr, has_other: tl.constexpr, has_gate: tl.constexpr, rows: tl.constexpr, stages: tl.constexpr,
    group: tl.constexpr, block_m: tl.constexpr, block_c: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    """y[m, f] = sum over taps and channels of x[m + tap, c] weight[f, tap, c], for columns of groups of neighbours m.

    A program computes one output row from three input rows; or it iterates over ``rows`` rows, reads each once, and
    adds it to the three output rows that it affects, unrolled by three, so that accumulators stay in their registers.
    ``transposed``: the gradient of the input; then x is the output's gradient, its channels are the weight's filters,
    and taps are mirrored.
    """
    channels, filters = channels * unit_c, filters * unit_f
    m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    first = tl.program_id(1) * rows
    stop = first + rows
    f = tl.arange(0, group * block_f) % block_f
    scale, shift, kept = 1.0, 0.0, 1.0
    if has_norm:
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
        for begin in tl.range(first - 1, stop + 1, 3, num_stages=stages):
            for row in tl.static_range(3):  # one: sums of the row above, two: of this one, three: of the one below
                values = read_row(x, m, groups, channels, begin + row, height, width, group, block_c)
                one = tl.dot(values, bottom, one)
                two = tl.dot(values, middle, two)
                three = tl.dot(values, top)
                _write_row(
                    y, one, scale, shift, kept, other, m, groups, filters, begin + row - 1, first, stop,
                    height, width, has_norm, has_other, group, block_f,
                )  # fmt: skip
                one, two = two, three


class Epilogue(NamedTuple):
    """Epilogue of a convolution: a frozen norm [F], then the sum, ReLU and gate [F]."""

    gain: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor
    eps: float
    other: Tensor | None
    gate: Tensor | None


def convolve(x: Tensor, weight: Tensor, *, transposed: bool = False, epilogue: Epilogue | None = None) -> Tensor:
    """The convolution with its epilogue, or the gradient of its input."""
    number, channels, height, width = x.shape
    filters = weight.shape[1] if transposed else weight.shape[0]
    shape = (number, filters, height, width)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    block_c, block_f = padded(channels), padded(filters)
    group, block_m, warps, rows, stages = FORWARD[max(block_c, block_f)]
    groups = number * triton.cdiv(width, group)
    grid = (triton.cdiv(groups, block_m), triton.cdiv(height, rows))
    norm = (None, None, None, None) if epilogue is None else epilogue[:4]
    eps, other, gate = (1.0, None, None) if epilogue is None else epilogue[4:]
    _convolve[grid](
        x, weight, y, *norm, other, gate, eps, groups, channels // unit(channels), filters // unit(filters),
        height=height, width=width, unit_c=unit(channels), unit_f=unit(filters), transposed=transposed,
        has_norm=epilogue is not None, has_other=other is not None, has_gate=gate is not None,
        rows=rows, stages=stages, group=group, block_m=block_m, block_c=block_c, block_f=block_f, num_warps=warps,
    )  # fmt: skip
    return y
