"""One table: operation -> how channels flow through it. What is not in the table is refused by name and place.

A rule is a function of a :class:`Site` (one node of the graph, with shapes and channel axes at hand) that returns
an :class:`Op`. To teach paam an operation, write its rule and enter it under the module class, the function, or the
name of the tensor method, and give it a case in tests/test_networks.py.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from paam.errors import GraphError
from paam.graph import elementwise, layers, movement
from paam.graph.channel_map import ChannelMap, ChannelOffset, NoChannels, OnesChannel
from paam.graph.elementwise import CONVOLVE
from paam.graph.flows import Sink, Source
from paam.graph.layers import BATCH_NORMS, CONVOLUTIONS, INSTANCE_NORMS, TRANSPOSED
from paam.graph.site import Op, Site, Tangle, TangleError
from paam.graph.trace import Traced, function_name
from paam.graph.tracer import LAYERS

Rule = Callable[[Site], Op | Tangle]

POINTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Threshold, nn.Hardshrink),
    *(nn.Softshrink, nn.Tanhshrink, F.hardshrink, F.softshrink, F.tanhshrink),
    *(F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.sigmoid, F.tanh),
    *(F.hardswish, F.hardsigmoid, F.hardtanh, F.softplus, F.softsign, F.logsigmoid, F.threshold),
    *(torch.relu, torch.sigmoid, torch.tanh, torch.abs, torch.exp, torch.sqrt, torch.square, torch.clamp, torch.sin),
    *(operator.neg, operator.pow, torch.pow, torch.neg, torch.cos, torch.log, torch.log1p, torch.rsqrt, torch.erf),
    *(torch.sign, torch.reciprocal, torch.expm1, torch.atan),
    *("relu", "sigmoid", "tanh", "abs", "exp", "sqrt", "square", "clamp", "neg", "pow", "float", "half", "double"),
    *("sin", "cos", "log", "log1p", "rsqrt", "erf", "sign", "reciprocal", "bfloat16", "clamp_min", "clamp_max", "to"),
)
UNCHANGED = (
    nn.PReLU,
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, F.max_pool1d, F.max_pool2d, F.max_pool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    *(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    *(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, F.interpolate, F.upsample),
    *(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
    *(nn.ReflectionPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
    "torchvision.ops.stochastic_depth.stochastic_depth",
)
AVERAGES = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
SOFTMAXES = (
    *(nn.Softmax, F.softmax, torch.softmax, "softmax"),
    *(nn.LogSoftmax, F.log_softmax, torch.log_softmax, "log_softmax"),
)
REDUCTIONS = (
    *(torch.mean, "mean", torch.sum, "sum", torch.amax, "amax", torch.amin, "amin"),
    *(torch.var, "var", torch.std, "std", torch.norm, "norm"),
)
TOGETHER = (F.batch_norm, "expand_as", torch.maximum, torch.minimum, torch.addcmul)
PADS = (
    *(F.pad, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
    *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
)
PRODUCTS = (operator.matmul, torch.matmul, "matmul", torch.bmm, "bmm", torch.einsum, F.scaled_dot_product_attention)
MIXING_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, F.layer_norm, F.group_norm, F.local_response_norm)

RULES: dict[Any, Rule] = {
    **dict.fromkeys(CONVOLUTIONS, layers.convolution),
    **dict.fromkeys(TRANSPOSED, layers.transposed_convolution),
    nn.Linear: layers.linear,
    **dict.fromkeys(BATCH_NORMS, layers.batch_norm),
    **dict.fromkeys(INSTANCE_NORMS, layers.instance_norm),
    **dict.fromkeys(MIXING_NORMS, layers.mixing_norm),
    **dict.fromkeys(POINTWISE, elementwise.pointwise),
    **dict.fromkeys(UNCHANGED, elementwise.unchanged),
    **dict.fromkeys(AVERAGES, elementwise.average_pool),
    F.normalize: elementwise.normalize,
    **dict.fromkeys(TOGETHER, elementwise.per_channel),
    **dict.fromkeys(PRODUCTS, elementwise.barrier),
    **dict.fromkeys(SOFTMAXES, elementwise.softmax),
    **dict.fromkeys(REDUCTIONS, elementwise.reduction),
    **dict.fromkeys((operator.add, torch.add, "add"), elementwise.add),
    **dict.fromkeys((operator.sub, torch.sub, "sub"), elementwise.subtract),
    **dict.fromkeys((operator.mul, torch.mul, "mul"), elementwise.multiply),
    **dict.fromkeys((operator.truediv, torch.div, "div"), elementwise.divide),
    **dict.fromkeys((torch.cat, torch.concat), movement.concat),
    torch.stack: movement.stack,
    ChannelMap: movement.channel_map,
    ChannelOffset: layers.channel_offset,
    OnesChannel: movement.ones_channel,
    NoChannels: movement.no_channels,
    nn.Flatten: movement.reshape,
    **dict.fromkeys(movement.RESHAPES, movement.reshape),
    operator.getitem: movement.index,
    **dict.fromkeys(CONVOLVE, elementwise.functional_convolution),
    **dict.fromkeys(PADS, movement.pad),
    **dict.fromkeys((nn.PixelShuffle, F.pixel_shuffle), movement.pixel_shuffle),
    **dict.fromkeys((nn.PixelUnshuffle, F.pixel_unshuffle), movement.pixel_unshuffle),
}


def bind(traced: Traced) -> tuple[Op, ...]:
    """Every value of the graph that carries channels, with its flow, in the order of execution."""
    binder = _Binder(traced)
    for node in traced.module.graph.nodes:
        if node.op == "output":
            binder.ops += [_output(traced, node, value, binder) for value in node.all_input_nodes]
        elif node.name in traced.shapes:  # others are sizes and numbers, computed anew from the smaller tensors
            binder.bind(node)
    ops = binder.ops
    uses = Counter(map(_holder, ops)) - Counter([None] * len(ops))
    return tuple(dataclasses.replace(op, shared=_holder(op)) if uses[_holder(op)] > 1 else op for op in ops)


class _Binder:
    """The operations found so far."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.ops: list[Op] = []
        self.axes: dict[str, int] = {}
        self.tangles: dict[str, Tangle] = {}
        self.whole: set[fx.Node] = set()
        self.owners: dict[nn.Parameter, str] = {}

    def bind(self, node: fx.Node) -> None:
        module = self.traced.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        site = Site(node, module, self.traced, self.axes, self.tangles, self.whole)
        found = self._settle(lambda: _rule(site)(site))
        if isinstance(found, Tangle):
            self.tangles[node.name] = found
            return
        for parameter in module.parameters() if module is not None else ():
            if (owner := self.owners.setdefault(parameter, str(node.target))) != node.target:
                raise site.refusal(f"it shares a parameter with '{owner}'; call one layer twice instead")
        self.axes[node.name] = found.axis
        self.ops.append(found)

    def _settle(self, rule: Callable[[], Op | Tangle]) -> Op | Tangle:
        """Apply a rule. Where it reads a tangle, make that whole first: its reshapings become operations."""
        while True:
            try:
                return rule()
            except TangleError as reads:
                self.whole.add(reads.first)
                members = [name for name, tangle in self.tangles.items() if tangle.first is reads.first]
                for name in members:
                    del self.tangles[name]
                for node in self.traced.module.graph.nodes:
                    if node.name in members:
                        self.bind(node)

    def axis(self, node: fx.Node) -> int | None:
        """The channels' axis of a value, or None if it has none."""
        if node.name in self.tangles:
            site = Site(node, None, self.traced, self.axes, self.tangles, self.whole)
            self._settle(lambda: Op(node, Source(1), (), site.axis(node)))
        return self.axes.get(node.name)


