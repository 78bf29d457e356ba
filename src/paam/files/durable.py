"""Files and directories that outlive a power cut: written whole or not at all, their names flushed to the disk.

POSIX promises nothing of a file before its fsync, nor of a name before the fsync of the directory that holds it.
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
"""What flushing a directory fails with where directories cannot be opened, or not be flushed."""


def write_atomically(path: Path, *parts: bytes | memoryview, flush: bool = True) -> None:
    """Write under a new name beside the target, flush to the disk, then rename over it.

    Readers see the old file or the new one. What stands there is replaced, never written into: where the target is a
    link, the link goes and the file that it named stays as it was. Without ``flush`` a power cut may take the content.
    """
    if not path.name:
        raise ArtifactError(f"{path} is a folder; give the name of a file in it.")
    try:
        _check_no_device(path)
        descriptor, temporary = _create_beside(path)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                for block in _joined(parts):
                    write_all(descriptor, block)
                if flush:
                    sync(descriptor)
                if not UNIX:  # a system that renames no open file
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


def _check_no_device(path: Path) -> None:
    """Refuse what root could replace by a file: /dev/null, and /dev/stdout, which is a link to a terminal or a pipe."""
    try:
        there = path.stat().st_mode
    except OSError:  # nothing, or a link to nothing
        return
    if not stat.S_ISREG(there):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def _create_beside(path: Path) -> tuple[int, Path]:
    """A new file for what will be renamed to ``path``, locked as long as it is written."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | CAREFULLY, 0o666)
        try_lock(descriptor)
        if os.fstat(descriptor).st_nlink:
            return descriptor, temporary
        os.close(descriptor)  # taken for a left one, and removed, before it was locked


def _joined(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | bytearray | memoryview]:
    """Small parts together, in one call of the system; large ones as they are, uncopied."""
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
    """Write all of the content, however little the system takes at a time."""
    rest = memoryview(content).cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def remove_left(directory: Path, ours: Callable[[str], bool]) -> None:
    """Remove what killed processes left half written of files whose names are ``ours``; not what is being written."""
    for path in left_half_written(directory, ours):
        try:
            descriptor = open_regular(path, os.O_RDONLY)
        except OSError:  # a link or a pipe of somebody else's, or gone already
            continue
        try:
            if try_lock(descriptor) is not False:
                path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def left_half_written(directory: Path, ours: Callable[[str], bool]) -> list[Path]:
    """Files that are, or were when their process was killed, on the way to names that are ``ours``."""
    names = [entry.name for entry in os.scandir(directory)]
    return [directory / n for n in names if (found := _TEMPORARY.fullmatch(n)) is not None and ours(found[1])]


def make_directory(path: Path) -> None:
    """Make a directory with its parents, and let its whole path outlive a power cut.

    Also where it is there already: whoever made it may have been killed before that.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        for folder in path.absolute().parents:
            sync_directory(folder)
    except OSError as error:
        raise ArtifactError(f"The directory {path} cannot be written: {reason(error)}.") from error


def sync_directory(directory: Path) -> None:
    """Let names in a directory, new, changed or gone, outlive a power cut, where directories can be flushed at all."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FLUSHED:
            raise
