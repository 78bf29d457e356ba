"""A network whose training steps go through kernels of our own, written in Triton.

Small networks on a large GPU are limited by how many kernels there are and by how often they read their input: see
kernels/norm.py and kernels/conv.py.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from paam.gates import apply_gate
from paam.train.kernels.conv import FastConv, check_countable, is_fast
from paam.train.kernels.norm import FrozenNorm, TrainedNorm


class FusedNorm(nn.Module):
    """relu(bn(x) + other) * gate, by a batch norm that it shares with the network."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, other: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
        check_countable(x)
        norm = self.norm
        if not self._knows(x, other, gate):
            y = norm(x)
            return apply_gate(F.relu(y if other is None else y + other), gate, 1)
        affine = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        result: Tensor
        if norm.training:
            tail = (norm.num_batches_tracked, norm.momentum, norm.eps)
            result = TrainedNorm.apply(x, other, gate, *affine, *tail)  # type: ignore[no-untyped-call]
        else:
            result = FrozenNorm.apply(x, other, gate, *affine, norm.eps)  # type: ignore[no-untyped-call]
        return result

    def _knows(self, x: Tensor, other: Tensor | None, gate: Tensor | None) -> bool:
        """Whether the kernels have every gradient: none into gates with batch statistics, none into a frozen norm."""
        if other is not None and other.shape != x.shape:
            return False
        if not torch.is_grad_enabled():
            return True
        if self.norm.training:
            return gate is None or not gate.requires_grad
        return not (self.norm.weight.requires_grad or self.norm.bias.requires_grad)


ADDS = (operator.add, operator.iadd, torch.add)
RELUS = (F.relu, torch.relu, F.relu_, torch.relu_)


def fused(model: nn.Module, plan: fx.Graph) -> nn.Module:
    """The network that ``plan`` makes of a model's layers, which it shares, by kernels of our own; or the model itself.

    Every chain of norm, sum, ReLU and gate becomes one; convolutions of few channels are replaced. Without such a chain
    the model is left as it is.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(plan, {}))
    root = nn.Module()
    for name, child in model.named_children():
        root.add_module(name, child)
    for name, parameter in model.named_parameters(recurse=False):
        root.register_parameter(name, parameter)
    for name, buffer in model.named_buffers(recurse=False):
        root.register_buffer(name, buffer)
    holder = nn.ModuleList()
    root.add_module(HOLDER, holder)
    layers = {node: model.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"}
    readers = Counter(id(parameter) for layer in layers.values() for parameter in layer.parameters())
    for node in list(graph.nodes):
        layer = layers.get(node)
        if isinstance(layer, nn.Conv2d) and is_fast(layer):
            holder.append(FastConv(layer, alone=readers[id(layer.weight)] == 1))
            node.target = f"{HOLDER}.{len(holder) - 1}"
            continue
        chain = _chain(node, model)
        if chain is None:
            continue
        links, other, gate = chain
        holder.append(FusedNorm(model.get_submodule(str(node.target))))  # type: ignore[arg-type]
        with graph.inserting_after(links[-1]):
            joined = graph.call_module(f"{HOLDER}.{len(holder) - 1}", (node.args[0], other, gate))
        links[-1].replace_all_uses_with(joined)
        for link in reversed(links):
            graph.erase_node(link)
    if not any(isinstance(layer, FusedNorm) for layer in holder):
        return model
    return fx.GraphModule(root, graph, f"Fused{type(model).__name__}")


HOLDER = "paam_fused"


def _chain(node: fx.Node, model: nn.Module) -> tuple[list[fx.Node], Any, Any] | None:
    """The nodes of a chain that begins with this norm, the value added and the gate; None if it is no chain."""
    if node.op != "call_module":
        return None
    norm = model.get_submodule(str(node.target))
    plain = type(norm) is nn.BatchNorm2d and norm.affine and norm.track_running_stats and norm.momentum is not None
    if not plain or norm.weight.dtype != torch.float32 or len(node.users) != 1:
        return None
    other = gate = None
    links, here = [node], next(iter(node.users))
    if here.op == "call_function" and here.target in ADDS and len(here.args) == 2 and not here.kwargs:
        values = [value for value in here.args if value is not node]
        if len(values) != 1 or not isinstance(values[0], fx.Node) or len(here.users) != 1:
            return None
        other = values[0]
        links, here = [*links, here], next(iter(here.users))
    if not _is_relu(here, model):
        return None
    if len(here.users) == 1:
        after = next(iter(here.users))
        if after.op == "call_function" and after.target is apply_gate and after.args[2] == 1:
            return [*links, here, after], other, after.args[1]
    return [*links, here], other, gate


def _is_relu(node: fx.Node, model: nn.Module) -> bool:
    if node.op == "call_module":
        return type(model.get_submodule(str(node.target))) is nn.ReLU
    return (node.op == "call_function" and node.target in RELUS) or (node.op, node.target) == ("call_method", "relu")
