"""Data sets as uint8 tensors: bundled digits, CIFAR-10 and image folders, in memory or streamed from files.

Each module of this package that has a data set registers it; all are imported here.
Also augmentation (augment.py) and streaming for data sets that do not fit into memory (stream.py).
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from dataclasses import replace
from pathlib import Path

from paam.config.settings import Augmentation
from paam.data.cifar10 import load_cifar10
from paam.data.dataset import Dataset, Split, check_share, hold_out
from paam.data.digits import load_digits
from paam.data.folder import load_folder
from paam.data.marks import Covers, mark_files, mark_pixels
from paam.data.registry import DATASETS, Wanted, check_dataset, register_dataset
from paam.data.stream import ImageFiles
from paam.errors import DataError

__all__ = [
    "DATASETS",
    "Augmentation",
    "Dataset",
    "Split",
    "Wanted",
    "check_dataset",
    "hold_out",
    "load_cifar10",
    "load_data",
    "load_digits",
    "load_folder",
    "register_dataset",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def load_data(
    name: str,
    *,
    directory: str | Path | None = None,
    image_size: int | None = None,
    holdout: float = 0.0,
    seed: int = 0,
    memory: float = math.inf,
    workers: int | None = None,
) -> Dataset:
    """Load a data set by name and hold out a share of its training images.

    directory: location of "cifar10" and "folder"; "digits" is bundled and takes none. image_size (pixels): required
    by "folder"; None or the native size for the others. holdout: share of the train set, 0 <= holdout < 1. seed:
    chooses which images are held out, and the test set if a folder has none. A folder whose images take more than
    ``memory`` bytes is streamed by ``workers`` processes.
    """
    check_dataset(name)
    check_share(holdout)
    try:
        dataset = DATASETS[name](Wanted(directory, image_size, seed, memory, workers))
    except OSError as error:
        raise DataError(f"Cannot read {error.filename}: {error.strerror}.") from error
    dataset = _with_names(dataset)
    train, held = hold_out(dataset.train, holdout, seed)
    return replace(dataset, train=train, holdout=held)


def _with_names(data: Dataset) -> Dataset:
    """Add image names and marks if a user's loader gives none: positions, and marks of pixels or files."""
    train, of_train = _named(data.train, "train")
    test, of_test = _named(data.test, "test")
    return replace(data, train=train, test=test, covers="sizes" if "sizes" in (of_train, of_test) else data.covers)


def _named(split: Split, half: str) -> tuple[Split, Covers | None]:
    """A split with names and marks, and what those are made of where they had to be made."""
    if split.names:
        return split, None
    covers: Covers = "contents"
    if isinstance(split.images, ImageFiles):
        marks, covers = mark_files(split.images.files)
    else:
        marks = mark_pixels(split.images)
    return replace(split, names=tuple(f"{half}/{place}" for place in range(len(split))), marks=marks), covers
