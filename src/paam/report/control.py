"""Runs on one page that are each other's dense control."""

from __future__ import annotations

from collections.abc import Sequence

from paam.report.facts import Facts

SAME = 0.05
"""Points of accuracy that one dense network may differ by from machine to machine."""


def control_of(run: Facts, runs: Sequence[Facts]) -> Facts | None:
    """The run that went on from the same dense network for as many epochs and removed nothing; None without one."""
    return next((other for other in runs if other is not run and _is_control(other, run)), None)


def removes_nothing(run: Facts) -> bool:
    return run.end is not None and (run.kept_macs, run.kept_params) == (1, 1)


def _is_control(other: Facts, run: Facts) -> bool:
    if run.start is None or run.end is None or other.start is None or other.end is None:
        return False
    what, same = (
        (facts.model, facts.data, start.data, start.seed, _epochs(facts))
        for facts, start in ((run, run.start), (other, other.start))
    )
    one_network = abs(run.end.dense.accuracy - other.end.dense.accuracy) < SAME
    return what == same and one_network and removes_nothing(other) and not removes_nothing(run)


def _epochs(run: Facts) -> int:
    """Of training after the dense network."""
    return sum(epoch.does != "warmup" for epoch in run.own_epochs)
