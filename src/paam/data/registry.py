"""Data sets by name: modules of this package register theirs, and so do users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paam.data.dataset import Dataset
from paam.errors import RecipeError, nearest


@dataclass(frozen=True)
class Wanted:
    """What a run asks of a data set: see :func:`paam.data.load_data`."""

    directory: str | Path | None
    image_size: int | None
    seed: int
    memory: float
    workers: int | None


DATASETS: dict[str, Callable[[Wanted], Dataset]] = {}


def register_dataset(name: str, load: Callable[[Wanted], Dataset]) -> None:
    """Make a data set known by its name (data.name of a recipe). ``load`` returns train and test images, no holdout."""
    if name in DATASETS:
        raise RecipeError(f"There is a data set '{name}' already; give yours another name.")
    DATASETS[name] = load


def check_dataset(name: str) -> None:
    """Raise the error that names the nearest data set where there is none called ``name``."""
    if name not in DATASETS:
        raise RecipeError(f"There is no data set '{name}'.{nearest(name, DATASETS)}")
