"""A finished run, opened again: its recipe, its record, the dense architecture and the pruned network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from paam.artifacts import PLAN_FILE, load
from paam.errors import ArtifactError
from paam.models import build_model
from paam.plan import Plan
from paam.recipe import Recipe, load_recipe
from paam.record import RECIPE_FILE, RECORD_FILE, Event, of_kind, read_record


@dataclass(frozen=True, eq=False)
class OpenedRun:
    """``dense`` has the architecture that the run began with, with fresh weights; ``small`` is what came out of it."""

    recipe: Recipe
    record: list[Event]
    plan: Plan
    dense: nn.Module
    small: nn.Module

    def example(self, batch: int, device: str = "cpu") -> Tensor:
        """A batch of random images of the size that the network was traced with."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(batch, *self.plan.inputs[0][1:], generator=generator).to(device)


def open_run(directory: Path) -> OpenedRun:
    """Read a finished run. No training data are needed."""
    if not (directory / RECORD_FILE).is_file():
        raise ArtifactError(f"{directory} is no run directory: there is no {RECORD_FILE} in it.")
    record = read_record(directory / RECORD_FILE)
    start = of_kind(record, "start")
    finished = bool(start and of_kind(record, "end"))
    if not finished and (failed := of_kind(record, "failed")):
        raise ArtifactError(f"The run in {directory} failed: {failed[-1].get('reason')}")
    if not finished:
        raise ArtifactError(f"The run in {directory} is not finished; go on with --resume, then come back.")
    recipe = load_recipe(str(directory / RECIPE_FILE))
    plan = Plan.read(directory / PLAN_FILE)
    classes, channels = len(start[0]["classes"]), plan.inputs[0][1]
    dense = build_model(recipe.model.name, num_classes=classes, in_channels=channels)
    return OpenedRun(recipe, record, plan, dense.eval(), load(directory, dense))
