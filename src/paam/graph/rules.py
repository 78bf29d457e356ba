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
from torch import Tensor, fx, nn

from paam.errors import GraphError, PaamError, one_line
from paam.graph import elementwise, layers, movement
from paam.graph.channel_map import ChannelMap, ChannelOffset, NoChannels, OnesChannel
from paam.graph.elementwise import CONVOLVE
from paam.graph.flows import Pass, Sink, Source
from paam.graph.layers import BATCH_NORMS, CONVOLUTIONS, INSTANCE_NORMS, TRANSPOSED
from paam.graph.site import Op, Site, Tangle, TangleError
from paam.graph.sizes import is_counted
from paam.graph.trace import Traced, attribute, function_name
from paam.graph.tracer import LAYERS, is_fact

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
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(torch.dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    "torchvision.ops.stochastic_depth.stochastic_depth",
)
OVER_THE_MAP = (
    nn.PReLU,
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, F.max_pool1d, F.max_pool2d, F.max_pool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    *(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    *(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, F.interpolate, F.upsample),
    *(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
    *(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
    *(nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
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
TOGETHER = ("expand_as", torch.maximum, torch.minimum, torch.addcmul)
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
    **dict.fromkeys(OVER_THE_MAP, elementwise.over_the_map),
    **dict.fromkeys(AVERAGES, elementwise.average_pool),
    F.normalize: elementwise.normalize,
    F.batch_norm: elementwise.functional_norm,
    **dict.fromkeys(TOGETHER, elementwise.together),
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
    spread: set[fx.Node] = set()
    while True:
        try:
            ops = _bind(traced, spread)
        except TangleError as reads:  # make the value whole where its channels spread, and begin again
            if reads.first in spread:  # or else this would never end
                raise GraphError(
                    f"The channels of '{reads.first.name}' spread in a way that is not followed."
                ) from reads
            spread.add(reads.first)
        else:
            break
    uses = Counter(map(_holder, ops)) - Counter([None] * len(ops))
    by_node = {op.node: op for op in ops if op.node.op != "output"}
    return tuple(
        dataclasses.replace(
            op, shared=_holder(op) if uses[_holder(op)] > 1 else None, counted=is_counted(op, by_node, traced)
        )
        for op in ops
    )


def _bind(traced: Traced, spread: set[fx.Node]) -> list[Op]:
    ops: list[Op] = []
    axes: dict[str, int] = {}
    tangles: dict[str, Tangle] = {}
    owners: dict[Tensor, str] = {}
    for node in traced.module.graph.nodes:
        if node.op == "output":
            ops += [_output(traced, node, value, axes, tangles) for value in node.all_input_nodes]
        elif node.name in traced.shapes:  # others are sizes and numbers, computed anew from the smaller tensors
            module = traced.module.get_submodule(str(node.target)) if node.op == "call_module" else None
            site = Site(node, module, traced, axes, tangles, spread)
            found = _found(site)
            if isinstance(found, Tangle):
                if any(map(is_fact, node.users)):  # its shape must be that of the whole value
                    raise TangleError(found.first)
                tangles[node.name] = found
                continue
            _check_owners(site, owners)
            axes[node.name] = found.axis
            ops.append(found)
    return ops


def _found(site: Site) -> Op | Tangle:
    try:
        found = _rule(site)(site)
    except (PaamError, TangleError):
        raise
    except Exception as error:  # arguments that the rule has not thought of
        raise site.refusal(f"its arguments are not understood ({type(error).__name__}: {one_line(error)})") from error
    if isinstance(found, Op) and isinstance(found.flow, Pass) and site.shape():
        if site.shape()[found.axis] != site.width(found.inputs[0]):
            raise site.refusal("it changes the number of channels")
    return found


def _check_owners(site: Site, owners: dict[Tensor, str]) -> None:
    """What a layer holds must be its own alone, and nothing may change what it returns."""
    node, module = site.node, site.module
    held: list[Tensor] = []
    if node.op == "get_attr":
        held = [attribute(site.traced.module, str(node.target))]
    elif module is not None:
        held = [*module.parameters(), *module.buffers()]
        opaque = node.name in site.traced.ignore or node.target in site.traced.ignore
        patched = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        if patched and not opaque:
            raise site.refusal("hooks, or a forward() put in its place, may change what it returns; remove them")
    for tensor in held:
        if (owner := owners.setdefault(tensor, str(node.target))) != node.target:
            raise site.refusal(f"it shares a tensor with '{owner}'; use one of them for both")


def _holder(op: Op) -> str | None:
    """The name of the layer or parameter that belongs to an operation, if any."""
    called = op.node.op == "call_module" and op.module is not None
    holds = op.node.op == "get_attr" or (called and len(op.module.state_dict()) > 0)  # type: ignore[union-attr]
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


def _output(traced: Traced, node: fx.Node, value: fx.Node, axes: dict[str, int], tangles: dict[str, Tangle]) -> Op:
    if value.name in tangles:
        raise TangleError(tangles[value.name].first)
    if value.name not in axes:
        raise GraphError(f"The model returns '{value.name}', which carries no channels; return tensors only.")
    axis = axes[value.name]
    return Op(node, Sink(traced.shapes[value.name][axis]), (value,), axis)
