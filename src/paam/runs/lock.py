"""One process at a time in a run directory."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from paam.errors import ArtifactError, reason
from paam.files.durable import make_directory
from paam.files.system import open_regular, try_lock
from paam.runs.record import LOCK_FILE


class RunLock:
    """A lock on a run directory for one process. The OS releases it when the process ends, however it ends."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._descriptor is not None:
            self._tell(self._descriptor, b"")
            os.close(self._descriptor)
            self._descriptor = None

    def take(self) -> None:
        """Create the directory if needed, and lock it. May be called again."""
        if self._descriptor is not None:
            return
        make_directory(self.out)
        path = self.out / LOCK_FILE
        try:
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            foreign = path.is_symlink() or (path.exists() and not path.is_file())
            hint = f" Remove {path}, or choose another --out." if foreign else ""
            raise ArtifactError(f"The run directory {self.out} cannot be written: {reason(error)}.{hint}") from error
        if not _claim(descriptor):
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise ArtifactError(f"The run in {self.out} is locked by process {holder}; wait for it or stop it.")
        self._descriptor = descriptor
        self._tell(descriptor, str(os.getpid()).encode())

    def _tell(self, descriptor: int, holder: bytes) -> None:
        """Write the holder's process id, for messages; not into a file with hard links, which may belong to others."""
        with contextlib.suppress(OSError):  # a full disk
            if os.fstat(descriptor).st_nlink == 1:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, holder, 0)


def _claim(descriptor: int, attempts: int = 5) -> bool:
    """Whether we hold the lock, or locks are not supported here."""
    for left in reversed(range(attempts)):
        if try_lock(descriptor) is not False:
            return True
        if left:
            time.sleep(0.05)  # another process may only be testing the lock
    return False
