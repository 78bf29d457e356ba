"""The typer application, its entry point, and error handling."""

from __future__ import annotations

import contextlib
import errno
import io
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from paam.errors import PaamError
from paam.version import __version__
from paam.views.format import clean
from paam.views.lines import complain, let_go


class _Shown:
    """Shows flags without a type, and removes terminal escapes from usage errors."""

    def get_params(self, ctx: Any) -> Any:
        return without_types(super().get_params(ctx))  # type: ignore[misc]

    def make_context(self, *args: Any, **options: Any) -> Any:
        with usage_cleaned():
            return super().make_context(*args, **options)  # type: ignore[misc]


class Command(_Shown, TyperCommand):
    """One command."""


class Group(_Shown, TyperGroup):
    """All commands."""

    def resolve_command(self, *args: Any) -> Any:
        with usage_cleaned():
            return super().resolve_command(*args)


def without_types(params: list[Any]) -> list[Any]:
    """Flags take no value, but typer shows them as bool."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


@contextlib.contextmanager
def usage_cleaned() -> Iterator[None]:
    """Usage errors quote the arguments, which may be file names from a shell glob."""
    try:
        yield
    except Exception as error:
        if isinstance(message := getattr(error, "message", None), str):
            error.message = clean(message)  # type: ignore[attr-defined]
        raise


app = typer.Typer(
    name="paam",
    cls=Group,
    help="Prune CNNs by active attention manipulation: smaller dense networks, exact by construction.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def command(*examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command; its help ends with examples to copy, one per line."""
    title = "Example:" if len(examples) == 1 else "Examples:"
    return app.command(cls=Command, epilog="\n\n".join([title, *(f"[bold]{line}[/]" for line in examples)]))


UNREACHABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
"""Errors that any access to a path may raise."""


UNWRITABLE = (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF, errno.EAGAIN)
"""Errors of writing to standard output: disk full, no reader, I/O error, opened read-only, would block."""


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        typer.echo(f"paam {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: a PaamError or an inaccessible path becomes one sentence and exit code 2.

    Standard output may have a limited encoding or a full disk: neither may end in a traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # standard error escapes what it cannot encode
    try:
        app()
    except PaamError as error:
        complain(str(error))
        sys.exit(2)
    except OSError as error:
        if error.filename is not None and error.errno in UNREACHABLE:
            complain(f"{error.filename} cannot be used: {error.strerror}.")
            sys.exit(2)
        if error.filename is not None or error.errno not in UNWRITABLE:
            raise
        let_go(sys.stdout)
        complain(f"Standard output cannot be written: {error.strerror}.")
        sys.exit(1)


def kept_clean(ours: bool) -> contextlib.AbstractContextManager[object]:
    """If standard output is ``ours`` alone, for programs to read, redirect what a model prints to standard error."""
    return contextlib.redirect_stdout(sys.stderr) if ours else contextlib.nullcontext()
