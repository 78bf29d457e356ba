"""One root error and a handful of kinds. Every message says what is wrong, where, and what to do next.

The command line turns each of them into one sentence on standard error and exit code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PaamError(Exception):
    """Root of everything paam raises on purpose."""


class RecipeError(PaamError):
    """A recipe, a key in it, or a value is unknown, of the wrong type, or out of range."""


class DataError(PaamError):
    """A data file is missing, damaged, or not what it should be."""


class GraphError(PaamError):
    """A model cannot be traced, or holds an operation that no channel rule covers."""


class ConstantMapError(GraphError):
    """A layer of a pruned network became a constant map, which is right for inputs of one size alone."""


class TargetError(PaamError):
    """A pruning target cannot be reached, or is contradictory."""


class ArtifactError(PaamError):
    """A plan, a weight file or a run directory is missing, damaged, foreign, or in the way."""


class DamagedError(ArtifactError):
    """The content of a file is proven to be wrong; one that merely cannot be read now is not damaged."""


class DeviceError(PaamError):
    """The requested device is not there."""


class DivergedError(PaamError):
    """Training produced a loss that is not finite, or scores that say nothing."""


class FailedError(PaamError):
    """Something else than paam's own refusals ended a run: memory, a user's code, torch.

    ``change``: "key=value" of the recipe with which the run has a chance to go on; empty where none is known.
    """

    def __init__(self, sentence: str, change: str = "") -> None:
        super().__init__(sentence)
        self.change = change


class TrustError(PaamError):
    """A file names code to run, and the user has not said to run it."""


class StoppedError(PaamError):
    """A run did as it was asked: it stopped, with its state saved."""


def one_line(error: BaseException) -> str:
    """An error of somebody else's code as part of one of our sentences."""
    try:
        said = str(error)
    except Exception:  # of a class of somebody's own
        said = ""
    return " ".join(said.split()).rstrip(".") or type(error).__name__


def reason(error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be used, without the system's numbers and the path, which the sentence has already."""
    return (error.strerror or one_line(error)) if isinstance(error, OSError) else "it is not UTF-8"


def nearest(name: object, known: Iterable[str]) -> str:
    """A hint such as " Did you mean 'kq'?" for a mistyped name, or the list of what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Known: {', '.join(known)}."
