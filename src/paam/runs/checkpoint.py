"""Checkpoints: one file of tensors and a header per position, the last two kept, written in the background."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paam.errors import ArtifactError, DamagedError, one_line, reason
from paam.files.durable import make_directory
from paam.files.tensors import read_tensors, write_tensors
from paam.train.packing import Packed, pack, unpack

KIND = "checkpoint"
KEPT = 2
DELAY = 0.15
"""Maximum delay in seconds before a write starts: right after a checkpoint the GPU waits for the next epoch's setup."""
_NAME = re.compile(r"epoch-([0-9]{6,12})-step-([0-9]{6,12})\.safetensors")

Position = tuple[int, int]
"""Where a run resumes: epoch, and how many of its steps are done."""
State = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors, and a header of plain data."""


class CheckpointWriter:
    """Writes one checkpoint at a time in a thread that touches no device: training waits for a copy, not for the disk.

    A write starts after a short delay, or as soon as it is waited for. ``before`` is called in the thread before each
    write. A failed write raises at the next call. Leaving the context waits for the pending write.
    """

    def __init__(self, directory: Path, before: Callable[[], None] = lambda: None) -> None:
        self.directory = directory
        self._before = before
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()
        self._last = -math.inf
        self._failure: Exception | None = None
        self._made = False

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.wait()

    def save(self, position: Position, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        """Copy a state and schedule its write."""
        self.finish()
        self._wanted.clear()
        # If checkpoints follow each other closely, leave enough time to write them.
        now = time.monotonic()
        delay, self._last = min(DELAY, (now - self._last) / 4), now
        # A daemon thread: a process that must end immediately does not wait for the disk.
        arguments = (position, snapshot(tensors), dict(header), delay)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._wanted.set()
            self._thread.join()
            self._thread = None

    def check(self) -> None:
        """Raise if a write has failed; do not wait for a pending one."""
        if self._failure is not None:
            raise ArtifactError(
                f"{one_line(self._failure)}. Older checkpoints are intact. Fix the problem and rerun with --resume."
            ) from self._failure

    def finish(self) -> None:
        """Wait for the pending write, and raise if it failed."""
        self.wait()
        self.check()

    def _write(self, position: Position, tensors: dict[str, Tensor], header: dict[str, Any], delay: float) -> None:
        self._wanted.wait(delay)
        try:
            self._before()
            if not self._made:
                make_directory(self.directory)
                self._made = True
            write_checkpoint(self.directory, position, tensors, header)
        except Exception as error:  # re-raised in the main thread
            self._failure = error


def snapshot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory, which training cannot change; from a GPU in one transfer per dtype, not per tensor.

    Pinned memory makes the transfer fast; torch's allocator caches it for the next one.
    """
    blocks, layout = pack(tensors)
    here = [
        torch.empty(len(block), dtype=block.dtype, pin_memory=True).copy_(block) if block.is_cuda else block
        for block in blocks
    ]
    return unpack(Packed(here, layout))


def write_checkpoint(directory: Path, position: Position, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Save the state at a position, then delete all but the newest checkpoints."""
    epoch, step = position
    path = directory / f"epoch-{epoch:06d}-step-{step:06d}.safetensors"
    write_tensors(path, KIND, tensors, {"epoch": epoch, "step": step, **header})
    for old in checkpoints(directory)[KEPT:]:
        try:
            old.unlink(missing_ok=True)
        except OSError as error:
            raise ArtifactError(f"The old checkpoint {old} cannot be removed: {reason(error)}.") from error


def read_newest_checkpoint(directory: Path) -> tuple[State | None, list[str]]:
    """The newest valid checkpoint (None if there are no checkpoints), and why newer ones were skipped.

    Skipped ones are corrupt; they are renamed, so that they never count among the last two. One that merely cannot be
    read right now is left alone, and the run is not resumed from an older one, which would replace it.
    """
    problems: dict[Path, str] = {}
    for path in checkpoints(directory):
        try:
            tensors, header = read_tensors(path, KIND)
        except DamagedError as error:
            problems[path] = str(error)
            continue
        except ArtifactError as error:
            raise ArtifactError(
                f"{error} Nothing was changed; try again. If the error persists, move the file elsewhere: --resume then"
                " uses the checkpoint before it."
            ) from error
        if (header.get("epoch"), header.get("step")) == _position(path):
            _put_aside(list(problems))
            return (tensors, header), list(problems.values())
        problems[path] = f"{path} is not the checkpoint that its name says."
    if problems:
        told = " ".join(problems.values())
        raise ArtifactError(f"No checkpoint is usable. {told} Start over with --overwrite.")
    return None, []


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoint files of a directory, newest first. One that cannot be listed is not an empty one."""
    try:
        found = list(directory.iterdir())  # glob would find nothing where it may not look
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ArtifactError(f"The folder {directory} cannot be listed: {reason(error)}.") from error
    return sorted((path for path in found if is_checkpoint(path.name)), key=_position, reverse=True)


def is_checkpoint(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def _position(path: Path) -> Position:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1]), int(found[2])


def _put_aside(paths: list[Path]) -> None:
    try:
        for path in paths:
            path.rename(path.with_name(f"{path.name}.unreadable"))
    except OSError as error:
        raise ArtifactError(f"{path} cannot be renamed: {reason(error)}.") from error
