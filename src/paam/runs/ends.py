"""The first and the last event of a record: origin and result of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from torch import Tensor

from paam.artifacts.latency import measure_latency
from paam.artifacts.saved import save
from paam.artifacts.weights import save_weights
from paam.data import Dataset
from paam.data.batches import EvaluationBatches
from paam.data.manifest import Manifest
from paam.errors import StoppedError
from paam.events import VERSION, Cost, End, GroupFacts, Milliseconds, Outcome, PhaseFacts, Start
from paam.graph.cost import count, macs_by_layer
from paam.methods import find_method
from paam.pruning.pruner import Pruner
from paam.runs.directory import CONTROL_FILE, portable
from paam.runs.environment import environment
from paam.runs.job import Job
from paam.train.engine import Emit, Engine
from paam.train.evaluation import accuracy
from paam.train.phase import Phase
from paam.version import __version__

LATENCY_BATCH = 128


def phase_facts(phases: Sequence[Phase]) -> list[PhaseFacts]:
    return [PhaseFacts(phase.name, phase.epochs, phase.cycle, phase.role, phase.label) for phase in phases]


def start_event(job: Job, pruner: Pruner, data: Dataset, manifest: Manifest) -> Start:
    dense = pruner.network.dense
    return Start(
        version=VERSION,
        paam=__version__,
        **environment(job.device),
        device=job.device,
        seed=job.seed,
        command=job.command,
        recipe=portable(job.recipe),
        method=find_method(job.recipe.prune.method).label(job.recipe),
        epochs=job.epochs,
        phases=phase_facts(job.phases),
        data={"hash": manifest.digest, "of": ["names", "labels", "split", manifest.covers]},
        samples={"train": len(data.train), "holdout": len(data.holdout or ()), "test": len(data.test)},
        classes=list(data.classes),
        normalization={"mean": list(data.mean), "std": list(data.std)},
        monitor="holdout" if data.holdout else "test",
        dense=Cost(dense.params, dense.macs),
        groups={group.name: GroupFacts(group.width, group.stream is not None) for group in pruner.network.groups},
    )


def finish(job: Job, engine: Engine, test: EvaluationBatches, images: Tensor, emit: Emit) -> None:
    """Measure the result, write the artifacts, and close the record. Can be stopped in between."""
    small = engine.result()
    dense = engine.networks.dense() if engine.networks.control is None else engine.networks.control
    plan = engine.selected().plan
    latency = measure_latency({"dense": dense, "pruned": small}, images)
    save(small, job.out)
    if engine.networks.control is not None:
        save_weights(job.out / CONTROL_FILE, dense.state_dict(), "dense control, trained for as long")
    results: list[Outcome] = []
    for name, model in (("dense", dense), ("pruned", small)):
        if job.listener.stop():
            raise StoppedError("Stopped while measuring the result; all training is saved.")
        counted = count(model, images[:1])
        outcome = Outcome(
            accuracy=accuracy(model, test),
            params=counted.params,
            macs=counted.macs,
            latency_ms=Milliseconds(**asdict(latency[name])),
            uncounted=counted.uncounted,
            trained=_trained(engine) if name == "dense" else "",
            layers=macs_by_layer(model, images[:1]),
        )
        results.append(outcome)
    emit(End(len(images), plan.counts, *results))


def _trained(engine: Engine) -> str:
    """How long the dense baseline of the pruned network was trained."""
    if engine.networks.control is not None:
        return "as long"
    return "warm-up" if any(phase.makes_dense for phase in engine.phases) else "as given"
