"""Following the record of a run in another process: what is there, then what comes, even when it is written anew."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from paam.errors import ArtifactError
from paam.record import Event, parse_event
from paam.report.checking import check_line


class Follower:
    """Reads a record as it grows. The open file is kept: its inode cannot be given to the file that replaces it."""

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
        """Events that are new. A record that was written anew is told from its start.

        Where it begins as the one known so far, up to an epoch or to what was changed, its run was resumed: an event of
        that kind comes first and says how many are old.
        """
        before: list[bytes] | None = None
        if self.file is None or self._replaced():
            try:
                opened = self.path.open("rb")
            except FileNotFoundError:
                return []  # between two runs; without any, the caller has said so
            except OSError as error:
                raise ArtifactError(f"The record {self.path} cannot be read: {error.strerror}.") from error
            self._close()
            before, self.file, self.rest, self.lines = self.lines, opened, b"", []
        known = len(self.lines)
        *whole, self.rest = (self.rest + self.file.read()).split(b"\n")
        self.lines += whole
        events = [self._event(line, number) for number, line in enumerate(whole, known + 1)]
        old = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before or (), whole, strict=False)))
        epochs = [event["epoch"] for event in events[:old] if event["event"] == "epoch"]
        if old and (epochs or old == len(whole) or events[old]["event"] == "changed"):
            events.insert(0, {"event": "resumed", "epoch": max(epochs, default=-1) + 1, "told": old})
        return events

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

    def _event(self, line: bytes, number: int) -> Event:
        event = parse_event(line.decode("utf-8", "replace"), self.path, number)
        check_line(event, self.path, number)
        return event
