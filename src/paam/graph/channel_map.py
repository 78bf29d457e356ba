"""The extra layers that a compacted network may hold: channels picked, spread, offset by constants."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ChannelMap(nn.Module):
    """Output channel j is input channel ``index[j]`` (0 where that is -1), plus ``offset[j]``.

    Turns the channels that one block kept into those that the next one reads; the offsets carry what removed layers
    contributed as a constant. ``axis`` is the channel axis.
    """

    index: Tensor

    def __init__(self, index: Sequence[int], axis: int, offset: Tensor | None = None) -> None:
        super().__init__()
        self.axis = axis
        self.offset = None if offset is None else nn.Parameter(offset)
        self.width = len(index)
        self.padded = -1 in index
        self.moves = list(index) != list(range(len(index))) or self.padded
        # Missing channels read one channel of zeros that is appended behind the largest index in use.
        self.zeros_at = max(index, default=-1) + 1
        lookup = torch.tensor([self.zeros_at if i < 0 else i for i in index])
        self.register_buffer("index", lookup, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.padded:
            behind = [0, 0] * (x.dim() - 1 - self.axis)
            x = nn.functional.pad(x.narrow(self.axis, 0, self.zeros_at), [*behind, 0, 1])
        if self.moves or x.shape[self.axis] != self.width:
            x = x.index_select(self.axis, self.index)
        if self.offset is not None:
            x = x + self.offset.view([-1] + [1] * (x.dim() - 1 - self.axis))
        return x

    def extra_repr(self) -> str:
        return f"width={self.width}, axis={self.axis}, offset={self.offset is not None}"


class OnesChannel(nn.Module):
    """One more channel, all ones: a padded convolution reads the sum of its constant inputs from it."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        behind = [0, 0] * (x.dim() - 1 - self.axis)
        return nn.functional.pad(x, [*behind, 0, 1], value=1.0)


class NoChannels(nn.Module):
    """A value whose channels all became constant: a batch of the traced shape without channels, to be filled."""

    def __init__(self, shape: Sequence[int], axis: int) -> None:
        super().__init__()
        self.shape = tuple(0 if place == axis else size for place, size in enumerate(shape))

    def forward(self, network_input: Tensor) -> Tensor:
        return network_input.new_empty(network_input.shape[0], *self.shape[1:])
