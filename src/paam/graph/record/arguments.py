"""Arguments of calls: tensors and numbers in tuples, lists, dictionaries and slices."""

from __future__ import annotations

from typing import Any

from paam.graph.record.numbers import plain


def leaves_of(value: Any) -> list[Any]:
    """The leaves of nested tuples, lists, dictionaries and slices."""
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in leaves_of(part)]
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves_of(part)]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return [value]


def without_numbers(value: Any) -> Any:
    """Arguments with plain instead of recorded numbers, for torch."""
    if isinstance(value, tuple):
        parts = [without_numbers(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [without_numbers(part) for part in value]
    if isinstance(value, dict):
        return {key: without_numbers(part) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    return plain(value)
