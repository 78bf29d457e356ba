"""Values of a record that may be missing or damaged: each as what it must be, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def number_or_none(value: Any) -> float | None:
    """A finite number that can be drawn; anything else is None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e30 else None  # false for what is not finite


def positive(value: Any) -> float | None:
    found = number_or_none(value)
    return found if found is not None and found >= 0 else None


def percent(value: Any) -> float | None:
    found = number_or_none(value)
    return found if found is not None and 0 <= found <= 100 else None


def fraction(value: Any) -> float | None:
    found = number_or_none(value)
    return found if found is not None and 0 <= found <= 1 else None


def whole(value: Any) -> int | None:
    """A count: a whole number from 0 to 1e15."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**15 else None


def text(value: Any) -> str:
    return "" if value is None else str(value)


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def share(part: int | None, of: int | None) -> float | None:
    return part / of if part is not None and of else None


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
