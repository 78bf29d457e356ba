"""A network whose layers were connected anew, in a form that can be copied and pickled with its name and its plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn


class RewiredModel(fx.GraphModule):
    """Keeps its name when it is copied, and its plan when it is pickled, both of which torch.fx leaves behind."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RewiredModel:
        plain = super().__deepcopy__(memo)
        memo[id(self)] = twin = _restored(plain, type(self).__name__, plain.meta)
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        make, arguments = super().__reduce__()
        return _unpickled, (make, arguments, type(self).__name__, self.meta)


def connected(root: nn.Module, graph: fx.Graph, name: str) -> RewiredModel:
    """The layers of ``root`` connected by a graph; ``name``: of its class."""
    for node in graph.nodes:
        node.type = None  # an annotation of forward() that is a text cannot be pickled
    return RewiredModel(root, graph, name)


def _unpickled(
    make: Callable[..., fx.GraphModule], arguments: tuple[Any, ...], name: str, meta: dict[str, Any]
) -> RewiredModel:
    return _restored(make(*arguments), name, meta)


def _restored(plain: fx.GraphModule, name: str, meta: dict[str, Any]) -> RewiredModel:
    model = connected(plain, plain.graph, name)
    model.meta = meta
    return model
