"""Lines of the model's own code, for messages."""

from __future__ import annotations

import linecache
import sys
import traceback
from pathlib import Path
from types import FrameType

import torch

Line = tuple[str, int]
"""File and line number."""

NOT_THE_MODELS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/")
"""Directories of code that is not the model's own."""


def running_line() -> Line | None:
    """The line of the model's own code that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_MODELS):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def quoted(line: Line | None) -> str:
    """ "net.py:12 (`return x[0]`)" """
    return f"{Path(line[0]).name}:{line[1]} (`{linecache.getline(*line).strip()}`)" if line else ""


def at(line: Line | None) -> str:
    return f" at {quoted(line)}" if line else ""


def leave_alone(name: str) -> str:
    """Advice at the end of a message to ignore a part of the model; empty for the model itself."""
    return f" Or leave '{name}' alone with ignore=['{name}']: it then runs as it is." if name else ""


def line_of(error: Exception) -> str:
    """Where in the model's own code an error was raised, such as " at net.py:12 (`return x[0]`)"."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [place for place in places if not place[0].startswith(NOT_THE_MODELS)]
    return at(own[-1]) if own else ""
