"""Batches of a split on the device, as a pure function of seed and epoch.

Images are read, augmented and normalised in blocks of several batches: a few large GPU operations instead of many
small ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paam.config.settings import Augmentation
from paam.data.augment import augment_pixels, cut_out, draw, mix_up
from paam.data.dataset import Split
from paam.data.stream import ImageFiles

EVALUATION_BATCH = 1000
BLOCK_VALUES = 1 << 25
"""Maximum pixels in a block (at least one batch): 128 MiB as floats."""


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
    """Batches of a training split. An incomplete last batch is dropped: the next epoch reshuffles."""

    def __init__(
        self,
        split: Split,
        normalize: Normalization,
        augmentation: Augmentation,
        *,
        batch_size: int,
        classes: int,
        seed: int,
        device: str,
    ) -> None:
        self.batch_size = min(batch_size, len(split))
        self.steps = len(split) // self.batch_size
        self.normalize, self.augmentation = normalize, augmentation
        self.classes, self.seed, self.device = classes, seed, device
        self.images = _on_device(split, device)
        self.labels = split.labels.to(device)
        # Streamed images are prefetched by the block: one batch each is enough.
        batches = _fitting(split) // self.batch_size if isinstance(self.images, Tensor) else 1
        self.block = max(1, min(batches, self.steps)) * self.batch_size

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Images float32 [batch, C, H, W]; labels [batch], or soft labels [batch, classes] with mixup.

        ``start``: the first step to yield; blocks before it are not read.
        """
        if start == self.steps:
            return  # stopped after the last step: no block left
        what = self.augmentation
        draws = draw(what, len(self.labels), self.steps, epoch_seed(self.seed, epoch))
        order = draws.order[: self.steps * self.batch_size]
        position = start * self.batch_size // self.block * self.block
        for pixels in _blocks(self.images, order[position:], self.block, self.device):
            part = slice(position, position + len(pixels))
            images = self.normalize(augment_pixels(pixels, what, draws, part))
            if what.cutout:
                images = cut_out(images, what.cutout, draws.holes[:, part].to(self.device))
            labels = self.labels[order[part].to(self.device)]
            for first in range(0, len(pixels), self.batch_size):
                batch = images[first : first + self.batch_size], labels[first : first + self.batch_size]
                step = (position + first) // self.batch_size
                if step < start:
                    continue
                yield mix_up(*batch, draws.mix[step].to(self.device), self.classes) if what.mixup else batch
            position += len(pixels)


class EvaluationBatches:
    """All batches of a split in order, without augmentation."""

    def __init__(self, split: Split, normalize: Normalization, *, device: str) -> None:
        self.images, self.labels = _on_device(split, device), split.labels.to(device)
        self.normalize, self.device = normalize, device
        self.block = max(1, min(EVALUATION_BATCH, _fitting(split)))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        blocks = _blocks(self.images, torch.arange(len(self.labels)), self.block, self.device)
        for pixels, labels in zip(blocks, torch.split(self.labels, self.block), strict=True):
            yield self.normalize(pixels), labels


def _fitting(split: Split) -> int:
    """Maximum images in a block."""
    return BLOCK_VALUES // math.prod(split.images.shape[1:])


def _on_device(split: Split, device: str) -> Tensor | ImageFiles:
    return split.images.to(device) if isinstance(split.images, Tensor) else split.images


def _blocks(images: Tensor | ImageFiles, order: Tensor, size: int, device: str) -> Iterator[Tensor]:
    """uint8 [n, C, H, W] on the device, in the given order."""
    if isinstance(images, Tensor):
        for part in torch.split(order, size):
            yield images[part.to(device)]
    else:
        for block in images.blocks(order, size):
            yield block.to(device, non_blocking=True)


def epoch_seed(seed: int, epoch: int) -> int:
    """One seed per run and epoch; unique for fewer than a million epochs."""
    return seed * 1_000_003 + epoch
