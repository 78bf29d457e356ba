"""Files written whole or not at all, and tensor files that know what they are: safetensors with a JSON header."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paam.errors import ArtifactError, reason

VERSION = 1
_HEADER = "paam"
_DTYPES = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls the types of tensors."""


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Write beside the target, flush to disk, then rename over it: readers see the old file or the new one."""
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _flush_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ArtifactError(f"{path} cannot be written: {reason(error)}.") from error


def temporary_name(path: Path) -> Path:
    """Where a file stands while it is written; a killed process leaves it there."""
    return path.with_name(f".{path.name}.tmp")


def _flush_directory(directory: Path) -> None:
    """Let a rename outlive a power cut, where directories can be flushed at all."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_name(path: Path) -> None:
    """Refuse a path that is not UTF-8: safetensors could not open again what was written there."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ArtifactError(
            f"{str(path)!a} is not UTF-8, but weights can only be read from such a path; choose another."
        ) from error


def read_text(path: Path, what: str) -> str:
    """A text file in UTF-8; ``what`` names it in messages."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{what} {path} cannot be read: {reason(error)}.") from error


def parse_json(text: str) -> Any:
    """json.loads whose every failure is a ValueError, deep nesting included."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_tensors(path: Path, kind: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors with a header of plain data. The same content gives the same bytes.

    The format is safetensors', put together here so that large tensors go from memory to the file uncopied, without
    holding up other threads.
    """
    check_name(path)
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    unknown = [f"'{name}' ({tensor.dtype})" for name, tensor in plain.items() if tensor.dtype not in _DTYPES]
    if unknown:
        raise ArtifactError(f"{path} cannot be written: {unknown[0]} is of a type that safetensors files do not have.")
    body = json.dumps({"kind": kind, "version": VERSION, **header}, sort_keys=True)
    entries: dict[str, Any] = {"__metadata__": {_HEADER: f"{_checksum(body, plain):08x} {body}"}}
    order = sorted(plain, key=lambda name: (-plain[name].element_size(), name))  # keeps every tensor aligned
    end = 0
    for name in order:
        start, end = end, end + plain[name].nbytes
        entries[name] = {
            "dtype": _DTYPES[plain[name].dtype],
            "shape": list(plain[name].shape),
            "data_offsets": [start, end],
        }
    index = json.dumps(entries).encode()
    index += b" " * (-len(index) % 8)
    write_atomically(path, len(index).to_bytes(8, "little"), index, *(_content(plain[name]) for name in order))


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
        total = zlib.crc32(_content(tensor), total)
    return total


def _content(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, uncopied."""
    return tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
