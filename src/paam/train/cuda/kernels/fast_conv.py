"""A convolution by Triton kernels, with its gradients.

Weight gradients are computed on a side stream during the backward pass: only the optimiser waits for them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paam.train.cuda.kernels.conv import FORWARD, Epilogue, convolve
from paam.train.cuda.kernels.counting import check_countable
from paam.train.cuda.kernels.norm import channels_last
from paam.train.cuda.kernels.rows import padded
from paam.train.cuda.kernels.weight_gradient import weight_gradient
from paam.train.cuda.side_stream import join, on_side_stream

LARGEST = {16: 32 * 32, 32: 32 * 32, 64: 8 * 8}
"""Larger of C and F, padded -> maximum positions of an image. With more channels cuDNN is faster on 16 x 16 and
32 x 32 (benchmarks/kernels.h200.txt); larger images were not timed.
"""


@contextmanager
def _on_side_stream(*read: Tensor) -> Iterator[None]:
    """Run work on the side stream during a backward pass, and join at its end. ``read``: its inputs."""
    first = torch.cuda.current_stream(read[0].device)
    with on_side_stream(read[0].device):
        yield
    # Kept alive until then, so that autograd neither frees them nor accumulates into them.
    torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_join, first, read))


def _join(first: Any, held: tuple[Tensor, ...]) -> None:
    with torch.cuda.stream(first):
        join(held[0].device)


class Convolution(torch.autograd.Function):
    """x [N, C, H, W] and weight [F, C, 3, 3], both channels last and of one dtype.

    ``deferred``: the gradient of the weight is ready only at the end of the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, deferred: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.deferred = deferred
        return convolve(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = channels_last(grads[0])
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            with _on_side_stream(x, dy) if ctx.deferred else nullcontext():
                dweight = weight_gradient(x, dy, weight)
        if ctx.needs_input_grad[0]:
            dx = convolve(dy, weight, transposed=True)
        return dx, dweight, None


class FastConv(nn.Module):
    """A convolution shared with the network. ``alone``: nothing else reads its weight."""

    def __init__(self, conv: nn.Conv2d, *, alone: bool) -> None:
        super().__init__()
        self.conv = conv
        self.alone = alone

    def forward(self, x: Tensor) -> Tensor:
        if not self.supports(x):
            plain: Tensor = self.conv(x)
            return plain
        x, weight = self._read(x)
        # Only a gradient that goes directly to the optimiser may be deferred: not one that is cast or accumulated.
        deferred = self.alone and weight is self.conv.weight and weight.is_cuda
        y: Tensor = Convolution.apply(x, weight, deferred)  # type: ignore[no-untyped-call]
        return y

    def with_norm(self, x: Tensor, epilogue: Epilogue) -> Tensor:
        """Without gradients: the convolution and its epilogue in one kernel."""
        other = None if epilogue.other is None else channels_last(epilogue.other)
        return convolve(*self._read(x), epilogue=epilogue._replace(other=other))

    def supports(self, x: Tensor) -> bool:
        return x.dim() == 4 and x.shape[2] * x.shape[3] <= LARGEST[padded(max(self.conv.weight.shape[:2]))]

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Input and weight in the kernels' layout."""
        check_countable(x.numel() // x.shape[1] * max(self.conv.weight.shape[:2]))
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        return channels_last(x.to(dtype)), channels_last(self.conv.weight.to(dtype))


def is_fast(module: nn.Conv2d) -> bool:
    """Whether these kernels support a layer.

    Wider layers must be multiples of 8, for vectorized loads and few compilations.
    """
    widths = (module.in_channels, module.out_channels)
    return (
        type(module) is nn.Conv2d
        and (module.kernel_size, module.stride, module.padding, module.dilation) == ((3, 3), (1, 1), (1, 1), (1, 1))
        and (module.groups, module.bias, module.padding_mode) == (1, None, "zeros")
        and padded(max(widths)) in FORWARD
        and all(width <= 16 or width % 8 == 0 for width in widths)
    )
