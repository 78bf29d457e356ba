"""The application that the commands register with, its entry point, and how it complains."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from paam.errors import PaamError
from paam.version import __version__

app = typer.Typer(
    name="paam",
    help="Prune CNNs by active attention manipulation: smaller dense networks, exact by construction.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        typer.echo(f"paam {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: every error paam raises on purpose becomes one sentence and exit code 2."""
    try:
        app()
    except PaamError as error:
        complain(str(error))
        sys.exit(2)


def complain(sentence: str) -> None:
    Console(stderr=True).print(f"paam: {sentence}", style="red", highlight=False, markup=False, soft_wrap=True)
