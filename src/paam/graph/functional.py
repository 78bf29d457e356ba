"""In-place operations out of a graph: every value becomes what its node computes."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

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
        method = node.op == "call_method" and node.target.endswith("_") and not node.target.endswith("__")
        function = node.op == "call_function" and (node.target in IN_PLACE or node.kwargs.get("inplace", False))
        layer = node.op == "call_module" and getattr(model.get_submodule(node.target), "inplace", False)
        if not (method or function or layer) or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        doubtful |= len(source.users) > 1 or not (source in changed or _is_fresh(model, source))
        changed.add(node)
        for reader in list(source.users):
            if order[reader] > order[node]:
                reader.replace_input_with(source, node)
        if method:
            node.target = node.target.removesuffix("_")
        elif node.target in IN_PLACE:
            node.target = IN_PLACE[node.target]
        elif function:
            node.kwargs = {**node.kwargs, "inplace": False}
    return doubtful


def _is_fresh(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(model.get_submodule(str(node.target)), LAYERS)
    return node.op == "call_function" and node.target in FRESH
