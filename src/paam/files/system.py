"""Differences between Linux, macOS and others: opening without following links, locks, flushing."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a Unix: no such locks
    fcntl = None  # type: ignore[assignment]

UNIX = fcntl is not None
FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
"""macOS, where fsync leaves data in the drive's cache."""
CAREFULLY: int = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
"""Flags to open an untrusted file: do not follow links, do not wait for pipes."""


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file; OSError for a link, a folder, a pipe, a device."""
    try:
        descriptor = os.open(path, flags | CAREFULLY, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) and path.is_symlink():
            raise OSError(error.errno, f"{path.name} is a link", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file", str(path))
    return descriptor


def try_lock(descriptor: int, *, shared: bool = False) -> bool | None:
    """Lock a file without waiting: False if another process holds the lock, None if locks are unsupported.

    The OS releases a lock when its process ends, however it ends.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


def sync(descriptor: int) -> None:
    """Flush a file, or the names in a directory, to the disk itself."""
    if FULL_SYNC is not None:
        with contextlib.suppress(OSError):  # a file system that does not support it
            fcntl.fcntl(descriptor, FULL_SYNC)
            return
    os.fsync(descriptor)
