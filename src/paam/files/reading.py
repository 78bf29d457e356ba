"""Files that are read may be anybody's: regular ones only, as large and as deep as their kind can be.

A FIFO would wait for a writer for ever, and a device may never end. What is read whole has a limit of its own.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import stat
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from paam.errors import ArtifactError, reason

LARGEST_TENSORS = 1 << 36
"""Bytes of a file of weights or of a checkpoint."""
LARGEST_IMAGE = 1 << 30
BLOCK = 1 << 16
"""Bytes that are asked for at a time of a file that does not say how long it is."""
DEEPEST = 200
"""Levels of JSON: a plan has one for each time that its network was pruned before."""


def open_to_read(path: Path, limit: int) -> BinaryIO:
    """Open a regular file of up to ``limit`` bytes for reading; anything else is an OSError that says what it is."""
    check_regular(path, limit)  # first, since opening a device may already do something
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _check(os.fstat(descriptor), path, limit)  # it may have been replaced meanwhile
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def check_regular(path: Path, limit: int) -> None:
    """Refuse with an OSError what :func:`open_to_read` would refuse; for libraries that open files themselves."""
    _check(path.stat(), path, limit)


def _check(found: os.stat_result, path: Path, limit: int) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file in it", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if found.st_size > limit:
        raise _too_large(path, limit, found.st_size)


def _too_large(path: Path, limit: int, size: int) -> OSError:
    return OSError(errno.EFBIG, f"it has {size:,} bytes, and {limit:,} is the most that paam reads of one", str(path))


def read_bytes(path: Path, limit: int) -> bytes:
    """A whole file; it must not have grown beyond ``limit`` bytes while it was read either."""
    parts: list[bytes] = []
    length = 0
    with open_to_read(path, limit) as file:
        # Asked for as much as there may be, Python would first take that much memory.
        most = max(os.fstat(file.fileno()).st_size + 1, BLOCK)
        try:
            while part := os.read(file.fileno(), most):
                parts.append(part)
                if (length := length + len(part)) > limit:
                    raise _too_large(path, limit, length)
        except BlockingIOError as error:  # of Linux's own: some look regular and wait for news
            raise BlockingIOError(errno.EAGAIN, "nothing can be read of it", str(path)) from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_compressed(path: Path, limit: int) -> bytes:
    """What a gzip file holds, up to ``limit`` bytes: a small file may unpack to any size."""
    try:
        with open_to_read(path, limit) as file, gzip.open(file) as unpacked:
            content = unpacked.read(limit + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(errno.EINVAL, "it is not a complete gzip file", str(path)) from error
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it unpacks to more than {limit:,} bytes, the most that paam reads", str(path))
    return content


def read_text(path: Path, what: str, limit: int) -> str:
    """A text file in UTF-8; ``what`` names it in messages."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{what} {path} cannot be read: {reason(error)}.") from error


_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"?')
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def is_deep(text: str) -> bool:
    """Whether JSON is nested deeper than anything honest: Python's functions for plain data recurse."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return False
    depth = 0
    for bracket in _TEXTS.sub("", text).encode("utf-8", "replace").translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > DEEPEST:
            return True
    return False


def check_name(path: Path) -> None:
    """Refuse a path that is not UTF-8: safetensors could not open again what was written there."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ArtifactError(
            f"{str(path)!a} is not UTF-8, but weights can only be read from such a path; choose another."
        ) from error


def parse_json(text: str) -> Any:
    """json.loads whose every failure is a ValueError, deep nesting included."""
    if is_deep(text):
        raise ValueError("it is nested too deeply")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def shown(value: Any, longest: int = 200) -> str:
    """A value of somebody's file as part of a sentence: some are too long, too large or too deep to be written out."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a value ({type(value).__name__}) that cannot be written out"
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
