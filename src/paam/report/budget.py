"""The network drawn layer by layer: one bar per layer, its full width and the part that was kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from paam.report.facts import Facts

HEIGHT = 150
"""Pixels of the tallest bar."""
PAGE = 960
"""Pixels that all bars fill side by side where they can: short networks get wider bars."""
WIDEST = 52
"""Pixels of a bar, at most."""
PHONE = 340
"""Pixels of the widest panel, so that one fits on a phone."""


@dataclass(frozen=True)
class Bar:
    """Pixels within its panel; ``stream``: the layer writes into a residual stream, others may write there too."""

    x: float
    label: str
    kept: int
    width: int
    stream: bool
    tip: str


@dataclass(frozen=True)
class Panel:
    """Neighbouring layers. ``title``: what their names begin with."""

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
    """Whether bars show shares of each layer at first: where widths differ so much that narrow layers would vanish."""
    streams: bool
    kept: int
    filters: int
    emptied: int

    def pixels(self, count: int, width: int) -> float:
        """Height of a bar of ``count`` filters of a layer of ``width``."""
        return round(HEIGHT * count / (width if self.by_share else self.widest), 1)


def budget(facts: Facts) -> Budget | None:
    if not facts.kept:
        return None
    widths = [width for _, width in facts.kept.values()]
    widest = max(widths)
    digits = max(len(str(kept)) for kept, _ in facts.kept.values())
    pitch = max(5 + 6 * digits, min(PAGE // len(widths), WIDEST))
    panels = []
    for title, names in _panels(list(facts.kept), max(1, PHONE // pitch)):
        bars = []
        for place, name in enumerate(names):
            kept, width = facts.kept[name]
            stream = name in facts.streams
            tip = f"{name}: {kept} of {width} filters kept ({100 * kept / width:.0f} %)"
            tip += ", residual stream" if stream else ""
            label = name.removeprefix(title).lstrip(".") or name
            bars.append(Bar(place * pitch, _clipped(label), kept, width, stream, tip))
        panels.append(Panel(title, len(names) * pitch, bars))
    longest_label = max(len(bar.label) for panel in panels for bar in panel.bars)
    return Budget(
        panels=panels,
        widest=widest,
        pitch=pitch,
        label_pixels=20 + 6 * longest_label,
        by_share=widest > 8 * min(widths),
        streams=any(name in facts.streams for name in facts.kept),
        kept=sum(kept for kept, _ in facts.kept.values()),
        filters=sum(widths),
        emptied=sum(kept == 0 for kept, _ in facts.kept.values()),
    )


def _panels(names: Sequence[str], longest: int) -> list[tuple[str, list[str]]]:
    """Runs of layers with one first part of their name, in pieces of equal length where they are long."""
    panels = []
    for head, run in groupby(names, key=lambda name: name.partition(".")[0] if "." in name else ""):
        members = list(run)
        pieces = -(-len(members) // longest)
        size = -(-len(members) // pieces)
        panels += [(head, members[i : i + size]) for i in range(0, len(members), size)]
    return panels


def _clipped(label: str, longest: int = 18) -> str:
    return label if len(label) <= longest else f"…{label[1 - longest :]}"
