"""Data sets as uint8 tensors: shipped digits, CIFAR-10, and a user's own image folders, in memory or from their files.

A module of this package that holds a data set registers it; all are imported here.
Also what is done to training images (augment.py) and how images are read that memory cannot hold (stream.py).
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
from paam.data.registry import DATASETS, Wanted, check_dataset, register_dataset
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

    directory is where "cifar10" and "folder" lie; "digits" is shipped and has none. image_size (pixels) is
    required by "folder", and for the others is None or their own size. holdout is a share of the train set,
    0 <= holdout < 1; seed chooses which images are held out, and the test set where a folder has none.
    A folder whose images take more than ``memory`` bytes is read as it is needed, by ``workers`` processes.
    """
    check_dataset(name)
    check_share(holdout)
    try:
        dataset = DATASETS[name](Wanted(directory, image_size, seed, memory, workers))
    except OSError as error:
        raise DataError(f"Cannot read {error.filename}: {error.strerror}.") from error
    train, held = hold_out(dataset.train, holdout, seed)
    return replace(dataset, train=train, holdout=held)
