"""Find a run's dense control among the runs of one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paam.report.facts import Facts

SAME = 0.05
"""Tolerance in points of accuracy for the same dense network on different machines."""


def control_of(run: Facts, runs: Sequence[Facts]) -> Facts | None:
    """The run that removed nothing, with the same dense accuracy, training and epochs; None if there is none."""
    return next((other for other in runs if other is not run and _is_control(other, run)), None)


def removes_nothing(run: Facts) -> bool:
    return run.end is not None and (run.kept_macs, run.kept_params) == (1, 1)


def _is_control(other: Facts, run: Facts) -> bool:
    if run.start is None or run.end is None or other.start is None or other.end is None:
        return False
    what, same = (
        (facts.model, facts.data, start.data, start.seed, _epochs(facts), _training(start.recipe))
        for facts, start in ((run, run.start), (other, other.start))
    )
    one_network = abs(run.end.dense.accuracy - other.end.dense.accuracy) < SAME
    return what == same and one_network and removes_nothing(other) and not removes_nothing(run)


def _training(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Training settings after warm-up: these must be equal except for pruning."""
    found = {name: recipe.get(name) for name in ("weight", "finetune", "distill", "data")}
    sections = {name: dict(section) if isinstance(section, Mapping) else {} for name, section in found.items()}
    for location in ("directory", "workers", "memory"):
        sections["data"].pop(location, None)
    sections["distill"].pop("teacher", None)
    return sections


def _epochs(run: Facts) -> int:
    """Number of epochs after the dense network was trained."""
    return sum(epoch.does != "warmup" for epoch in run.own_epochs)
