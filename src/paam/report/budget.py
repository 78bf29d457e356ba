"""Layer-by-layer chart: one bar per layer, its filters or MACs, and the part that was kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from paam.events import Widths
from paam.report.facts import Facts

HEIGHT = 150
"""Pixels of the tallest bar."""
PAGE = 960
"""Total width in pixels that the bars fill if possible: networks with few layers get wider bars."""
WIDEST = 52
"""Maximum width of a bar in pixels."""
PHONE = 340
"""Maximum width of a panel in pixels, so that one fits on a phone."""


@dataclass(frozen=True)
class Bar:
    """Pixels within its panel; ``kept`` of ``width`` are left.

    ``stream``: the layer writes into a residual stream, which other layers may share.
    """

    x: float
    label: str
    kept: int
    width: int
    stream: bool
    tip: str
    shown: str
    """Label above the bar."""


@dataclass(frozen=True)
class Panel:
    """Neighbouring layers. ``title``: the common first part of their names."""

    title: str
    pixels: int
    bars: list[Bar]


@dataclass(frozen=True)
class Budget:
    panels: list[Panel]
    widest: int
    pitch: int
    label_pixels: int
    by_share: bool
    """Whether bars initially show shares of each layer: if widths differ so much that narrow layers would vanish."""
    streams: bool
    kept: int
    total: int
    emptied: int

    def pixels(self, count: int, width: int) -> float:
        """Height of a bar of ``count``, in a layer of ``width``."""
        return round(HEIGHT * count / (width if self.by_share else self.widest), 1)


def budget(facts: Facts) -> Budget | None:
    """Filters of the groups; above each bar the number kept."""
    widths = [width for _, width in facts.kept.values()]
    tips = {
        name: f"{name}: {kept} of {width} filters kept ({100 * kept / width:.0f} %)"
        + (", residual stream" if name in facts.streams else "")
        for name, (kept, width) in facts.kept.items()
    }
    shown = {name: str(kept) for name, (kept, _) in facts.kept.items()}
    by_share = bool(widths) and max(widths) > 8 * min(widths)
    return _budget(facts.kept, shown, tips, facts.streams, by_share=by_share)


def macs(facts: Facts) -> Budget | None:
    """MACs of the layers; above each bar the percentage kept."""
    layers = facts.layer_macs
    shown = {name: f"{100 * left / whole:.0f}" for name, (left, whole) in layers.items()}
    tips = {
        name: f"{name}: {left:,} of {whole:,} MACs left ({shown[name]} %)" for name, (left, whole) in layers.items()
    }
    return _budget(layers, shown, tips, frozenset(), by_share=False)


def _budget(
    layers: Widths, shown: Mapping[str, str], tips: Mapping[str, str], streams: frozenset[str], *, by_share: bool
) -> Budget | None:
    if not layers:
        return None
    pitch = max(5 + 6 * max(map(len, shown.values())), min(PAGE // len(layers), WIDEST))
    panels = []
    for title, names in _panels(list(layers), max(1, PHONE // pitch)):
        bars = []
        for place, name in enumerate(names):
            label = name.removeprefix(title).lstrip(".") or name
            kept, width = layers[name]
            bars.append(Bar(place * pitch, _clipped(label), kept, width, name in streams, tips[name], shown[name]))
        panels.append(Panel(title, len(names) * pitch, bars))
    longest_label = max(len(bar.label) for panel in panels for bar in panel.bars)
    return Budget(
        panels=panels,
        widest=max(width for _, width in layers.values()),
        pitch=pitch,
        label_pixels=20 + 6 * longest_label,
        by_share=by_share,
        streams=any(name in streams for name in layers),
        kept=sum(kept for kept, _ in layers.values()),
        total=sum(width for _, width in layers.values()),
        emptied=sum(kept == 0 for kept, _ in layers.values()),
    )


def _panels(names: Sequence[str], longest: int) -> list[tuple[str, list[str]]]:
    """Consecutive layers with the same first part of their name, split into pieces of equal length if too long."""
    panels = []
    for head, run in groupby(names, key=lambda name: name.partition(".")[0] if "." in name else ""):
        members = list(run)
        pieces = -(-len(members) // longest)
        size = -(-len(members) // pieces)
        panels += [(head, members[i : i + size]) for i in range(0, len(members), size)]
    return panels


def _clipped(label: str, longest: int = 18) -> str:
    return label if len(label) <= longest else f"…{label[1 - longest :]}"
