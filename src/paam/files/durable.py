"""Atomic, durable files and directories, which survive a power failure.

POSIX guarantees nothing about a file before its fsync, nor about a name before the fsync of its directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from paam.errors import ArtifactError, reason
from paam.files.system import CAREFULLY, UNIX, open_regular, sync, try_lock

BLOCK = 1 << 20
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp")
_NOT_FLUSHED = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EROFS}
"""Errors from flushing a directory if directories cannot be opened or flushed."""


def write_atomically(path: Path, *parts: bytes | memoryview, flush: bool = True) -> None:
    """Write to a temporary file next to the target, flush it to the disk, then rename it over the target.

    Readers see the old file or the new one. The target is replaced, never written into: if it is a link, the link is
    replaced and the file that it pointed to is unchanged. Without ``flush`` a power failure may lose the content.
    """
    if not path.name:
        raise ArtifactError(f"{path} is a folder; give a file name.")
    try:
        _check_regular(path)
        descriptor, temporary = _create_temporary(path)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                for block in _joined(parts):
                    write_all(descriptor, block)
                if flush:
                    sync(descriptor)
                if not UNIX:  # this OS cannot rename an open file
                    file.close()
                temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        if flush:
            sync_directory(path.parent)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be written: {reason(error)}.") from error


def _check_regular(path: Path) -> None:
    """Refuse what root could replace by a file: /dev/null, or /dev/stdout, which links to a terminal or a pipe."""
    try:
        there = path.stat().st_mode
    except OSError:  # nothing, or a link to nothing
        return
    if not stat.S_ISREG(there):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def _create_temporary(path: Path) -> tuple[int, Path]:
    """A new temporary file to be renamed to ``path``, locked while it is written."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | CAREFULLY, 0o666)
        try_lock(descriptor)
        if os.fstat(descriptor).st_nlink:
            return descriptor, temporary
        os.close(descriptor)  # mistaken for a leftover and removed before it was locked


def _joined(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | bytearray | memoryview]:
    """Join small parts into one system call; pass large ones on without a copy."""
    small = bytearray()
    for part in parts:
        if small and len(small) + len(part) > BLOCK:
            yield small
            small = bytearray()
        if len(part) > BLOCK:
            yield part
        else:
            small += part
    if small:
        yield small


def write_all(descriptor: int, content: bytes | bytearray | memoryview) -> None:
    """Write all of the content, also after partial writes."""
    rest = memoryview(content).cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def remove_left(directory: Path, ours: Callable[[str], bool]) -> None:
    """Remove partial files of killed processes for names that are ``ours``; not files that are being written."""
    for path in left_half_written(directory, ours):
        try:
            descriptor = open_regular(path, os.O_RDONLY)
        except OSError:  # a link or a pipe that is not ours, or removed already
            continue
        try:
            if try_lock(descriptor) is not False:
                path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def left_half_written(directory: Path, ours: Callable[[str], bool]) -> list[Path]:
    """Temporary files, of live or killed processes, for names that are ``ours``."""
    names = [entry.name for entry in os.scandir(directory)]
    return [directory / n for n in names if (found := _TEMPORARY.fullmatch(n)) is not None and ours(found[1])]


def make_directory(path: Path) -> None:
    """Create a directory with its parents, and flush the whole path to the disk.

    Also if it exists: the process that created it may have been killed before flushing.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        for folder in path.absolute().parents:
            sync_directory(folder)
    except OSError as error:
        raise ArtifactError(f"The directory {path} cannot be written: {reason(error)}.") from error


def sync_directory(directory: Path) -> None:
    """Flush added, changed and removed names in a directory to the disk, if directories can be flushed at all."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FLUSHED:
            raise
