"""The records of a folder of runs: which are seeds of one experiment, and how many epochs a network was trained for.

A run is in a directory <name>-seed<k>, or <name> if there is only one seed.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from paam.report.facts import Facts
from paam.report.gathering import gather
from paam.runs.record import read_events, record_in


def runs(folder: Path) -> list[Facts]:
    """All runs of a folder by name; empty if the folder does not exist."""
    found = sorted({path.parent for path in folder.glob("*/record.jsonl*")})
    return [gather(run.name, read_events(record_in(run))) for run in found]


def experiments(folder: Path) -> dict[str, list[Facts]]:
    """Name -> its finished runs, one per seed. Unfinished runs are left out."""
    found: dict[str, list[Facts]] = {}
    for run in runs(folder):
        if run.finished:
            found.setdefault(re.sub(r"-seed\d+$", "", run.name), []).append(run)
    return found


def given(run: Facts, section: str, key: str) -> str | None:
    """A file that a run was given in its command; recipes name files only in old records."""
    words = shlex.split(run.start.command if run.start else "")
    named = next((word.partition("=")[2] for word in words if word.startswith(f"{section}.{key}=")), None)
    recorded = run.setting(f"{section}.{key}")
    return named or (str(recorded) if recorded else None)


def epochs_behind(run: Facts, folder: Path) -> str:
    """Total epochs of training of a run's pruned network.

    Those of the network it started from count; a teacher is only mentioned.
    """
    epochs = len(run.own_epochs)
    if weights := given(run, "model", "weights"):
        before = _dense_epochs(weights, folder)
        return str(epochs + before) if before is not None else f"{epochs} + unknown"
    if teacher := given(run, "distill", "teacher"):
        taught = _dense_epochs(teacher, folder)
        return f"{epochs} (its teacher: {'unknown' if taught is None else taught})"
    return str(epochs)


def _dense_epochs(weights: str, folder: Path) -> int | None:
    """Epochs of a dense network: the warm-up of a run in this folder, which saved it in or next to its directory."""
    path = Path(weights)
    run = folder / (path.parent.name if path.name == "dense.safetensors" else path.stem)
    if path.suffix != ".safetensors" or not record_in(run).is_file():
        return None
    return sum(epoch.does == "warmup" for epoch in gather(run.name, read_events(record_in(run))).epochs)
