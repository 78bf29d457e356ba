"""Overview of many runs: find them below a folder, with their progress and headline numbers."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from paam.config.trust import FLAG, is_code, is_named
from paam.errors import ArtifactError, DamagedError
from paam.events import Changed, End, Epoch, Event, Failed, Selected, Start, last, of_kind
from paam.runs.liveness import life, silent_for
from paam.runs.record import COMPRESSED_FILE, LOCK_FILE, RECIPE_FILE, RECORD_FILE, read_events, record_in
from paam.views.format import MONITORS, age, change, clean, control_line, data_name, model_name, removed

LEVELS = 4
"""How many folder levels below the given one are searched for runs."""
STATES = {
    "running": "cyan",
    "stopped": "yellow",
    "failed": "red",
    "finished": "green",
    "damaged": "red",
    "unreadable": "red",
}
"""In the order of the listing, with their colours."""


@dataclass(frozen=True)
class RunRow:
    """Accuracy in percent, on ``measured_on`` (test, or the set monitored during training); removed: percent of dense.

    ``control_accuracy``: of a dense control, measured on the same images. ``resume``: the command that resumes the run.
    """

    path: str
    state: str
    age_seconds: float
    why: str | None = None
    epochs_done: int | None = None
    epochs: int | None = None
    model: str | None = None
    data: str | None = None
    method: str | None = None
    seed: int | None = None
    accuracy: float | None = None
    measured_on: str | None = None
    control_accuracy: float | None = None
    macs_removed: float | None = None
    params_removed: float | None = None
    resume: str | None = None


def list_runs(top: Path) -> list[RunRow]:
    """Running ones first, then by state; newest first. A run that cannot be read becomes a row with the reason."""
    rows = [_row(path) for path in _find(top, LEVELS)]
    order = list(STATES)
    return sorted(rows, key=lambda row: (order.index(row.state), row.age_seconds, row.path))


def _find(folder: Path, levels: int) -> Iterator[Path]:
    """Run directories, and folders that could not be listed."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError:
        yield folder
        return
    if any(entry.name in (RECORD_FILE, COMPRESSED_FILE) for entry in entries):
        yield folder
    elif levels:
        for entry in entries:
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                yield from _find(folder / entry.name, levels - 1)


def _row(path: Path) -> RunRow:
    quiet = silent_for(path)
    try:
        events = read_events(record_in(path))
    except DamagedError as error:
        return RunRow(clean(path), "damaged", quiet, why=clean(error))
    except ArtifactError as error:
        return RunRow(clean(path), "unreadable", quiet, why=clean(error))
    return _summarised(path, events, quiet)


def _summarised(path: Path, events: list[Event], quiet: float) -> RunRow:
    start, end, failed, cut = last(events, Start), last(events, End), last(events, Failed), last(events, Selected)
    assert start is not None  # the reader has checked this
    epochs = of_kind(events, Epoch)
    own = [event.accuracy for event in epochs if event.does != "control"]
    controls = [event.accuracy for event in epochs if event.does == "control" and event.accuracy is not None]
    control = controls[-1] if controls else None
    accuracy: float | None
    gone: tuple[float | None, float | None] = None, None
    why = resume = None
    if end is not None:
        state, accuracy, measured_on = "finished", end.pruned.accuracy, "test"
        control = None if control is None else end.dense.accuracy
        gone = removed(end, "macs"), removed(end, "params")
    else:
        longest = max((event.seconds for event in epochs), default=0.0)
        state = "running" if life(path, longest, quiet, grace=0) == "alive" else "stopped"
        if failed is not None:  # the last event of its record; resuming removes it
            state, why = "failed", clean(failed.reason)
        if state != "running":
            resume = resume_command(path, start, last(events, Changed)) or None
        accuracy, measured_on = (own[-1] if own else None), start.monitor
        if cut is not None:
            gone = 100 * (1 - cut.kept_macs), 100 * (1 - cut.kept_params)
    return RunRow(
        path=clean(path),
        state=state,
        age_seconds=quiet,
        why=why,
        epochs_done=max((event.epoch + 1 for event in epochs), default=0),
        epochs=start.epochs,
        model=model_name(start),
        data=data_name(start),
        method=clean(start.method),
        seed=start.seed,
        accuracy=accuracy,
        measured_on=None if accuracy is None else measured_on,
        control_accuracy=control,
        macs_removed=gone[0],
        params_removed=gone[1],
        resume=resume,
    )


