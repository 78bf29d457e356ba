"""Many runs at a glance: which there are below a folder, how far they are, and their headline numbers."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from paam.errors import ArtifactError
from paam.record import LOCK_FILE, RECIPE_FILE, RECORD_FILE, Event, of_kind
from paam.report.alive import life, silent_for
from paam.report.checking import read_events, recorded_schedule
from paam.report.phrases import MONITORS, age, clean, control_line, less, removed

LEVELS = 4
"""Folders below the one given in which runs are looked for."""
STATES = {"running": "cyan", "stopped": "yellow", "failed": "red", "finished": "green", "damaged": "red"}
"""In the order of the listing, with their colours."""


@dataclass(frozen=True)
class RunRow:
    """Accuracy in percent, on ``measured_on`` (test, or what is watched while training); removed: percent of dense.

    ``control_accuracy``: of a dense control, measured on the same. ``resume``: the command that goes on with the run.
    """

    path: str
    state: str
    age_seconds: float
    why: str | None = None
    epochs_done: int | None = None
    epochs: int | None = None
    model: str | None = None
    data: str | None = None
    scorer: str | None = None
    seed: int | None = None
    accuracy: float | None = None
    measured_on: str | None = None
    control_accuracy: float | None = None
    macs_removed: float | None = None
    params_removed: float | None = None
    resume: str | None = None


def list_runs(top: Path) -> list[RunRow]:
    """Running ones first, then by state; the newest first. A run that cannot be read is a row that says why."""
    rows = [_row(path) for path in _find(top, LEVELS)]
    order = list(STATES)
    return sorted(rows, key=lambda row: (order.index(row.state), row.age_seconds, row.path))


def _find(folder: Path, levels: int) -> Iterator[Path]:
    """Run directories, and folders that could not be looked into."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError:
        yield folder
        return
    if any(entry.name == RECORD_FILE and not _is_pipe(entry) for entry in entries):
        yield folder
    elif levels:
        for entry in entries:
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                yield from _find(folder / entry.name, levels - 1)


def _is_pipe(entry: os.DirEntry[str]) -> bool:
    """Who opens one may wait for ever."""
    try:
        return stat.S_ISFIFO(entry.stat().st_mode)
    except OSError:
        return False


def _row(path: Path) -> RunRow:
    quiet = silent_for(path)
    try:
        events = read_events(path / RECORD_FILE)
    except ArtifactError as error:
        return RunRow(clean(path), "damaged", quiet, why=clean(error))
    return _summarised(path, events, quiet)


def _summarised(path: Path, events: list[Event], quiet: float) -> RunRow:
    start = events[0]
    gone: tuple[float | None, float | None]
    epochs, cuts, ends, failures = (of_kind(events, kind) for kind in ("epoch", "selection", "end", "failed"))
    own = [event["accuracy"] for event in epochs if event["phase"] != "control"]
    controls = [event["accuracy"] for event in epochs if event["phase"] == "control" and event["accuracy"] is not None]
    control = controls[-1] if controls else None
    why = resume = None
    if ends:
        state, accuracy, where = "finished", ends[-1]["pruned"]["accuracy"], "test"
        control = None if control is None else ends[-1]["dense"]["accuracy"]
        gone = removed(ends[-1], "macs"), removed(ends[-1], "params")
    else:
        longest = max((event["seconds"] for event in epochs), default=0.0)
        state = "running" if life(path, longest, grace=0) == "alive" else "stopped"
        if failures:  # its last words, of which a resumed run takes back the record
            state, why = "failed", clean(failures[-1]["reason"])
        if state != "running":
            resume = resume_command(path, start, next(reversed(of_kind(events, "changed")), None)) or None
        accuracy, where = (own[-1] if own else None), start["monitor"]
        gone = (100 * (1 - cuts[-1]["kept_macs"]), 100 * (1 - cuts[-1]["kept_params"])) if cuts else (None, None)
    recipe = start["recipe"]
    return RunRow(
        path=clean(path),
        state=state,
        age_seconds=quiet,
        why=why,
        epochs_done=max((event["epoch"] + 1 for event in epochs), default=0),
        epochs=recorded_schedule(start).total,
        model=clean(recipe["model"]["name"]),
        data=clean(recipe["data"]["name"]),
        scorer=clean(recipe["prune"]["scorer"]),
        seed=start["seed"],
        accuracy=accuracy,
        measured_on=None if accuracy is None else where,
        control_accuracy=control,
        macs_removed=gone[0],
        params_removed=gone[1],
        resume=resume,
    )


