"""Simulated disk: the files and names that are left after a power cut, under three readings of fsync's guarantees.

lost     names are up to date, but files contain only flushed data
torn     of unflushed changes a prefix survives, per file and per directory; its last write is torn
strict   POSIX to the letter: only flushed content and names, and only what flushed directories lead to
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from faulty.operations import Operation

CUTS = ("lost", "torn", "strict")
Names = dict[str, "File | Directory"]


@dataclass(eq=False)
class File:
    """``changes``: since the last flush; an offset of None is the end, data of None a new size."""

    flushed: bytes = b""
    changes: list[tuple[int | None, bytes | None]] = field(default_factory=list)

    def flush(self) -> None:
        self.flushed, self.changes = _changed(self.flushed, self.changes), []

    def after(self, cut: str, random: Random) -> bytes:
        if cut != "torn" or not self.changes:
            return self.flushed
        *whole, (offset, data) = self.changes[: random.randint(1, len(self.changes))]
        if data is None:
            return _changed(self.flushed, whole)
        kept = random.randrange(len(data) + 1)
        rest = random.choice((b"", bytes(len(data) - kept), random.randbytes(len(data) - kept)))
        return _changed(self.flushed, [*whole, (offset, data[:kept] + rest)])


@dataclass(eq=False)
class Directory:
    """``changes``: steps since the last flush, each of some names; None marks a removed name."""

    names: Names = field(default_factory=dict)
    flushed: Names = field(default_factory=dict)
    changes: list[dict[str, File | Directory | None]] = field(default_factory=list)

    def change(self, step: dict[str, File | Directory | None]) -> None:
        self.changes.append(step)
        self.names = _renamed(self.names, [step])

    def flush(self) -> None:
        self.flushed, self.changes = dict(self.names), []

    def after(self, cut: str, random: Random) -> Names:
        if cut == "torn":
            return _renamed(self.flushed, self.changes[: random.randint(0, len(self.changes))])
        return self.names if cut == "lost" else self.flushed


def _changed(content: bytes, changes: Iterable[tuple[int | None, bytes | None]]) -> bytes:
    new = bytearray(content)
    for offset, data in changes:
        if data is None:
            new[offset:] = bytes((offset or 0) - len(new)) if (offset or 0) > len(new) else b""
        else:
            start = len(new) if offset is None else offset
            new += bytes(max(start - len(new), 0))
            new[start : start + len(data)] = data
    return bytes(new)


def _renamed(names: Names, steps: Iterable[dict[str, File | Directory | None]]) -> Names:
    new: dict[str, File | Directory | None] = dict(names)
    for step in steps:
        new |= step
    return {name: node for name, node in new.items() if node is not None}


class Disk:
    """Replays recorded operations. The initial content of the folder is on the disk."""

    def __init__(self, folder: Path) -> None:
        self.root = _loaded(folder)
        self.handles: dict[int, File] = {}

    def follow(self, operation: Operation) -> None:
        kind, handle = operation.kind, operation.handle
        where, name = self._place(operation.path)
        if kind == "mkdir":
            where.change({name: Directory()})
        elif kind == "create":
            self.handles[handle] = File()
            where.change({name: self.handles[handle]})
        elif kind in ("open", "read"):
            found = where.names.get(name)
            if isinstance(found, File):
                self.handles[handle] = found
        elif kind in ("write", "append"):
            self.handles[handle].changes.append((operation.offset, operation.data))
        elif kind == "truncate":
            self.handles[handle].changes.append((operation.offset, None))
        elif kind == "fsync":
            self.handles[handle].flush()
        elif kind == "fsync-directory":
            self._directory(operation.path).flush()
        elif kind == "unlink":
            where.change({name: None})
        elif kind == "rename":
            there, new = self._place(operation.target)
            assert where is there, "a rename from one directory to another"
            where.change({name: None, new: where.names[name]})
        else:
            raise AssertionError(kind)

    def after(self, cut: str, random: Random, folder: Path) -> None:
        """Write the state after a power cut into an empty folder."""
        _lay_out(self.root, cut, random, folder)

    def _place(self, path: str) -> tuple[Directory, str]:
        parent, _, name = path.rpartition("/")
        return self._directory(parent), name

    def _directory(self, path: str) -> Directory:
        found = self.root
        for name in path.split("/") if path not in ("", ".") else ():
            inner = found.names[name]
            assert isinstance(inner, Directory)
            found = inner
        return found


def _loaded(folder: Path) -> Directory:
    names: Names = {
        path.name: _loaded(path) if path.is_dir() else File(path.read_bytes()) for path in sorted(folder.iterdir())
    }
    return Directory(names, dict(names))


def _lay_out(directory: Directory, cut: str, random: Random, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, node in directory.after(cut, random).items():
        if isinstance(node, Directory):
            _lay_out(node, cut, random, folder / name)
        else:
            (folder / name).write_bytes(node.after(cut, random))
