"""Gates: one vector per group of filters, which multiplies their feature maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from paam.graph.modes import evaluating
from paam.pruning.scorers import Scorer

Mode = Literal["open", "analog", "binary"]


class Gate(nn.Module):
    """Learned scores of one group of filters, if any, and its ``mask``: 1 for kept filters and 0 for the others."""

    mask: Tensor

    def __init__(
        self, layers: Sequence[nn.Module], width: int, scorer: Scorer | None, phi: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        # A plain list, so that the network's layers are not registered as submodules of the gate.
        self._layers = list(layers)
        self._phi = phi
        self.scorer = scorer
        self.register_buffer("mask", torch.ones(width, device=filter_rows(layers[0]).device))

    def rows(self) -> Tensor:
        """The scorer's input: one row of weights per filter, [F, N], detached; empty rows if it reads no weights."""
        if self.scorer is None or not self.scorer.reads_filters:
            return filter_rows(self._layers[0]).new_empty(len(self.mask), 0)
        return rows_of(self._layers, len(self.mask))


class Gates(nn.ModuleList):
    """All gates of a network. Called, it returns what each of them multiplies by in the current ``mode``.

    open: None, no gate at all. analog: the scores, differentiable. binary: the masks.
    Layers of the same shape are scored in one batch. Between ``hold`` and ``release``, scorers read a cached copy of
    the weights: a score phase does not change them.
    """

    weights: Tensor

    def __init__(self, gates: Sequence[Gate]) -> None:
        super().__init__(gates)
        alike: dict[Any, list[int]] = {}
        for index, gate in enumerate(gates):
            if gate.scorer is None:
                continue
            shapes = (type(gate.scorer), gate.rows().shape, *(tensor.shape for tensor in gate.scorer.tensors()))
            alike.setdefault(shapes, []).append(index)
        self._alike = list(alike.values())
        self._held: list[Tensor] = []  # per set of layers of the same shape, [layers, F, N]
        self._holding = False
        self.mode: Mode = "open"
        self.weigh([1.0] * len(gates))

    def weigh(self, balances: Sequence[float]) -> None:
        """Set ``weights``: each gate's weight in the penalty, repeated for each of its filters, concatenated."""
        masks = [self._gate(index).mask for index in range(len(self))]
        weights = torch.cat([torch.full_like(mask, w) for mask, w in zip(masks, balances, strict=True)])
        self.register_buffer("weights", weights, persistent=False)

    def forward(self) -> tuple[Tensor | None, ...]:
        if self.mode == "analog":
            return self.scores()
        return tuple(None if self.mode == "open" else self._gate(index).mask for index in range(len(self)))

    def scores(self) -> tuple[Tensor, ...]:
        """One score per filter, [F], of every gate, with a gradient for the scorers but not for the filters.

        In full precision, also under autocast.
        """
        found: dict[int, Tensor] = {}
        with torch.autocast(self._gate(0).mask.device.type, enabled=False):
            for number, indices in enumerate(self._alike):
                gates = [self._gate(index) for index in indices]
                rows_LFN = self._held[number] if self._holding else torch.stack([gate.rows() for gate in gates])
                scorers = [gate.scorer for gate in gates if gate.scorer is not None]
                tensors = zip(*(scorer.tensors() for scorer in scorers), strict=True)
                scores_LF = gates[0]._phi(scorers[0].attend(rows_LFN, *map(torch.stack, tensors)))
                found.update(zip(indices, scores_LF.unbind(), strict=True))
        return tuple(found[index] for index in range(len(self)))

    def hold(self) -> None:
        """Cache the filters' weights until :meth:`release`. Reuses its memory, since captured steps read it."""
        rows = [torch.stack([self._gate(index).rows() for index in indices]) for indices in self._alike]
        if [(held.device, held.dtype) for held in self._held] != [(row.device, row.dtype) for row in rows]:
            self._held = rows
        for held, row in zip(self._held, rows, strict=True):
            held.copy_(row)
        self._holding = True

    def release(self) -> None:
        self._holding = False

    def _gate(self, index: int) -> Gate:
        gate = self[index]
        assert isinstance(gate, Gate)
        return gate


def by_filter(layer: nn.Module, tensor: Tensor) -> Tensor:
    """A view of a layer's weight as [groups, filters per group, ...]: transposed convolutions have filters second."""
    if tensor.dim() > 1 and getattr(layer, "transposed", False):
        groups: Any = layer.groups
        return tensor.view(groups, -1, *tensor.shape[1:]).transpose(1, 2)
    return tensor.unsqueeze(0)


def filter_rows(layer: nn.Module) -> Tensor:
    """The weights of each filter of a layer as one row: [F, N], detached."""
    # In training mode, reading a parametrized weight updates the vectors of a spectral norm.
    with evaluating(layer) if is_parametrized(layer) else nullcontext():
        weight = layer.weight
    assert isinstance(weight, Tensor)
    return by_filter(layer, weight.detach()).flatten(0, 1).flatten(1)


def rows_of(layers: Sequence[nn.Module], width: int) -> Tensor:
    """The weights of each filter of a group, over all of its layers, as one row: [width, N], detached."""
    rows = [_by_group(filter_rows(layer), width) for layer in layers]
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1)


def _by_group(rows: Tensor, width: int) -> Tensor:
    """[F, N] -> [width, ...]: filters i, i + width, ... of a layer whose output is read in parts are one row."""
    return rows if len(rows) == width else rows.view(-1, width, rows.shape[1]).transpose(0, 1).flatten(1)
