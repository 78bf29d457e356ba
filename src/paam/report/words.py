"""How values are written on the page."""

from __future__ import annotations

from typing import Any

NOTHING = "–"
"""A dash where nothing is recorded or set."""
TIMES = "×"
MINUS = "−"


def signed(value: float, digits: int = 2) -> str:
    """A number with its sign."""
    return f"{value:+.{digits}f}".replace("-", MINUS)


def score_words(score: float) -> str:
    """Three digits, or as many as tell it from 1, where scores begin."""
    digits = next((digits for digits in range(3, 7) if score == 1 or round(score, digits) != 1), 7)
    return f"{score:.{digits if digits == 3 else digits + 1}f}"


def duration(seconds: float) -> str:
    """ "1 h 12 min", "3 min 5 s", "42 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def plain(value: Any) -> str:
    """A value of a recipe."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):  # of plain values: what is nested deeper is damage, and may be endless
        return ", ".join("…" if isinstance(part, list) else plain(part) for part in value) or "none"
    if isinstance(value, dict):
        return "…"
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value)
