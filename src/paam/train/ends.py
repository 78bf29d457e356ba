"""What a record begins and ends with: where a run comes from, and what came out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from paam.artifacts import save
from paam.cost import count
from paam.data import Dataset
from paam.errors import StoppedError
from paam.pruner import Pruner
from paam.recipe import Recipe
from paam.record import SAME_EPOCHS, VERSION, Event, environment
from paam.speed import measure_latency
from paam.train.batches import EvaluationBatches
from paam.train.directory import portable
from paam.train.engine import Engine
from paam.train.evaluation import accuracy
from paam.version import __version__

LATENCY_BATCH = 128


def start_event(recipe: Recipe, seed: int, device: str, pruner: Pruner, data: Dataset, command: str) -> Event:
    dense = pruner.network.dense
    sizes = {"train": len(data.train), "holdout": len(data.holdout or ()), "test": len(data.test)}
    return {
        "event": "start",
        "version": VERSION,
        "paam": __version__,
        **environment(device),
        "device": device,
        "seed": seed,
        "command": command,
        "recipe": portable(recipe),
        "epochs": recipe.schedule.total,
        "samples": sizes,
        "classes": data.classes,
        "normalization": {"mean": data.mean, "std": data.std},
        "monitor": "holdout" if data.holdout else "test",
        "dense": {"params": dense.params, "macs": dense.macs},
        "groups": {g.name: {"width": g.width, "stream": g.stream is not None} for g in pruner.network.groups},
    }


def finish(
    engine: Engine,
    test: EvaluationBatches,
    images: Tensor,
    out: Path,
    emit: Callable[[Event], None],
    stop: Callable[[], bool],
) -> None:
    """Measure what came out, write the artifacts, and close the record. Asked to ``stop``, it does so on the way."""
    small = engine.result()
    dense = engine.networks.dense() if engine.networks.control is None else engine.networks.control
    assert engine.pruner.selection is not None  # every schedule has at least one cycle
    plan = engine.pruner.selection.plan
    latency = measure_latency({"dense": dense, "pruned": small}, images)
    save(small, out)
    results: dict[str, Any] = {}
    for name, model in (("dense", dense), ("pruned", small)):
        if stop():
            raise StoppedError("Stopped while the result was measured; all that was trained is saved.")
        counted = count(model, images[:1])
        results[name] = {
            "accuracy": accuracy(model, test),
            "params": counted.params,
            "macs": counted.macs,
            "latency_ms": asdict(latency[name]),
            "uncounted": counted.uncounted,
        }
    alone = "warm-up only" if engine.recipe.schedule.warmup else "as it came"
    results["dense"]["trained"] = alone if engine.networks.control is None else SAME_EPOCHS
    emit({"event": "end", "latency_batch": len(images), "kept_filters": plan.counts, **results})
