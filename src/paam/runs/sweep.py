"""Concurrent runs: recipes x settings x seeds, each in its own process, a few at a time.

A small network leaves most of a GPU idle; under NVIDIA's MPS the kernels of several processes run concurrently. If MPS
is installed, a daemon is started for the sweep and stopped at the end.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from paam.config.recipe import Recipe
from paam.errors import ArtifactError, PaamError, StoppedError, reason
from paam.events import End, of_kind
from paam.files.reading import open_to_read
from paam.files.system import open_regular
from paam.runs.failures import foreseen_failures
from paam.runs.leash import leashed
from paam.runs.planned import Planned
from paam.runs.record import LOCK_FILE, RECORD_FILE, read_events
from paam.runs.setup import check_run, load_run_data

POLL_SECONDS = 0.5
LAST_WORDS = 1 << 16
"""Bytes at the end of a log in which to look for the reason of a failure."""


def check_variants(recipes: Mapping[str, Recipe]) -> None:
    """Check every variant before the first one runs for hours; data is loaded once."""
    alike: dict[str, dict[str, Recipe]] = {}
    for variant, recipe in recipes.items():
        alike.setdefault(repr(recipe.data), {})[variant] = recipe
    for several in alike.values():
        with ExitStack() as opened:
            data = None
            for variant, recipe in several.items():
                try:
                    with foreseen_failures("cpu"):
                        data = data or opened.enter_context(closing(load_run_data(recipe, seed=0)))
                        check_run(recipe, data, seed=0)
                except PaamError as error:
                    raise type(error)(f"{variant} cannot be run: {error}") from error


Running = dict[Planned, subprocess.Popen[bytes]]


def run_jobs(
    jobs: Sequence[Planned],
    concurrent: int,
    say: Callable[[str], object],
    stop: Callable[[], bool],
    running: Running,
    is_held: Callable[[Path], bool] = lambda out: False,
) -> dict[Path, int]:
    """Run all, ``concurrent`` at a time, each with DIR.log next to its directory. Returns exit codes by directory.

    Finished runs are not repeated, interrupted ones are resumed. When ``stop`` returns True the runs are stopped, and
    StoppedError is raised when they have saved. ``running``: pass an empty dict; it holds the active runs that have not
    been asked to stop. Waits for a directory that ``is_held`` by another process, such as a run of a killed sweep that
    is still saving.
    """
    waiting = list(jobs)
    held: set[Planned] = set()
    said: dict[Planned, int] = {}  # length of the log before
    codes: dict[Path, int] = {}
    try:
        while waiting or running:
            if stop():
                raise StoppedError("Stopped; rerun the same command to resume the runs.")
            for job in list(waiting):
                if len(running) >= concurrent or stop():
                    break
                if is_held(job.out):
                    if job not in held:
                        say(f"{'waiting':9} {job.out.name}: locked by another process")
                    held.add(job)
                    continue
                waiting.remove(job)
                started, ended = is_started(job), bool(results([job])[job.variant])
                running[job], said[job] = _start(job)
                if not ended:
                    say(f"{'resumed' if started else 'started':9} {job.out.name}")
            for job, process in list(running.items()):
                if process.poll() is not None:
                    _wait_for(running.pop(job))
                    codes[job.out] = process.returncode
                    failed = f"; {_last_line(job, said[job])}" if process.returncode else ""
                    say(f"{'failed' if failed else 'finished':9} {job.out.name}{failed}")
            with suppress(subprocess.TimeoutExpired):
                for process in running.values():
                    process.wait(POLL_SECONDS)
            if waiting and not running:
                time.sleep(POLL_SECONDS)
    finally:
        for process in request_stop(running):
            _wait_for(process)
    return codes


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def request_stop(running: Running) -> list[subprocess.Popen[bytes]]:
    """Ask all to save and stop; once only, since a second signal would stop them without saving."""
    told = []
    while running:
        told.append(running.popitem()[1])
        told[-1].send_signal(signal.SIGTERM)  # SIGINT is ignored by processes that a script started with &
    return told


def is_started(job: Planned) -> bool:
    return (job.out / LOCK_FILE).is_file() or (job.out / RECORD_FILE).is_file()


def _start(job: Planned) -> tuple[subprocess.Popen[bytes], int]:
    resume = ["--resume"] if is_started(job) else []
    with _log_of(job) as log:
        before = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "paam", "prune", *job.arguments, *resume],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,  # closed when this process is gone: see leash.py
            env=leashed(_environment()),
            start_new_session=True,  # Ctrl-C reaches them once, through this process
        )
    return process, before


def _environment() -> dict[str, str]:
    """Our environment, without empty entries of PYTHONPATH: Python reads them as the current, untrusted folder."""
    environment = dict(os.environ)
    if "PYTHONPATH" in environment:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, environment["PYTHONPATH"].split(os.pathsep)))
    return environment


def _last_line(job: Planned, before: int) -> str:
    """The last line of a failed run's log, preferably its error; the log was ``before`` bytes long when it started."""
    try:
        with open_to_read(Path(f"{job.out}.log"), sys.maxsize) as log:
            log.seek(max(before, log.seek(0, os.SEEK_END) - LAST_WORDS))
            lines = log.read(LAST_WORDS).decode("utf-8", "replace").split("\n")
    except OSError as error:
        return f"its log cannot be read: {reason(error)}"
    said = [line for line in lines if line.strip()]
    return next((line for line in reversed(said) if line.startswith("paam: ")), said[-1] if said else "no output")


def _log_of(job: Planned) -> BinaryIO:
    try:
        job.out.parent.mkdir(parents=True, exist_ok=True)
        return os.fdopen(open_regular(Path(f"{job.out}.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
    except OSError as error:
        raise ArtifactError(f"{job.out}.log cannot be written: {reason(error)}; choose another --out.") from error


def results(jobs: Sequence[Planned]) -> dict[str, list[End]]:
    """The end events of the finished runs, by variant."""
    found: dict[str, list[End]] = {}
    for job in jobs:
        ends = found.setdefault(job.variant, [])
        with suppress(ArtifactError):  # without a valid record the run has failed, which is reported already
            ends += of_kind(read_events(job.out / RECORD_FILE), End)
    return found


@contextmanager
def shared_gpu(wanted: bool) -> Iterator[bool]:
    """NVIDIA's MPS for processes started inside, if ``wanted`` and installed; yields whether it runs."""
    control = shutil.which("nvidia-cuda-mps-control")
    if not wanted or control is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield "CUDA_MPS_PIPE_DIRECTORY" in os.environ
        return
    with tempfile.TemporaryDirectory(prefix="paam-mps-") as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        try:
            started = subprocess.run([control, "-d"], capture_output=True, check=False).returncode == 0
            try:
                yield started
            finally:
                if started:
                    subprocess.run([control], input=b"quit\n", capture_output=True, check=False)
        finally:
            del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]
