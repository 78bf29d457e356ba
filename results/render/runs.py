"""The records of a folder of runs: which are seeds of one experiment, and how much training lies behind a network.

A run lies in a directory <name>-seed<k>, or <name> where one seed is all there is.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from paam.report.facts import Facts
from paam.report.gathering import gather
from paam.runs.record import read_events, record_in


def runs(folder: Path) -> list[Facts]:
    """All runs of a folder by name; none where there is no such folder."""
    found = sorted({path.parent for path in folder.glob("*/record.jsonl*")})
    return [gather(run.name, read_events(record_in(run))) for run in found]


def experiments(folder: Path) -> dict[str, list[Facts]]:
    """Name -> its finished runs, one per seed. A run without an end is in none of them."""
    found: dict[str, list[Facts]] = {}
    for run in runs(folder):
        if run.finished:
            found.setdefault(re.sub(r"-seed\d+$", "", run.name), []).append(run)
    return found


def given(run: Facts, section: str, key: str) -> str | None:
    """A file that a run was given, by its command; recipes in records name files in old ones only."""
    words = shlex.split(run.start.command if run.start else "")
    named = next((word.partition("=")[2] for word in words if word.startswith(f"{section}.{key}=")), None)
    recorded = run.setting(f"{section}.{key}")
    return named or (str(recorded) if recorded else None)


def epochs_behind(run: Facts, folder: Path) -> str:
    """Epochs of training behind the pruned network of a run.

    A network that it began with counts, one that only taught it is named.
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
    """Epochs of a dense network: the warm-up of a run of the same folder, which left it in or beside that run."""
    path = Path(weights)
    run = folder / (path.parent.name if path.name == "dense.safetensors" else path.stem)
    if path.suffix != ".safetensors" or not record_in(run).is_file():
        return None
    return sum(epoch.does == "warmup" for epoch in gather(run.name, read_events(record_in(run))).epochs)
