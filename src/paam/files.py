"""Files written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from paam.errors import ArtifactError


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
        temporary.unlink(missing_ok=True)
        raise ArtifactError(f"{path} cannot be written: {error.strerror or error}.") from error
