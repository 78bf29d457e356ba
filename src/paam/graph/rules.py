"""One table: operation -> how channels flow through it. What is not in the table is refused by name and place.

A rule is a function of a :class:`Site` (one node of the graph, with shapes and channel axes at hand) that returns
an :class:`Op`. To teach paam an operation, write its rule and enter it under the module class, the function, or the
name of the tensor method, and give it a case in tests/test_rules.py.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn

from paam.errors import GraphError
from paam.graph.flows import CONST, LIVE, ZERO, Add, Concat, Flatten, Flow, Mix, Pass, Route, Sink, Source
from paam.graph.trace import Shape, Traced, function_name


@dataclass(frozen=True, eq=False)
class Op:
    """One operation with its flow. ``inputs``: the nodes whose channels it reads, in the order the flow expects."""

    node: fx.Node
    flow: Flow
    inputs: tuple[fx.Node, ...]
    axis: int
    module: nn.Module | None = None

    @property
    def name(self) -> str:
        return self.node.name


@dataclass(frozen=True)
class Site:
    """What a rule may look at: the node, its module, shapes, and the channel axes found so far."""

    node: fx.Node
    module: nn.Module | None
    shapes: dict[str, Shape]
    axes: dict[str, int]

    @property
    def x(self) -> fx.Node:
        return self.tensor(0)

    def tensor(self, position: int) -> fx.Node:
        node = self.node.args[position] if len(self.node.args) > position else None
        if not isinstance(node, fx.Node) or node.name not in self.shapes:
            raise self.refusal(f"its argument {position} is not a tensor computed by the model")
        return node

    def argument(self, position: int, name: str, default: Any) -> Any:
        args = self.node.args
        return args[position] if len(args) > position else self.node.kwargs.get(name, default)

    def shape(self, node: fx.Node | None = None) -> Shape:
        return self.shapes[(node or self.node).name]

    def axis(self, node: fx.Node) -> int:
        return self.axes[node.name]

    def width(self, node: fx.Node) -> int:
        return self.shape(node)[self.axis(node)]

    def op(self, flow: Flow, *inputs: fx.Node, axis: int | None = None) -> Op:
        inputs = inputs or (self.x,)
        return Op(self.node, flow, inputs, self.axis(inputs[0]) if axis is None else axis, self.module)

    def refusal(self, why: str) -> GraphError:
        """The error for an operation that the rules do not cover: what, where, what to do."""
        what = type(self.module).__name__ if self.module is not None else function_name(self.node.target)
        where = f"'{self.node.target}'" if self.node.op == "call_module" else f"node '{self.node.name}'"
        stack = [line.strip() for line in (self.node.stack_trace or "").splitlines() if line.strip()]
        code = f" (`{stack[-1]}`)" if stack and self.node.op != "call_module" else ""
        return GraphError(
            f"paam does not know how channels flow through {what} at {where}{code}: {why}."
            " Replace that operation, or add a rule for it in paam/graph/rules.py."
        )


Rule = Callable[[Site], Op]


# --- layers with weights -------------------------------------------------------------------------------------------


def convolution(site: Site) -> Op:
    conv = site.module
    _check_weight(site)
    assert isinstance(conv, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    groups, inputs, outputs = conv.groups, conv.in_channels, conv.out_channels
    if groups > 1 and not groups == inputs == outputs:
        raise site.refusal(f"{groups} groups of {inputs // groups} channels (only groups of one are supported)")
    if conv.padding == "same":
        padded = any((k - 1) * d > 0 for k, d in zip(conv.kernel_size, conv.dilation, strict=True))
    else:
        padded = conv.padding != "valid" and any(conv.padding)
    # Every other padding mode repeats values of the channel itself, and so leaves a constant channel constant.
    padded &= conv.padding_mode == "zeros"
    return site.op(Mix(inputs, outputs, groups, conv.bias is not None, padded), axis=1)


def _check_weight(site: Site) -> None:
    if not isinstance(getattr(site.module, "weight", None), nn.Parameter):
        raise site.refusal("its weight is computed from other tensors; remove the reparametrisation first")


def linear(site: Site) -> Op:
    layer = site.module
    _check_weight(site)
    assert isinstance(layer, nn.Linear)
    dims = len(site.shape(site.x))
    if site.axis(site.x) != dims - 1:
        raise site.refusal("it reads another axis than the channels'")
    return site.op(Mix(layer.in_features, layer.out_features, 1, layer.bias is not None, False), axis=dims - 1)


def batch_norm(site: Site) -> Op:
    norm = site.module
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    if not norm.track_running_stats:
        raise site.refusal("without running statistics its output depends on the batch")
    return site.op(Pass(zero=CONST))


# --- one channel in, the same channel out --------------------------------------------------------------------------


def pointwise(site: Site) -> Op:
    """Any function of single values: whether it maps zero to zero is found by applying it to zero."""
    zero = torch.zeros(1)
    with torch.no_grad():
        if site.module is not None:
            at_zero = site.module(zero)
        elif site.node.op == "call_method":
            at_zero = getattr(zero, str(site.node.target))(*site.node.args[1:], **site.node.kwargs)
        else:
            assert callable(site.node.target)
            at_zero = site.node.target(zero, *site.node.args[1:], **site.node.kwargs)
    return site.op(Pass(zero=ZERO if at_zero == 0 else CONST))


def unchanged(site: Site) -> Op:
    return site.op(Pass())


def average_pool(site: Site) -> Op:
    pool = site.module
    padding = site.argument(3, "padding", 0) if pool is None else pool.padding
    counts = site.argument(5, "count_include_pad", True) if pool is None else pool.count_include_pad
    padded = any(padding) if isinstance(padding, tuple | list) else bool(padding)
    rounds_up = site.argument(4, "ceil_mode", False) if pool is None else pool.ceil_mode
    divisor = site.argument(6, "divisor_override", None) if pool is None else getattr(pool, "divisor_override", None)
    # A window that reaches beyond the map sums fewer values, and with a fixed divisor averages to something else.
    uneven = (padded and counts) or (divisor is not None and (padded or rounds_up))
    return site.op(Pass(const=LIVE if uneven else CONST))


def mean(site: Site) -> Op:
    dims = site.argument(1, "dim", None)
    dims = (dims,) if isinstance(dims, int) else dims
    total = len(site.shape(site.x))
    axis = site.axis(site.x)
    if dims is None or axis in {d % total for d in dims}:
        raise site.refusal("it averages over channels")
    dropped = 0 if site.argument(2, "keepdim", False) else sum(d % total < axis for d in dims)
    return site.op(Pass(), axis=axis - dropped)


# --- channels moved, joined, spread --------------------------------------------------------------------------------


def add(site: Site) -> Op:
    left, right = site.node.args[0], site.argument(1, "other", None)
    if site.node.kwargs.get("alpha", 1) != 1:
        raise site.refusal("alpha is not 1")
    if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
        raise site.refusal("one side is a plain number")
    for side in (left, right):
        if side.name not in site.axes:
            raise site.refusal(f"'{side.name}' does not carry channels")
    if site.shape(left)[1:] != site.shape(right)[1:] or site.axis(left) != site.axis(right):
        raise site.refusal(f"it adds {list(site.shape(left))} and {list(site.shape(right))}")
    return site.op(Add(), left, right)


def concat(site: Site) -> Op:
    parts = site.argument(0, "tensors", ())
    axis = site.axis(parts[0])
    if site.argument(1, "dim", 0) % len(site.shape(parts[0])) != axis:
        raise site.refusal("it joins another axis than the channels'")
    return site.op(Concat(tuple(site.width(part) for part in parts)), *parts)


def flatten(site: Site) -> Op:
    shape, axis = site.shape(site.x), site.axis(site.x)
    return site.op(Flatten(math.prod(shape[axis + 1 :])), axis=_flat_axis(site, shape, axis))


def _flat_axis(site: Site, shape: Shape, axis: int) -> int:
    if axis != 1 or site.shape() != (shape[0], math.prod(shape[1:])):
        raise site.refusal(
            f"it turns {list(shape)} into {list(site.shape())}; only [N, C, ...] to [N, features] is known"
        )
    return 1


def view(site: Site) -> Op:
    sizes = site.node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = tuple(sizes[0])
    if len(sizes) != 2 or sizes[1] != -1:
        raise site.refusal("its last size must be -1, so that it holds for fewer channels too")
    return flatten(site)


def index(site: Site) -> Op:
    key: Any = site.node.args[1]
    keys = key if isinstance(key, tuple) else (key,)
    if not all(isinstance(key, slice) for key in keys):
        raise site.refusal("only slices such as x[:, :, ::2, ::2] are known")
    axis, width = site.axis(site.x), site.width(site.x)
    if axis >= len(keys) or keys[axis] == slice(None):
        return site.op(Pass())
    if any(key != slice(None) for place, key in enumerate(keys) if place != axis):
        raise site.refusal("it slices channels and another axis at once; do it in two steps")
    if any(isinstance(bound, fx.Node) for bound in (keys[axis].start, keys[axis].stop, keys[axis].step)):
        raise site.refusal("the bounds of its channel slice are computed from a tensor's shape; write them as numbers")
    return site.op(Route(width, np.arange(width)[keys[axis]]))


def pad(site: Site) -> Op:
    amounts = tuple(site.argument(1, "pad", ()))
    constant = site.argument(2, "mode", "constant") == "constant"
    zeros = constant and site.argument(3, "value", None) in (None, 0)
    axis, width = site.axis(site.x), site.width(site.x)
    first = 2 * (len(site.shape(site.x)) - 1 - axis)
    before, after = amounts[first : first + 2] or (0, 0)
    spatial = any(amounts[:first])
    if not (before or after):
        # Reflected or repeated borders hold the channel's own values; a constant border differs from what it surrounds.
        uneven = Pass(zero=ZERO if zeros else LIVE, const=LIVE)
        return site.op(uneven if constant else Pass())
    if spatial or any(amounts[first + 2 :]) or not zeros or min(before, after) < 0:
        raise site.refusal("it pads channels with something else than zeros, or other axes at the same time")
    missing = np.full((2, max(before, after)), -1)
    source = np.concatenate([missing[0, :before], np.arange(width), missing[1, :after]])
    return site.op(Route(width, source))


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
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
