"""The record of a run: one JSON object per line, versioned. Everything shown of a run is a view of it."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from paam.config.schema import InvalidError
from paam.errors import ArtifactError, DamagedError, reason
from paam.events import NAMES, VERSION, Event, Start, as_line, read_event
from paam.files.durable import write_all, write_atomically
from paam.files.reading import parse_json, read_bytes
from paam.files.system import open_regular, sync

RECORD_FILE = "record.jsonl"
LARGEST_FILE, LONGEST_LINE, MOST_LINES = 256 << 20, 32 << 20, 1 << 20
"""Bytes of a record, characters of one event (that of the scores of a million filters has 20 million), and events."""
RECIPE_FILE = "recipe.toml"
REPORT_FILE = "report.html"
LOCK_FILE = "lock"
"""Held by the process that writes the record."""
EXPLAINED = 3
"""Damaged lines that a report explains; it counts the others."""

Line = dict[str, Any]
"""A line of a record as it stands there; what copies a record copies these, also those of a later version."""


class Entry(NamedTuple):
    """``event``: None where only a later version knows its kind."""

    line: Line
    event: Event | None


class RecordWriter:
    """Appends events to a record. Each line is flushed, so that a run can be watched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        """Lines in the record."""

    def cut_back(self, count: int) -> tuple[list[Event], list[str]]:
        """Keep the first ``count`` lines of an existing record: what followed is written again.

        Returns their events, and a sentence on damage after them.
        """
        entries, damage = read_until_damage(self.path)
        kept = entries[:count]
        if len(kept) < count:
            raise damage or ArtifactError(
                f"The record {self.path} has {len(kept)} events, fewer than the {count} before its checkpoint;"
                " restore it, or start over with --overwrite."
            )
        self._replace([entry.line for entry in kept])
        cut = f"{str(damage).removesuffix('.')}; it was cut back to the {count} events before that."
        return events_of(kept), [] if damage is None else [cut]

    def __call__(self, event: Event) -> None:
        """The first event takes the place of any other record, the following ones are appended."""
        line = as_line(event)
        if self.count:
            self._append(f"{json.dumps(line)}\n".encode())
            self.count += 1
        else:
            self._replace([line])

    def flush(self) -> None:
        """Have everything so far on the disk."""
        with self._opened() as descriptor:
            sync(descriptor)

    def _replace(self, lines: list[Line]) -> None:
        write_atomically(self.path, "".join(f"{json.dumps(line)}\n" for line in lines).encode())
        self.count = len(lines)

    def _append(self, line: bytes) -> None:
        with self._opened() as descriptor:
            before = os.fstat(descriptor).st_size
            try:
                write_all(descriptor, line)
            except OSError:
                with contextlib.suppress(OSError):  # half a line would spoil the next one
                    os.ftruncate(descriptor, before)
                raise

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            descriptor = open_regular(self.path, os.O_WRONLY | os.O_APPEND)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ArtifactError(f"The record {self.path} cannot be written: {reason(error)}.") from error


def read_events(path: Path) -> list[Event]:
    """The events of an undamaged record, which begins with the start of a run."""
    entries, damage = read_until_damage(path)
    if damage is not None:
        raise damage
    if not entries:
        raise DamagedError(f"The record {path} is empty: its run never began.")
    check_start(entries[0], path)
    return events_of(entries)


def read_record(path: Path) -> list[Line]:
    """The lines of an undamaged record; a last line cut short by a crash is left out."""
    entries, damage = read_until_damage(path)
    if damage is not None:
        raise damage
    return [entry.line for entry in entries]


def read_until_damage(path: Path) -> tuple[list[Entry], ArtifactError | None]:
    """Every line before the first damaged one, and what is wrong with that one; None where all is well.

    A last line cut short by a crash is no damage.
    """
    *lines, rest = _read(path).split(b"\n")
    entries: list[Entry] = []
    for number, line in enumerate([*lines, rest] if rest else lines, 1):
        try:
            entries.append(read_line(line, path, number))
        except ArtifactError as error:
            cut_short = number > len(lines) and isinstance(error.__cause__, json.JSONDecodeError)
            return entries, None if cut_short else error
    return entries, None


def read_line(line: bytes, path: Path, number: int) -> Entry:
    """One line of a record, strictly; ``number`` counts from 1."""
    _check_length(number, path)
    try:
        found = _parse(line)
        check_version(found, path)
        return Entry(found, read_event(found))
    except ValueError as error:
        raise DamagedError(f"The record {path} is damaged at line {number}: {_why(error)}") from error


def check_start(first: Entry, path: Path) -> None:
    if not isinstance(first.event, Start):
        raise DamagedError(f"The record {path} does not begin with the start of a run.")


def check_version(line: Line, path: Path) -> None:
    """A start event of another version is not damaged; this version cannot read its record."""
    if line["event"] == NAMES[Start] and line.get("version") != VERSION:
        raise ArtifactError(f"The record {path} has version {line.get('version')!r}; this paam reads {VERSION}.")


def events_of(entries: Iterable[Entry]) -> list[Event]:
    """Without what only a later version knows."""
    return [entry.event for entry in entries if entry.event is not None]


def salvage_events(path: Path) -> tuple[list[Event], list[str]]:
    """Every event of a record that can still be read, and sentences on what cannot; for reports on damaged runs."""
    lines = _read(path).split(b"\n")
    events: list[Event] = []
    damaged: dict[int, str] = {}
    cut_short = False
    unknown: Counter[str] = Counter()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = _parse(line)
            check_version(found, path)
            event = read_event(found)
        except ValueError as error:
            if number == len(lines) and not isinstance(error, InvalidError):  # no line break after it
                cut_short = True
            else:
                damaged[number] = _why(error)
            continue
        if event is None:
            unknown[str(found["event"])] += 1
        else:
            events.append(event)
    if not events:
        raise DamagedError(f"The record {path} holds no event that can be read.")
    problems = ["The last line of the record is cut short."] if cut_short else []
    explained = [*damaged.items()][:EXPLAINED]
    problems += [f"The record is damaged at line {number}: {why}" for number, why in explained]
    if more := [str(number) for number in damaged][EXPLAINED:]:
        and_others = " and others" if len(more) > 5 else ""
        problems.append(f"It is damaged at line {', '.join(more[:5])}{and_others} too.")
    if unknown:
        problems.append(f"Events of an unknown kind were skipped: {', '.join(sorted(unknown))}.")
    return events, problems


def _read(path: Path) -> bytes:
    try:
        content = read_bytes(path, LARGEST_FILE)
    except OSError as error:
        raise ArtifactError(f"The record {path} cannot be read: {reason(error)}.") from error
    _check_length(content.count(b"\n"), path)
    return content


def _check_length(lines: int, path: Path) -> None:
    """Short lines take a hundred times their size in memory, and seconds per million."""
    if lines > MOST_LINES:
        raise ArtifactError(f"The record {path} has more than {MOST_LINES:,} lines, the most that paam reads of one.")


def _parse(line: bytes) -> Line:
    """Raises ValueError."""
    if len(line) > LONGEST_LINE:
        raise InvalidError(f"it has {len(line):,} characters.")
    found = parse_json(line.decode())
    if not isinstance(found, dict) or not isinstance(found.get("event"), str):
        raise InvalidError("it is not an event.")
    return found


def _why(error: ValueError) -> str:
    """The end of a sentence."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8."
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON (character {error.pos + 1}: {error.msg})."
    return str(error) if isinstance(error, InvalidError) else f"{error}."
