"""Data sets as uint8 tensors: shipped digits, CIFAR-10, and a user's own image folders, in memory or from their files.

Also what is done to training images (augment.py) and how images are read that memory cannot hold (stream.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from paam.data.augment import Augmentation
from paam.data.cifar10 import load_cifar10
from paam.data.dataset import Dataset, Split, check_share, hold_out
from paam.data.digits import load_digits
from paam.data.folder import load_folder
from paam.errors import DataError, RecipeError, nearest

__all__ = [
    "DATASETS",
    "Augmentation",
    "Dataset",
    "Split",
    "hold_out",
    "load_cifar10",
    "load_data",
    "load_digits",
    "load_folder",
]

DATASETS = ("digits", "cifar10", "folder")


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

    directory is where "cifar10" and "folder" lie; "digits" is shipped and has none. image_size (pixels) is
    required by "folder", and for the others is None or their own size. holdout is a share of the train set,
    0 <= holdout < 1; seed chooses which images are held out, and the test set where a folder has none.
    A folder whose images take more than ``memory`` bytes is read as it is needed, by ``workers`` processes.
    """
    if name not in DATASETS:
        raise RecipeError(f"Unknown dataset '{name}'.{nearest(name, DATASETS)}")
    check_share(holdout)
    if name == "digits" and directory is not None:
        raise RecipeError("The digits come with paam and lie in no folder; leave out --data (data.directory).")
    try:
        if name == "digits":
            dataset = load_digits(image_size)
        elif name == "cifar10":
            dataset = load_cifar10(directory, image_size)
        else:
            dataset = load_folder(directory, image_size, seed, memory=memory, workers=workers)
    except OSError as error:
        raise DataError(f"Cannot read {error.filename}: {error.strerror}.") from error
    train, held = hold_out(dataset.train, holdout, seed)
    return replace(dataset, train=train, holdout=held)
