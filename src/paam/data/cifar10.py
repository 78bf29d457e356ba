"""CIFAR-10 from either official layout: the binary one (preferred) or the Python one.

Binary: per image one label byte and 3,072 pixel bytes in the order channel, row, column. Python: pickled
dicts with the same pixel order under b'data' and the labels under b'labels', read by `safe_unpickle`, which
executes nothing. Class names and sizes are fixed by the data set, so the meta files are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paam.data.dataset import IMAGENET_MEAN, IMAGENET_STD, Dataset, Split, check_native_size
from paam.data.marks import mark_pixels
from paam.data.registry import register_dataset
from paam.data.safe_unpickle import safe_load
from paam.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGES_PER_FILE = 10_000
PIXELS_PER_IMAGE = 3 * 32 * 32
BINARY_FILE_BYTES = IMAGES_PER_FILE * (1 + PIXELS_PER_IMAGE)
TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCHES = ("test_batch",)

# labels [10000] of any integer type, pixels uint8 [10000, 3072]
Batch = tuple[NDArray[Any], NDArray[np.uint8]]


def load_cifar10(directory: str | Path | None, image_size: int | None = None) -> Dataset:
    """Train uint8 [50000, 3, 32, 32], test uint8 [10000, 3, 32, 32], in the order of the files; no holdout.

    directory contains the batch files, or the official folder with them. mean and std are ImageNet's, because the
    public CIFAR-10 checkpoints were trained with those.
    """
    check_native_size("cifar10", image_size, native=32)
    layout, folder = _locate(directory)
    return Dataset(
        train=_read_split(layout, folder, TRAIN_BATCHES),
        holdout=None,
        test=_read_split(layout, folder, TEST_BATCHES, first=len(TRAIN_BATCHES) * IMAGES_PER_FILE),
        classes=CLASSES,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def _locate(directory: str | Path | None) -> tuple[Layout, Path]:
    """The first complete layout, binary before Python; else an error about the first incomplete one."""
    if directory is None:
        raise DataError(
            f"CIFAR-10 is not bundled with paam: unpack the official archive {BINARY.archive} and give its "
            "folder with --data DIR."
        )
    root = Path(directory)
    if not root.is_dir():
        raise DataError(
            f"There is no directory {root}. Unpack the official archive {BINARY.archive} or {PYTHON.archive} "
            "and give its folder with --data DIR."
        )
    missing = []
    for layout in (BINARY, PYTHON):
        for folder in (root, root / layout.folder):
            absent = [name for name in layout.files() if not (folder / name).is_file()]
            if not absent:
                return layout, folder
            if (folder != root and folder.is_dir()) or len(absent) < len(layout.files()):
                missing.append((layout, folder, absent[0]))
    if not missing:
        raise DataError(
            f"{root} does not contain CIFAR-10: neither {BINARY.folder} (from {BINARY.archive}) nor {PYTHON.folder} "
            f"(from {PYTHON.archive}). Unpack either official archive and give its folder with --data DIR."
        )
    layout, folder, name = missing[0]
    raise DataError(
        f"{name} ({layout.size}) is missing from {folder}. Unpack the official archive {layout.archive} "
        "again and give its folder with --data DIR."
    )


def _read_split(layout: Layout, folder: Path, batches: tuple[str, ...], first: int = 0) -> Split:
    """Read batch files one by one into one tensor, so that peak memory is the tensor plus one file.

    An image's name is its position in the data set, in either layout, counted from ``first``.
    """
    images = np.empty((len(batches), IMAGES_PER_FILE, PIXELS_PER_IMAGE), dtype=np.uint8)
    labels = np.empty((len(batches), IMAGES_PER_FILE), dtype=np.int64)
    for index, batch in enumerate(batches):
        path = folder / (batch + layout.suffix)
        batch_labels, images[index] = layout.read(path)
        wrong = np.flatnonzero((batch_labels < 0) | (batch_labels >= len(CLASSES)))
        if wrong.size:
            record = wrong[0]
            raise DataError(
                f"{path} is corrupt: record {record} (counted from 0) has label {batch_labels[record]}, not "
                f"one of 0 to 9. Unpack the official archive {layout.archive} again."
            )
        labels[index] = batch_labels
    pixels = torch.from_numpy(images).view(-1, 3, 32, 32)
    names = tuple(map(str, range(first, first + len(pixels))))
    return Split(pixels, torch.from_numpy(labels).view(-1), names, mark_pixels(pixels))


def _read_binary(path: Path) -> Batch:
    """Labels uint8 [10000] and pixels uint8 [10000, 3072] of one file of the binary layout."""
    found = path.stat().st_size
    if found != BINARY_FILE_BYTES:
        raise DataError(
            f"{path} has {found:,} bytes, not {BINARY_FILE_BYTES:,}. Unpack the official archive "
            f"{BINARY.archive} again."
        )
    records = np.fromfile(path, dtype=np.uint8, count=BINARY_FILE_BYTES).reshape(IMAGES_PER_FILE, -1)
    return records[:, 0], records[:, 1:]


def _read_python(path: Path) -> Batch:
    """Integer labels [10000] and pixels uint8 [10000, 3072] of one file of the Python layout."""
    content = safe_load(path)
    # files rewritten by Python 3 may have str keys instead of bytes
    pixels = content.get(b"data", content.get("data"))
    labels = content.get(b"labels", content.get("labels"))
    # integers only: numpy string arrays are as wide as their longest item, so a hostile list could exhaust memory
    if isinstance(labels, list) and all(isinstance(label, int) for label in labels):
        labels = np.array(labels, dtype=np.int64)
    expected = (IMAGES_PER_FILE, PIXELS_PER_IMAGE)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape != expected:
        raise DataError(
            f"{path} has no b'data' of type uint8 and shape {expected}, so it is not a CIFAR-10 batch. Unpack "
            f"the official archive {PYTHON.archive} again."
        )
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iu" or labels.shape != expected[:1]:
        raise DataError(
            f"{path} has no b'labels' of {IMAGES_PER_FILE:,} integers, so it is not a CIFAR-10 batch. Unpack "
            f"the official archive {PYTHON.archive} again."
        )
    return labels, pixels


@dataclass(frozen=True)
class Layout:
    """One official archive: its name, its folder, and suffix, size and reader of its batch files."""

    archive: str
    folder: str
    suffix: str
    size: str
    read: Callable[[Path], Batch]

    def files(self) -> list[str]:
        return [batch + self.suffix for batch in (*TRAIN_BATCHES, *TEST_BATCHES)]


BINARY = Layout(
    archive="cifar-10-binary.tar.gz",
    folder="cifar-10-batches-bin",
    suffix=".bin",
    size=f"{BINARY_FILE_BYTES:,} bytes",
    read=_read_binary,
)
PYTHON = Layout(
    archive="cifar-10-python.tar.gz",
    folder="cifar-10-batches-py",
    suffix="",
    size="about 31,035,000 bytes",
    read=_read_python,
)


register_dataset("cifar10", lambda wanted: load_cifar10(wanted.directory, wanted.image_size))
