"""Where the program begins."""

from __future__ import annotations

import os
import sys

from paam.loading import loading


def main() -> None:
    _open_closed_streams()
    # Python puts the current folder first on the path of processes that others start for us, such as readers of images.
    os.environ["PYTHONSAFEPATH"] = "1"
    with loading():
        from paam.cli import main as program
    program()


def _open_closed_streams() -> None:
    """Where one was closed (``>&-``) what goes there goes nowhere, and no file of a run is given its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            if nowhere != number:
                os.close(nowhere)
            os.set_inheritable(number, True)  # which dup2 does, but for a number that it has already
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - as long as we run
