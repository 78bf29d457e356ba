"""The command that writes an HTML report on runs: report."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from paam.cli.app import command
from paam.runs.record import REPORT_FILE, record_in
from paam.views.lines import complain, put


@command("paam report runs/demo", "paam report runs/kq-seed0 runs/kq-seed1 -o kq.html")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories, finished or not.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write.  [dim]default: RUN/report.html, of several ./report.html[/]"),
    ] = None,
) -> None:
    """Write one HTML file that shows a run or compares several; it works offline."""
    from paam.report.page import write_report

    out = out or (runs[0] / REPORT_FILE if len(runs) == 1 else Path(REPORT_FILE))
    for sentence in write_report([record_in(run) for run in runs], out):
        complain(sentence)
    if sys.stdout.isatty():
        put(str(out))
    else:
        typer.echo(os.fsencode(out))  # raw bytes for programs: the name may not be UTF-8
