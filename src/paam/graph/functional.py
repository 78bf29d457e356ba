"""In-place operations out of a graph: every value becomes what its node computes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from paam.errors import GraphError
from paam.graph.tracer import LAYERS

IN_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
FRESH = (operator.add, operator.sub, operator.mul, torch.add, torch.sub, torch.mul, torch.cat)
"""Functions whose result is a tensor of its own, never a view of what they read. So are those of layers."""


def make_functional(model: nn.Module, graph: fx.Graph) -> bool:
    """Let later readers of a value changed in place read the changed one. True if that may not be all there is to it.

    Functions and methods become their copying forms. Modules keep their flag, which is the model's own; compact.py
    clears it in the graphs it builds, where two nodes may come to share one tensor.

    An operation that changes a tensor of its own which nobody else reads is beyond doubt. Any other might change what
    is read through a view or an alias, of which the graph knows nothing.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    changed: set[fx.Node] = set()
    doubtful = False
    for node in graph.nodes:
        if node.kwargs.get("out") is not None:
            raise GraphError(
                f"'{node.name}' writes into out=, a tensor that others may read; use what the operation returns."
            )
        method = node.op == "call_method" and node.target.endswith("_") and not node.target.endswith("__")
        copying = _copying_form(node.target) if node.op == "call_function" else None
        function = copying is not None or (node.op == "call_function" and node.kwargs.get("inplace", False))
        layer = node.op == "call_module" and getattr(model.get_submodule(node.target), "inplace", False)
        source = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
        if not (method or function or layer) or not isinstance(source, fx.Node):
            continue
        doubtful |= len(source.users) > 1 or not (source in changed or _is_fresh(model, source))
        changed.add(node)
        for reader in list(source.users):
            if order[reader] > order[node]:
                reader.replace_input_with(source, node)
        if method:
            node.target = node.target.removesuffix("_")
        elif copying is not None:
            node.target = copying
        elif function:
            node.kwargs = {**node.kwargs, "inplace": False}
    return doubtful


def _copying_form(function: Any) -> Any:
    """operator.add for operator.iadd, torch.relu for torch.relu_; None for what copies anyway."""
    name = getattr(function, "__name__", "")
    if function in IN_PLACE or not name.endswith("_") or name.endswith("__"):
        return IN_PLACE.get(function)
    return getattr(torch, name[:-1], None) or getattr(nn.functional, name[:-1], None)


def _is_fresh(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(model.get_submodule(str(node.target)), LAYERS)
    return node.op == "call_function" and node.target in FRESH
