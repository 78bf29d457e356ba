"""Several runs side by side: recipes x settings x seeds, each in a process of its own, a few at a time.

A small network leaves most of a GPU idle; under NVIDIA's MPS the kernels of several processes run at once. A daemon of
our own is started where there is one to start, and stopped at the end.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paam.errors import ArtifactError, PaamError, RecipeError, StoppedError
from paam.recipe import Recipe, parse_override
from paam.record import LOCK_FILE, RECORD_FILE, Event, of_kind, read_record
from paam.train.setup import check_run, load_run_data

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """One run: its directory, the variant that it belongs to, seeds aside, and the arguments of `paam prune`."""

    out: Path
    variant: str
    seed: int
    arguments: tuple[str, ...]


def jobs_of(
    recipes: Sequence[str], seeds: Sequence[int], vary: Sequence[str], options: Sequence[str], out: Path
) -> list[Job]:
    """Every combination, seed by seed. ``vary``: texts such as "prune.balance=area,side"; ``options``: for all runs."""
    choices: dict[str, list[str]] = {}
    for text in vary:
        key, equals, listed = text.partition("=")
        values = _split(listed)
        if not equals or not key.strip() or not all(values):
            raise RecipeError(
                f"--vary takes key=value,value, for example --vary prune.balance=area,side; not '{text}'."
            )
        key = key.strip()
        given = [option.partition("=")[0].strip() for option in options]
        if key in choices or key in given or (key == "data.directory" and "--data" in given):
            raise RecipeError(f"{key} is given twice; all its values belong into one --vary.")
        choices[key] = [f"{key}={value}" for value in values]
        meant = [parse_override(setting)[1] for setting in choices[key]]
        if any(one == other for one, other in itertools.combinations(meant, 2)):
            raise RecipeError(f"--vary {key} has a value twice: {listed}.")
    jobs = []
    for seed in seeds:
        for recipe in recipes:
            for settings in itertools.product(*choices.values()):
                variant = "-".join([Path(recipe).stem, *(setting.replace("/", "_") for setting in settings)])
                given = [part for setting in settings for part in ("--set", setting)]
                folder = out / f"{variant}-seed{seed}"
                arguments = (recipe, "--seed", str(seed), "--out", str(folder), *given, *options)
                jobs.append(Job(folder, variant, seed, arguments))
    if len({job.out for job in jobs}) < len(jobs):
        raise RecipeError("Two runs of the sweep would have one directory: give recipes of different names.")
    return jobs


def _split(listed: str) -> list[str]:
    """At commas, but not inside of brackets and quotes: a value may be a list."""
    values, depth, quoted = [""], 0, False
    for letter in listed:
        if letter == '"':
            quoted = not quoted
        elif not quoted:
            depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth and not quoted:
            values.append("")
        else:
            values[-1] += letter
    return values


def check_variants(recipes: Mapping[str, Recipe]) -> None:
    """Refuse now what a later variant would be refused for when hours of others have passed; data is loaded once."""
    alike: dict[str, dict[str, Recipe]] = {}
    for variant, recipe in recipes.items():
        alike.setdefault(repr(recipe.data), {})[variant] = recipe
    for several in alike.values():
        with ExitStack() as opened:
            data = None
            for variant, recipe in several.items():
                try:
                    data = data or opened.enter_context(closing(load_run_data(recipe, seed=0)))
                    check_run(recipe, data, seed=0)
                except PaamError as error:
                    raise type(error)(f"{variant} cannot be run: {error}") from error


Running = dict[Job, subprocess.Popen[bytes]]


def run_jobs(
    jobs: Sequence[Job], at_once: int, say: Callable[[str], object], stop: Callable[[], bool], running: Running
) -> dict[Path, int]:
    """Run all, ``at_once`` at a time, each writing to DIR.log beside its directory; exit code by directory.

    A run that is finished is not run again, one that was cut goes on. Once ``stop`` says yes the runs are told, and
    when they have saved, StoppedError is raised. ``running``: empty, and then those at work that are not told to stop.
    """
    waiting = list(jobs)
    said: dict[Job, int] = {}  # how long a log was before
    codes: dict[Path, int] = {}
    try:
        while waiting or running:
            if stop():
                raise StoppedError("Stopped; the same command goes on from what the runs have saved.")
            while waiting and len(running) < at_once and not stop():
                job = waiting.pop(0)
                begun, ended = is_begun(job), bool(results([job])[job.variant])
                running[job], said[job] = _start(job)
                if not ended:
                    say(f"{'goes on' if begun else 'started':9} {job.out.name}")
            for job, process in list(running.items()):
                if process.poll() is not None:
                    del running[job]
                    codes[job.out] = process.returncode
                    failed = f"; {_last_line(job, said[job])}" if process.returncode else ""
                    say(f"{'failed' if failed else 'finished':9} {job.out.name}{failed}")
            with suppress(subprocess.TimeoutExpired):
                for process in running.values():
                    process.wait(POLL_SECONDS)
    finally:
        for process in tell_to_stop(running):
            process.wait()
    return codes


def tell_to_stop(running: Running) -> list[subprocess.Popen[bytes]]:
    """Ask all to save and stop; once only, since a second time would stop them at once."""
    told = []
    while running:
        told.append(running.popitem()[1])
        told[-1].send_signal(signal.SIGTERM)  # SIGINT is ignored by what a script started with &
    return told


def is_begun(job: Job) -> bool:
    return (job.out / LOCK_FILE).is_file() or (job.out / RECORD_FILE).is_file()


def _start(job: Job) -> tuple[subprocess.Popen[bytes], int]:
    resume = ["--resume"] if is_begun(job) else []
    with _log_of(job) as log:
        before = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "paam", "prune", *job.arguments, *resume],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt is passed on once, by us
        )
    return process, before


def _last_line(job: Job, before: int) -> str:
    """What a failed run said last, and above all why; its log, which was ``before`` bytes long, has the rest."""
    lines = Path(f"{job.out}.log").read_bytes()[before:].decode("utf-8", "replace").split("\n")
    said = [line for line in lines if line.strip()]
    return next((line for line in reversed(said) if line.startswith("paam: ")), said[-1] if said else "it said nothing")


def _log_of(job: Job) -> BinaryIO:
    try:
        job.out.parent.mkdir(parents=True, exist_ok=True)
        return Path(f"{job.out}.log").open("ab")
    except OSError as error:
        raise ArtifactError(f"{job.out}.log cannot be written: {error.strerror}; choose another --out.") from error


def results(jobs: Sequence[Job]) -> dict[str, list[Event]]:
    """The "end" events of the finished runs, by variant."""
    found: dict[str, list[Event]] = {}
    for job in jobs:
        ends = found.setdefault(job.variant, [])
        with suppress(ArtifactError):  # without a record, or with a damaged one, the run has failed and said so
            ends += of_kind(read_record(job.out / RECORD_FILE), "end")
    return found


@contextmanager
def shared_gpu(wanted: bool) -> Iterator[bool]:
    """NVIDIA's MPS for the processes started inside, if ``wanted`` and there; says whether it runs."""
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
