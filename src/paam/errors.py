"""One root error and a handful of kinds. Every message says what is wrong, where, and what to do next.

The command line turns each of them into one sentence on standard error and exit code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PaamError(Exception):
    """Base class of all errors that paam raises on purpose."""


class RecipeError(PaamError):
    """A recipe, a key in it, or a value is unknown, of the wrong type, or out of range."""


class DataError(PaamError):
    """A data file is missing, corrupt or invalid."""


class GraphError(PaamError):
    """A model cannot be traced, or has an unsupported operation."""


class ConstantMapError(GraphError):
    """A layer of a pruned network became a constant map, which is valid for one input size only."""


class TargetError(PaamError):
    """A pruning target is unreachable or contradictory."""


class ArtifactError(PaamError):
    """A plan, a weight file or a run directory is missing, corrupt, of another network, or exists already."""


class DamagedError(ArtifactError):
    """The content of a file is corrupt, as opposed to a file that cannot be read right now."""


class DeviceError(PaamError):
    """The requested device is not available."""


class DivergedError(PaamError):
    """Training diverged, or all scores vanished."""


class FailedError(PaamError):
    """An unexpected error ended a run: out of memory, user code, torch.

    ``change``: "key=value" of the recipe with which resuming may succeed; empty if none is known.
    """

    def __init__(self, sentence: str, change: str = "") -> None:
        super().__init__(sentence)
        self.change = change


class TrustError(PaamError):
    """A file names code to run, and the user has not allowed it."""


class StoppedError(PaamError):
    """A run stopped as requested, with its state saved."""


def one_line(error: BaseException) -> str:
    """An error of foreign code, formatted as part of a message."""
    try:
        said = str(error)
    except Exception:  # an exception class whose __str__ fails
        said = ""
    return " ".join(said.split()).rstrip(".") or type(error).__name__


def reason(error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be used, without errno and path, which the message has already."""
    return (error.strerror or one_line(error)) if isinstance(error, OSError) else "it is not UTF-8"


def nearest(name: object, known: Iterable[str]) -> str:
    """A hint such as " Did you mean 'kq'?" for a mistyped name, or the list of known names."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Known: {', '.join(known)}."
