"""What is known about a tensor seen during recording."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx


@dataclass(slots=True)
class Known:
    """State of a tensor: its node, or which part of a node's output it is; neither for a constant.

    ``version``: the tensor's version counter when this was noted.
    """

    book: object
    node: fx.Node | None
    version: int
    part: tuple[fx.Node, Any] | None = None
    born: int = -1
    """Version when the tensor was made; since then it has been changed directly ``changes`` times."""
    changes: int = 0
    without_gradient: bool = False
    detached: fx.Node | None = None
    """The detached node, for readers outside of the no-grad region of forward() in which it was made."""


def version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
