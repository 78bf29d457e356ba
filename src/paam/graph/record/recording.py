"""The result of recording one call of a model: a graph, and information about its nodes by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from paam.graph.record.numbers import expect

LAYERS = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._BatchNorm)
"""Layers that are one operation, subclasses included."""

CONSTANT = "_tensor_constant"
"""Name prefix in the graph of tensors that are neither computed from the inputs nor named parameters or buffers."""

FACT = "fact"
"""Key in the meta of nodes that follow from the shapes and dtypes of tensors alone."""

DTYPE = "dtype"
"""Key in a node's meta: dtype of the tensor that it computes."""

LINE = "line"
"""Key in a node's meta: line of the model's code that created it."""

WITHIN = "within"
"""Key in a node's meta: name of the module whose forward() created it; empty for the model's own."""

Shape = tuple[int, ...]


class ValueDecisionError(Exception):
    """A tensor's values were converted to a plain number, or to a data-dependent size."""


@dataclass
class Recording:
    """A recorded call, by node name: shapes of tensors, numbers such as sizes, multiply-accumulates of the batch."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    shapes: dict[str, Shape] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    macs: dict[str, int] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    """Constants that forward() creates with recorded functions."""
    transparent: set[str] = field(default_factory=set)
    """Parameter-free modules that returned their input; they may be active in training mode."""
    read_numbers: set[str] = field(default_factory=set)
    """Layers whose attributes, such as out_channels, were read by the forward() of another module."""
    asks: set[str] = field(default_factory=set)
    """What forward() queries: whether gradients are on ("gradients"), a tensor's memory layout ("layout")."""
    decision: str = ""
    """The first data-dependent decision, after which nothing was recorded; empty if there was none."""
    fixed: list[str] = field(default_factory=list)
    """Data-dependent decisions that were fixed to their outcome, as the user requested."""
    result: Any = None


def same_tensor(a: Tensor, b: Tensor) -> bool:
    if a is b or (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return a is b
    try:
        return torch.equal(a, b)
    except RuntimeError:  # tensors cannot be compared inside vmap()
        return False


def same_way(a: Recording, b: Recording) -> bool:
    """Whether two recordings have the same sequence of calls, with the same number of axes in every tensor."""
    if len(a.graph.nodes) != len(b.graph.nodes) or not all(map(same_call, a.graph.nodes, b.graph.nodes)):
        return False
    pairs = zip(a.graph.nodes, b.graph.nodes, strict=True)
    return all(len(a.shapes.get(one.name, ())) == len(b.shapes.get(other.name, ())) for one, other in pairs)


def same_call(node: fx.Node, twin: fx.Node) -> bool:
    """Whether two nodes of two recordings are the same call, apart from arguments that follow the training mode."""
    if (node.op, node.target, node.kwargs.keys()) != (twin.op, twin.target, twin.kwargs.keys()):
        return False
    if node.target is expect and node.args[1] != twin.args[1]:
        return False
    return _alike(node.args, twin.args) and _alike(node.kwargs, twin.kwargs)


def _alike(here: Any, there: Any) -> bool:
    if isinstance(here, tuple | list):
        if not isinstance(there, tuple | list) or len(here) != len(there):
            return False
        return all(map(_alike, here, there))
    if isinstance(here, dict):
        return isinstance(there, dict) and here.keys() == there.keys() and all(_alike(here[k], there[k]) for k in here)
    if isinstance(here, bool) and isinstance(there, bool):
        return True  # an argument that follows the training mode, or is the same
    # Nodes of different graphs are compared by repr, which is their name.
    return type(here) is type(there) and (here is there or bool(here == there) or repr(here) == repr(there))
