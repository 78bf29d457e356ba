"""Hand-written lines of a record: a run of seven epochs on a network of two layers, with known numbers.

They have all keys that a run writes, in the same order; :func:`typed` parses them.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paam.events import Event, as_line, read_event

Line = dict[str, Any]

SCHEDULE = {"warmup": 2, "cycles": 1, "score": 1, "weight": 2, "finetune": 2, "control": False}
LENGTHS = [
    {"name": "warmup", "epochs": 2, "cycle": 0, "role": "warmup", "label": ""},
    {"name": "score", "epochs": 1, "cycle": 1, "role": "score", "label": ""},
    {"name": "weight", "epochs": 2, "cycle": 1, "role": "weight", "label": ""},
    {"name": "finetune", "epochs": 2, "cycle": 0, "role": "finetune", "label": ""},
]
PHASES = ["warmup", "warmup", "score", "weight", "weight", "finetune", "finetune"]
KEPT = {"conv1": [3, 4], "conv2": [0, 6]}


def start(**changes) -> Line:
    event = {
        "event": "start",
        "version": 2,
        "seed": 7,
        "monitor": "holdout",
        "hardware": "1 x Abacus",
        "recipe": {
            "model": {"name": "tiny"},
            "data": {"name": "beads"},
            "prune": {"scorer": "kq"},
            "schedule": SCHEDULE,
        },
        "method": "PAAM (KQ)",
        "epochs": 7,
        "phases": LENGTHS,
        "dense": {"params": 1000, "macs": 20000},
        "groups": {"conv1": {"width": 4, "stream": True}, "conv2": {"width": 6, "stream": False}},
        "paam": "0.1.0",
        "python": "3.11.7",
        "torch": "2.13.0",
        "commit": "abc123",
        "device": "cpu",
        "command": "paam prune",
        "data": {"hash": "9c1e", "of": ["names"]},
        "samples": {"train": 90, "holdout": 10, "test": 20},
        "classes": ["round", "square"],
        "normalization": {"mean": [0.5], "std": [0.25]},
    }
    return copy.deepcopy(event) | changes


def epoch(number: int, seconds: float = 2.0, accuracy: float | None = 50.0, loss: float = 0.25) -> Line:
    cut = number > 2
    return {
        "event": "epoch",
        "epoch": number,
        "phase": PHASES[number],
        "cycle": 1 if PHASES[number] in ("score", "weight") else 0,
        "loss": loss,
        "lr": 0.1 / (number + 1),
        "accuracy": accuracy,
        "kept_params": 0.4 if cut else 1.0,
        "kept_macs": 0.55 if cut else 1.0,
        "seconds": seconds,
        "role": PHASES[number],
        "label": "",
    }


FAILED = {"event": "failed", "epoch": 4, "reason": "The loss of step 3 is not finite."}
VANISHED = {"event": "vanished", "epoch": 1, "scales": 5, "of": 40, "layers": "bn1"}


def controlled(epochs: int = 2) -> list[Line]:
    """The seven epochs and those of a better dense control: 98.46 % after its first epoch, higher after the others."""
    events = record(7, end=False)
    events[0]["recipe"]["schedule"] = {**SCHEDULE, "control": True}
    events[0] |= {
        "epochs": 12,
        "phases": [*LENGTHS, {"name": "control", "epochs": 5, "cycle": 0, "role": "control", "label": ""}],
    }
    last = {**epoch(6), "phase": "control", "role": "control", "kept_params": 1.0, "kept_macs": 1.0, "loss": 0.125}
    return events + [{**last, "epoch": 7 + number, "accuracy": 98.46 + number} for number in range(epochs)]


SCORES = {
    "event": "scores",
    "epoch": 2,
    "cycle": 1,
    "scores": {"conv1": [0.0, 0.74, 0.76, 1.0], "conv2": [0.1, 0.1, 0.1, 0.1, 0.1, 0.1]},
}
SELECTION = {
    "event": "selection",
    "epoch": 3,
    "cycle": 1,
    "threshold": 0.5,
    "kept_params": 0.4,
    "kept_macs": 0.55,
    "kept_filters": KEPT,
    "accuracy": 30.0,
}
LATENCY = {"median": 4.0, "low": 3.0, "high": 5.0}
END = {
    "event": "end",
    "latency_batch": 128,
    "kept_filters": KEPT,
    "dense": {
        "accuracy": 90.0,
        "params": 1000,
        "macs": 20000,
        "latency_ms": LATENCY,
        "uncounted": {"softmax": 1},
        "trained": "warm-up",
        "layers": {"conv1": 8000, "conv2": 12000},
    },
    "pruned": {
        "accuracy": 88.5,
        "params": 400,
        "macs": 11000,
        "latency_ms": {**LATENCY, "median": 2.0},
        "uncounted": {},
        "trained": "",
        "layers": {"conv1": 6000, "conv2": 5000},
    },
}


def resumed(epoch: int, told: int, **changes) -> Line:
    return {"event": "resumed", "told": told, "epoch": epoch, "step": 0, "skipped": [], "notes": []} | changes


def changed(epoch: int, changes: dict[str, list], command: str = "") -> Line:
    return {"event": "changed", "epoch": epoch, "changes": changes, "step": 0, "command": command}


def typed(lines: Iterable[Line]) -> list[Event]:
    """As event objects, like those of a run."""
    events = [read_event(line) for line in lines]
    assert None not in events
    return events


def as_lines(events: Iterable[Event]) -> list[Line]:
    """As lines of a record."""
    return [json.loads(json.dumps(as_line(event))) for event in events]


def of_kind(lines: Iterable[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["event"] == kind]


def record(until: int = 7, *, end: bool = True, **changes) -> list[Line]:
    """The first ``until`` epochs, and the end event."""
    events = [start(**changes)]
    for number in range(until):
        events += [SCORES] if number == 2 else [SELECTION] if number == 3 else []
        events.append(epoch(number))
    return events + ([END] if end and until == 7 else [])


def lines(events: Sequence[Line]) -> str:
    return "".join(json.dumps(event) + "\n" for event in events)


def write_run(folder: Path, events: list[Line], age: float = 0.0) -> Path:
    """A run directory whose record was written ``age`` seconds ago."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "record.jsonl"
    path.write_text(lines(events), "utf-8")
    then = path.stat().st_mtime - age
    os.utime(path, (then, then))
    return folder
