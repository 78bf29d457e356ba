"""Kernels count in 32 bits."""

from __future__ import annotations

from paam.errors import RecipeError


def check_countable(values: int) -> None:
    """Refuse a layer of more values than that."""
    if values >= 2**31:
        raise RecipeError(
            f"A layer of {values} values is more than paam's own kernels can count: make data.batch_size smaller, "
            "or go without them by --set train.fused=false."
        )
