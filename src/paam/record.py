"""The record of a run: one JSON object per line, versioned. Everything shown of a run is a view of it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from paam.errors import ArtifactError
from paam.files import parse_json, read_text, write_atomically

VERSION = 1
RECORD_FILE = "record.jsonl"
RECIPE_FILE = "recipe.toml"
LOCK_FILE = "lock"
"""Held by the process that writes the record."""
SAME_EPOCHS = "the same epochs"
"""What a record says of a dense network that was trained as long as the pruned one."""

Event = dict[str, Any]


class RecordWriter:
    """Appends events to a record. Each line is flushed, so that a run can be followed while it goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        """Events in the record."""

    def go_on_behind(self, count: int) -> list[Event]:
        """Keep the first ``count`` events of an existing record, and return them: what followed is written again."""
        kept = read_record(self.path)[:count]
        if len(kept) < count:
            raise ArtifactError(
                f"The record {self.path} has {len(kept)} events, fewer than the {count} before its checkpoint;"
                " put it back as it was, or start over with --overwrite."
            )
        write_atomically(self.path, "".join(f"{json.dumps(event)}\n" for event in kept).encode())
        self.count = count
        return kept

    def __call__(self, event: Event) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(event)}\n")
        except OSError as error:
            raise ArtifactError(f"The record {self.path} cannot be written: {error.strerror}.") from error
        self.count += 1

    def flush(self) -> None:
        """Have everything so far on the disk."""
        try:
            with self.path.open("a") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise ArtifactError(f"The record {self.path} cannot be written: {error.strerror}.") from error


def read_record(path: Path) -> list[Event]:
    """All whole events of a record; a last line cut short by a crash is left out."""
    lines = read_text(path, "The record").split("\n")
    if not lines[-1]:
        lines.pop()
    events: list[Event] = []
    for number, line in enumerate(lines, 1):
        try:
            events.append(parse_event(line, path, number))
        except ArtifactError as error:
            if number == len(lines) and isinstance(error.__cause__, ValueError):
                break
            raise
    return events


def parse_event(line: str, path: Path, number: int) -> Event:
    """One line of a record; ``number`` counts from 1."""
    try:
        event = parse_json(line)
    except ValueError as error:
        raise ArtifactError(f"The record {path} is damaged at line {number}: {error}.") from error
    if not isinstance(event, dict) or "event" not in event:
        raise ArtifactError(f"The record {path} is damaged at line {number}: not an event.")
    if number == 1 and event.get("version") != VERSION:
        raise ArtifactError(f"The record {path} has version {event.get('version')}; this paam reads {VERSION}.")
    return event


def salvage_record(path: Path) -> tuple[list[Event], list[str]]:
    """Every event of a record that can still be read, and a sentence on what cannot; for views of damaged runs."""
    try:
        lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    except OSError as error:
        raise ArtifactError(f"The record {path} cannot be read: {error.strerror}.") from error
    events: list[Event] = []
    lost: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = parse_json(line)
        except ValueError:
            event = None
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
        else:
            lost.append(number)
    for start in of_kind(events, "start"):
        if start.get("version") != VERSION:
            raise ArtifactError(f"The record {path} has version {start.get('version')}; this paam reads {VERSION}.")
    if not events:
        raise ArtifactError(f"The record {path} holds no event.")
    problems = []
    if lost and lost[-1] == len(lines):  # no line break behind it
        problems.append("The last line of the record is cut short.")
        lost.pop()
    if lost:
        named = ", ".join(map(str, lost[:5])) + (" and others" if lost[5:] else "")
        problems.append(f"The record is damaged at line {named}.")
    return events, problems


def of_kind(events: Iterable[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def environment(device: str) -> dict[str, str]:
    """Hardware and versions that a number depends on."""
    hardware = torch.cuda.get_device_name(device) if device.startswith("cuda") else _cpu_name()
    return {"hardware": hardware, "python": platform.python_version(), "torch": torch.__version__, "commit": _commit()}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def _commit() -> str:
    """Commit of the source tree that paam runs from, with + when it has changes; "unknown" when installed elsewhere.

    A copy of the tree on a machine without git is told its commit through PAAM_COMMIT.
    """
    if given := os.environ.get("PAAM_COMMIT"):
        return given
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name)
    if not tracked:
        return "unknown"
    return _git("rev-parse", "--short=12", "HEAD") + ("+" if _git("status", "--porcelain", "--", ".") else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
