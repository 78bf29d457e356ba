"""A network's parameters as one flat buffer, so that an optimiser step is one operation instead of one per layer.

Parameters become views of the buffer, in their own memory layout. For training in bfloat16 the network reads from a
second buffer of rounded weights, cast by one operation per step instead of one per layer and use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paam.train.packing import Place, memory_order

ALIGNMENT = 64
"""Parameters start at multiples of this many elements: kernels need aligned weights."""


class FlatParameters:
    """``blocks``: one flat parameter per dtype and device, with a persistent ``grad``.

    ``layout``: the position of each parameter in them, by its name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = list(parameters.values())
        kinds = list(dict.fromkeys((parameter.dtype, parameter.device) for parameter in self.parameters))
        totals = [0] * len(kinds)
        self.layout: dict[str, Place] = {}
        for name, parameter in parameters.items():
            home = kinds.index((parameter.dtype, parameter.device))
            self.layout[name] = (home, totals[home], tuple(parameter.shape), memory_order(_dense_strides(parameter)))
            totals[home] += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.blocks = [
            nn.Parameter(torch.zeros(total, dtype=dtype, device=device))
            for total, (dtype, device) in zip(totals, kinds, strict=True)
        ]
        for parameter, view in zip(self.parameters, self.views([block.data for block in self.blocks]), strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        grads = [torch.zeros_like(block) for block in self.blocks]
        for block, grad in zip(self.blocks, grads, strict=True):
            block.grad = grad
        self._grads = self.views(grads)

    def views(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Views per parameter of tensors with the blocks' layout."""
        return [
            blocks[block].as_strided(parameter.shape, _dense_strides(parameter), start)
            for parameter, (block, start, *_) in zip(self.parameters, self.layout.values(), strict=True)
        ]

    def take_gradients(self, loss: Tensor, leaves: Sequence[Tensor]) -> None:
        """Write gradients of the loss into the blocks; ``leaves``: the tensors that the network used as parameters.

        Unused parameters get gradient 0: weight decay and momentum still apply to them.
        """
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for view, grad in zip(self._grads, grads, strict=True):
            if grad is None:
                view.zero_()
            else:
                into, out_of = by_dtype.setdefault(grad.dtype, ([], []))
                into.append(view)
                out_of.append(grad)
        for into, out_of in by_dtype.values():
            torch._foreach_copy_(into, out_of)


def _dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """A parameter's own memory layout; contiguous if it has gaps."""
    strides = parameter.stride()
    by_size = sorted(zip(strides, parameter.shape, strict=True))
    expected = 1
    for stride, size in by_size:
        if size > 1 and stride != expected:
            return torch.empty(parameter.shape, device="meta").stride()
        expected *= size
    return strides


class RoundedWeights:
    """A bfloat16 copy of a block of float32 parameters, for a network's weights (of two or more dimensions)."""

    def __init__(self, flat: FlatParameters, network: nn.Module) -> None:
        self.flat = flat
        self.block = torch.empty_like(flat.blocks[0], dtype=torch.bfloat16, requires_grad=False)
        rounded = [
            nn.Parameter(view) if parameter.dim() > 1 else parameter
            for parameter, view in zip(flat.parameters, flat.views([self.block]), strict=True)
        ]
        twin_of = dict(zip(flat.parameters, rounded, strict=True))
        self.leaves = rounded
        self._homes = [
            (module, name, parameter, twin_of[parameter])
            for module in network.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and twin_of.get(parameter, parameter) is not parameter
        ]

    def refresh(self) -> None:
        self.block.copy_(self.flat.blocks[0].detach())

    @contextmanager
    def in_place(self, *, trained: bool) -> Iterator[None]:
        """Inside, the network's layers have the rounded weights; outside, their own."""
        for module, name, _, twin in self._homes:
            twin.requires_grad_(trained)
            module._parameters[name] = twin
        self.refresh()
        try:
            yield
        finally:
            for module, name, parameter, _ in self._homes:
                module._parameters[name] = parameter
