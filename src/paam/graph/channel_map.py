"""The extra layers of a compacted network: they pick and scatter channels, or add constants to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paam.errors import ConstantMapError, GraphError


class ChannelMap(nn.Module):
    """Output channel j is input channel ``index[j]``, or 0 where that is -1.

    Maps the channels that one block kept to those that the next one reads. ``axis`` is the channel axis, ``inputs``
    the number of input channels; each is used at most once.
    """

    index: Tensor
    back: Tensor
    index_mask: Tensor | None
    back_mask: Tensor | None

    def __init__(self, index: Sequence[int], inputs: int, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.source = tuple(index)
        self.inputs = inputs
        forth = np.asarray(index, dtype=np.int64)
        back = np.full(inputs, -1, dtype=np.int64)
        back[forth[forth >= 0]] = np.flatnonzero(forth >= 0)
        for name, numbers in (("index", forth), ("back", back)):
            present = numbers >= 0
            mask = None if present.all() else torch.from_numpy(present).to(torch.get_default_dtype())
            self.register_buffer(name, torch.from_numpy(numbers.clip(min=0)), persistent=False)
            self.register_buffer(f"{name}_mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        _check_length(x, self.axis, self.inputs)
        if torch.jit.is_tracing() or not (torch.is_grad_enabled() and x.requires_grad):  # type: ignore[no-untyped-call]
            return _take(x, self.index, self.index_mask, self.axis)
        taken: Tensor = _Take.apply(x, self.index, self.index_mask, self.back, self.back_mask, self.axis)  # type: ignore[no-untyped-call]
        return taken

    def forget_gradients(self) -> None:
        """Delete buffers that only the backward pass reads, for exported networks."""
        del self.back, self.back_mask

    def extra_repr(self) -> str:
        return f"{self.inputs} -> {len(self.source)}, axis={self.axis}"


class ChannelOffset(nn.Module):
    """Adds one number to each channel: the constant contribution of removed layers."""

    def __init__(self, offset: Tensor, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.offset = nn.Parameter(offset)

    def forward(self, x: Tensor) -> Tensor:
        _check_length(x, self.axis, len(self.offset))
        moved = x + self.offset.view([-1] + [1] * (x.dim() - 1 - self.axis))
        return moved if x.is_floating_point() else moved.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{len(self.offset)}, axis={self.axis}"


def _check_length(x: Tensor, axis: int, channels: int) -> None:
    """Indices refer to other values if there are more channels, as along a flattened map."""
    if not torch.jit.is_tracing() and x.shape[axis] not in (0, channels):  # type: ignore[no-untyped-call]
        raise GraphError(
            f"This pruned network reads {channels} values in a row where this input gives it {x.shape[axis]}: it takes"
            " images of the size of its example. Use that size, or prune with an example of the size that is used."
        )


class _Take(torch.autograd.Function):
    """Channels by index. Its gradient is a gather too; torch's own would scatter with atomic additions."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, mask: Tensor | None, back: Tensor, back_mask: Tensor | None, axis: int
    ) -> Tensor:
        ctx.save_for_backward(back, back_mask, index, mask)
        ctx.axis = axis
        return _take(x, index, mask, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        taken = _Take.apply(gradient, *ctx.saved_tensors, ctx.axis)  # type: ignore[no-untyped-call]
        return taken, None, None, None, None, None


def _take(x: Tensor, index: Tensor, mask: Tensor | None, axis: int) -> Tensor:
    """Channels ``index`` of x along ``axis``, times the mask, in the memory format of x."""
    if x.shape[axis] == 0:
        return x.new_zeros([len(index) if place == axis else size for place, size in enumerate(x.shape)])
    last = x.dim() == 4 and axis == 1 and x.is_contiguous(memory_format=torch.channels_last)
    if last:
        x, axis = x.permute(0, 2, 3, 1), 3
    taken = x.index_select(axis, index)
    if mask is not None:
        taken = taken * mask.to(x.dtype).view([-1] + [1] * (x.dim() - 1 - axis))
    return taken.permute(0, 3, 1, 2) if last else taken


class OnesChannel(nn.Module):
    """Appends a channel of ones, from which a padded convolution reads the sum of its constant inputs."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        behind = [0, 0] * (x.dim() - 1 - self.axis)
        return nn.functional.pad(x, [*behind, 0, 1], value=1.0)


class NoChannels(nn.Module):
    """A value whose channels all became constant: a tensor of the traced shape with 0 channels, to be filled.

    ``shape`` is the value's and ``example`` the network input's, as traced: other image sizes are not supported.
    ``growth``: by how much each axis of the value grows per additional sample.
    """

    like: Tensor

    def __init__(
        self, shape: Sequence[int], axis: int, example: Sequence[int], dtype: torch.dtype, growth: Sequence[int]
    ) -> None:
        super().__init__()
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)
        self.shape = tuple(0 if place == axis else size for place, size in enumerate(shape))
        self.example = tuple(example)
        self.growth = tuple(growth)

    def forward(self, network_input: Tensor) -> Tensor:
        if tuple(network_input.shape[1:]) != self.example[1:]:
            raise ConstantMapError(
                f"A layer of this pruned network became a constant map for inputs {list(self.example)}, not for"
                f" {list(network_input.shape)}; prune with an example of the size that is used."
            )
        more = network_input.shape[0] - self.example[0]
        return self.like.new_empty([size + more * step for size, step in zip(self.shape, self.growth, strict=True)])


def whole_shape(x: Tensor, axis: int, channels: int) -> tuple[int, ...]:
    """The shape that x had before channels were removed."""
    return (*x.shape[:axis], channels, *x.shape[axis + 1 :])


ADDED_LAYERS = (ChannelMap, ChannelOffset, OnesChannel, NoChannels)
