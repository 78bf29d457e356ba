"""The manifest of a data set: names, labels, marks and split, without pixels; and one hash of it all."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from paam.data.dataset import Dataset, Split
from paam.data.marks import MARK_BYTES, Covers
from paam.errors import ArtifactError
from paam.files.durable import make_directory
from paam.files.tensors import read_tensors, write_tensors

KIND = "data manifest"


class Listed(NamedTuple):
    """The images of one part: names within their classes, labels int64 [N], marks uint8 [N, MARK_BYTES]."""

    names: tuple[str, ...]
    labels: Tensor
    marks: Tensor


@dataclass(frozen=True, eq=False)
class Manifest:
    """``parts``: "train", "holdout" where there is one, and "test"."""

    covers: Covers
    classes: tuple[str, ...]
    parts: Mapping[str, Listed]

    @cached_property
    def digest(self) -> str:
        """A hexadecimal hash of the manifest; independent of the data's location."""
        whole = hashlib.blake2b(json.dumps([self.covers, self.classes]).encode(), digest_size=16)
        for name, part in self.parts.items():
            names = _joined(part.names)
            whole.update(f"{name} {len(part.names)} {len(names)} ".encode())
            for content in (names, part.labels.numpy().tobytes(), part.marks.numpy().tobytes()):
                whole.update(content)
        return whole.hexdigest()


def splits(data: Dataset) -> dict[str, Split]:
    """The parts of a data set by name."""
    parts = {"train": data.train, "holdout": data.holdout, "test": data.test}
    return {name: split for name, split in parts.items() if split is not None}


def manifest_of(data: Dataset) -> Manifest:
    parts = {name: Listed(split.names, split.labels, split.marks) for name, split in splits(data).items()}
    return Manifest(data.covers, data.classes, parts)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Save a manifest in a folder under its hash, unless it exists already."""
    path = _path(folder, manifest.digest)
    if path.exists():
        return
    make_directory(folder)
    tensors = {}
    for name, part in manifest.parts.items():
        tensors[f"{name}/names"] = torch.frombuffer(bytearray(_joined(part.names)), dtype=torch.uint8)
        tensors[f"{name}/labels"] = part.labels.int()
        tensors[f"{name}/marks"] = part.marks
    header = {"covers": manifest.covers, "classes": manifest.classes, "parts": list(manifest.parts)}
    write_tensors(path, KIND, tensors, header)


def read_manifest(folder: Path, digest: str) -> Manifest:
    path = _path(folder, digest)
    try:
        tensors, header = read_tensors(path, KIND)
        parts = {
            name: Listed(_parted(tensors[f"{name}/names"]), tensors[f"{name}/labels"].long(), tensors[f"{name}/marks"])
            for name in header["parts"]
        }
        manifest = Manifest(header["covers"], tuple(header["classes"]), parts)
        if manifest.digest != digest:
            raise ArtifactError(f"{path} is corrupt: its content does not match its name.")
        _check(manifest)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ArtifactError(f"{path} is corrupt: it is not a data manifest.") from error
    return manifest


def _check(manifest: Manifest) -> None:
    """Raise ValueError unless the parts are valid and complete, and their labels are classes."""
    if not {"train", "test"} <= set(manifest.parts) <= {"train", "holdout", "test"}:
        raise ValueError("wrong parts")
    for part in manifest.parts.values():
        shapes = [part.labels.shape, part.marks.shape] == [(len(part.names),), (len(part.names), MARK_BYTES)]
        if not shapes or not all(0 <= label < len(manifest.classes) for label in set(part.labels.tolist())):
            raise ValueError("wrong sizes")


def manifests(folder: Path) -> list[Path]:
    """The manifest files of a folder."""
    return sorted(folder.glob(_path(folder, "*").name))


def is_manifest(name: str) -> bool:
    return re.fullmatch(r"data-[0-9a-f]{32}\.safetensors", name) is not None


def _path(folder: Path, digest: str) -> Path:
    return folder / f"data-{digest}.safetensors"


def _joined(names: tuple[str, ...]) -> bytes:
    """Join file names, which may not be UTF-8 but never contain a zero byte."""
    return os.fsencode("\0".join(names))


def _parted(names: Tensor) -> tuple[str, ...]:
    return tuple(os.fsdecode(names.numpy().tobytes()).split("\0"))
