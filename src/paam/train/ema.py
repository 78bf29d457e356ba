"""EMA of the weights that a phase trains: what the phase leaves, and what is measured on its way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paam.train.flat import FlatParameters
from paam.train.packing import Packed, copy_by_name, pack


class EMA:
    """The mean of parameters and of a network's statistics, in which those of so many steps ago count decay ** steps.

    It begins at what they are when it is made, and is in float32 at least: a thousandth of a step is nothing to
    bfloat16. Its memory stays where it is, so that a step that updates it can be captured.
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
        """The network holds the mean inside, and what is trained outside."""
        trained = [value.clone() for value in self._trained]
        self.apply()
        try:
            yield
        finally:
            torch._foreach_copy_(self._trained, trained)

    def apply(self) -> None:
        """The mean takes the place of what was trained."""
        torch._foreach_copy_(self._trained, self._mean)

    def state(self) -> dict[str, Packed]:
        count = len(self.flat.blocks)
        statistics = dict(zip(self._buffers, self._mean[count:], strict=True))
        return {"weights": Packed(self._mean[:count], self.flat.layout), "statistics": pack(statistics)}

    def restore(self, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load what :meth:`state` returned, unpacked; it may come from a network laid out otherwise in memory."""
        count = len(self.flat.blocks)
        weights = dict(zip(self.flat.layout, self.flat.views(self._mean[:count]), strict=True))
        copy_by_name(weights, parts["weights"])
        copy_by_name(dict(zip(self._buffers, self._mean[count:], strict=True)), parts["statistics"])
