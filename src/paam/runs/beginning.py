"""Start a run: fresh in an empty directory, or resumed from its newest checkpoint."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from paam.data import Dataset
from paam.data.manifest import Manifest
from paam.errors import ArtifactError, one_line
from paam.events import Changed, Epoch, PhaseFacts, Resumed, Start, last, of_kind
from paam.runs.checkpoint import State, checkpoints, read_newest_checkpoint
from paam.runs.directory import (
    CHECKPOINTS,
    ENVIRONMENT,
    Changes,
    clear,
    find_changes,
    find_moved_files,
    find_moves,
    has_checkpoints,
    started_events,
    tidy,
    write_recipe,
)
from paam.runs.ends import phase_facts, start_event
from paam.runs.environment import environment
from paam.runs.failures import out_of_memory
from paam.runs.job import Job
from paam.runs.record import RecordWriter
from paam.runs.same_data import find_same_data
from paam.runs.setup import teacher_state
from paam.train.engine import Emit, Engine
from paam.train.state import restore_engine

PENDING = 2
"""Checkpoints that a killed run may be missing: one being written, and one that its record is already ahead of."""


class Saved(NamedTuple):
    """What to resume from: the newest readable checkpoint, and messages about newer ones that were skipped."""

    state: State | None
    skipped: list[str]


def find_saved(job: Job) -> Saved:
    return (
        Saved(*read_newest_checkpoint(job.out / CHECKPOINTS))
        if job.resume and has_checkpoints(job.out)
        else Saved(None, [])
    )


def data_as_before(job: Job, saved: Saved, data: Dataset) -> tuple[Dataset, tuple[str, str] | None]:
    """The data set with the run's split; and descriptions of it before and now, if an accepted change was found."""
    if saved.state is None:
        return data, None
    known = str(saved.state[1].get("data"))
    if re.fullmatch("[0-9a-f]{32}", known) is None:
        raise ArtifactError(
            f"The checkpoints in {job.out} were written by an older paam, which did not hash the data, so the data"
            " cannot be compared. Start over with --overwrite."
        )
    return find_same_data(data, job.out, job.out / CHECKPOINTS, known, accept=job.accept_changed_data)


def begin(job: Job, engine: Engine, data: Dataset, manifest: Manifest, emit: Emit) -> int:
    """Clear the directory and emit the first event. Returns the epoch to start at."""
    if job.resume and _checkpoints_due(job) > PENDING:
        raise ArtifactError(
            f"The checkpoints of the run in {job.out} are missing: restore {job.out / CHECKPOINTS}, or start over with"
            " --overwrite."
        )
    engine.networks.teacher_state = teacher_state(job.recipe, engine.pruner)
    clear(job.out, job.recipe)
    if job.resume:
        job.listener.event(Resumed(0, 0, notes=["no checkpoint was saved yet: the run starts over"]))
    emit(start_event(job, engine.pruner, data, manifest))
    return 0


def go_on(
    job: Job, engine: Engine, saved: Saved, writer: RecordWriter, other_data: tuple[str, str] | None, emit: Emit
) -> int:
    """Restore the engine, truncate the record to the checkpoint and report changes. Returns the epoch to resume at."""
    assert saved.state is not None
    first, step, events = restore(engine, saved.state, job.out)
    tidy(job.out)
    kept, notes = writer.cut_back(events)
    if (start := last(kept, Start)) is not None and _lengths(start.phases) != _lengths(phase_facts(job.phases)):
        raise ArtifactError(
            f"The phases of the method '{job.recipe.prune.method}' have changed since the run in {job.out} was started:"
            " resume it with the code that it was started with, or give another --out."
        )
    for event in (Resumed(len(kept), first, step, saved.skipped, notes), *kept):
        job.listener.event(event)
    changes: Changes = find_changes(job.out, kept, job.recipe, job.seed) | find_moved_files(job.out, job.recipe)
    if changes:
        write_recipe(job.out, job.recipe)
    if other_data:
        changes[f"{ENVIRONMENT}data"] = other_data
    if changes := changes | find_moves(kept, {**environment(job.device), "device": job.device}):
        emit(Changed(first, changes, step, job.command))
    return first


def _lengths(phases: Sequence[PhaseFacts]) -> list[tuple[str, int, int]]:
    """What must not change of phases; their words may."""
    return [(phase.name, phase.epochs, phase.cycle) for phase in phases]


def restore(engine: Engine, saved: State, out: Path) -> tuple[int, int, int]:
    """Epoch and step to resume at, and the number of record events before them."""
    tensors, header = saved
    try:
        epoch, step, events = (int(header[key]) for key in ("epoch", "step", "events"))
        restore_engine(engine, epoch, tensors, header)
    except Exception as error:  # an intact file of another network or version can fail in any way
        if out_of_memory(error) is not None:
            raise
        raise ArtifactError(
            f"The newest checkpoint in {out / CHECKPOINTS} does not fit this run ({one_line(error)});"
            " restore the run's own, or start over with --overwrite."
        ) from error
    return epoch, step, events


def _checkpoints_due(job: Job) -> int:
    """How many checkpoints the epochs in the existing record should have left."""
    epochs = [event.epoch for event in of_kind(started_events(job.out), Epoch)]
    return sum(job.checkpoint_due(epoch + 1) for epoch in epochs if epoch < job.epochs)


def last_good(out: Path) -> str:
    """How to continue after a failure, as a sentence."""
    with contextlib.suppress(ArtifactError):  # a folder that cannot be listed does not hide that failure
        if checkpoints(out / CHECKPOINTS):
            return (
                f" The last good state is in {out / CHECKPOINTS}: rerun the same command with the change (--set) and"
                " --resume to continue from it."
            )
    return ""
