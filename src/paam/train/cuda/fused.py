"""Fused training and evaluation of a network by Triton kernels.

Small networks on a large GPU are bound by the number of kernels and by memory traffic: see kernels/norm.py and
kernels/conv.py.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from paam.graph.gating import apply_gate
from paam.graph.modes import copying
from paam.train.cuda.kernels.conv import Epilogue
from paam.train.cuda.kernels.counting import check_countable
from paam.train.cuda.kernels.fast_conv import FastConv, is_fast
from paam.train.cuda.kernels.frozen_norm import FrozenNorm
from paam.train.cuda.kernels.norm import TrainedNorm


class FusedNorm(nn.Module):
    """relu(bn(x) + other) * gate, with a batch norm shared with the network."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, other: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
        norm = self.norm
        if not self._knows(x, other, gate):
            y = norm(x)
            return apply_gate(F.relu(y if other is None else y + other), gate, 1)
        check_countable(x.numel())
        affine = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        result: Tensor
        if norm.training:
            tail = (norm.num_batches_tracked, norm.momentum, norm.eps)
            result = TrainedNorm.apply(x, other, gate, *affine, *tail)  # type: ignore[no-untyped-call]
        else:
            result = FrozenNorm.apply(x, other, gate, *affine, norm.eps)  # type: ignore[no-untyped-call]
        return result

    def _knows(self, x: Tensor, other: Tensor | None, gate: Tensor | None) -> bool:
        """Whether the kernels support all gradients: not for gates with batch statistics, nor for a frozen norm."""
        if other is not None and other.shape != x.shape:
            return False
        if self.norm.training and x.numel() == x.shape[1]:
            return False  # one value per channel: leave the error to torch
        if not torch.is_grad_enabled():
            return True
        if self.norm.training:
            return gate is None or not gate.requires_grad
        return not (self.norm.weight.requires_grad or self.norm.bias.requires_grad)


class ConvNorm(nn.Module):
    """A convolution and its epilogue chain: one kernel if neither batch statistics nor gradients are needed."""

    def __init__(self, conv: FastConv, norm: FusedNorm) -> None:
        super().__init__()
        self.conv, self.norm = conv, norm

    def forward(self, x: Tensor, other: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
        norm = self.norm.norm
        same = other is None or other.shape == (x.shape[0], norm.num_features, *x.shape[2:])
        if norm.training or torch.is_grad_enabled() or not same or not self.conv.supports(x):
            result: Tensor = self.norm(self.conv(x), other, gate)
            return result
        assert norm.running_mean is not None and norm.running_var is not None  # noqa: PT018 - fused() chose such norms
        affine = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        return self.conv.with_norm(x, Epilogue(*affine, norm.eps, other, gate))


class OutOfPlace(nn.Module):
    """Replaces an in-place layer: in the fused network, others may read its input later than in the original."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with copying(self.layer):
            return self.layer(*args, **kwargs)


ADDS = (operator.add, operator.iadd, torch.add)
RELUS = (F.relu, torch.relu, F.relu_, torch.relu_)
HOLDER = "paam_fused"


def fused(network: fx.GraphModule) -> fx.GraphModule:
    """The fused network, which shares the layers; or the network itself, if there is nothing to fuse.

    Every chain of norm, sum, ReLU and gate is fused; convolutions of few channels are replaced.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(network.graph, {}))
    if any(node.op == "get_attr" and isinstance(_attribute(network, node), nn.Parameter) for node in graph.nodes):
        return network  # rounded weights are put into the network, not into the deep copy that a fused one would have
    result = fx.GraphModule(network, graph, f"Fused{type(network).__name__}")
    layers = {node: result.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"}
    readers = Counter(id(parameter) for layer in layers.values() for parameter in layer.parameters())
    fast: dict[fx.Node, FastConv] = {}
    chains = 0
    for node in list(graph.nodes):
        layer, name = layers.get(node), f"{HOLDER}.{node.name}"
        if layer is None or _has_hooks(layer) or len(node.args) != 1 or node.kwargs:
            continue
        if isinstance(layer, nn.Conv2d) and is_fast(layer):
            fast[node] = FastConv(layer, alone=readers[id(layer.weight)] == 1)
            result.add_submodule(name, fast[node])
            node.target = name
        elif (chain := _chain(node, layers)) is not None:
            links, other, gate = chain
            chains += 1
            before: Any = node.args[0]
            norm = FusedNorm(layer)  # type: ignore[arg-type]
            with_conv = before in fast and len(before.users) == 1
            result.add_submodule(name, ConvNorm(fast[before], norm) if with_conv else norm)
            if with_conv:
                links, before = [before, *links], before.args[0]
            with graph.inserting_after(links[-1]):
                joined = graph.call_module(name, (before, other, gate))
            links[-1].replace_all_uses_with(joined)
            for link in reversed(links):
                graph.erase_node(link)
    if not chains:
        return network
    for node in graph.nodes:
        if node in layers and getattr(layers[node], "inplace", False):
            name = f"{HOLDER}.{node.name}"
            result.add_submodule(name, OutOfPlace(layers[node]))
            node.target = name
    result.recompile()
    return result


def _attribute(network: nn.Module, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(network)


def _has_hooks(layer: nn.Module) -> bool:
    """Whether a layer has hooks, which fused kernels would not call."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def _chain(node: fx.Node, layers: dict[fx.Node, nn.Module]) -> tuple[list[fx.Node], Any, Any] | None:
    """The nodes of a chain that starts at this layer, the value added and the gate; None if it is not a chain."""
    norm = layers[node]
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
    if not _is_relu(here, layers):
        return None
    if len(here.users) == 1:
        after = next(iter(here.users))
        if after.op == "call_function" and after.target is apply_gate and after.args[2] == 1:
            return [*links, here, after], other, after.args[1]
    return [*links, here], other, gate


def _is_relu(node: fx.Node, layers: dict[fx.Node, nn.Module]) -> bool:
    if node.op == "call_module":
        return type(layers[node]) is nn.ReLU and not _has_hooks(layers[node])
    return (node.op == "call_function" and node.target in RELUS) or (node.op, node.target) == ("call_method", "relu")
