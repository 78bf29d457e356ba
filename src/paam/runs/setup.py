"""What a run needs before its first epoch: a seed, data, the gated network, its teacher; checked as they come."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from paam.artifacts.weights import load_weights, not_finite
from paam.config.recipe import Recipe, check_values
from paam.data import Dataset, check_dataset, load_data
from paam.errors import RecipeError, one_line
from paam.methods import find_method
from paam.models import build_model
from paam.pruning.activations import activation as find_activation
from paam.pruning.pruner import Pruner
from paam.pruning.select import check_reachable
from paam.runs.failures import out_of_memory
from paam.train.device import on_device
from paam.train.divergence import HOPELESS


def check_seed(seed: int) -> None:
    if not 0 <= seed < 1 << 31:
        raise RecipeError(f"The seed must be from 0 to {(1 << 31) - 1}; {seed} was given.")


def check_recipe(recipe: Recipe) -> None:
    """Refuse what a recipe names and there is not, and what its method cannot follow."""
    check_values(recipe)
    with _naming("data.name"):
        check_dataset(recipe.data.name)
    with _naming("prune.activation"):
        find_activation(recipe.prune.activation)
    with _naming("prune.method"):
        method = find_method(recipe.prune.method)
    method.check(recipe)
    with _naming("prune.scorer"):
        method.scorer(recipe)


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{key}: {error}") from error


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
    if fresh and (name := not_finite({**dict(model.named_parameters()), **dict(model.named_buffers())})):
        raise RecipeError(
            f"The model '{recipe.model.name}' begins with weights that are not finite, in '{name}': correct the"
            " function that makes it."
        )
    model = on_device(model, example(data, "cpu", 1), device)
    if device.startswith("cuda"):
        torch.backends.cudnn.benchmark = True
    pruner = make_pruner(model, example(data, device, 1), recipe)
    with torch.no_grad():
        penalty = 0.0 if pruner.optimizer is None else float(pruner.penalty())
        if not penalty < HOPELESS:
            raise RecipeError(
                f"prune.penalty = {recipe.prune.penalty:g} is too high: the penalty on the scores alone begins at"
                f" {penalty:.3g}, and no loss above {HOPELESS:g} can be trained on. Lower it."
            )
        answer = _answer(pruner.model.eval(), example(data, device, 2), recipe.model.name)
    if not isinstance(answer, Tensor) or answer.shape != (2, len(data.classes)):
        raise RecipeError(
            f"The model '{recipe.model.name}' must return logits [N, {len(data.classes)}] for this data set"
            f" ({len(data.classes)} classes); it returned {list(getattr(answer, 'shape', []))} for two images."
        )
    return pruner


def _answer(model: nn.Module, images: Tensor, name: str) -> object:
    """What a model says to images; what it raises, lack of memory aside, is told as a sentence."""
    try:
        return model(images)
    except Exception as error:
        if out_of_memory(error) is not None:
            raise
        kind, said = type(error).__name__, one_line(error)
        raise RecipeError(
            f"The model '{name}' fails on two images, {kind}{'' if said == kind else f': {said}'}; correct its code."
        ) from error


def make_pruner(model: nn.Module, example: Tensor, recipe: Recipe) -> Pruner:
    """The model with gates, and the scorers of the recipe's method, in place."""
    settings = asdict(recipe.prune)
    for name in ("method", "scorer", "dim_ratio", "alpha"):  # what the method's scorer has been made of
        del settings[name]
    scorer = find_method(recipe.prune.method).scorer(recipe)
    return Pruner(model, example, scorer=scorer, score_lr=recipe.score.lr, inplace=True, **settings)


def check_run(recipe: Recipe, data: Dataset, seed: int) -> None:
    """Refuse a network, weights and a target that a run would refuse with this data; on a CPU."""
    pruner = build_pruner(recipe, data, seed, "cpu", fresh=True)
    check_reachable(pruner.network, recipe.target)
    teacher_state(recipe, pruner)
