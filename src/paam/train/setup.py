"""What a run needs before its first epoch: a seed, data, the gated network, its teacher; checked as they come."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from paam.data import Dataset, load_data
from paam.errors import RecipeError
from paam.models import build_model
from paam.pruner import Pruner
from paam.recipe import Recipe
from paam.select import check_reachable
from paam.train.device import on_device
from paam.train.weights import load_weights


def check_seed(seed: int) -> None:
    if not 0 <= seed < 1 << 31:
        raise RecipeError(f"The seed must be from 0 to {(1 << 31) - 1}; {seed} was given.")


def load_run_data(recipe: Recipe, seed: int) -> Dataset:
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


def teacher_state(recipe: Recipe, pruner: Pruner) -> dict[str, Tensor] | None:
    """Weights of the teacher that the recipe names; None where it is the dense network after warm-up, or none."""
    if recipe.distill.teacher is None:
        return None
    teacher = copy.deepcopy(pruner.network.traced.model)
    load_weights(teacher, Path(recipe.distill.teacher), "distill.teacher")
    return teacher.state_dict()


def example(data: Dataset, device: str, batch: int) -> Tensor:
    return torch.zeros(batch, *data.train.images.shape[1:], device=device)


def build_pruner(recipe: Recipe, data: Dataset, seed: int, device: str, *, fresh: bool) -> Pruner:
    """The network with gates. ``fresh``: with the weights that a run begins with; a checkpoint brings its own."""
    torch.manual_seed(seed)
    channels = data.train.images.shape[1]
    model = build_model(recipe.model.name, num_classes=len(data.classes), in_channels=channels)
    if fresh and recipe.model.weights is not None:
        load_weights(model, Path(recipe.model.weights), "model.weights")
    model = on_device(model, example(data, "cpu", 1), device)
    if device.startswith("cuda"):
        torch.backends.cudnn.benchmark = True
    pruner = Pruner(model, example(data, device, 1), score_lr=recipe.score_lr, inplace=True, **asdict(recipe.prune))
    with torch.no_grad():
        answer = pruner.model.eval()(example(data, device, 2))
    if not isinstance(answer, Tensor) or answer.shape != (2, len(data.classes)):
        raise RecipeError(
            f"The model '{recipe.model.name}' must return logits [N, {len(data.classes)}] for this data set"
            f" ({len(data.classes)} classes); it returned {list(getattr(answer, 'shape', []))} for two images."
        )
    return pruner


def check_run(recipe: Recipe, data: Dataset, seed: int) -> None:
    """Refuse a network, weights and a target that a run would refuse with this data; on a CPU."""
    pruner = build_pruner(recipe, data, seed, "cpu", fresh=True)
    check_reachable(pruner.network, recipe.target)
    teacher_state(recipe, pruner)
