"""The result of every loader, and the split of a validation set from the training set."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paam.data.marks import MARK_BYTES, Covers
from paam.data.stream import ImageFiles
from paam.errors import RecipeError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def check_share(share: float) -> None:
    """Raise RecipeError unless 0 <= share < 1 (NaN fails too)."""
    if not 0 <= share < 1:
        raise RecipeError(f"holdout must be a share of the train set, at least 0 and less than 1 (got {share}).")


def check_native_size(name: str, image_size: int | None, native: int) -> None:
    """Raise RecipeError unless image_size (pixels) is None or the data set's native size."""
    if image_size is not None and image_size != native:
        raise RecipeError(
            f"image_size is {image_size}, but the images of '{name}' are {native} x {native}: leave it out."
        )


def stratified_mask(labels: Tensor, share: float, seed: int) -> Tensor:
    """Draw a share of each class: bool [N], True where drawn, for labels int64 [N].

    Of n > 1 images of a class, round(share * n) are drawn, but at least 1 and at most n - 1. The only image of a class
    is never drawn. The draw depends on labels, share and seed only, not on global state.
    """
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = shuffled[torch.argsort(labels[shuffled], stable=True)]
    counts = torch.bincount(labels)
    wanted = torch.round(counts.double() * share).long().clamp(min=1).minimum((counts - 1).clamp(min=0))
    first = torch.cumsum(counts, 0) - counts
    place_in_class = torch.arange(len(labels)) - first.repeat_interleave(counts)
    mask = torch.zeros(len(labels), dtype=torch.bool)
    mask[by_class[place_in_class < wanted.repeat_interleave(counts)]] = True
    return mask


def hold_out(train: Split, share: float, seed: int) -> tuple[Split, Split | None]:
    """Split train into (training set, held-out set), stratified by class; with share 0 the latter is None.

    Both parts keep the order of train. The same labels, share and seed always give the same split.
    """
    check_share(share)
    if share == 0:
        return train, None
    held = stratified_mask(train.labels, share, seed)
    if not held.any():
        raise RecipeError(f"holdout is {share}, but no class of the train set has a second image: set holdout to 0.")
    return train.take((~held).nonzero().flatten()), train.take(held.nonzero().flatten())


@dataclass(frozen=True, eq=False)
class Split:
    """images: uint8 [N, C, H, W], 0..255, in memory or in files; labels: int64 [N], positions in Dataset.classes.

    names: image names within their classes, independent of the data set's location. marks: uint8 [N, MARK_BYTES], see
    marks.py. Both are empty if a user's loader gives none; load_data then uses positions, and marks of its own.
    """

    images: Tensor | ImageFiles
    labels: Tensor
    names: tuple[str, ...] = ()
    marks: Tensor = field(default_factory=lambda: torch.empty(0, MARK_BYTES, dtype=torch.uint8))

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> Split:
        """The images at these indices, int64 [n], in this order."""
        if not self.names:
            return Split(self.images[indices], self.labels[indices])
        names = tuple(self.names[index] for index in indices.tolist())
        return Split(self.images[indices], self.labels[indices], names, self.marks[indices])


@dataclass(frozen=True, eq=False)
class Dataset:
    """A whole data set. mean and std: one per channel, in units of pixel / 255. covers: what marks are from."""

    train: Split
    holdout: Split | None
    test: Split
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    covers: Covers = "contents"

    def close(self) -> None:
        """Stop the worker processes, if any."""
        for split in (self.train, self.holdout, self.test):
            if split is not None and isinstance(split.images, ImageFiles):
                split.images.close()