def _holder(op: Op) -> str | None:
    """The name of the layer or parameter that belongs to an operation, if any."""
    holds = op.node.op == "get_attr" or (op.module is not None and len(op.module.state_dict()) > 0)
    return str(op.node.target) if holds else None


def _rule(site: Site) -> Rule:
    node = site.node
    if node.name in site.traced.ignore or node.target in site.traced.ignore:
        return elementwise.left_alone
    if node.op == "placeholder":
        return _input
    if node.op == "get_attr":
        return elementwise.stored
    if isinstance(site.module, LAYERS):  # anybody's own kind of a known layer is taken for that layer, and tried out
        key: Any = next((kind for kind in type(site.module).__mro__ if kind in RULES), None)
    else:
        key = type(site.module) if site.module is not None else node.target
    rule = RULES.get(key) or RULES.get(function_name(key))
    if rule is None:
        raise site.refusal("it has no channel rule")
    return rule


def _input(site: Site) -> Op:
    shape = site.shape()
    if len(shape) < 2:
        raise GraphError(f"The input '{site.node.name}' has shape {list(shape)}; a batch [N, C, ...] is needed.")
    return Op(site.node, Source(shape[1]), (), 1)


def _output(traced: Traced, node: fx.Node, value: fx.Node, binder: _Binder) -> Op:
    axis = binder.axis(value)
    if axis is None:
        raise GraphError(f"The model returns '{value.name}', which carries no channels; return tensors only.")
    return Op(node, Sink(traced.shapes[value.name][axis]), (value,), axis)
