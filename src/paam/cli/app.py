"""The application that the commands register with, its entry point, and how it complains."""

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
    """Flags are shown without a type, and what is said of wrong usage without what a terminal would obey."""

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
    """A flag takes no value, but typer shows that it is a bool."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


@contextlib.contextmanager
def usage_cleaned() -> Iterator[None]:
    """Errors of usage quote what was given, such as names of files that a shell has put there."""
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
    """Register a command; its help ends with examples, one per line, to be copied."""
    title = "Example:" if len(examples) == 1 else "Examples:"
    return app.command(cls=Command, epilog="\n\n".join([title, *(f"[bold]{line}[/]" for line in examples)]))


UNREACHABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
"""What looking at a path may end with, whatever it is looked at for."""


UNWRITABLE = (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF, errno.EAGAIN)
"""What writing to standard output may end with: no room, no reader, opened to be read, not to be waited for."""


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
        if error.filename is not None or error.errno not in UNWRITABLE:
            raise
        let_go(sys.stdout)
        complain(f"Standard output cannot be written: {error.strerror}.")
        sys.exit(1)


def kept_clean(ours: bool) -> contextlib.AbstractContextManager[object]:
    """Where standard output is ``ours`` alone, for programs to read: what a model prints goes to standard error."""
    return contextlib.redirect_stdout(sys.stderr) if ours else contextlib.nullcontext()
