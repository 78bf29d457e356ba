"""Build and check what a run needs before its first epoch: seed, data, gated network, teacher."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from paam.artifacts.weights import load_weights, not_finite
from paam.config.recipe import Recipe, check_values
from paam.config.schema import fields_of
from paam.config.settings import PruneSettings
from paam.data import Dataset, check_dataset, load_data
from paam.errors import PaamError, RecipeError, nearest, one_line
from paam.methods import find_method
from paam.models import build_model
from paam.pruning.activations import activation as find_activation
from paam.pruning.pruner import Pruner
from paam.pruning.scorers import check_options, known_options
from paam.pruning.select import check_reachable
from paam.runs.failures import out_of_memory
from paam.train.device import on_device
from paam.train.divergence import MAX_LOSS


def check_seed(seed: int) -> None:
    if not 0 <= seed < 1 << 31:
        raise RecipeError(f"The seed must be from 0 to {(1 << 31) - 1}; {seed} was given.")


def check_recipe(recipe: Recipe) -> Recipe:
    """Refuse unknown names in a recipe, and settings that its method does not support.

    Returns the recipe with the defaults of scorers' options, as runs record it.
    """
    check_values(recipe)
    keys = {*known_options(), *fields_of(PruneSettings)} - {"options"}
    for name in recipe.prune.options:
        if name not in keys:
            hint = nearest(name, keys).replace("mean '", "mean 'prune.")
            raise RecipeError(f"Invalid recipe: unknown key 'prune.{name}'.{hint}")
    with _naming("prune"):
        options = check_options(recipe.prune.options)
    with _naming("data.name"):
        check_dataset(recipe.data.name)
    with _naming("prune.activation"):
        find_activation(recipe.prune.activation)
    with _naming("prune.method"):
        method = find_method(recipe.prune.method)
    method.check(recipe)
    with _naming("prune.scorer"):
        method.scorer(recipe)
    return replace(recipe, prune=replace(recipe.prune, options=options))


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
    """Weights of the recipe's teacher; None if that is the dense network after warm-up, or if there is none."""
    if recipe.distill.teacher is None:
        return None
    teacher = copy.deepcopy(pruner.network.traced.model)
    load_weights(teacher, Path(recipe.distill.teacher), "distill.teacher")
    return teacher.state_dict()


def example(data: Dataset, device: str, batch: int) -> Tensor:
    return torch.zeros(batch, *data.train.images.shape[1:], device=device)


def build_pruner(recipe: Recipe, data: Dataset, seed: int, device: str, *, fresh: bool) -> Pruner:
    """The network with gates. ``fresh``: load the initial weights; not needed when a checkpoint is loaded."""
    torch.manual_seed(seed)
    channels = data.train.images.shape[1]
    model = build_model(recipe.model.name, num_classes=len(data.classes), in_channels=channels)
    if fresh and recipe.model.weights is not None:
        load_weights(model, Path(recipe.model.weights), "model.weights")
    if fresh and (name := not_finite({**dict(model.named_parameters()), **dict(model.named_buffers())})):
        raise RecipeError(
            f"The model '{recipe.model.name}' has initial weights that are not finite, in '{name}': fix the function"
            " that builds it."
        )
    model = on_device(model, example(data, "cpu", 1), device)
    if device.startswith("cuda"):
        torch.backends.cudnn.benchmark = True
    pruner = make_pruner(model, example(data, device, 1), recipe)
    with torch.no_grad():
        penalty = 0.0 if pruner.optimizer is None else float(pruner.penalty())
        if not penalty < MAX_LOSS:
            raise RecipeError(
                f"prune.penalty = {recipe.prune.penalty:g} is too high: the penalty alone starts at {penalty:.3g}, and"
                f" a loss above {MAX_LOSS:g} cannot be trained on. Lower it."
            )
        answer = _answer(pruner.model.eval(), example(data, device, 2), recipe.model.name)
    if not isinstance(answer, Tensor) or answer.shape != (2, len(data.classes)):
        raise RecipeError(
            f"The model '{recipe.model.name}' must return logits [N, {len(data.classes)}] for this data set"
            f" ({len(data.classes)} classes); it returned {list(getattr(answer, 'shape', []))} for two images."
        )
    return pruner


def _answer(model: nn.Module, images: Tensor, name: str) -> object:
    """The model's outputs; what its code raises becomes one sentence, except for lack of memory."""
    try:
        return model(images)
    except Exception as error:
        if out_of_memory(error) is not None or isinstance(error, PaamError):
            raise
        kind, said = type(error).__name__, one_line(error)
        raise RecipeError(
            f"The model '{name}' fails on two images, {kind}{'' if said == kind else f': {said}'}; correct its code."
        ) from error


def make_pruner(model: nn.Module, example: Tensor, recipe: Recipe) -> Pruner:
    """Attach gates and the scorers of the recipe's method to the model, in place."""
    settings = asdict(recipe.prune)
    for name in ("method", "scorer", "options"):  # already used to build the scorer
        del settings[name]
    scorer = find_method(recipe.prune.method).scorer(recipe)
    return Pruner(model, example, scorer=scorer, score_lr=recipe.score.lr, inplace=True, **settings)


def check_run(recipe: Recipe, data: Dataset, seed: int) -> None:
    """Check network, weights and target with this data, as a run would; on a CPU."""
    pruner = build_pruner(recipe, data, seed, "cpu", fresh=True)
    check_reachable(pruner.network, recipe.target)
    teacher_state(recipe, pruner)
