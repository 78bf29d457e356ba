"""Follow the record of a run in another process as it grows, even if the file is replaced."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from paam.errors import ArtifactError, reason
from paam.events import Changed, Epoch, Event, Resumed, of_kind
from paam.files.reading import open_to_read
from paam.runs.record import LARGEST_FILE, Entry, check_start, events_of, read_line


class Follower:
    """Reads a record as it grows. The file stays open, so that its replacement cannot get the same inode."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO | None = None
        self.rest = b""
        self.lines: list[bytes] = []

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def poll(self) -> list[Event]:
        """New events. A record that was replaced is read from its start.

        If it begins like the previous one, up to an epoch or a change, its run was resumed: the first event is then a
        Resumed event with the number of old events.
        """
        before: list[bytes] | None = None
        if self.file is None or self._replaced():
            try:
                opened = open_to_read(self.path, LARGEST_FILE)
            except FileNotFoundError:
                return []  # between two runs; if there was never a record, the caller has reported that
            except OSError as error:
                raise self._unreadable(error) from error
            self._close()
            before, self.file, self.rest, self.lines = self.lines, opened, b"", []
        known = len(self.lines)
        try:
            news = self.file.read(LARGEST_FILE) or b""
        except OSError as error:
            raise self._unreadable(error) from error
        *whole, self.rest = (self.rest + news).split(b"\n")
        if self.file.tell() > LARGEST_FILE:
            raise ArtifactError(f"The record {self.path} has more than {LARGEST_FILE:,} bytes.")
        self.lines += whole
        entries = [self._entry(line, number) for number, line in enumerate(whole, known + 1)]
        events = events_of(entries)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before or (), whole, strict=False)))
        old = events_of(entries[:same])
        epochs = [event.epoch for event in of_kind(old, Epoch)]
        if same and (epochs or same == len(whole) or isinstance(entries[same].event, Changed)):
            events.insert(0, Resumed(len(old), max(epochs, default=-1) + 1))
        return events

    def _unreadable(self, error: OSError) -> ArtifactError:
        return ArtifactError(f"The record {self.path} cannot be read: {reason(error)}.")

    def _close(self) -> None:
        if self.file is not None:
            self.file.close()

    def _replaced(self) -> bool:
        assert self.file is not None
        try:
            there = self.path.stat()
        except OSError:
            return False
        here = os.fstat(self.file.fileno())
        return (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino) or there.st_size < self.file.tell()

    def _entry(self, line: bytes, number: int) -> Entry:
        entry = read_line(line, self.path, number)
        if number == 1:
            check_start(entry, self.path)
        return entry
