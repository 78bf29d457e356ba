"""EMA of the weights that a phase trains; used for evaluation, and as the phase's result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paam.train.flat import FlatParameters
from paam.train.packing import Packed, copy_by_name, pack


class EMA:
    """EMA of a network's parameters and buffers: values of n steps ago have weight decay ** n.

    It starts at their current values, in float32 at least: bfloat16 would round small updates away. Its memory is
    allocated once, so that a step that updates it can be captured.
    """

    def __init__(self, flat: FlatParameters, model: nn.Module, decay: float) -> None:
        self.flat, self.decay = flat, decay
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
        self._trained = [*(block.data for block in flat.blocks), *self._buffers.values()]
        self._mean = [value.to(torch.promote_types(value.dtype, torch.float32), copy=True) for value in self._trained]

    @torch.no_grad()
    def update(self) -> None:
        now = [value.to(mean.dtype) for value, mean in zip(self._trained, self._mean, strict=True)]
        torch._foreach_lerp_(self._mean, now, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the network has the EMA weights; outside, the trained ones."""
        trained = [value.clone() for value in self._trained]
        self.apply()
        try:
            yield
        finally:
            torch._foreach_copy_(self._trained, trained)

    def apply(self) -> None:
        """Replace the trained weights by the EMA."""
        torch._foreach_copy_(self._trained, self._mean)

    def state(self) -> dict[str, Packed]:
        count = len(self.flat.blocks)
        statistics = dict(zip(self._buffers, self._mean[count:], strict=True))
        return {"weights": Packed(self._mean[:count], self.flat.layout), "statistics": pack(statistics)}

    def restore(self, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load an unpacked :meth:`state`; the memory layout of its network may differ."""
        count = len(self.flat.blocks)
        weights = dict(zip(self.flat.layout, self.flat.views(self._mean[:count]), strict=True))
        copy_by_name(weights, parts["weights"])
        copy_by_name(dict(zip(self._buffers, self._mean[count:], strict=True)), parts["statistics"])
