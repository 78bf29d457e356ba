"""Checkpoints: tensors and a JSON header in one safetensors file per position, the last two kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paam.errors import ArtifactError
from paam.files import write_atomically

FORMAT = "paam-checkpoint"
VERSION = "1"
KEPT = 2


def write_checkpoint(directory: Path, epoch: int, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Save the state before ``epoch``."""
    directory.mkdir(parents=True, exist_ok=True)
    metadata = {"format": FORMAT, "version": VERSION, "header": json.dumps({"epoch": epoch, **header})}
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    write_atomically(directory / f"epoch-{epoch:06d}.safetensors", safetensors.torch.save(plain, metadata))
    for old in _newest_first(directory)[KEPT:]:
        old.unlink(missing_ok=True)


def read_newest_checkpoint(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Tensors and header of the newest whole checkpoint; None when there is none at all."""
    problems = []
    for path in _newest_first(directory):
        try:
            return _read(path)
        except (ArtifactError, SafetensorError, ValueError, KeyError, OSError) as error:
            problems.append(f"{path.name}: {error}")
    if problems:
        raise ArtifactError(f"No checkpoint in {directory} can be read: {'; '.join(problems)}. Start with --overwrite.")
    return None


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
            raise ArtifactError("not a checkpoint of this version of paam")
        header: dict[str, Any] = json.loads(metadata["header"])
        return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118 - not a mapping


def _newest_first(directory: Path) -> list[Path]:
    return sorted(directory.glob("epoch-*.safetensors"), reverse=True)
