"""Tensor files: safetensors with a JSON header and a checksum."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from paam.errors import ArtifactError, DamagedError, one_line, reason
from paam.files.durable import write_atomically
from paam.files.reading import LARGEST_TENSORS, check_name, parse_json, read_bytes

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
"""safetensors' names of dtypes."""


def write_tensors(path: Path, kind: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors with a header of plain data. The same content gives the same bytes.

    The format is safetensors', serialized here so that large tensors are written without a copy and without holding
    the GIL.
    """
    check_name(path)
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    unknown = [f"'{name}' ({tensor.dtype})" for name, tensor in plain.items() if tensor.dtype not in _DTYPES]
    if unknown:
        raise ArtifactError(f"{path} cannot be written: safetensors does not support the dtype of {unknown[0]}.")
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
    """Read tensors and header of a file that :func:`write_tensors` wrote as this kind.

    Raises DamagedError for invalid content, and ArtifactError for a file that cannot be read right now or by this
    version, whose content may be valid.
    """
    try:
        content = read_bytes(path, LARGEST_TENSORS)
    except (OSError, MemoryError) as error:
        why = reason(error) if isinstance(error, OSError) else "there is not enough memory"
        raise ArtifactError(f"{path} cannot be read: {why}.") from error
    try:
        tensors = safetensors.torch.load(content)
        index = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")].decode())
        checksum, _, body = index.get("__metadata__", {}).get(_HEADER, "").partition(" ")
        header = parse_json(body or "null")
    except (SafetensorError, LookupError, ValueError, RuntimeError) as error:
        raise DamagedError(f"{path} is not a valid tensor file: {one_line(error)}.") from error
    if not isinstance(header, dict) or header.get("kind") != kind:
        raise DamagedError(f"{path} is not a paam {kind} file.")
    if checksum != f"{_checksum(body, tensors):08x}":
        raise DamagedError(f"{path} is corrupt: its content does not match its checksum.")
    if header.get("version") != VERSION:
        raise ArtifactError(f"{path} has version {header.get('version')}; this paam reads version {VERSION}.")
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
