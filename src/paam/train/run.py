"""Recipe -> run directory: the resolved recipe, the record, the plan and the weights, with checkpoints on the way."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from paam.artifacts import save
from paam.cost import count
from paam.data import Dataset, load_data
from paam.errors import ArtifactError, DeviceError, DivergedError, RecipeError, StoppedError, one_line
from paam.files import write_atomically
from paam.models import build_model
from paam.progress import PROGRESS_FILE, ProgressFile
from paam.pruner import Pruner
from paam.recipe import Recipe
from paam.record import RECORD_FILE, VERSION, Event, RecordWriter, environment, of_kind, read_record
from paam.schedule import phase_at
from paam.select import select
from paam.speed import measure_latency
from paam.train.batches import EvaluationBatches, Normalization, TrainingBatches
from paam.train.checkpoint import CheckpointWriter, State, checkpoints, read_newest_checkpoint
from paam.train.directory import (
    CHECKPOINTS,
    DENSE_FILE,
    RunLock,
    begun,
    check_directory,
    clear,
    find_changes,
    portable,
    tidy,
    write_recipe,
)
from paam.train.engine import Engine
from paam.train.evaluation import Monitor, accuracy
from paam.version import __version__

LATENCY_BATCH = 128

OnStep = Callable[[int, int], None]


def run(
    recipe: Recipe,
    out: Path,
    *,
    seed: int = 0,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    watch: Callable[[Event], None] = lambda event: None,
    on_step: OnStep = lambda step, steps: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Event]:
    """Run a recipe and return its record. Nothing is written before data, model and target have been checked.

    ``stop`` is asked behind every step: once it says yes, and stays with that, the state is saved and StoppedError
    raised. Signals are the caller's business; none is caught here.
    ``watch`` is told of every event. A run that goes on is announced by ``resumed``, which no record holds, and then
    told again from its start, so that a view needs nothing but what it is told; ``on_step(step, steps)``: of each step.
    """
    device = find_device(device)
    if not 0 <= seed < 1 << 31:
        raise RecipeError(f"The seed must be from 0 to {(1 << 31) - 1}; {seed} was given.")
    check_directory(out, resume=resume, overwrite=overwrite)
    if resume and (events := begun(out)):
        find_changes(out, events, recipe, seed)
        if of_kind(events, "end"):
            _tell_again(events, watch, epoch=recipe.schedule.total)
            return events
    with RunLock(out) as lock, _threads(recipe.train.threads):
        if (resume or overwrite) and out.is_dir():
            lock.take()
        with closing(_load_data(recipe, seed)) as data:
            pruner = _build_pruner(recipe, data, seed, device)
            select(pruner.network, pruner.scores(), recipe.target)  # an impossible target must not cost a warm-up
            lock.take()
            check_directory(out, resume=resume, overwrite=overwrite)  # another process may have come and gone
            return _run(recipe, out, data, pruner, seed, device, resume=resume, watch=watch, on_step=on_step, stop=stop)


def _run(
    recipe: Recipe,
    out: Path,
    data: Dataset,
    pruner: Pruner,
    seed: int,
    device: str,
    *,
    resume: bool,
    watch: Callable[[Event], None],
    on_step: OnStep,
    stop: Callable[[], bool],
) -> list[Event]:
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
    on_gpu = device.startswith("cuda")
    monitor = Monitor(
        EvaluationBatches(data.holdout or data.test, normalize, device=device),
        bfloat16=on_gpu and recipe.train.bfloat16,
        capture=on_gpu and recipe.train.capture,
    )
    engine = Engine(pruner, recipe, batches, seed=seed, emit=emit)
    engine.on_step, engine.stop = step_done, stop
    saved, passed_over = read_newest_checkpoint(out / CHECKPOINTS) if resume else (None, [])
    if saved is None:
        clear(out, recipe)
        emit(_start_event(recipe, seed, device, pruner, data))
        first = 0
    else:
        first, step, events = restore(engine, saved, out)
        tidy(out)
        kept = writer.go_on_behind(events)
        progress.clock.epoch = first
        _tell_again(kept, watch, epoch=first, step=step, passed_over=passed_over)
        if changes := find_changes(out, kept, recipe, seed):
            write_recipe(out, recipe)
            emit({"event": "changed", "epoch": first, "step": step, "changes": changes})
    with CheckpointWriter(out / CHECKPOINTS, before=writer.flush) as saver:
        for epoch in range(first, recipe.schedule.total):
            try:
                finished = engine.run_epoch(epoch, monitor)
            except DivergedError as error:
                saver.wait()
                raise DivergedError(f"{error}{_last_good(out)}") from error
            if finished and epoch + 1 == recipe.schedule.warmup:
                _save_dense(engine, out)
            position = (epoch + 1, 0) if engine.pause is None else (epoch, len(engine.pause.losses))
            stopping = not finished or stop()
            if stopping or _is_due(recipe, epoch + 1):
                tensors, header = engine.state(position[0])
                saver.save(position, tensors, {"events": writer.count, **header})
            saver.check()
            if stopping:
                saver.finish()
                where = "" if finished else f", step {position[1]} of {batches.steps},"
                raise StoppedError(
                    f"Stopped in epoch {epoch + 1}{where} of {recipe.schedule.total}; all of it is saved."
                )
        saver.finish()
    test = EvaluationBatches(data.test, normalize, device=device)
    _finish(engine, test, _example(data, device, LATENCY_BATCH), out, emit)
    return read_record(out / RECORD_FILE)


def _is_due(recipe: Recipe, following: int) -> bool:
    """Whether a checkpoint stands before the ``following`` epoch."""
    ends_phase = following == recipe.schedule.total or phase_at(recipe.schedule, following).first
    return ends_phase or following % recipe.train.checkpoint_every == 0


def restore(engine: Engine, saved: State, out: Path) -> tuple[int, int, int]:
    """Epoch and step to go on with, and how many events of the record come before them."""
    tensors, header = saved
    try:
        epoch, step, events = (int(header[key]) for key in ("epoch", "step", "events"))
        engine.restore(epoch, tensors, header)
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


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def usual_device(name: str) -> str:
    """What "auto" stands for: a GPU when there is one. It is not touched."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def find_device(name: str) -> str:
    """A device that can be used; "auto" takes a GPU when there is one."""
    device = usual_device(name)
    try:
        torch.ones(1, device=device).item()  # "meta" holds no values to train
    except (RuntimeError, AssertionError) as error:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if gpus and device in ("cuda", *(f"cuda:{number}" for number in range(gpus))):
            raise DeviceError(
                f"The GPU '{device}' is there but cannot be used ({_first_line(error)}); wait until it is free,"
                " or give --device cpu."
            ) from error
        there = "cpu" + (f", cuda (0 to {gpus - 1})" if gpus else "")
        raise DeviceError(f"The device '{device}' is not there; this machine has: {there}.") from error
    return device


