"""The application that the commands register with, its entry point, and how it complains."""

from __future__ import annotations

import contextlib
import errno
import io
import sys
from typing import Annotated

import typer
from rich.console import Console

from paam.errors import PaamError
from paam.report.plain import let_go
from paam.version import __version__

app = typer.Typer(
    name="paam",
    help="Prune CNNs by active attention manipulation: smaller dense networks, exact by construction.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def examples(*commands: str) -> str:
    """The end of a command's help: one example per line, to be copied."""
    return "\n\n".join(["Example:" if len(commands) == 1 else "Examples:", *(f"[bold]{line}[/]" for line in commands)])


UNREACHABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
"""What looking at a path may end with, whatever it is looked at for."""


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        typer.echo(f"paam {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: every error paam raises on purpose becomes one sentence and exit code 2, as unreachable paths do.

    Standard output may know few characters, or have no room behind it: neither may end in a traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # standard error escapes what it does not know
    try:
        app()
    except PaamError as error:
        complain(str(error))
        sys.exit(2)
    except OSError as error:
        if error.filename is not None and error.errno in UNREACHABLE:
            complain(f"{error.filename} cannot be used: {error.strerror}.")
            sys.exit(2)
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EPIPE, errno.EIO):
            raise
        let_go(sys.stdout)
        complain(f"Standard output cannot be written: {error.strerror}.")
        sys.exit(1)


def kept_clean(ours: bool) -> contextlib.AbstractContextManager[object]:
    """Where standard output is ``ours`` alone, for programs to read: what a user's model prints goes beside it."""
    return contextlib.redirect_stdout(sys.stderr) if ours else contextlib.nullcontext()


def complain(sentence: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone must not change how the program ends
        Console(stderr=True).print(f"paam: {sentence}", style="red", highlight=False, markup=False, soft_wrap=True)
