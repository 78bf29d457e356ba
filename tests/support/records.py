"""Handmade records with numbers that are easy to check: lines of JSON, as in the file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paam.report.facts import Facts
from paam.report.gathering import gather
from paam.runs.record import salvage_events

Line = dict[str, Any]

RECIPE = {
    "description": "a record made by hand",
    "model": {"name": "resnet56"},
    "data": {"name": "cifar10", "image_size": None, "holdout": 0.0, "batch_size": 256, "crop": 4, "flip": True},
    "prune": {"scorer": "kq", "penalty": 0.0005, "ignore": []},
    "target": {"threshold": 0.5, "keep_macs": None},
    "schedule": {"warmup": 2, "cycles": 2, "score": 1, "weight": 1, "finetune": 2, "control": True},
    "finetune": {"optimizer": "sgd", "lr": 0.1},
}

# phase, cycle, loss, accuracy
EPOCHS = [
    ("warmup", 0, 2.0, 40.0),
    ("warmup", 0, 1.0, 70.0),
    ("score", 1, 4.0, 69.0),
    ("weight", 1, 0.8, 74.0),
    ("score", 2, 3.0, 73.0),
    ("weight", 2, 0.6, 76.0),
    ("finetune", 0, 0.3, 85.0),
    ("finetune", 0, 0.1, 88.0),
    ("control", 0, 0.2, 89.0),
    ("control", 0, 0.05, 90.25),
]
PHASES = [
    {"name": "warmup", "epochs": 2, "cycle": 0},
    {"name": "score", "epochs": 1, "cycle": 1},
    {"name": "weight", "epochs": 1, "cycle": 1},
    {"name": "score", "epochs": 1, "cycle": 2},
    {"name": "weight", "epochs": 1, "cycle": 2},
    {"name": "finetune", "epochs": 2, "cycle": 0},
    {"name": "control", "epochs": 2, "cycle": 0},
]
SCORES = {
    1: {"stem": [0.9, 1.0, 1.0, 0.2], "block.inner": [0.1, 0.3, 0.6, 0.7], "block.outer": [1.01, 0.8, 0.4, 0.55]},
    2: {"stem": [0.9, 1.0, 1.0, 0.0], "block.inner": [0.0, 0.0, 0.1, 0.1], "block.outer": [1.01, 0.8, 0.0, 0.55]},
}
KEPT = {
    1: {"stem": [3, 4], "block.inner": [2, 4], "block.outer": [3, 4]},
    2: {"stem": [3, 4], "block.inner": [0, 4], "block.outer": [3, 4]},
}
AFTER_CUT = {1: 30.0, 2: 60.5}
KEPT_MACS = {1: 0.6, 2: 0.25}
KEPT_PARAMS = {1: 0.7, 2: 0.4}


def events(*, seed: int = 0, accuracy: float = 88.5, trained: str = "as long", **start: Any) -> list[Line]:
    """A finished run of three layers: dense 1,000 parameters and 2,000 MACs, pruned 400 and 500."""
    record: list[Line] = [
        {
            "event": "start",
            "version": 2,
            "paam": "0.1.0",
            "hardware": "an abacus",
            "python": "3.11.7",
            "torch": "2.13.0",
            "commit": "abc123",
            "device": "cpu",
            "seed": seed,
            "command": f"paam prune by-hand --seed {seed}",
            "recipe": RECIPE,
            "method": "PAAM (KQ)",
            "epochs": len(EPOCHS),
            "phases": PHASES,
            "samples": {"train": 50_000, "holdout": 0, "test": 10_000},
            "classes": ["cat", "dog"],
            "monitor": "test",
            "dense": {"params": 1000, "macs": 2000},
            "groups": {
                "stem": {"width": 4, "stream": True},
                "block.inner": {"width": 4, "stream": False},
                "block.outer": {"width": 4, "stream": True},
            },
            **start,
        }
    ]
    cycle_now = 0
    for number, (phase, cycle, loss, seen) in enumerate(EPOCHS):
        if phase == "weight":
            cycle_now = cycle
            event = {"event": "selection", "epoch": number, "cycle": cycle, "threshold": 0.5}
            event |= {"kept_params": KEPT_PARAMS[cycle], "kept_macs": KEPT_MACS[cycle], "kept_filters": KEPT[cycle]}
            record.append({**event, "accuracy": AFTER_CUT[cycle]})
        if phase == "score":
            record.append({"event": "scores", "epoch": number, "cycle": cycle, "scores": SCORES[cycle]})
        dense = phase in ("warmup", "control") or not cycle_now
        event = {"event": "epoch", "epoch": number, "phase": phase, "cycle": cycle, "loss": loss, "lr": 0.1}
        event |= {"accuracy": seen, "kept_params": 1.0 if dense else KEPT_PARAMS[cycle_now]}
        record.append({**event, "kept_macs": 1.0 if dense else KEPT_MACS[cycle_now], "seconds": 6.5})
    times = {"dense": (10.0, 9.0, 12.0), "pruned": (8.0, 7.5, 8.5)}
    counts = {"dense": (90.0, 1000, 2000), "pruned": (accuracy, 400, 500)}
    end: Line = {"event": "end", "latency_batch": 32, "kept_filters": KEPT[2]}
    for name in ("dense", "pruned"):
        latency = dict(zip(("median", "low", "high"), times[name], strict=True))
        end[name] = {**dict(zip(("accuracy", "params", "macs"), counts[name], strict=True)), "latency_ms": latency}
    end["dense"]["trained"] = trained
    return [*record, end]


def large(layers: int = 109, width: int = 64, cycles: int = 10, epochs: int = 440) -> list[Line]:
    """A record as long as that of ResNet-110 with the paper's recipe; every score is different."""
    names = [f"layer{1 + i // 37}.{i % 37 // 2}.conv{1 + i % 2}" for i in range(layers)]
    record = events(
        groups={name: {"width": width, "stream": i % 2 == 0} for i, name in enumerate(names)},
        epochs=epochs,
        phases=[{"name": "finetune", "epochs": epochs, "cycle": 0}],
    )
    start, end = record[0], record[-1]
    kept = {name: [(7 * i) % (width + 1), width] for i, name in enumerate(names)}
    between: list[Line] = []
    for cycle in range(1, cycles + 1):
        scores = {
            n: [round((37 * (k + i + cycle) % 1000) / 1000, 4) for k in range(width)] for i, n in enumerate(names)
        }
        between.append({"event": "scores", "epoch": 50 + 9 * cycle, "cycle": cycle, "scores": scores})
        event = {"event": "selection", "epoch": 50 + 9 * cycle, "cycle": cycle, "threshold": 0.5, "kept_filters": kept}
        between.append({**event, "kept_params": 0.5, "kept_macs": 0.5, "accuracy": 50.0})
    for number in range(epochs):
        event = {"event": "epoch", "epoch": number, "phase": "finetune", "cycle": 0, "loss": 1 / (number + 1.37)}
        event |= {"lr": 0.1, "accuracy": 90 - 50 / (number + 1), "kept_params": 0.5, "kept_macs": 0.5}
        between.append({**event, "seconds": 1.234567})
    return [start, *between, {**end, "kept_filters": kept}]


def write(folder: Path, record: list[Line]) -> Path:
    """A run directory that contains this record; returns the record's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in record), "utf-8")
    return folder / "record.jsonl"


def facts_of(name: str, record: list[Line], problems: Sequence[str] = ()) -> Facts:
    """The facts that a report gathers from a record, corrupt or not."""
    with TemporaryDirectory() as folder:
        events, found = salvage_events(write(Path(folder), record))
    return gather(name, events, [*problems, *found])
