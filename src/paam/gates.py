"""Gates: one vector per group of filters that multiplies the feature maps those filters make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Mode = Literal["open", "analog", "binary"]


class Gate(nn.Module):
    """Scores of one group of filters, and which of them count right now.

    open: no gate at all. analog: the scores, differentiable. binary: ``mask``, 1 for kept filters and 0 for the others.
    """

    mask: Tensor

    def __init__(self, filters: Sequence[nn.Parameter], scorer: nn.Module, phi: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        # A plain list, so that the network's weights are read here without belonging to the gate.
        self._filters = list(filters)
        self._phi = phi
        self.scorer = scorer
        self.mode: Mode = "open"
        self.register_buffer("mask", torch.ones(self._filters[0].shape[0], device=self._filters[0].device))

    def scores(self) -> Tensor:
        """One score per filter, shape [F], with a gradient into the scorer and none into the filters."""
        rows = [weight.detach().flatten(1) for weight in self._filters]
        scores: Tensor = self._phi(self.scorer(rows[0] if len(rows) == 1 else torch.cat(rows, 1)))
        return scores

    def forward(self) -> Tensor | None:
        if self.mode == "open":
            return None
        return self.mask if self.mode == "binary" else self.scores()


def apply_gate(x: Tensor, gate: Tensor | None, axis: int) -> Tensor:
    """x times the gate along the channel axis; None is an open gate."""
    if gate is None:
        return x
    shape = [1] * x.dim()
    shape[axis] = -1
    return x * gate.to(x.dtype).view(shape)
