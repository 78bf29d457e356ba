"""The whole state of an engine, at an epoch boundary or where a stop left an epoch: tensors and plain data."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paam.plan import Plan
from paam.schedule import BEFORE_FINETUNE, phase_at
from paam.select import Selection
from paam.train.engine import Engine
from paam.train.optimizers import load_optimizer_state, optimizer_state
from paam.train.packing import as_tensors, from_tensors, pack
from paam.train.pause import Pause


def engine_state(engine: Engine, epoch: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and plain data that :func:`restore_engine` needs to go on with ``epoch``, or in it after a stop."""
    current = phase_at(engine.recipe.schedule, epoch - (engine.pause is None)).name
    alternating = current in BEFORE_FINETUNE
    parts = engine.networks.state(scored=alternating)
    for name, optimizer in engine.optimizers.items():
        if name == current or (alternating and name in ("score", "weight")):
            remembered = optimizer_state(optimizer, engine.networks.trained(name))
            parts |= {f"optimizer/{name}/{key}": packed for key, packed in remembered.items()}
    if current in engine.averages:
        parts |= {f"average/{key}": packed for key, packed in engine.averages[current].state().items()}
    chosen = engine.pruner.selection
    header: dict[str, Any] = {  # not by asdict(), which copies the plan filter by filter
        "selection": None if chosen is None else {**vars(chosen), "plan": chosen.plan.to_json()}
    }
    if not alternating:
        header["masked"] = engine.networks.masked
    if engine.pause is not None:
        parts["pause"] = pack(engine.pause.tensors())
        header["seconds"] = engine.pause.seconds
    tensors, header["layouts"] = as_tensors(parts)
    return tensors, header


def restore_engine(engine: Engine, epoch: int, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Take up a state that :func:`engine_state` handed out, in a fresh process."""
    if header["selection"] is not None:
        stored = header["selection"]
        engine.pruner.use(Selection(**{**stored, "plan": Plan.from_json(stored["plan"])}))
    parts = from_tensors(tensors, header["layouts"])
    # A fine-tune goes on as it was begun, on whatever device.
    engine.networks.masked = header.get("masked", engine.networks.masked)
    current = phase_at(engine.recipe.schedule, epoch - ("pause" not in parts)).name
    engine.networks.restore(parts, scored=current in BEFORE_FINETUNE)
    if (mean := _part(parts, "average/")) and (average := engine.average(current)):
        average.restore(mean)
    if "pause" in parts:
        device = next(engine.pruner.model.parameters()).device
        engine.pause = Pause.from_tensors(parts["pause"], header["seconds"], device)
    begun = epoch + (engine.pause is not None)
    for phase in {phase_at(engine.recipe.schedule, number).name for number in range(begun)}:
        if remembered := _part(parts, f"optimizer/{phase}/"):
            load_optimizer_state(engine.optimizer(phase), engine.networks.trained(phase), remembered)


def _part(parts: dict[str, dict[str, Tensor]], start: str) -> dict[str, dict[str, Tensor]]:
    return {name.removeprefix(start): tensors for name, tensors in parts.items() if name.startswith(start)}
