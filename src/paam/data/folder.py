"""Image folders: one folder per class, decoded once into memory as RGB squares.

Either `DIR/train/<class>/*` with `DIR/test/<class>/*` (or `val` instead of `test`), or `DIR/<class>/*`, of which
20 % of each class, chosen by the seed, become the test set. Names are sorted, so the order never depends on
the file system. Hidden files and files without an image extension are ignored.
"""

from __future__ import annotations

import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from paam.data.dataset import IMAGENET_MEAN, IMAGENET_STD, Dataset, Split, stratified_mask
from paam.data.marks import mark_files
from paam.data.registry import Wanted, register_dataset
from paam.data.stream import ImageFiles, usual_workers
from paam.errors import DataError, RecipeError
from paam.files.reading import LARGEST_IMAGE, open_to_read

EXTENSIONS = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"))
# Pillow detects formats by content; an allow-list keeps, say, PostScript in a .png away from its interpreter
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF")
MAX_PIXELS = 50_000_000
TEST_SHARE = 0.2


class Entry(NamedTuple):
    """``label``: index of its class. ``name``: within its class, independent of the data set's location."""

    path: Path
    label: int
    name: str


def load_folder(
    directory: str | Path | None,
    image_size: int | None,
    seed: int = 0,
    *,
    memory: float = math.inf,
    workers: int | None = None,
) -> Dataset:
    """Train and test images uint8 [N, 3, image_size, image_size] in sorted order; no holdout; ImageNet mean and std.

    Each image is converted to RGB (transparency is dropped, 16-bit grey divided by 256, EXIF rotation ignored),
    scaled so that its shorter side is image_size pixels, and center-cropped.
    Images that would take more than ``memory`` bytes are streamed from disk by ``workers`` processes.
    """
    if directory is None:
        raise DataError("The dataset 'folder' needs a directory with one folder per class: give it with --data DIR.")
    if image_size is None or image_size < 1:
        raise RecipeError(
            f"The dataset 'folder' needs image_size, the side of the network's square input in pixels, such "
            f"as 64 (got {image_size})."
        )
    root = Path(directory)
    if not root.is_dir():
        raise DataError(f"There is no directory {root}. Give one that has a folder per class with --data DIR.")
    classes, train, test = _list_both(root, seed)
    marks, covers = mark_files([entry.path for entry in (*train, *test)])
    streams = (len(train) + len(test)) * 3 * image_size**2 > memory
    number = usual_workers() if workers is None else workers

    def split(entries: list[Entry], marks: Tensor) -> Split:
        paths = [entry.path for entry in entries]
        images = ImageFiles(paths, image_size, decode, number) if streams else _decode_all(paths, image_size)
        return Split(images, _labels(entries), tuple(entry.name for entry in entries), marks)

    parts = split(train, marks[: len(train)]), None, split(test, marks[len(train) :])
    return Dataset(*parts, classes, IMAGENET_MEAN, IMAGENET_STD, covers)


def _labels(entries: list[Entry]) -> Tensor:
    return torch.tensor([entry.label for entry in entries])


def _list_both(root: Path, seed: int) -> tuple[tuple[str, ...], list[Entry], list[Entry]]:
    """Class names, training files and test files of either layout."""
    # a folder `train` without subfolders is a class named train, not a split
    if not _folders(root / "train"):
        classes, entries = _list_classes(root)
        labels = _labels(entries)
        for name, count in zip(classes, torch.bincount(labels).tolist(), strict=True):
            if count < 2:
                raise DataError(
                    f"{root / name} has a single image, but needs one to train on and one to test with. "
                    "Add images, or lay them out as train/<class> and test/<class>."
                )
        in_test = stratified_mask(labels, TEST_SHARE, seed).tolist()
        train = [entry for entry, drawn in zip(entries, in_test, strict=True) if not drawn]
        return classes, train, [entry for entry, drawn in zip(entries, in_test, strict=True) if drawn]
    test_root = root / "test" if (root / "test").is_dir() else root / "val"
    if not test_root.is_dir():
        raise DataError(f"{root} has a folder train, but neither test nor val. Add one with the same class folders.")
    classes, train = _list_classes(root / "train", "train/")
    test_classes, test = _list_classes(test_root, "test/")
    if classes != test_classes:
        differing = ", ".join(sorted(set(classes) ^ set(test_classes)))
        raise DataError(
            f"The class folders of {root / 'train'} and {test_root} differ: only one of them has {differing}."
        )
    return classes, train, test


