"""Weight gradients of 3 x 3 convolutions in Triton: partial sums by one kernel, their sum by another.

Shapes as in rows.py; weights are [F, 9, C], taps in row order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paam.train.cuda.kernels.rows import SIZES, SPAN, padded, place_row, read_row, unit

WEIGHT = {16: (2, 128, 4, 3, 8, 3), 32: (2, 64, 4, 1, 8, 3), 64: (1, 64, 8, 1, 8, 3)}
"""Larger of C and F, padded -> positions per group, groups, warps, rows of taps (1 or 3), rows, pipeline stages."""

PROGRAMS = 256
"""Maximum programs, and so partial sums, per weight gradient; more only for very high layers."""

SUM = {"block_p": 128, "block": 32}
"""Partial sums and weights per tile of the final sum."""


@triton.jit
def _store_taps(
    parts, part, total, down, channels, filters, group: tl.constexpr, block_c: tl.constexpr, block_f: tl.constexpr
):
    """Store one row of taps of the products of a load: parts [programs, group, F, 9, C]."""
    k, n = tl.arange(0, SPAN * block_c), tl.arange(0, group * block_f)
    j, c, g, f = k // block_c, k % block_c, n // block_f, n % block_f
    tap = j[:, None] - g[None, :]
    mask = (tap >= 0) & (tap < 3) & (c < channels)[:, None] & (f < filters)[None, :]
    part = (part * group + g) * filters + f
    tl.store(parts + (part * 9 + down * 3)[None, :] * channels + tap * channels + c[:, None], total, mask)


@triton.jit
def _read_own(
    dy, m, groups, filters, row, first, stop, height: tl.constexpr, width: tl.constexpr, group: tl.constexpr,
    block_f: tl.constexpr,
):  # fmt: skip
    where, inside = place_row(m, groups, filters, row, first, stop, height, width, group, block_f)
    return tl.load(dy + where, inside, 0.0)


@triton.jit(do_not_specialize=SIZES)
def _weight_partial(
    x, dy, parts, groups, channels, filters, share, height: tl.constexpr, width: tl.constexpr,
    unit_c: tl.constexpr, unit_f: tl.constexpr, downs: tl.constexpr, rows: tl.constexpr, stages: tl.constexpr,
    group: tl.constexpr, block_m: tl.constexpr, block_c: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    """Sums over this program's ``share`` of groups and ``rows`` rows of x[m + tap, c] dy[m, f].

    For one row of taps; or for all three, in which case each row of x and dy is read once.
    """
    channels, filters = channels * unit_c, filters * unit_f
    start = tl.program_id(0) * share
    end = tl.minimum(start + share, groups)
    first = tl.program_id(1) * rows
    stop = first + rows
    down = tl.program_id(2)
    one = tl.zeros([SPAN * block_c, group * block_f], tl.float32)
    if downs == 3:
        two = tl.zeros([SPAN * block_c, group * block_f], tl.float32)
        three = tl.zeros([SPAN * block_c, group * block_f], tl.float32)
    for begin in range(start, end, block_m):
        m = begin + tl.arange(0, block_m)
        if downs == 1:
            for row in tl.range(first, stop, num_stages=stages):
                values = read_row(x, m, end, channels, row + down - 1, height, width, group, block_c)
                grads = _read_own(dy, m, end, filters, row, first, stop, height, width, group, block_f)
                one = tl.dot(tl.trans(values), grads, one)
        else:
            for row in tl.range(first - 1, stop + 1, num_stages=stages):
                values = tl.trans(read_row(x, m, end, channels, row, height, width, group, block_c))
                below = _read_own(dy, m, end, filters, row + 1, first, stop, height, width, group, block_f)
                here = _read_own(dy, m, end, filters, row, first, stop, height, width, group, block_f)
                above = _read_own(dy, m, end, filters, row - 1, first, stop, height, width, group, block_f)
                one = tl.dot(values, below, one)
                two = tl.dot(values, here, two)
                three = tl.dot(values, above, three)
    part = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    _store_taps(parts, part, one, down, channels, filters, group, block_c, block_f)
    if downs == 3:
        _store_taps(parts, part, two, 1, channels, filters, group, block_c, block_f)
        _store_taps(parts, part, three, 2, channels, filters, group, block_c, block_f)


@triton.jit(do_not_specialize=SIZES)
def _sum_parts(parts, total, programs, size, block_p: tl.constexpr, block: tl.constexpr):
    place = tl.program_id(0) * block + tl.arange(0, block)
    result = tl.zeros([block], tl.float32)
    for first in range(0, programs, block_p):
        row = first + tl.arange(0, block_p)
        mask = (row < programs)[:, None] & (place < size)[None, :]
        result += tl.sum(tl.load(parts + row[:, None] * size + place[None, :], mask, 0.0), 0)
    tl.store(total + place, result.to(total.dtype.element_ty), place < size)


def weight_gradient(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    number, channels, height, width = x.shape
    filters = dy.shape[1]
    block_c, block_f = padded(channels), padded(filters)
    group, block_m, warps, downs, rows, stages = WEIGHT[max(block_c, block_f)]
    groups, bands = number * triton.cdiv(width, group), triton.cdiv(height, rows)
    share = triton.cdiv(triton.cdiv(groups * bands, PROGRAMS), block_m) * block_m
    programs = triton.cdiv(groups, share)
    parts = torch.empty(programs * bands * group, weight.numel(), device=x.device)
    _weight_partial[(programs, bands, 3 // downs)](
        x, dy, parts, groups, channels // unit(channels), filters // unit(filters), share, height=height, width=width,
        unit_c=unit(channels), unit_f=unit(filters), downs=downs, rows=rows, stages=stages,
        group=group, block_m=block_m, block_c=block_c, block_f=block_f, num_warps=warps,
    )  # fmt: skip
    total = torch.empty_like(weight)
    blocks = triton.cdiv(weight.numel(), SUM["block"])
    _sum_parts[(blocks,)](parts, total, len(parts), weight.numel(), **SUM, num_warps=4)
    return total
