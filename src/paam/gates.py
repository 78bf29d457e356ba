"""Gates: one vector per group of filters that multiplies the feature maps those filters make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

Mode = Literal["open", "analog", "binary"]


class Gate(nn.Module):
    """Scores of one group of filters, and which of them count right now.

    open: no gate at all. analog: the scores, differentiable. binary: ``mask``, 1 for kept filters and 0 for the others.
    """

    mask: Tensor

    def __init__(
        self, layers: Sequence[nn.Module], width: int, scorer: nn.Module, phi: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        # A plain list, so that the network's layers are read here without belonging to the gate.
        self._layers = list(layers)
        self._phi = phi
        self.scorer = scorer
        self.mode: Mode = "open"
        self.register_buffer("mask", torch.ones(width, device=filter_rows(layers[0]).device))

    def scores(self) -> Tensor:
        """One score per filter, shape [F], with a gradient into the scorer and none into the filters."""
        rows = [filter_rows(layer) for layer in self._layers]
        scores: Tensor = self._phi(self.scorer(rows[0] if len(rows) == 1 else torch.cat(rows, 1)))
        return scores

    def forward(self) -> Tensor | None:
        if self.mode == "open":
            return None
        return self.mask if self.mode == "binary" else self.scores()


def by_filter(layer: nn.Module, tensor: Tensor) -> Tensor:
    """A view of a layer's weight as [groups, filters per group, ...]: transposed convolutions keep filters second."""
    if tensor.dim() > 1 and getattr(layer, "transposed", False):
        groups: Any = layer.groups
        return tensor.view(groups, -1, *tensor.shape[1:]).transpose(1, 2)
    return tensor.unsqueeze(0)


def filter_rows(layer: nn.Module) -> Tensor:
    """The weights of each filter of a layer as one row: [F, N], without gradient."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return by_filter(layer, weight.detach()).flatten(0, 1).flatten(1)


def apply_gate(x: Tensor, gate: Tensor | None, axis: int) -> Tensor:
    """x times the gate along the channel axis; None is an open gate."""
    if gate is None:
        return x
    shape = [1] * x.dim()
    shape[axis] = -1
    return x * gate.to(x.dtype).view(shape)