def _first_line(error: BaseException) -> str:
    """What CUDA says; advice on debugging follows it."""
    return str(error).partition("\n")[0].rstrip(".")


def _load_data(recipe: Recipe, seed: int) -> Dataset:
    settings = recipe.data
    return load_data(
        settings.name,
        directory=settings.directory,
        image_size=settings.image_size,
        holdout=settings.holdout,
        seed=seed,
        memory=settings.memory * 2**30,
        workers=settings.workers,
    )


def _build_pruner(recipe: Recipe, data: Dataset, seed: int, device: str) -> Pruner:
    torch.manual_seed(seed)
    channels = data.train.images.shape[1]
    model = build_model(recipe.model.name, num_classes=len(data.classes), in_channels=channels).to(device)
    if recipe.model.weights is not None:
        load_weights(model, Path(recipe.model.weights))
    if device.startswith("cuda"):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        torch.backends.cudnn.benchmark = True
    pruner = Pruner(model, _example(data, device, 1), score_lr=recipe.score_lr, inplace=True, **asdict(recipe.prune))
    with torch.no_grad():
        answer = pruner.model.eval()(_example(data, device, 2))
    if not isinstance(answer, Tensor) or answer.shape != (2, len(data.classes)):
        raise RecipeError(
            f"The model '{recipe.model.name}' must return logits [N, {len(data.classes)}] for this data set"
            f" ({len(data.classes)} classes); it returned {list(getattr(answer, 'shape', []))} for two images."
        )
    return pruner


