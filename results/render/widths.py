"""The widths that runs of a CIFAR ResNet learned: streams, the blocks that change them, and all other layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from statistics import correlation, fmean

from paam.report.facts import Facts
from render.markdown import table
from render.runs import experiments

Kept = Mapping[str, tuple[int, int]]
"""Group of filters -> (kept, all)."""
INNER = re.compile(r"layer(\d)\.(\d+)\.conv1")


def discovered(folder: Path, names: Iterable[str]) -> str:
    """One row per seed of each experiment; below, the agreement between seeds."""
    found = experiments(folder)
    residual = {name: [run for run in found.get(name, []) if any(map(INNER.fullmatch, run.kept))] for name in names}
    members = {name: runs for name, runs in residual.items() if runs}
    rows = [[run.name, *_row(run.kept)] for runs in members.values() for run in runs]
    first = "inner filters of the stages' first blocks"
    head = ["", "streams keep", first, "of the other blocks, mean by stage", "the narrowest"]
    lines = [line for name, runs in members.items() if (line := _agreement(name, runs))]
    return table(head, rows) + "".join(f"\n{line}\n" for line in lines)


def _row(kept: Kept) -> list[str]:
    inner = {name: found for name, found in kept.items() if INNER.fullmatch(name)}
    firsts = [found for name, found in inner.items() if _place(name)[1] == 0]
    others: dict[int, list[float]] = {}
    for name, (stay, width) in inner.items():
        if _place(name)[1] > 0:
            others.setdefault(_place(name)[0], []).append(stay / width)
    streams = [found for name, found in kept.items() if name not in inner]
    least = min(stay / width for stay, width in inner.values())
    narrow = sum(stay / width == least for stay, width in inner.values())
    return [
        _counts(streams),
        _counts(firsts),
        ", ".join(f"{100 * fmean(shares):.0f} %" for _, shares in sorted(others.items())),
        f"{100 * least:.0f} % in {narrow} of {len(inner)} inner layers",
    ]


def _agreement(name: str, runs: list[Facts]) -> str:
    """Pearson correlation of the filters kept in inner layers, for all seed pairs, with and without first blocks."""
    if len(runs) < 2:
        return ""
    layers = [layer for layer in runs[0].kept if INNER.fullmatch(layer)]
    others = [layer for layer in layers if _place(layer)[1] > 0]
    return (
        f"Pearson's correlation of the shares that inner layers keep, between the seeds of {name}:"
        f" {_correlations(runs, layers)}; without the stages' first blocks {_correlations(runs, others)}."
    )


def _correlations(runs: list[Facts], layers: list[str]) -> str:
    shares = [[run.kept[layer][0] / run.kept[layer][1] for layer in layers] for run in runs]
    if any(len(set(one)) == 1 for one in shares):
        return "that has no meaning, as in one of them they are all alike"
    pairs = sorted(correlation(one, other) for one, other in combinations(shares, 2))
    return " to ".join(f"{pair:.2f}" for pair in dict.fromkeys((pairs[0], pairs[-1])))


def _place(name: str) -> tuple[int, int]:
    """Stage and number of a block, from the name of its inner layer."""
    match = INNER.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2])


def _counts(found: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{stay} of {width}" for stay, width in found)
