"""Shared parts of the convolution kernels: read and write image rows by groups of neighbours.

Shapes: activations are [M, C] with M = N * H * W positions, channels last. A group is one or two neighbours of a row;
groups are numbered across one row of all images, so that a program can iterate over rows with the same groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

SPAN: tl.constexpr = tl.constexpr(4)
"""Positions of a row per load. A group of one or two neighbours loads that many in each of three rows."""

SIZES = ["groups", "channels", "filters", "share", "programs", "size"]
"""Arguments that a kernel is not specialized for: pruned networks have dozens of values.

Channels and filters are passed in units of 8 where possible, so that the compiler can vectorize their loads.
"""


@triton.jit
def places(m, width: tl.constexpr, group: tl.constexpr):
    """Of groups, numbered across one row of all images: the image, and the group's first column."""
    across = (width + group - 1) // group
    return m // across, (m % across) * group


@triton.jit
def read_row(
    x, m, groups, channels, row, height: tl.constexpr, width: tl.constexpr, group: tl.constexpr, block_c: tl.constexpr
):
    """[groups, SPAN * block_c]: a group with its neighbours on both sides in a row; 0 outside of the image."""
    image, column = places(m, width, group)
    k = tl.arange(0, SPAN * block_c)
    j, c = k // block_c, k % block_c
    there = (m < groups) & (row >= 0) & (row < height)
    place = (column - 1)[:, None] + j[None, :]
    inside = there[:, None] & (place >= 0) & (place < width) & ((j < group + 2) & (c < channels))[None, :]
    start = ((image * height + row) * width + column - 1) * channels
    return tl.load(x + start[:, None] + (j * channels + c)[None, :], inside, 0.0)


@triton.jit
def place_row(
    m, groups, filters, row, first, stop, height: tl.constexpr, width: tl.constexpr, group: tl.constexpr,
    block_f: tl.constexpr,
):  # fmt: skip
    """[groups, group * block_f]: offsets of the groups' own values in a row; and their mask in rows ``first:stop``."""
    image, column = places(m, width, group)
    n = tl.arange(0, group * block_f)
    g, f = n // block_f, n % block_f
    there = (m < groups) & (row >= first) & (row < tl.minimum(stop, height))
    inside = there[:, None] & (column[:, None] + g[None, :] < width) & (f < filters)[None, :]
    return (((image * height + row) * width + column) * filters)[:, None] + (g * filters + f)[None, :], inside


def padded(channels: int) -> int:
    return max(16, triton.next_power_of_2(channels))


def unit(width: int) -> int:
    return 1 if width % 8 else 8
