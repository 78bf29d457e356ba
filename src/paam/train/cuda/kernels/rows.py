"""What convolutions share: rows of images, read and written by groups of neighbours.

Shapes: activations are [M, C] with M = N * H * W positions, channels last. A group is one or two neighbours of a row;
groups are counted through one row of every image, so that a program can go down the rows with the same groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

SPAN: tl.constexpr = tl.constexpr(4)
"""Positions of a row that are read together. A group of one or two neighbours reads that much in each of three rows."""

SIZES = ["groups", "channels", "filters", "share", "programs", "size"]
"""Numbers that a kernel is not compiled anew for: pruned networks have dozens of them.

Channels and filters are given in units of 8 where that can be: so their rows are known to be readable in whole pieces.
"""


@triton.jit
def places(m, width: tl.constexpr, group: tl.constexpr):
    """Of groups, counted through one row of every image: the image, and the column where the group begins."""
    across = (width + group - 1) // group
    return m // across, (m % across) * group


@triton.jit
def read_row(
    x, m, groups, channels, row, height: tl.constexpr, width: tl.constexpr, group: tl.constexpr, block_c: tl.constexpr
):
    """[groups, SPAN * block_c]: a group and its neighbours to both sides in a row of the image; 0 outside of it."""
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
    """[groups, group * block_f]: where the groups' own values lie in a row; which exist, in the rows ``first:stop``."""
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
