"""Commands that show runs: watch one from another terminal, list many."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paam.cli.app import command
from paam.errors import ArtifactError
from paam.events import Event
from paam.runs.liveness import FRESH, Life, Silence, life, lock_held
from paam.runs.progress import PROGRESS_FILE, read_progress
from paam.runs.record import COMPRESSED_FILE, LOCK_FILE, RECORD_FILE, read_events, record_in
from paam.views.choose import View, choose_view
from paam.views.follow import Follower
from paam.views.format import age
from paam.views.lines import complain, show
from paam.views.listing import list_runs, resume_command, runs_notes, runs_table
from paam.views.state import RunState, after
from paam.views.summary import summary

POLL = 0.5
"""Seconds between polls of the record."""


@command("paam watch runs/demo", "paam watch runs/demo --json")
def watch(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the record's events as JSON lines.")] = False,
) -> None:
    """Follow a run from another terminal until it ends; Ctrl-C does not stop the run."""
    record = run_directory / RECORD_FILE
    if record_in(run_directory).name == COMPRESSED_FILE:
        raise ArtifactError(
            f"The record in {run_directory} is compressed: show it with paam runs or paam report, or run"
            f" 'gunzip {COMPRESSED_FILE}' there first."
        )
    if not record.is_file():
        raise ArtifactError(f"{run_directory} is not a run directory (no {RECORD_FILE}).")
    try:
        with choose_view("Ctrl-C leaves; the run continues", as_json=as_json) as view:
            state = _follow(run_directory, view)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if not view.heard:
        return
    if state.end is None:
        ended = "stopped" if state.failed is None else "failed"
        resuming = resume_command(run_directory, state.start, state.changed) if state.start else ""
        how = f" Resume with:  {resuming}" if resuming else ""
        complain(f"The run in {run_directory} {ended} {_where(state)}.{how}")
        raise typer.Exit(1)
    if not as_json and state.start is not None:
        show(Console(), summary(state.start, state.end))


@command("paam runs", "paam runs results --json")
def runs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to look in.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the runs below a folder with their state and main results."""
    if not directory.is_dir():
        raise ArtifactError(f"There is no folder {directory}; give the folder of your runs.")
    rows = list_runs(directory)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
        return
    if not rows:
        raise ArtifactError(f"There are no runs in {directory}: no folder in it has a {RECORD_FILE}.")
    console = Console()
    if not console.is_terminal:
        console.width = 10_000  # one line per run, for grep
    console.print(runs_table(rows, console.width))
    if notes := runs_notes(rows):
        console.print("", *notes, sep="\n", soft_wrap=True)


def _follow(run_directory: Path, view: View) -> RunState:
    """Show events until the run has ended, its process is gone, or the view's output is closed."""
    state = RunState()
    silence = Silence(run_directory)
    with Follower(run_directory / RECORD_FILE) as follower:
        while view.heard:
            news: list[Event] = follower.poll()
            for event in news:
                state = after(state, event)
                view.event(event)
            if state.end is not None or state.failed is not None:
                break
            if state.start is None and not news and _left_alone(run_directory, silence):
                read_events(run_directory / RECORD_FILE)  # raises the specific error
            view.at(read_progress(run_directory / PROGRESS_FILE))
            signs = life(run_directory, state.longest, silence.seconds())
            if signs == "gone" and not news:  # otherwise it may have written more events before it ended
                break
            view.warn(_silence(signs, silence))
            time.sleep(POLL)
    return state


def _left_alone(run_directory: Path, silence: Silence) -> bool:
    """Whether no process is known to be working on the run, nor was a moment ago."""
    return lock_held(run_directory / LOCK_FILE) is None and silence.seconds() > FRESH


def _where(state: RunState) -> str:
    if state.start is None:
        return "before its first event"
    return f"in epoch {state.done + 1} of {state.epochs}" if state.place else "while measuring its result"


def _silence(signs: Life, silence: Silence) -> str:
    if signs != "silent":
        return ""
    return f"no output for {age(silence.seconds())}: the run may have stopped"
