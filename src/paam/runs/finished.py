"""Load a finished run: its recipe, its record, the dense architecture and the pruned network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from paam.artifacts.saved import WEIGHTS_FILE, assemble, read_network
from paam.config.recipe import Recipe, load_recipe
from paam.config.trust import check_trusted
from paam.errors import ArtifactError
from paam.events import End, Failed, Start, last
from paam.graph.plan import Plan
from paam.models import build_model
from paam.runs.record import RECIPE_FILE, RECORD_FILE, read_events, record_in


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """``dense`` is the original architecture with fresh weights; ``small`` is the pruned network."""

    recipe: Recipe
    start: Start
    plan: Plan
    dense: nn.Module
    small: nn.Module

    def example(self, batch: int, device: str = "cpu") -> Tensor:
        """A batch of random images of the size used for tracing."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(batch, *self.plan.inputs[0][1:], generator=generator).to(device)


def run_record(directory: Path) -> Path:
    """The record of a run directory; an error if the directory is none."""
    record = record_in(directory)
    if not record.is_file():
        raise ArtifactError(f"{directory} is not a run directory (no {RECORD_FILE}).")
    return record


def open_run(directory: Path, *, trust_code: bool = False) -> FinishedRun:
    """Load a finished run. Needs no training data. ``trust_code``: allow running code that its recipe names."""
    events = read_events(run_record(directory))
    finished = last(events, End) is not None
    if not finished and (failed := last(events, Failed)):
        raise ArtifactError(f"The run in {directory} failed: {failed.reason}")
    start = last(events, Start)
    if start is None or not finished:
        raise ArtifactError(f"The run in {directory} is not finished; resume it first (--resume).")
    recipe = load_recipe(str(directory / RECIPE_FILE))
    check_trusted(recipe.model.name, f"The run in {directory}", trusted=trust_code)
    plan, state = read_network(directory / WEIGHTS_FILE)
    classes, channels = len(start.classes), plan.inputs[0][1]
    dense = build_model(recipe.model.name, num_classes=classes, in_channels=channels)
    return FinishedRun(recipe, start, plan, dense.eval(), assemble(dense, plan, state, directory / WEIGHTS_FILE))
