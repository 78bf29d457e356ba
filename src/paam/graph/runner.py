"""Runs a recorded graph with given layers and constants."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from paam.graph.trace import Traced


class GraphRunner(fx.Interpreter):
    """Runs the graph of a trace with the layers of a model: the traced one, or a copy of it."""

    def __init__(self, traced: Traced, model: nn.Module) -> None:
        super().__init__(model, graph=traced.graph)
        self.extra_traceback = False
        self.constants = traced.constants

    def fetch_attr(self, target: str) -> Any:
        return self.constants[target] if target in self.constants else super().fetch_attr(target)


def lend_constants(traced: Traced, root: nn.Module) -> None:
    """Register a trace's constants as buffers of a module that runs its graph: created in forward(), or attributes."""
    for name, tensor in traced.constants.items():
        if not hasattr(root, name):
            root.register_buffer(name, tensor)
