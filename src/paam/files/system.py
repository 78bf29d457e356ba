"""What Linux and macOS have under different names, and others lack: opening without following, locks, flushing."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a Unix: there are no such locks
    fcntl = None  # type: ignore[assignment]

UNIX = fcntl is not None
FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
"""macOS: fsync there leaves data in the drive's own cache."""
CAREFULLY: int = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
"""How a file is opened that somebody else may have put there: no link is followed, no pipe is waited for."""


def open_regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file; OSError for a link, a folder, a pipe, a device."""
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
    """Lock a file without waiting: False when another process holds it, None where files cannot be locked.

    A lock goes with its process, however that ends.
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
    """Have a file, or the names in a directory, on the disk itself."""
    if FULL_SYNC is not None:
        with contextlib.suppress(OSError):  # a file system that does not know it
            fcntl.fcntl(descriptor, FULL_SYNC)
            return
    os.fsync(descriptor)
