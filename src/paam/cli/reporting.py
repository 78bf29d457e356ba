"""The command that writes runs down as a page: report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from paam.cli.app import app, complain, examples
from paam.record import RECORD_FILE
from paam.report.html import write_report
from paam.train.directory import REPORT_FILE


@app.command(epilog=examples("paam report runs/demo", "paam report runs/kq-seed0 runs/kq-seed1 -o kq.html"))
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories, finished or not.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write.  [dim]default: RUN/report.html, of several ./report.html[/]"),
    ] = None,
) -> None:
    """Write one HTML file that shows a run, or compares several; it opens offline."""
    out = out or (runs[0] / REPORT_FILE if len(runs) == 1 else Path(REPORT_FILE))
    for sentence in write_report([run / RECORD_FILE for run in runs], out):
        complain(sentence)
    typer.echo(os.fsencode(out))  # bytes: a name need not be UTF-8