def resume_command(run: Path, start: Event, changed: Event | None = None) -> str:
    """What goes on with a run where it lies now, with what it last ``changed``.

    Empty where its record does not say how, or was brought here without the run, or lies where no command can say.
    """
    commands = [event.get("command") for event in (changed, start) if event is not None]
    known = [command for command in commands if isinstance(command, str) and command]
    if not known or clean(run) != str(run) or not (run / LOCK_FILE).exists():
        return ""
    try:
        words = shlex.split(clean(known[0]).removesuffix(" --resume"))
    except ValueError:  # quotes that do not close
        words = []
    if words[:1] != ["paam"] or "--" in words:  # not written by our own command line
        return ""
    elsewhere = [a == "--out" or b == "--out" or b.startswith("--out=") for a, b in pairwise(["", *words])]
    kept = [word for word, gone in zip(words, elsewhere, strict=True) if not gone]
    # The run's own copy, where the recipe does not lie below the folder that the command would be given in.
    copy = run / RECIPE_FILE
    kept = [str(copy) if _is_absent_recipe(word) and copy.is_file() else word for word in kept]
    return shlex.join([*kept, "--out", str(run), "--resume"])


def _is_absent_recipe(word: str) -> bool:
    return word.endswith(".toml") and "=" not in word and not Path(word).exists()


def runs_table(rows: Sequence[RunRow], width: int) -> RenderableType:
    """One line per run where all fit, two otherwise."""
    table = _one_line_each(rows)
    fits = Console(width=10_000).measure(table).maximum <= width
    return table if fits else Group(*_two_lines_each(rows, width))


def runs_notes(rows: Sequence[RunRow]) -> list[Text]:
    """Why runs are no more, and what goes on with them: lines to be copied, and so not to be broken."""
    notes = []
    for row in rows:
        if row.why:
            notes.append(Text(f"{row.path} failed: {row.why}" if row.state == "failed" else row.why, "red"))
        if row.resume:
            notes.append(Text(f"{row.path} goes on with:  {row.resume}", "dim"))
    return notes


def _one_line_each(rows: Sequence[RunRow]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("run", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("model", "data", "scorer"):
        table.add_column(column, no_wrap=True, max_width=24)
    for column in ("seed", "accuracy", "MACs", "parameters", "written"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = [row.model or "", row.data or "", row.scorer or "", "" if row.seed is None else str(row.seed)]
        cells += [_accuracy(row), _less(row.macs_removed), _less(row.params_removed), f"{age(row.age_seconds)} ago"]
        table.add_row(Text(row.path), _state(row), *map(Text, cells))
    return table


def _two_lines_each(rows: Sequence[RunRow], width: int) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for row in rows:
        state = _state(row)
        path = Text(row.path, "bold")
        written = f"  {age(row.age_seconds)} ago"
        path.truncate(max(width - state.cell_len - 2 - len(written), 8), overflow="ellipsis")
        lines.append(Text.assemble(path, "  ", state, (written, "dim")))
        if row.model is not None:
            what = f"  {row.model} on {row.data}, {row.scorer}, seed {row.seed}"
            parts = [what, _accuracy(row), _less(row.macs_removed, "MACs "), _less(row.params_removed, "params ")]
            second = Text("  ".join(part for part in parts if part), no_wrap=True, overflow="ellipsis")
            lines.append(second)
    return lines


def _state(row: RunRow) -> Text:
    behind = f" after {row.epochs_done} of {row.epochs} epochs"
    at = {"running": f" {row.epochs_done}/{row.epochs}", "stopped": behind, "failed": behind}
    return Text(row.state + at.get(row.state, ""), STATES[row.state])


def _accuracy(row: RunRow) -> str:
    if row.accuracy is None:
        return ""
    where = f" ({MONITORS.get(row.measured_on or '', clean(row.measured_on))})"
    if row.measured_on == "test":
        where = "" if row.state == "finished" else " (test, so far)"
    control = "" if row.control_accuracy is None else f", {control_line(row.control_accuracy)}"
    return f"{row.accuracy:.2f} %{where}{control}"


def _less(percent: float | None, name: str = "") -> str:
    return "" if percent is None else f"{name}{less(percent)}"