def _list_classes(root: Path, half: str = "") -> tuple[tuple[str, ...], list[Entry]]:
    """Sorted class names, and the image files of all classes, sorted within each; names start with ``half``."""
    folders = _folders(root)
    if len(folders) < 2:
        raise DataError(f"{root} has {len(folders)} class folders, but at least two are needed.")
    entries: list[Entry] = []
    for label, folder in enumerate(folders):
        files = sorted(
            path
            for path in folder.iterdir()
            if path.suffix.lower() in EXTENSIONS and not path.name.startswith(".") and path.is_file()
        )
        if not files:
            raise DataError(
                f"The class folder {folder} has no images: add some or remove it. "
                f"Image extensions are {' '.join(sorted(EXTENSIONS))}."
            )
        entries.extend(Entry(path, label, f"{half}{path.name}") for path in files)
    return tuple(folder.name for folder in folders), entries


def _folders(root: Path) -> list[Path]:
    """The visible folders in root, sorted; empty if root does not exist."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _decode_all(paths: list[Path], side: int) -> Tensor:
    """Decode into one tensor, in threads, since Pillow releases the GIL; errors are raised in order."""
    images = np.empty((len(paths), 3, side, side), dtype=np.uint8)

    def fill(index: int) -> None:
        images[index] = _decode(paths[index], side)

    # Pillow warns about odd metadata and large headers; _decode refuses what matters
    with warnings.catch_warnings(), ThreadPoolExecutor(usual_workers()) as pool:
        warnings.simplefilter("ignore")
        for _ in pool.map(fill, range(len(paths))):
            pass
    return torch.from_numpy(images)


def decode(path: Path, side: int) -> Tensor:
    """One image file as uint8 [3, side, side], without Pillow's warnings about what we accept."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(_decode(path, side).copy())


def _decode(path: Path, side: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """One image file as uint8 [3, side, side]."""
    try:
        with open_to_read(path, LARGEST_IMAGE) as file, Image.open(file, formats=FORMATS) as image:
            width, height = image.size
            if width * height <= MAX_PIXELS:
                short = min(width, height)
                left, top = (width - short) // 2, (height - short) // 2
                # scale the centre square only: scaling a strip of 1 x 50,000,000 would exhaust memory
                square = _to_rgb(image).resize(
                    (side, side), Image.Resampling.BILINEAR, box=(left, top, left + short, top + short)
                )
                return np.asarray(square).transpose(2, 0, 1)
    except Image.DecompressionBombError as error:
        raise DataError(f"{path} has too many pixels ({error}). Scale it down or remove it.") from error
    except UnidentifiedImageError as error:
        raise DataError(
            f"{path} cannot be read as an image (none of {', '.join(FORMATS)}). Replace or remove it."
        ) from error
    # on corrupt files Pillow's decoders raise nearly anything, SyntaxError and struct.error included
    except Exception as error:
        raise DataError(f"{path} cannot be read as an image ({error}). Replace or remove it.") from error
    raise DataError(
        f"{path} has {width:,} x {height:,} pixels, over the limit of {MAX_PIXELS:,}. Scale it down or remove it."
    )


def _to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB without Pillow's clipping of 16-bit grey levels."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return Image.fromarray((np.asarray(image) // 256).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"unsupported Pillow mode {image.mode}, which has no defined range")
    return image.convert("RGB")


def _wanted(wanted: Wanted) -> Dataset:
    return load_folder(wanted.directory, wanted.image_size, wanted.seed, memory=wanted.memory, workers=wanted.workers)


register_dataset("folder", _wanted)
