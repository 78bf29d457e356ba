"""Recipe -> run directory: the resolved recipe, the record, the plan and the weights, with checkpoints on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from paam.data import Dataset
from paam.errors import ArtifactError, DivergedError, PaamError, StoppedError, one_line
from paam.progress import PROGRESS_FILE, ProgressFile
from paam.pruner import Pruner
from paam.recipe import Recipe
from paam.record import RECORD_FILE, Event, RecordWriter, environment, of_kind, read_record
from paam.schedule import phase_at
from paam.select import check_reachable
from paam.train.batches import EvaluationBatches, Normalization, TrainingBatches
from paam.train.checkpoint import CheckpointWriter, State, checkpoints, read_newest_checkpoint
from paam.train.device import find_device, threads
from paam.train.directory import (
    CHECKPOINTS,
    DENSE_FILE,
    RunLock,
    begun,
    check_directory,
    clear,
    find_changes,
    find_moved_files,
    find_moves,
    tidy,
    write_recipe,
)
from paam.train.ends import LATENCY_BATCH, finish, start_event
from paam.train.engine import Engine
from paam.train.evaluation import Monitor
from paam.train.setup import build_pruner, check_seed, example, load_run_data, teacher_state
from paam.train.state import engine_state, restore_engine
from paam.train.weights import save_weights

PENDING = 2
"""Checkpoints that a killed run may not have finished writing: one under way, and one that its record is ahead of."""

OnStep = Callable[[int, int], None]


def run(
    recipe: Recipe,
    out: str | Path,
    *,
    seed: int = 0,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    watch: Callable[[Event], None] = lambda event: None,
    on_step: OnStep = lambda step, steps: None,
    stop: Callable[[], bool] = lambda: False,
    command: str = "",
) -> list[Event]:
    """Run a recipe and return its record. Nothing is written before data, model and target have been checked.

    ``stop`` is asked after every step, and while the result is measured: once it says yes, and stays with that, the
    state is saved and StoppedError raised. Signals are the caller's business; none is caught here. ``command``: what
    repeats the run, for its record. ``watch`` is told of every event. A run that goes on is announced by ``resumed``,
    which no record holds, and then told again from its start, so that a view needs nothing but what it is told;
    ``on_step(step, steps)``: of each step.
    """
    out, device = Path(out), find_device(device)
    check_seed(seed)
    check_directory(out, resume=resume, overwrite=overwrite)
    if resume and (events := begun(out)):
        find_changes(out, events, recipe, seed)
        if of_kind(events, "end"):
            _tell_again(events, watch, epoch=recipe.schedule.total)
            return events
    with RunLock(out) as lock, threads(recipe.train.threads):
        if (resume or overwrite) and out.is_dir():
            lock.take()
        with closing(load_run_data(recipe, seed)) as data:
            fresh = not (resume and checkpoints(out / CHECKPOINTS))
            pruner = build_pruner(recipe, data, seed, device, fresh=fresh)
            if fresh:
                check_reachable(pruner.network, recipe.target)
            lock.take()
            check_directory(out, resume=resume, overwrite=overwrite)  # another process may have come and gone
            return _run(
                recipe,
                out,
                data,
                pruner,
                seed,
                device,
                resume=resume,
                command=command,
                watch=watch,
                on_step=on_step,
                stop=stop,
            )


def _run(
    recipe: Recipe,
    out: Path,
    data: Dataset,
    pruner: Pruner,
    seed: int,
    device: str,
    *,
    resume: bool,
    command: str,
    watch: Callable[[Event], None],
    on_step: OnStep,
    stop: Callable[[], bool],
) -> list[Event]:
    """Begin or go on, train, and finish: the files of a run around its engine."""
    writer = RecordWriter(out / RECORD_FILE)
    progress = ProgressFile(out / PROGRESS_FILE)

    def emit(event: Event) -> None:
        writer(event)
        progress.event(event)
        watch(event)

    def step_done(step: int, steps: int) -> None:
        progress.step(step, steps)
        on_step(step, steps)

    normalize = Normalization(data.mean, data.std)
    batches = TrainingBatches(
        data.train,
        normalize,
        recipe.data.augmentation,
        batch_size=recipe.data.batch_size,
        classes=len(data.classes),
        seed=seed,
        device=device,
    )
    engine = Engine(pruner, recipe, batches, seed=seed, emit=emit)
    engine.on_step, engine.stop = step_done, stop
    saved, passed_over = read_newest_checkpoint(out / CHECKPOINTS) if resume else (None, [])
    if saved is None:
        if resume and _checkpoints_due(recipe, begun(out)) > PENDING:
            raise ArtifactError(
                f"The checkpoints of the run in {out} are gone: put {out / CHECKPOINTS} back, or start over with"
                " --overwrite."
            )
        engine.networks.teacher_state = teacher_state(recipe, pruner)
        clear(out, recipe)
        emit(start_event(recipe, seed, device, pruner, data, command))
        first = 0
    else:
        first, step, events = restore(engine, saved, out)
        tidy(out)
        kept = writer.go_on_behind(events)
        progress.clock.epoch = first
        _tell_again(kept, watch, epoch=first, step=step, passed_over=passed_over)
        changes = find_changes(out, kept, recipe, seed) | find_moved_files(out, recipe)
        if changes:
            write_recipe(out, recipe)
        if changes := changes | find_moves(kept, {**environment(device), "device": device}):
            emit({"event": "changed", "epoch": first, "step": step, "changes": changes, "command": command})
    on_gpu = device.startswith("cuda")
    monitor = Monitor(
        EvaluationBatches(data.holdout or data.test, normalize, device=device),
        bfloat16=on_gpu and recipe.train.bfloat16,
        capture=on_gpu and recipe.train.capture,
    )
    with _failure_told(emit, progress):
        _train(engine, first, monitor, out, writer)
        test = EvaluationBatches(data.test, normalize, device=device)
        finish(engine, test, example(data, device, LATENCY_BATCH), out, emit, stop)
    return read_record(out / RECORD_FILE)


def _train(engine: Engine, first: int, monitor: Monitor, out: Path, writer: RecordWriter) -> None:
    """All epochs from the ``first`` on, with a checkpoint where one is due, and where the engine is asked to stop."""
    recipe = engine.recipe
    with CheckpointWriter(out / CHECKPOINTS, before=writer.flush) as saver:
        for epoch in range(first, recipe.schedule.total):
            try:
                finished = engine.run_epoch(epoch, monitor)
            except DivergedError as error:
                saver.wait()
                raise DivergedError(f"{error}{_last_good(out)}") from error
            if finished and epoch + 1 == recipe.schedule.warmup:
                save_weights(out / DENSE_FILE, engine.networks.dense_state)
            position = (epoch + 1, 0) if engine.pause is None else (epoch, len(engine.pause.losses))
            stopping = not finished or engine.stop()
            if stopping or _is_due(recipe, epoch + 1):
                tensors, header = engine_state(engine, position[0])
                saver.save(position, tensors, {"events": writer.count, **header})
            saver.check()
            if stopping:
                saver.finish()
                where = "" if finished else f", step {position[1]} of {engine.batches.steps},"
                raise StoppedError(
                    f"Stopped in epoch {epoch + 1}{where} of {recipe.schedule.total}; all of it is saved."
                )
        saver.finish()


@contextlib.contextmanager
def _failure_told(emit: Callable[[Event], None], progress: ProgressFile) -> Iterator[None]:
    """An error that ends training is the record's last event; a resumed run cuts it off with what its epoch wrote."""
    try:
        yield
    except StoppedError:
        raise
    except PaamError as error:
        with contextlib.suppress(PaamError):  # it may be the record that cannot be written
            emit({"event": "failed", "epoch": progress.clock.epoch, "reason": str(error)})
        raise


