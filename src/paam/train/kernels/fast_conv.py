"""A convolution of a network by our own kernels, with its gradients.

Weights' gradients are computed beside the rest of the backward pass: nothing waits for them but the optimiser.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paam.train.beside import beside, join
from paam.train.kernels.conv import FORWARD, Behind, Sums, convolve, convolve_and_sum
from paam.train.kernels.counting import check_countable
from paam.train.kernels.norm import channels_last
from paam.train.kernels.rows import padded
from paam.train.kernels.weight_gradient import weight_gradient

LARGEST = 32 * 32
"""Positions of an image, at most: larger ones are left to the library."""


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
    """x [N, C, H, W] and weight [F, C, 3, 3], both channels last and of one dtype; the output, and its :class:`Sums`.

    ``late``: the gradient of the weight is ready at the end of the backward pass, and not before. ``around``: as for
    :func:`convolve_and_sum`; without it there are no sums.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, late: bool, around: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(x, weight)
        ctx.late = late
        if around is None:
            return convolve(x, weight), None, None
        y, sums = convolve_and_sum(x, weight, around)
        ctx.mark_non_differentiable(*sums)
        return y, *sums

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
        return dx, dweight, None, None


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
        return self._convolved(x, None)[0]

    def with_sums(self, x: Tensor, around: Tensor) -> tuple[Tensor, Sums]:
        """The convolution and what a norm needs of it."""
        y, *sums = self._convolved(x, around)
        return y, Sums(*sums)

    def _convolved(self, x: Tensor, around: Tensor | None) -> tuple[Tensor, ...]:
        x, weight = self._read(x)
        # Only a gradient that goes straight to the optimiser may be late: not one that is cast or added up on its way.
        late = self.alone and weight is self.conv.weight and weight.is_cuda
        found: tuple[Tensor, ...] = Convolution.apply(x, weight, late, around)  # type: ignore[no-untyped-call]
        return found

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
