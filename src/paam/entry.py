"""Entry point of the program."""

from __future__ import annotations

import os
import sys

from paam.loading import loading


def main() -> None:
    _open_closed_streams()
    # Python puts the current folder first on sys.path of processes that libraries start, such as image workers.
    os.environ["PYTHONSAFEPATH"] = "1"
    with loading():
        from paam.cli import main as program
    program()


def _open_closed_streams() -> None:
    """Replace a closed standard stream (``>&-``) by /dev/null, so that no file of a run gets its descriptor."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            if nowhere != number:
                os.close(nowhere)
            os.set_inheritable(number, True)  # dup2 does that too, except if source and target are equal
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - open until exit
