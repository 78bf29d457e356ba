"""Checkpoints: tensors and a header in one file per position, the last two kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from paam.errors import ArtifactError
from paam.files import read_tensors, write_tensors

KIND = "checkpoint"
KEPT = 2


def write_checkpoint(directory: Path, epoch: int, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Save the state before ``epoch``."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(f"The directory {directory} cannot be made: {error.strerror}.") from error
    write_tensors(directory / f"epoch-{epoch:06d}.safetensors", KIND, tensors, {"epoch": epoch, **header})
    for old in checkpoints(directory)[KEPT:]:
        old.unlink(missing_ok=True)


def read_newest_checkpoint(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Tensors and header of the newest whole checkpoint; None when there is none at all."""
    problems = []
    for path in checkpoints(directory):
        try:
            tensors, header = read_tensors(path, KIND)
        except ArtifactError as error:
            problems.append(str(error))
            continue
        if header.get("epoch") == _epoch(path):
            return tensors, header
        problems.append(f"{path} does not belong to its name")
    if problems:
        raise ArtifactError(f"No checkpoint can be used. {' '.join(problems)} Start over with --overwrite.")
    return None


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoint files of a directory, newest first."""
    return sorted((p for p in directory.glob("epoch-*.safetensors") if _epoch(p) >= 0), key=_epoch, reverse=True)


def _epoch(path: Path) -> int:
    digits = path.name.removeprefix("epoch-").removesuffix(".safetensors")
    return int(digits) if digits.isascii() and digits.isdigit() else -1
