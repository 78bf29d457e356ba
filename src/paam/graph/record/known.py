"""What is known of a tensor that came by while a call was recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx


@dataclass(slots=True)
class Known:
    """What is known of a tensor: its node, or which part of what a node returns; neither for a constant.

    ``version``: of the tensor when this was noted.
    """

    book: object
    node: fx.Node | None
    version: int
    part: tuple[fx.Node, Any] | None = None
    born: int = -1
    """Version when the tensor was made; after that it has itself been changed ``changes`` times."""
    changes: int = 0
    without_gradient: bool = False
    detached: fx.Node | None = None
    """The node without a gradient, for readers outside of the region of forward() in which it was made."""


def version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