def _save_dense(engine: Engine, out: Path) -> None:
    """The dense network as warm-up left it: another run may start from it (model.weights)."""
    plain = {name: value.contiguous().cpu() for name, value in engine.networks.dense_state.items()}
    write_atomically(out / DENSE_FILE, safetensors.torch.save(plain))


def load_weights(model: nn.Module, path: Path) -> None:
    """Take up the weights of a dense network; a file that does not fit is refused with what differs."""
    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        _check_kinds(model, stored)
        model.load_state_dict(stored)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise ArtifactError(f"model.weights = {path} cannot be taken up: {one_line(error)}.") from error


def _check_kinds(model: nn.Module, stored: dict[str, Tensor]) -> None:
    """Precision may differ; a cast to numbers of another kind would lose a part of them."""
    for name, value in model.state_dict().items():
        given, wanted = stored.get(name, value).dtype, value.dtype
        if (given.is_complex, given.is_floating_point) != (wanted.is_complex, wanted.is_floating_point):
            raise ValueError(f"{name} holds {given} where the network has {wanted}")


def _example(data: Dataset, device: str, batch: int) -> Tensor:
    return torch.zeros(batch, *data.train.images.shape[1:], device=device)


def _start_event(recipe: Recipe, seed: int, device: str, pruner: Pruner, data: Dataset) -> Event:
    dense = pruner.network.dense
    sizes = {"train": len(data.train), "holdout": len(data.holdout or ()), "test": len(data.test)}
    return {
        "event": "start",
        "version": VERSION,
        "paam": __version__,
        **environment(device),
        "device": device,
        "seed": seed,
        "command": shlex.join(["paam", *sys.argv[1:]]),
        "recipe": portable(recipe),
        "epochs": recipe.schedule.total,
        "samples": sizes,
        "classes": data.classes,
        "normalization": {"mean": data.mean, "std": data.std},
        "monitor": "holdout" if data.holdout else "test",
        "dense": {"params": dense.params, "macs": dense.macs},
        "groups": {g.name: {"width": g.width, "stream": g.stream is not None} for g in pruner.network.groups},
    }


def _finish(engine: Engine, test: EvaluationBatches, example: Tensor, out: Path, emit: Callable[[Event], None]) -> None:
    """Measure what came out, write the artifacts, and close the record."""
    small = engine.result()
    dense = engine.networks.dense() if engine.networks.control is None else engine.networks.control
    assert engine.pruner.selection is not None  # every schedule has at least one cycle
    plan = engine.pruner.selection.plan
    latency = measure_latency({"dense": dense, "pruned": small}, example)
    save(small, out)
    results: dict[str, Any] = {}
    for name, model in (("dense", dense), ("pruned", small)):
        counted = count(model, example[:1])
        results[name] = {
            "accuracy": accuracy(model, test),
            "params": counted.params,
            "macs": counted.macs,
            "latency_ms": asdict(latency[name]),
            "uncounted": counted.uncounted,
        }
    alone = "warm-up only" if engine.recipe.schedule.warmup else "as it came"
    results["dense"]["trained"] = alone if engine.networks.control is None else "the same epochs"
    kept = {name: [len(k.filters), k.width] for name, k in plan.groups.items()}
    emit({"event": "end", "latency_batch": len(example), "kept_filters": kept, **results})
