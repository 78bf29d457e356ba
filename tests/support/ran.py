"""Runs whose events are lines of a record, for comparison with what is written and shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import paam.runs.run
from events import Line, as_lines
from paam.config.recipe import Recipe


def run(
    recipe: Recipe, out: str | Path, *, watch: Callable[[Line], object] = lambda line: None, **options: Any
) -> list[Line]:
    """Like paam.runs.run.run."""

    def tell(event: Any) -> None:
        watch(*as_lines([event]))

    return as_lines(paam.runs.run.run(recipe, out, watch=tell, **options))
