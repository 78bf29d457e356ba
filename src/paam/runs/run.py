"""Recipe -> run directory: the resolved recipe, the record, the plan and the weights, with checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from paam.artifacts.weights import save_weights
from paam.config.recipe import Recipe
from paam.data import Dataset
from paam.data.batches import EvaluationBatches, Normalization, TrainingBatches
from paam.data.manifest import manifest_of, write_manifest
from paam.errors import ArtifactError, DivergedError, PaamError, StoppedError
from paam.events import End, Event, Failed, Resumed, of_kind
from paam.pruning.pruner import Pruner
from paam.pruning.select import check_reachable
from paam.runs.beginning import begin, data_as_before, find_saved, go_on, last_good
from paam.runs.checkpoint import CheckpointWriter
from paam.runs.directory import (
    CHECKPOINTS,
    DENSE_FILE,
    check_directory,
    find_changes,
    half_written,
    has_checkpoints,
    started_events,
    tidy,
)
from paam.runs.ends import LATENCY_BATCH, finish
from paam.runs.failures import all_failures, foreseen_failures
from paam.runs.job import Job, Listener
from paam.runs.lock import RunLock
from paam.runs.progress import PROGRESS_FILE, ProgressFile
from paam.runs.record import RECORD_FILE, RecordWriter, read_events, read_until_damage
from paam.runs.setup import build_pruner, check_recipe, check_seed, example, load_run_data
from paam.train.device import find_device, threads
from paam.train.engine import Engine
from paam.train.evaluation import Monitor
from paam.train.phase import place_of
from paam.train.state import engine_state


def run(
    recipe: Recipe,
    out: str | Path,
    *,
    seed: int = 0,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    accept_changed_data: bool = False,
    watch: Callable[[Event], None] = lambda event: None,
    on_step: Callable[[int, int], None] = lambda step, steps: None,
    stop: Callable[[], bool] = lambda: False,
    command: str = "",
) -> list[Event]:
    """Run a recipe and return its record. Nothing is written before data, model and target have been checked.

    ``stop`` is called after every step and while the result is measured: once it returns True (and keeps returning
    True), the state is saved and StoppedError raised. No signal handlers are installed; that is up to the caller.
    ``command``: the command line that reproduces the run, for its record. ``watch`` is called with every event. For a
    resumed run, these are a Resumed event, which is not in the record, and all earlier events, so that a view needs
    nothing else. ``on_step(step, steps)`` is called after each step. ``accept_changed_data``: resume although the data
    have changed.
    """
    check_seed(seed)
    recipe = check_recipe(recipe)
    listener = Listener(watch, on_step, stop)
    job = Job(recipe, Path(out), seed, find_device(device), resume, overwrite, accept_changed_data, command, listener)
    if accept_changed_data and not resume:
        raise ArtifactError("--accept-changed-data applies to resumed runs; add --resume.")
    check_directory(job.out, resume=resume, overwrite=overwrite)
    if resume and (events := started_events(job.out)):
        find_changes(job.out, events, recipe, seed)
        if of_kind(events, End):
            for event in (Resumed(len(events), job.epochs, notes=_mend(job.out)), *events):
                watch(event)
            return events
    with RunLock(job.out) as lock, threads(recipe.train.threads), foreseen_failures(job.device):
        if (resume or overwrite) and job.out.is_dir():
            lock.take()
        with closing(load_run_data(recipe, seed)) as data:
            fresh = not (resume and has_checkpoints(job.out))
            pruner = build_pruner(recipe, data, seed, job.device, fresh=fresh)
            if fresh:
                check_reachable(pruner.network, recipe.target)
            lock.take()
            check_directory(job.out, resume=resume, overwrite=overwrite)  # another process may have used it meanwhile
            return _run(job, data, pruner)


def _run(job: Job, data: Dataset, pruner: Pruner) -> list[Event]:
    """Start or resume, train, and finish: the files of a run around its engine."""
    recipe, out, listener = job.recipe, job.out, job.listener
    writer = RecordWriter(out / RECORD_FILE)
    progress = ProgressFile(out / PROGRESS_FILE)

    def emit(event: Event) -> None:
        writer(event)
        progress.event(event)
        listener.event(event)

    def step_done(step: int, steps: int) -> None:
        progress.step(step, steps)
        listener.step(step, steps)

    saved = find_saved(job)
    data, other_data = data_as_before(job, saved, data)
    manifest = manifest_of(data)
    normalize = Normalization(data.mean, data.std)
    batches = TrainingBatches(
        data.train,
        normalize,
        recipe.data.augmentation,
        batch_size=recipe.data.batch_size,
        classes=len(data.classes),
        seed=job.seed,
        device=job.device,
    )
    engine = Engine(pruner, recipe, job.phases, batches, seed=job.seed, emit=emit)
    engine.on_step, engine.stop = step_done, listener.stop
    if saved.state is None:
        first = begin(job, engine, data, manifest, emit)
    else:
        first = go_on(job, engine, saved, writer, other_data, emit)
        progress.clock.epoch = first

    def save_lists() -> None:
        """Flush what a checkpoint refers to before the checkpoint is written."""
        write_manifest(out / CHECKPOINTS, manifest)
        writer.flush()

    def batch() -> int:
        return batches.batch_size if engine.step else 0

    with _failure_recorded(emit, progress), closing(data):
        with all_failures(out, engine.where, job.device, batch):
            monitor = Monitor(
                EvaluationBatches(data.holdout or data.test, normalize, device=job.device),
                bfloat16=job.on_gpu and recipe.train.bfloat16,
                capture=job.on_gpu and recipe.train.capture,
            )
            saver = CheckpointWriter(out / CHECKPOINTS, before=save_lists)
            _train(job, engine, first, monitor, saver, lambda: {"events": writer.count, "data": manifest.digest})
        with all_failures(out, lambda: "while the result was measured", job.device, lambda: 0):
            test = EvaluationBatches(data.test, normalize, device=job.device)
            finish(job, engine, test, example(data, job.device, LATENCY_BATCH), emit)
    writer.flush()  # so that an ended run can no longer fail
    return read_events(out / RECORD_FILE)


def _train(
    job: Job,
    engine: Engine,
    first: int,
    monitor: Monitor,
    saver: CheckpointWriter,
    header: Callable[[], dict[str, Any]],
) -> None:
    """Run all epochs from ``first`` on, and save a checkpoint when one is due and when asked to stop.

    ``header``: what a checkpoint stores besides the engine's state.
    """
    with saver:
        for epoch in range(first, job.epochs):
            try:
                finished = engine.run_epoch(epoch, monitor)
            except DivergedError as error:
                saver.wait()
                raise DivergedError(f"{error}{last_good(job.out)}") from error
            place = place_of(job.phases, epoch)
            if finished and place.last and place.phase.makes_dense:
                save_weights(job.out / DENSE_FILE, engine.networks.dense_state, "dense network after warm-up")
            position = (epoch + 1, 0) if engine.mid_epoch is None else (epoch, len(engine.mid_epoch.losses))
            stopping = not finished or engine.stop()
            if stopping or job.checkpoint_due(epoch + 1):
                tensors, state = engine_state(engine, position[0])
                saver.save(position, tensors, header() | state)
            saver.check()
            if stopping:
                saver.finish()
                where = "" if finished else f", step {position[1]} of {engine.batches.steps},"
                raise StoppedError(f"Stopped in epoch {epoch + 1}{where} of {job.epochs}; the state is saved.")
        saver.finish()


@contextlib.contextmanager
def _failure_recorded(emit: Callable[[Event], None], progress: ProgressFile) -> Iterator[None]:
    """Record an error that ends training as the last event; resuming truncates it with the rest of its epoch."""
    try:
        yield
    except StoppedError:
        raise
    except PaamError as error:
        with contextlib.suppress(Exception):  # the record or a view may be what failed
            emit(Failed(progress.clock.epoch, str(error)))
        raise


def _mend(out: Path) -> list[str]:
    """Truncate a finished record after its end event, with a message, and remove partial files.

    Usually there is neither. If the directory is not writable, the run is shown all the same.
    """
    entries, damage = read_until_damage(out / RECORD_FILE)
    if damage is None and not half_written(out):
        return []
    try:
        with RunLock(out) as lock:
            lock.take()
            tidy(out)
            return [] if damage is None else RecordWriter(out / RECORD_FILE).cut_back(len(entries))[1]
    except ArtifactError:
        return [] if damage is None else [str(damage)]
