"""The whole state of an engine, at an epoch boundary or inside an epoch: tensors and plain data."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paam.graph.plan import Plan
from paam.pruning.select import Selection
from paam.train.engine import Engine
from paam.train.mid_epoch import MidEpochState
from paam.train.optimizers import load_optimizer_state, optimizer_state
from paam.train.packing import as_tensors, from_tensors, pack
from paam.train.phase import place_of


def engine_state(engine: Engine, epoch: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and plain data for :func:`restore_engine` to resume at ``epoch``, or inside it after a stop."""
    place = place_of(engine.phases, epoch - (engine.mid_epoch is None))
    by_name = {phase.name: phase for phase in engine.phases}
    gated = any(phase.network == "gated" for phase in engine.phases[place.number :])
    parts = engine.networks.state(scored=gated)
    for name in [name for name in engine.optimizers if name in engine.names_from(place.number)]:
        remembered = optimizer_state(engine.optimizers[name], engine.networks.trained(by_name[name]))
        parts |= {f"optimizer/{name}/{key}": packed for key, packed in remembered.items()}
    if place.phase.name in engine.emas:
        mean = engine.emas[place.phase.name].state()
        parts |= {f"average/{key}": packed for key, packed in mean.items()}
    chosen = engine.pruner.selection
    header: dict[str, Any] = {  # not asdict(), which copies the plan filter by filter
        "selection": None if chosen is None else {**vars(chosen), "plan": chosen.plan.to_json()}
    }
    if not gated:
        header["masked"] = engine.networks.masked
    if engine.mid_epoch is not None:
        parts["pause"] = pack(engine.mid_epoch.tensors())
        header |= {"seconds": engine.mid_epoch.seconds, "steps": engine.batches.steps}
    tensors, header["layouts"] = as_tensors(parts)
    return tensors, header


def restore_engine(engine: Engine, epoch: int, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Load a state of :func:`engine_state` in a new process."""
    if header["selection"] is not None:
        stored = header["selection"]
        engine.pruner.use(Selection(**{**stored, "plan": Plan.from_json(stored["plan"])}))
    parts = from_tensors(tensors, header["layouts"])
    # A fine-tune stays masked or compacted as it was started, also on another device.
    engine.networks.masked = header.get("masked", engine.networks.masked)
    place = place_of(engine.phases, epoch - ("pause" not in parts))
    engine.networks.restore(parts, scored=any(phase.network == "gated" for phase in engine.phases[place.number :]))
    if (mean := _part(parts, "average/")) and (ema := engine.ema(place.phase)):
        ema.restore(mean)
    if "pause" in parts:
        device = next(engine.pruner.model.parameters()).device
        engine.mid_epoch = MidEpochState.from_tensors(parts["pause"], header["seconds"], device)
        if header["steps"] != engine.batches.steps:  # another batch size, or changed data
            engine.mid_epoch = engine.mid_epoch.rescaled(header["steps"], engine.batches.steps)
    for phase in {phase.name: phase for phase in engine.phases[: place.number + 1]}.values():
        if remembered := _part(parts, f"optimizer/{phase.name}/"):
            load_optimizer_state(engine.optimizer(phase), engine.networks.trained(phase), remembered)


def _part(parts: dict[str, dict[str, Tensor]], start: str) -> dict[str, dict[str, Tensor]]:
    return {name.removeprefix(start): tensors for name, tensors in parts.items() if name.startswith(start)}