def _checkpoints_due(recipe: Recipe, events: list[Event]) -> int:
    """How many checkpoints the epochs of a record should have left."""
    epochs = [event.get("epoch") for event in of_kind(events, "epoch")]
    known = [epoch for epoch in epochs if type(epoch) is int and 0 <= epoch < recipe.schedule.total]
    return sum(_is_due(recipe, epoch + 1) for epoch in known)


def _is_due(recipe: Recipe, following: int) -> bool:
    """Whether a checkpoint stands before the ``following`` epoch."""
    ends_phase = following == recipe.schedule.total or phase_at(recipe.schedule, following).first
    return ends_phase or following % recipe.train.checkpoint_every == 0


def restore(engine: Engine, saved: State, out: Path) -> tuple[int, int, int]:
    """Epoch and step to go on with, and how many events of the record come before them."""
    tensors, header = saved
    try:
        epoch, step, events = (int(header[key]) for key in ("epoch", "step", "events"))
        restore_engine(engine, epoch, tensors, header)
    except Exception as error:  # a whole file of another network or version fails in as many ways as there are
        raise ArtifactError(
            f"The newest checkpoint in {out / CHECKPOINTS} does not fit this run ({one_line(error)});"
            " put the run's own back, or start over with --overwrite."
        ) from error
    return epoch, step, events


def _last_good(out: Path) -> str:
    if not checkpoints(out / CHECKPOINTS):
        return ""
    return (
        f" The last good state is in {out / CHECKPOINTS}: the same command with the change (--set) and --resume goes on"
        " from it."
    )


def _tell_again(events: list[Event], watch: Callable[[Event], None], **where: Any) -> None:
    """A record that was there before, to a view that knows nothing of it; ``told``: how many events are old."""
    watch({"event": "resumed", "told": len(events), **where})
    for event in events:
        watch(event)
