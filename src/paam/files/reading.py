"""Read untrusted files: regular ones only, with limits on size and nesting.

A FIFO would wait for a writer forever, and a device may never end.
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
"""Maximum bytes of a file of weights or a checkpoint."""
LARGEST_IMAGE = 1 << 30
BLOCK = 1 << 16
"""Bytes per read of a file of unknown size."""
DEEPEST = 200
"""Maximum levels of JSON: a plan has one for each time that its network was pruned before."""


def open_to_read(path: Path, limit: int) -> BinaryIO:
    """Open a regular file of up to ``limit`` bytes for reading; anything else raises an OSError that says why."""
    check_regular(path, limit)  # before opening, since opening a device may have side effects
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _check(os.fstat(descriptor), path, limit)  # again, since it may have been replaced meanwhile
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def check_regular(path: Path, limit: int) -> None:
    """Refuse with an OSError what :func:`open_to_read` would refuse; for libraries that open files themselves."""
    _check(path.stat(), path, limit)


def _check(found: os.stat_result, path: Path, limit: int) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder; give a file", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if found.st_size > limit:
        raise _too_large(path, limit, found.st_size)


def _too_large(path: Path, limit: int, size: int) -> OSError:
    return OSError(errno.EFBIG, f"it has {size:,} bytes, and {limit:,} is the limit", str(path))


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a whole file, which must not grow beyond ``limit`` bytes meanwhile."""
    parts: list[bytes] = []
    length = 0
    with open_to_read(path, limit) as file:
        # Python would allocate the whole limit up front if asked for it.
        most = max(os.fstat(file.fileno()).st_size + 1, BLOCK)
        try:
            while part := os.read(file.fileno(), most):
                parts.append(part)
                if (length := length + len(part)) > limit:
                    raise _too_large(path, limit, length)
        except BlockingIOError as error:  # files of Linux's /proc and /sys: some look regular and block
            raise BlockingIOError(errno.EAGAIN, "reading it would block", str(path)) from error
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
    """Read a UTF-8 text file; ``what`` is its kind, for messages."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{what} {path} cannot be read: {reason(error)}.") from error


_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"?')
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def is_deep(text: str) -> bool:
    """Whether JSON is nested too deeply: Python's functions for plain data recurse."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return False
    depth = 0
    for bracket in _TEXTS.sub("", text).encode("utf-8", "replace").translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > DEEPEST:
            return True
    return False


def check_name(path: Path) -> None:
    """Refuse a path that is not UTF-8: safetensors cannot open such paths."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ArtifactError(
            f"{str(path)!a} is not UTF-8, and safetensors needs a UTF-8 path; choose another one."
        ) from error


def parse_json(text: str) -> Any:
    """json.loads that raises only ValueError, also for deep nesting."""
    if is_deep(text):
        raise ValueError("it is nested too deeply")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def shown(value: Any, longest: int = 200) -> str:
    """A value from a file for a message: some are too long, too large or too deep to print."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a value ({type(value).__name__}) that cannot be printed"
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
