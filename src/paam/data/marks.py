"""Fingerprints of images: a hash of the content, or the file size if there is too much to read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from paam.data.stream import usual_workers
from paam.errors import DataError, reason
from paam.files.reading import LARGEST_IMAGE, open_to_read

MARK_BYTES = 16
CONTENTS_UP_TO = 4 << 30
"""Maximum total bytes of image files to hash; for a larger data set, file sizes are used."""

Covers = Literal["contents", "sizes"]
"""What the marks of a data set are computed from."""

_hash = partial(hashlib.blake2b, digest_size=MARK_BYTES)


def mark_pixels(images: Tensor) -> Tensor:
    """Marks uint8 [N, MARK_BYTES] of the pixels of images in memory."""
    rows = images.flatten(1).contiguous().numpy()
    return _stack([_hash(row).digest() for row in rows])


def mark_files(paths: Sequence[Path]) -> tuple[Tensor, Covers]:
    """Marks uint8 [N, MARK_BYTES] of image files, from their bytes on disk."""
    sizes = [_size_of(path) for path in paths]
    if sum(sizes) > CONTENTS_UP_TO:
        return _stack([size.to_bytes(MARK_BYTES, "big") for size in sizes]), "sizes"
    with ThreadPoolExecutor(usual_workers()) as pool:  # reading and hashing release the GIL
        return _stack(list(pool.map(_mark_file, paths))), "contents"


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}.") from error


def _mark_file(path: Path) -> bytes:
    try:
        with open_to_read(path, LARGEST_IMAGE) as file:
            found = _hash()
            while block := file.read(1 << 20):
                found.update(block)
            return found.digest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}.") from error


def _stack(marks: list[bytes]) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"".join(marks), np.uint8).reshape(-1, MARK_BYTES).copy())
