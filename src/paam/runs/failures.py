"""What ends a run although nobody meant to: as one sentence, with the traceback in a file beside the record."""

from __future__ import annotations

import contextlib
import errno
import re
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from paam.errors import ArtifactError, FailedError, PaamError, one_line
from paam.files.durable import write_atomically

LOG_FILE = "failed.log"
LONGEST = 300
"""Characters of a foreign error that are told; the log has all of them."""
_NO_MEMORY = re.compile(
    "DefaultCPUAllocator: can't allocate|_STATUS_ALLOC_FAILED|CUDA error: out of memory|backend out of memory"
)
"""How torch says it where it raises a plain RuntimeError."""


@contextlib.contextmanager
def foreseen_failures(device: str) -> Iterator[None]:
    """Before a run has begun: what lack of memory and sys.exit() would leave without a word is told as one."""
    try:
        yield
    except PaamError:
        raise
    except (Exception, SystemExit) as error:
        if out_of_memory(error) is None and not isinstance(error, SystemExit):
            raise
        raise FailedError(f"{_told(error, 'before training began', device)}{_advice(error, 0)}") from error


@contextlib.contextmanager
def all_failures(out: Path, where: Callable[[], str], device: str, batch: Callable[[], int]) -> Iterator[None]:
    """Whatever ends training is a PaamError outside; ``where``: how far it was. Its traceback goes to a log.

    ``batch``: images in the step that was under way; 0 outside of steps.
    """
    try:
        yield
    except PaamError:
        raise
    except (Exception, SystemExit) as error:
        sentence = f"{_told(error, where(), device)}{_advice(error, batch())}"
        change = f"data.batch_size={batch() // 2}" if out_of_memory(error) is not None and batch() > 1 else ""
        raise FailedError(f"{sentence} {_logged(error, out / LOG_FILE)}", change) from error


def out_of_memory(error: BaseException) -> BaseException | None:
    """The lack of memory behind an error: what is raised on the way out of it may hide it."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        if isinstance(found, MemoryError | torch.OutOfMemoryError):
            return found
        if isinstance(found, RuntimeError) and _NO_MEMORY.search(one_line(found)):
            return found
        if isinstance(found, OSError) and found.errno == errno.ENOMEM:
            return found
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return None


def _told(error: BaseException, where: str, device: str) -> str:
    if (lack := out_of_memory(error)) is not None:
        main = isinstance(lack, MemoryError | OSError) or "DefaultCPUAllocator" in one_line(lack)
        wanted = re.search(r"tried to allocate ([\d.]+ \w+)", one_line(lack), re.IGNORECASE)
        amount = f" ({wanted[1]} more were asked for)" if wanted else ""
        return f"Out of {'main memory' if main else f'memory on {device}'} {where}{amount}."
    if isinstance(error, SystemExit):
        return f"The model's code called sys.exit({error.code!r}) {where}; that must not end a run."
    said = textwrap.shorten(one_line(error), LONGEST, placeholder=" ...")
    name = type(error).__name__
    return f"Training failed {where}, {name}{'' if said == name else f': {said}'}."


def _advice(error: BaseException, batch: int) -> str:
    if out_of_memory(error) is None:
        return ""
    if batch > 1:
        return f" A smaller batch needs less (data.batch_size, {batch} now)."
    return " Free some, or take another device; smaller images (data.image_size) or a smaller network need less."


def _logged(error: BaseException, log: Path) -> str:
    try:
        write_atomically(log, "".join(traceback.format_exception(error)).encode("utf-8", "replace"))
    except (ArtifactError, MemoryError):
        return f"The traceback could not be written to {log}."
    return f"The traceback is in {log}."
