"""Work in forks of one process that has loaded torch: output, exit code, and file operations."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from faulty.operations import Fault, Operation, watch

PATIENCE = 300
"""Timeout in seconds: a fork that takes longer is stopped and counts as hanging."""


@dataclass
class Ended:
    """How a fork ended: an exit code, negative for a signal."""

    code: int
    said: str
    operations: list[Operation] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    modules: Sequence[str] = ()


def forked(work: Callable[[], object], folder: Path, fault: Fault | None = None, *, watched: bool = False) -> Ended:
    """Do work in a fork, in a folder; its operations are returned only if it was ``watched`` and survived."""
    with tempfile.TemporaryDirectory() as beside:
        said, told = Path(beside, "said"), Path(beside, "told")
        child = os.fork()
        if not child:
            _inside(work, folder, fault, said, told if watched else None)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        text = said.read_bytes().decode("utf-8", "replace")
        operations, unseen, modules = pickle.loads(told.read_bytes()) if told.exists() else ([], [], ())
    return Ended(code, text, operations, unseen, modules)


def _inside(work: Callable[[], object], folder: Path, fault: Fault | None, said: Path, told: Path | None) -> None:
    """Never returns: a fork must not continue its parent's work."""
    code = 99
    try:
        signal.alarm(PATIENCE)
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False, buffering=1)
        faulthandler.enable()
        os.chdir(folder)
        os.fsync = lambda descriptor: None  # its guarantees are modelled in disk.py; the real call would only cost time
        tape = watch(folder, fault) if told is not None or fault is not None else None
        try:
            work()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        except BaseException:
            traceback.print_exc()
        if told is not None and tape is not None:
            tape.folder = "\0"  # the following operations are not part of the work
            told.write_bytes(pickle.dumps((tape.operations, tape.unseen, sorted(sys.modules))))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def load_modules(names: Sequence[str]) -> None:
    """Import the modules that a fork loaded, so that later forks inherit them.

    Nothing is computed here: forks could not continue afterwards.
    """
    for name in names:
        if name.split(".")[0] in ("torch", "paam", "rich", "sympy", "jinja2", "typer", "click", "safetensors"):
            try:
                importlib.import_module(name)
            except Exception:  # created by its package, cannot be imported
                continue
