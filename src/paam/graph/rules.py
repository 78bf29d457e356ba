"""One table: operation -> how channels flow through it. What is not in the table is refused by name and place.

A rule is a function of a :class:`Site` (one node of the graph, with shapes and channel axes at hand) that returns
an :class:`Op`. To teach paam an operation, write its rule and enter it under the module class, the function, or the
name of the tensor method, and give it a case in tests/test_rules.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from paam.errors import GraphError
from paam.graph.elementwise import add, average_pool, mean, pointwise, unchanged
from paam.graph.flows import Sink, Source
from paam.graph.layers import BATCH_NORMS, CONVOLUTIONS, batch_norm, convolution, linear
from paam.graph.movement import concat, flatten, index, pad, view
from paam.graph.site import Op, Site
from paam.graph.trace import Traced

Rule = Callable[[Site], Op]

POINTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Threshold),
    *(F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.sigmoid, F.tanh),
    *(F.hardswish, F.hardsigmoid, F.hardtanh, F.softplus, F.softsign, F.logsigmoid, F.threshold),
    *(torch.relu, torch.sigmoid, torch.tanh, torch.abs, operator.neg, "relu", "sigmoid", "tanh", "abs"),
)
UNCHANGED = (
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, F.max_pool1d, F.max_pool2d, F.max_pool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, "contiguous"),
)

RULES: dict[Any, Rule] = {
    **dict.fromkeys(CONVOLUTIONS, convolution),
    nn.Linear: linear,
    **dict.fromkeys(BATCH_NORMS, batch_norm),
    **dict.fromkeys(POINTWISE, pointwise),
    **dict.fromkeys(UNCHANGED, unchanged),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d), average_pool),
    **dict.fromkeys((torch.mean, "mean"), mean),
    **dict.fromkeys((operator.add, torch.add, "add"), add),
    **dict.fromkeys((torch.cat, torch.concat), concat),
    **dict.fromkeys((nn.Flatten, torch.flatten, "flatten"), flatten),
    **dict.fromkeys(("view", "reshape", torch.reshape), view),
    operator.getitem: index,
    F.pad: pad,
}


def bind(traced: Traced) -> tuple[Op, ...]:
    """Every value of the graph that carries channels, with its flow, in the order of execution."""
    ops: list[Op] = []
    axes: dict[str, int] = {}
    called: dict[str, str] = {}
    for node in traced.module.graph.nodes:
        if node.op == "output":
            ops += [_output(traced, node, value, axes) for value in node.all_input_nodes]
            continue
        if node.name not in traced.shapes:
            continue  # a size or another number: it is computed anew from the smaller tensors
        module = traced.module.get_submodule(node.target) if node.op == "call_module" else None
        site = Site(node, module, traced.shapes, axes)
        if node.op == "placeholder":
            op = _input(site)
        else:
            rule = RULES.get(type(module) if module is not None else node.target)
            if rule is None:
                raise site.refusal("it has no channel rule")
            op = rule(site)
            if module is not None and (any(True for _ in module.parameters()) or any(True for _ in module.buffers())):
                if node.target in called:
                    raise site.refusal("the same layer is called twice")
                called[node.target] = node.name
        axes[node.name] = op.axis
        ops.append(op)
    return tuple(ops)


def _input(site: Site) -> Op:
    shape = site.shape()
    if len(shape) < 2:
        raise GraphError(f"The input '{site.node.name}' has shape {list(shape)}; a batch [N, C, ...] is needed.")
    return Op(site.node, Source(shape[1]), (), 1)


def _output(traced: Traced, node: fx.Node, value: fx.Node, axes: dict[str, int]) -> Op:
    if value.name not in axes:
        raise GraphError(f"The model returns '{value.name}', which carries no channels; return tensors only.")
    axis = axes[value.name]
    return Op(node, Sink(traced.shapes[value.name][axis]), (value,), axis)
