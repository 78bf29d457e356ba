"""What one recorded call of a model leaves: a graph, and what is known of its nodes by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from paam.graph.record.numbers import expect

LAYERS = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._BatchNorm)
"""Layers that are one operation also where somebody has built their own kind upon them."""

CONSTANT = "_tensor_constant"
"""How the graph names the tensors that are neither computed from the inputs nor held under a name by the model."""

FACT = "fact"
"""Marks nodes that follow from the shapes and types of tensors alone, in their meta."""

DTYPE = "dtype"
"""Under which a node's meta holds the type of the tensor that it computes."""

LINE = "line"
"""Under which a node's meta holds the line of the model's code that made it."""

WITHIN = "within"
"""Under which a node's meta holds the name of the module whose forward() made it; empty for the model's own."""

Shape = tuple[int, ...]


class ValueDecisionError(Exception):
    """A plain number was made of a tensor's values, or a size that depends on them."""


@dataclass
class Recording:
    """A recorded call, by node name: shapes of tensors, numbers such as sizes, multiply-accumulates of the batch."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    shapes: dict[str, Shape] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    macs: dict[str, int] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    """Constants that forward() makes of nothing by functions that were seen."""
    transparent: set[str] = field(default_factory=set)
    """Modules without parameters that returned their input: in training they may do something."""
    read_numbers: set[str] = field(default_factory=set)
    """Layers whose own numbers, such as out_channels, somebody else's forward() read."""
    asks: set[str] = field(default_factory=set)
    """What forward() asks: whether there are "gradients", how a tensor lies in memory ("layout")."""
    decision: str = ""
    """The first decision by values, after which nothing was recorded; empty if there was none."""
    fixed: list[str] = field(default_factory=list)
    """Decisions by values that were kept as they came out, as the user had asked for."""
    result: Any = None


def same_tensor(a: Tensor, b: Tensor) -> bool:
    if a is b or (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return a is b
    try:
        return torch.equal(a, b)
    except RuntimeError:  # inside of vmap() tensors cannot be compared
        return False


def same_way(a: Recording, b: Recording) -> bool:
    """Whether two recordings are of the same calls, one after the other, that make tensors of as many axes."""
    if len(a.graph.nodes) != len(b.graph.nodes) or not all(map(same_call, a.graph.nodes, b.graph.nodes)):
        return False
    pairs = zip(a.graph.nodes, b.graph.nodes, strict=True)
    return all(len(a.shapes.get(one.name, ())) == len(b.shapes.get(other.name, ())) for one, other in pairs)


def same_call(node: fx.Node, twin: fx.Node) -> bool:
    """Whether two nodes of two recordings stand for the same call, up to what follows the training mode."""
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
        return True  # an argument that follows the training mode, or one that does not differ
    # A node of another graph is equal in its words, which are its name.
    return type(here) is type(there) and (here is there or bool(here == there) or repr(here) == repr(there))
