"""Files written whole or not at all, and tensor files that know what they are: safetensors with a JSON header."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paam.errors import ArtifactError

VERSION = 1
_HEADER = "paam"


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside the target, flush to disk, then rename over it: readers see the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ArtifactError(f"{path} cannot be written: {error.strerror or error}.") from error


def read_text(path: Path, what: str) -> str:
    """A text file in UTF-8; ``what`` names it in messages."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{what} {path} cannot be read: {error}.") from error


def parse_json(text: str) -> Any:
    """json.loads whose every failure is a ValueError, deep nesting included."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_tensors(path: Path, kind: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors with a header of plain data. The same content gives the same bytes."""
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    body = json.dumps({"kind": kind, "version": VERSION, **header}, sort_keys=True)
    # One key: safetensors writes several in no fixed order.
    metadata = {_HEADER: f"{_checksum(body, plain):08x} {body}"}
    write_atomically(path, safetensors.torch.save(plain, metadata))


def read_tensors(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a file that :func:`write_tensors` wrote as this kind; anything else is refused."""
    try:
        with safe_open(path, framework="pt") as file:
            checksum, _, body = (file.metadata() or {}).get(_HEADER, "").partition(" ")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        header = parse_json(body or "null")
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}.") from error
    if not isinstance(header, dict) or header.get("kind") != kind:
        raise ArtifactError(f"{path} is not a paam {kind} file.")
    if header.get("version") != VERSION:
        raise ArtifactError(f"{path} has version {header.get('version')}; this paam reads version {VERSION}.")
    if checksum != f"{_checksum(body, tensors):08x}":
        raise ArtifactError(f"{path} is damaged: its content does not match its checksum.")
    return tensors, header


def _checksum(body: str, tensors: Mapping[str, Tensor]) -> int:
    total = zlib.crc32(body.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        total = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        if tensor.numel():
            total = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, total)
    return total
