"""A split on the device: shuffled, cropped and flipped as a pure function of seed and epoch.

All random numbers of an epoch come from one generator on the CPU, so that every device sees the same batches and a
resumed run sees the batches it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paam.data import Split

EVALUATION_BATCH = 1000


@dataclass(frozen=True)
class Normalization:
    """Per channel, in units of pixel / 255."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 [N, C, H, W] -> float32 of the same shape."""
        mean = torch.tensor(self.mean, device=pixels.device).view(1, -1, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).view(1, -1, 1, 1)
        return (pixels.float() / 255 - mean) / std


class TrainingBatches:
    """Batches of a training split. A ragged rest is left out: the next epoch shuffles it in."""

    def __init__(
        self, split: Split, normalize: Normalization, *, batch_size: int, crop: int, flip: bool, seed: int, device: str
    ) -> None:
        self.batch_size = min(batch_size, len(split))
        self.steps = len(split) // self.batch_size
        self.normalize = normalize
        self.crop, self.flip, self.seed = crop, flip, seed
        self.height, self.width = split.images.shape[2:]
        self.padded = F.pad(split.images, (crop,) * 4).to(device)
        self.labels = split.labels.to(device)

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Images float32 [batch, C, H, W] and labels [batch], on the device."""
        device = self.labels.device
        total = len(self.labels)
        generator = torch.Generator().manual_seed(epoch_seed(self.seed, epoch))
        order = torch.randperm(total, generator=generator).to(device)
        shifts = torch.randint(0, 2 * self.crop + 1, (2, total), generator=generator).to(device)
        flips = (torch.rand(total, generator=generator) < (0.5 if self.flip else 0.0)).to(device)
        rows, columns = torch.arange(self.height, device=device), torch.arange(self.width, device=device)
        for step in range(self.steps):
            part = slice(step * self.batch_size, (step + 1) * self.batch_size)
            chosen = order[part]
            across = torch.where(flips[part, None], columns.flip(0), columns) + shifts[1, part, None]
            down = rows + shifts[0, part, None]
            # Indexing three axes around a slice puts channels last: [batch, H, W, C].
            pixels = self.padded[chosen[:, None, None], :, down[:, :, None], across[:, None, :]]
            yield self.normalize(pixels.permute(0, 3, 1, 2)), self.labels[chosen]


class EvaluationBatches:
    """Batches of a split in order, whole and unaugmented."""

    def __init__(self, split: Split, normalize: Normalization, *, device: str) -> None:
        self.images, self.labels = split.images.to(device), split.labels.to(device)
        self.normalize = normalize

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.labels), EVALUATION_BATCH):
            part = slice(start, start + EVALUATION_BATCH)
            yield self.normalize(self.images[part]), self.labels[part]


def epoch_seed(seed: int, epoch: int) -> int:
    """One seed per run and epoch; two runs never share one while epochs stay below a million."""
    return seed * 1_000_003 + epoch
