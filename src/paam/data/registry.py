"""Data sets by name: modules of this package register theirs, and so can users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paam.data.dataset import Dataset
from paam.errors import RecipeError, nearest


@dataclass(frozen=True)
class Wanted:
    """Arguments for loading a data set: see :func:`paam.data.load_data`."""

    directory: str | Path | None
    image_size: int | None
    seed: int
    memory: float
    workers: int | None


DATASETS: dict[str, Callable[[Wanted], Dataset]] = {}


def register_dataset(name: str, load: Callable[[Wanted], Dataset]) -> None:
    """Register a data set under a name (data.name of a recipe). ``load`` returns train and test images, no holdout."""
    if name in DATASETS:
        raise RecipeError(f"The data set '{name}' is already registered; choose another name.")
    DATASETS[name] = load


def check_dataset(name: str) -> None:
    """Raise an error with the nearest name if there is no data set ``name``."""
    if name not in DATASETS:
        raise RecipeError(f"There is no data set '{name}'.{nearest(name, DATASETS)}")
