"""Every file operation below one folder: numbered, recorded, and interrupted or failed if a fault is requested.

Functions of ``os``, and ``open`` for reading, are patched in this process and never restored: it is a short-lived fork.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import secrets
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

CHANGING = ("mkdir", "create", "write", "append", "truncate", "fsync", "fsync-directory", "rename", "unlink")
"""Operations that change the disk. The others are "open" and "read"."""
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "ENOMEM": errno.ENOMEM}


@dataclass(frozen=True)
class Operation:
    """``path`` is relative to the folder; ``handle`` identifies an open file; ``offset`` is None for the end."""

    kind: str
    path: str
    handle: int = 0
    data: bytes = b""
    offset: int | None = None
    target: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.path}{f' -> {self.target}' if self.target else ''}"


@dataclass
class Fault:
    """The effect at operation ``number``: "kill" before it, "half" of a write, or the name of an error."""

    kind: str
    number: int

    def strike(self, operation: Operation, half: Callable[[], object]) -> None:
        if self.kind in ("half", "ENOSPC") and len(operation.data) > 1:
            half()
        if self.kind in ("kill", "half"):
            os.kill(os.getpid(), signal.SIGKILL)
        number = ERRORS[self.kind]
        raise OSError(number, os.strerror(number), operation.path)


@dataclass
class _Opened:
    handle: int
    path: str
    identity: tuple[int, int]
    position: int | None
    is_directory: bool


@dataclass
class Watched:
    """The operations so far, and those that bypassed the patched functions."""

    folder: str
    fault: Fault | None
    operations: list[Operation] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    _opened: dict[int, _Opened] = field(default_factory=dict)
    _ours: bool = False

    def name(self, path: object) -> str | None:
        """The path relative to the folder; None if it is outside."""
        if isinstance(path, int) or path is None:
            return None
        whole = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - a link that lies last is not followed
        if whole == self.folder:
            return "."
        return whole.removeprefix(f"{self.folder}/") if whole.startswith(f"{self.folder}/") else None

    def does(self, operation: Operation, action: Callable[..., Any], half: Callable[[], object] = lambda: None) -> Any:
        number = len(self.operations)
        self.operations.append(operation)
        if self.fault is not None and self.fault.number == number:
            self.passes(lambda: self.fault.strike(operation, half))
        return self.passes(action)

    def passes(self, action: Callable[[], Any]) -> Any:
        """Perform an operation without the audit."""
        self._ours = True
        try:
            return action()
        finally:
            self._ours = False

    def opened(self, descriptor: int) -> _Opened | None:
        found = self._opened.get(descriptor)
        status = os.fstat(descriptor) if found else None
        return found if found and status and found.identity == (status.st_dev, status.st_ino) else None

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python's audit hook, called for every open for writing, rename and remove: no operation may go unnoticed."""
        if self._ours:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and self.name(path):
                self.unseen.append(f"open {path}")
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"):
            if any(isinstance(one, str | bytes | os.PathLike) and self.name(one) for one in arguments):
                self.unseen.append(f"{event} {arguments}")


def watch(folder: Path, fault: Fault | None = None) -> Watched:
    """Patch functions that change files in this process; a flush is recorded but not executed, to save time."""
    watched = Watched(os.path.realpath(folder), fault)
    handles, tokens = count(1), count()
    real = {name: getattr(os, name) for name in ("open", "write", "pwrite", "read", "replace", "ftruncate")}
    secrets.token_hex = lambda size: f"{next(tokens):0{2 * size}x}"  # the same names every time

    def opening(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        name = watched.name(path) if dir_fd is None else None
        if name is None:
            return int(real["open"](path, flags, mode, dir_fd=dir_fd))
        writing, there = flags & (os.O_WRONLY | os.O_RDWR), os.path.lexists(path)
        kind = "create" if flags & os.O_CREAT and not there else "open" if writing or Path(path).is_dir() else "read"
        handle = next(handles)
        descriptor: int = watched.does(Operation(kind, name, handle), lambda: real["open"](path, flags, mode))
        status = os.fstat(descriptor)
        position = None if flags & os.O_APPEND else 0
        identity = status.st_dev, status.st_ino
        watched._opened[descriptor] = _Opened(handle, name, identity, position, Path(path).is_dir())
        return descriptor

    def writing(descriptor: int, data: Any) -> int:
        file = watched.opened(descriptor)
        if file is None:
            return int(real["write"](descriptor, data))
        kind = "append" if file.position is None else "write"
        operation = Operation(kind, file.path, file.handle, bytes(data), file.position)
        half = memoryview(data).cast("B")[: len(operation.data) // 2]
        written: int = watched.does(
            operation, lambda: real["write"](descriptor, data), lambda: real["write"](descriptor, half)
        )
        assert written == len(operation.data)
        if file.position is not None:
            file.position += written
        return written

    def writing_at(descriptor: int, data: Any, offset: int) -> int:
        file = watched.opened(descriptor)
        if file is None:
            return int(real["pwrite"](descriptor, data, offset))
        operation = Operation("write", file.path, file.handle, bytes(data), offset)
        return int(watched.does(operation, lambda: real["pwrite"](descriptor, data, offset)))

    def truncating(descriptor: int, size: int) -> None:
        file = watched.opened(descriptor)
        assert file is not None
        watched.does(
            Operation("truncate", file.path, file.handle, b"", size), lambda: real["ftruncate"](descriptor, size)
        )

    def flushing(descriptor: int) -> None:
        file = watched.opened(descriptor)
        if file is not None:
            kind = "fsync-directory" if file.is_directory else "fsync"
            watched.does(Operation(kind, file.path, file.handle), lambda: None)

    def reading(descriptor: int, size: int) -> bytes:
        file = watched.opened(descriptor)
        if file is None:
            return bytes(real["read"](descriptor, size))
        return bytes(watched.does(Operation("read", file.path, file.handle), lambda: real["read"](descriptor, size)))

    def renaming(source: Any, target: Any) -> None:
        names = watched.name(source), watched.name(target)
        assert None not in names
        watched.does(Operation("rename", str(names[0]), target=str(names[1])), lambda: real["replace"](source, target))

    def on_name(kind: str, action: Callable[..., Any]) -> Callable[..., Any]:
        def changing(path: Any, *arguments: Any, **options: Any) -> Any:
            name = watched.name(path)
            if name is None or options.get("dir_fd") is not None:
                return action(path, *arguments, **options)
            if os.path.lexists(path) == (kind == "mkdir"):  # it will fail or do nothing
                return watched.passes(lambda: action(path, *arguments, **options))
            return watched.does(Operation(kind, name), lambda: action(path, *arguments, **options))

        return changing

    def reading_open(action: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            name = watched.name(path)
            if name is None or set(mode) & set("wax+"):
                return action(path, mode, *arguments, **options)
            return watched.does(Operation("read", name), lambda: action(path, mode, *arguments, **options))

        return opened

    os.open, os.write, os.pwrite, os.read = opening, writing, writing_at, reading
    os.ftruncate, os.fsync, os.replace, os.rename = truncating, flushing, renaming, renaming
    os.unlink, os.remove, os.mkdir = (
        on_name("unlink", os.unlink),
        on_name("unlink", os.remove),
        on_name("mkdir", os.mkdir),
    )
    io.open = builtins.open = reading_open(io.open)
    sys.addaudithook(watched.audit)
    return watched
