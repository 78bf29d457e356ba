"""Accuracy of a network on a split."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from paam.errors import DataError
from paam.graph.modes import evaluating
from paam.train.cuda.capture import CapturedStep, Step


def accuracy(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Percent of samples classified correctly, in evaluation mode and the network's own precision."""
    return _accuracy(model, batches, lambda images, labels: (model(images).argmax(1) == labels).sum())


class Monitor:
    """Accuracy after every epoch; on a GPU captured in a CUDA graph, and in the training precision."""

    def __init__(self, batches: Iterable[tuple[Tensor, Tensor]], *, bfloat16: bool, capture: bool) -> None:
        self.batches = batches
        self.bfloat16, self.capture = bfloat16, capture
        self._model: nn.Module | None = None
        self._counts: dict[str, Step] = {}
        """Evaluations of that model by phase name, since gates differ."""

    def __call__(self, model: nn.Module, phase: str) -> float:
        if model is not self._model:
            self._model = model
            self._counts.clear()  # captured ones hold GPU memory
        if phase not in self._counts:

            def count(images: Tensor, labels: Tensor) -> Tensor:
                with torch.autocast("cuda", torch.bfloat16, enabled=self.bfloat16, cache_enabled=False):
                    right: Tensor = (model(images).argmax(1) == labels).sum()
                return right

            self._counts[phase] = CapturedStep(count) if self.capture else count
        return _accuracy(model, self.batches, self._counts[phase])


def _accuracy(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], count: Step) -> float:
    right: list[Tensor] = []
    total = 0
    with evaluating(model), torch.inference_mode():
        for images, labels in batches:
            right.append(count(images, labels))
            total += len(labels)
    if not total:
        raise DataError("The validation batches are empty or exhausted; pass a DataLoader.")
    return 100 * int(torch.stack(right).sum()) / total
