"""Kernels use 32-bit indices."""

from __future__ import annotations

from paam.errors import RecipeError


def check_countable(values: int) -> None:
    """Refuse a layer of too many values for 32-bit indices."""
    if values >= 2**31:
        raise RecipeError(
            f"A layer of {values} values is too large for the fused kernels: use a smaller data.batch_size, "
            "or turn them off with --set train.fused=false."
        )
