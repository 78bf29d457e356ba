"""Recipe -> run directory: the resolved recipe, the record, the plan and the weights, with checkpoints on the way."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from paam.artifacts import PLAN_FILE, WEIGHTS_FILE, save
from paam.cost import count
from paam.data import Dataset, load_data
from paam.errors import ArtifactError, DeviceError, DivergedError, RecipeError, one_line
from paam.files import write_atomically
from paam.models import build_model
from paam.pruner import Pruner
from paam.recipe import Recipe, recipe_to_toml
from paam.record import VERSION, Event, RecordWriter, environment, of_kind, read_record
from paam.schedule import phase_at
from paam.select import select
from paam.speed import measure_latency
from paam.train.batches import EvaluationBatches, Normalization, TrainingBatches
from paam.train.checkpoint import checkpoints, read_newest_checkpoint, write_checkpoint
from paam.train.engine import Engine
from paam.train.evaluation import Monitor, accuracy
from paam.version import __version__

RECIPE_FILE = "recipe.toml"
RECORD_FILE = "record.jsonl"
REPORT_FILE = "report.html"
DENSE_FILE = "dense.safetensors"
CHECKPOINTS = "checkpoints"
OWN_FILES = {RECIPE_FILE, RECORD_FILE, REPORT_FILE, DENSE_FILE, PLAN_FILE, WEIGHTS_FILE, CHECKPOINTS}
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
) -> list[Event]:
    """Run a recipe and return its record. Nothing is written before data, model and target have been checked."""
    device = find_device(device)
    if not 0 <= seed < 1 << 31:
        raise RecipeError(f"The seed must be from 0 to {(1 << 31) - 1}; {seed} was given.")
    finished = _check_directory(out, recipe, seed, resume=resume, overwrite=overwrite)
    if finished:
        return finished
    with _threads(recipe.train.threads):
        return _run(recipe, out, seed=seed, device=device, resume=resume, watch=watch, on_step=on_step)


def _run(
    recipe: Recipe, out: Path, *, seed: int, device: str, resume: bool, watch: Callable[[Event], None], on_step: OnStep
) -> list[Event]:
    data = _load_data(recipe, seed)
    pruner = _build_pruner(recipe, data, seed, device)
    select(pruner.network, pruner.scores(), recipe.target)  # an impossible target must not cost a warm-up
    saved = read_newest_checkpoint(out / CHECKPOINTS) if resume else None
    first = 0 if saved is None else int(saved[1]["epoch"])

    writer = _prepare_directory(out, recipe, first if saved else None)

    def emit(event: Event) -> None:
        writer(event)
        watch(event)

    if saved is None:
        emit(_start_event(recipe, seed, device, pruner, data))
    else:
        watch(of_kind(read_record(out / RECORD_FILE), "start")[0])
        watch({"event": "resumed", "epoch": first})
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
    engine.on_step = on_step
    if saved is not None:
        engine.restore(first, *saved)
    for epoch in range(first, recipe.schedule.total):
        try:
            engine.run_epoch(epoch, monitor)
        except DivergedError as error:
            kept = f" The last good state is in {out / CHECKPOINTS}." if checkpoints(out / CHECKPOINTS) else ""
            raise DivergedError(f"{error}{kept}") from error
        following = epoch + 1
        if following == recipe.schedule.warmup:
            _save_dense(engine, out)
        ends_phase = following == recipe.schedule.total or phase_at(recipe.schedule, following).first
        if ends_phase or following % recipe.train.checkpoint_every == 0:
            write_checkpoint(out / CHECKPOINTS, following, *engine.state(following))
    test = EvaluationBatches(data.test, normalize, device=device)
    _finish(engine, test, _example(data, device, LATENCY_BATCH), out, emit)
    return read_record(out / RECORD_FILE)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def find_device(name: str) -> str:
    """ "auto" takes a GPU when there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.ones(1, device=name).item()  # "meta" holds no values to train
    except (RuntimeError, AssertionError) as error:
        there = "cpu" + (f", cuda (0 to {torch.cuda.device_count() - 1})" if torch.cuda.is_available() else "")
        raise DeviceError(f"The device '{name}' is not there; this machine has: {there}.") from error
    return name


def _check_directory(out: Path, recipe: Recipe, seed: int, *, resume: bool, overwrite: bool) -> list[Event] | None:
    """The record of a run that is finished and only to be shown again; None when there is work to do."""
    if resume and overwrite:
        raise ArtifactError("--resume and --overwrite contradict each other; give one of them.")
    try:
        if out.exists() and not out.is_dir():
            raise ArtifactError(f"{out} is a file; give a directory with --out.")
        occupied = out.is_dir() and any(out.iterdir())
    except OSError as error:
        raise ArtifactError(f"{out} cannot be a run directory: {error.strerror}; choose another --out.") from error
    if occupied and not (resume or overwrite):
        raise ArtifactError(
            f"The directory {out} is not empty; go on with --resume, start over with --overwrite,"
            " or choose another --out."
        )
    if occupied and not {path.name for path in out.iterdir()} <= OWN_FILES and not (out / RECORD_FILE).is_file():
        raise ArtifactError(f"The directory {out} holds something else than a run; choose another --out.")
    if not resume:
        return None
    if not (out / RECORD_FILE).is_file():
        raise ArtifactError(f"There is no run in {out} to resume; start it without --resume.")
    events = read_record(out / RECORD_FILE)
    start = of_kind(events, "start")
    if not start or start[0]["seed"] != seed or start[0]["recipe"] != _portable(recipe):
        raise ArtifactError(
            f"The run in {out} was started with another recipe or seed; repeat its command and add --resume"
            " (its record.jsonl begins with both)."
        )
    return events if of_kind(events, "end") else None


def _prepare_directory(out: Path, recipe: Recipe, resume_at: int | None) -> RecordWriter:
    if resume_at is not None:
        return RecordWriter(out / RECORD_FILE, keep_before_epoch=resume_at)
    try:
        out.mkdir(parents=True, exist_ok=True)
        old = [out / name for name in OWN_FILES - {CHECKPOINTS}]
        for path in (*old, *checkpoints(out / CHECKPOINTS)):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ArtifactError(f"The run directory {out} cannot be made: {error.strerror}.") from error
    write_atomically(out / RECIPE_FILE, recipe_to_toml(recipe).encode())
    return RecordWriter(out / RECORD_FILE)


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
        _load_weights(model, Path(recipe.model.weights))
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


def _load_weights(model: nn.Module, path: Path) -> None:
    """Take up the weights of a dense network; a file that does not fit is refused with what differs."""
    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        model.load_state_dict(stored)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ArtifactError(f"model.weights = {path} cannot be taken up: {one_line(error)}.") from error


def _portable(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data, without where files lie: a run may go on where they lie elsewhere."""
    tree: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    del tree["data"]["directory"], tree["data"]["workers"]
    return tree


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
        "recipe": _portable(recipe),
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
