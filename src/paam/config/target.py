"""A target: how much of the network to keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paam.config.schema import InvalidError, Range, check
from paam.errors import TargetError


@dataclass(frozen=True)
class Target:
    """How much to keep: one of the first five, or keep_macs and keep_params together.

    Shares are of the dense network, 0 to 1, and are never exceeded.

    ``threshold``: remove filters scored below it. ``widths``: a plan file; every group keeps as many filters as in it.
    ``round_to``: every group keeps a multiple of this many filters (or all of them, or none), for fast kernels.
    ``floor``: minimum share of its filters that every group keeps.
    ``uniform``: remove the same share of every group; scores decide within a group only.
    """

    threshold: Annotated[float | None, Range()] = None
    keep_filters: Annotated[float | None, Range(0, 1, above=True)] = None
    keep_macs: Annotated[float | None, Range(0, 1, above=True)] = None
    keep_params: Annotated[float | None, Range(0, 1, above=True)] = None
    widths: str | None = None
    round_to: Annotated[int, Range(1, 4096)] = 1
    floor: Annotated[float, Range(0, 1)] = 0.0
    uniform: bool = False

    def __post_init__(self) -> None:
        try:
            check(self)
        except InvalidError as error:
            raise TargetError(f"Invalid target: {error}") from error
        chosen = [*self.limits, *["widths"] * (self.widths is not None)]
        if len(chosen) != 1 and chosen != ["keep_macs", "keep_params"]:
            what = " and ".join(chosen) or "none"
            raise TargetError(
                "Give one of threshold, keep_filters, keep_macs, keep_params, widths,"
                f" or keep_macs and keep_params together (got {what})."
            )
        if self.widths is not None and (self.round_to > 1 or self.floor or self.uniform):
            raise TargetError("widths fix how many filters each group keeps; leave out round_to, floor and uniform.")
        if self.uniform and self.threshold is not None:
            raise TargetError("A threshold compares scores of all groups; uniform needs a share or a budget instead.")

    @property
    def limits(self) -> dict[str, float]:
        """Threshold and shares that are set."""
        return {name: getattr(self, name) for name in LIMITS if getattr(self, name) is not None}

    def __str__(self) -> str:
        parts = [f"{name} = {value:g}" for name, value in self.limits.items()]
        parts += [f"widths of {self.widths}"] if self.widths else []
        parts += ["the same share of every group"] if self.uniform else []
        parts += [f"at least {self.floor:g} of each group"] if self.floor else []
        parts += [f"widths in steps of {self.round_to}"] if self.round_to > 1 else []
        return ", ".join(parts)


LIMITS = ("threshold", "keep_filters", "keep_macs", "keep_params")
MODIFIERS = ("round_to", "floor", "uniform")
"""Keys of a target that are not limits."""