def resume_command(run: Path, start: Start, changed: Changed | None = None) -> str:
    """The command that resumes a run at its current path, with the settings that it last ``changed``.

    Empty if the record has no command, was copied here without the run, or has a path that cannot be written in a
    command.
    """
    known = [event.command for event in (changed, start) if event is not None and event.command]
    if not known or clean(run) != str(run) or not (run / LOCK_FILE).exists():
        return ""
    try:
        words = shlex.split(clean(known[0]).removesuffix(" --resume"))
    except ValueError:  # unbalanced quotes
        words = []
    if words[:1] != ["paam"] or "--" in words:  # not written by the command line
        return ""
    elsewhere = [a == "--out" or b == "--out" or b.startswith("--out=") for a, b in pairwise(["", *words])]
    kept = [word for word, gone in zip(words, elsewhere, strict=True) if not gone]
    # The run's own copy, if the recipe does not exist relative to the current folder.
    copy = run / RECIPE_FILE
    kept = [str(copy) if _is_absent_recipe(word) and copy.is_file() else word for word in kept]
    flag = [FLAG] if is_code(str(start.setting("model.name"))) and not _allows_code(kept) else []
    return shlex.join([*kept, *flag, "--out", str(run), "--resume"])


def _allows_code(words: list[str]) -> bool:
    """Whether a recorded command allows the code that its recipe names."""
    return FLAG in words or is_named(word.removeprefix("--set=") for word in words)


def _is_absent_recipe(word: str) -> bool:
    return word.endswith(".toml") and "=" not in word and not Path(word).exists()


def runs_table(rows: Sequence[RunRow], width: int) -> RenderableType:
    """One line per run if all fit, otherwise two."""
    table = _one_line_each(rows)
    fits = Console(width=10_000).measure(table).maximum <= width
    return table if fits else Group(*_two_lines_each(rows, width))


def runs_notes(rows: Sequence[RunRow]) -> list[Text]:
    """Why runs ended, and the commands that resume them: lines for copying, which must not be wrapped."""
    notes = []
    for row in rows:
        if row.why:
            notes.append(Text(f"{row.path} failed: {row.why}" if row.state == "failed" else row.why, "red"))
        if row.resume:
            notes.append(Text(f"{row.path}: resume with:  {row.resume}", "dim"))
    return notes


def _one_line_each(rows: Sequence[RunRow]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("run", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("model", "data", "method"):
        table.add_column(column, no_wrap=True, max_width=24)
    for column in ("seed", "accuracy", "MACs", "parameters", "written"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = [row.model or "", row.data or "", row.method or "", "" if row.seed is None else str(row.seed)]
        cells += [_accuracy(row), _change(row.macs_removed), _change(row.params_removed), f"{age(row.age_seconds)} ago"]
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
            what = f"  {row.model} on {row.data}, {row.method}, seed {row.seed}"
            parts = [what, _accuracy(row), _change(row.macs_removed, "MACs "), _change(row.params_removed, "params ")]
            second = Text("  ".join(part for part in parts if part), no_wrap=True, overflow="ellipsis")
            lines.append(second)
    return lines


def _state(row: RunRow) -> Text:
    ended = f" after {row.epochs_done} of {row.epochs} epochs"
    at = {"running": f" {row.epochs_done}/{row.epochs}", "stopped": ended, "failed": ended}
    return Text(row.state + at.get(row.state, ""), STATES[row.state])


def _accuracy(row: RunRow) -> str:
    if row.accuracy is None:
        return ""
    where = f" ({MONITORS['holdout']})"
    if row.measured_on == "test":
        where = "" if row.state == "finished" else " (test, so far)"
    control = "" if row.control_accuracy is None else f", {control_line(row.control_accuracy)}"
    return f"{row.accuracy:.2f} %{where}{control}"


def _change(percent: float | None, name: str = "") -> str:
    return "" if percent is None else f"{name}{change(percent)}"
