"""Channel rules of operations without weights: one channel in, the same channel out; and sums of several values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from paam.graph.flows import CONST, LIVE, ZERO, Pass
from paam.graph.joins import Add, Given, Stored, Zip
from paam.graph.record.recording import CONSTANT, DTYPE
from paam.graph.rules.functions import RANDOM
from paam.graph.rules.site import Op, Site


def pointwise(site: Site, x: fx.Node | None = None) -> Op:
    """Any elementwise function: the result for zero is found by applying it to zero."""
    if len(tensors := _tensors(site)) > 1:
        return _joint(site, *tensors, zero_wins=False)
    x = x or tensors[0]
    zero, const = _of_zeros(site, (x,))
    return site.op(Pass(zero, const), x)


def _tensors(site: Site) -> list[fx.Node]:
    return [node for node in site.node.all_input_nodes if node.name in site.shapes]


def _of_zeros(site: Site, inputs: Sequence[fx.Node]) -> tuple[np.int8, np.int8]:
    """The states that an elementwise function returns for zeros and for constants.

    If it reads sizes, the result for a constant depends on the size of the image or the batch.
    """
    if is_random(site.node):
        return LIVE, LIVE
    sized = [n for n in site.node.all_input_nodes if isinstance(site.traced.numbers.get(n.name), int | float)]
    results = []
    for more in range(2 if sized else 1):

        def known(node: fx.Node, more: int = more) -> Any:
            if node in inputs:
                held = node.meta.get(DTYPE, torch.float32)
                return torch.zeros(1, dtype=torch.float32 if held.is_floating_point else held)
            value = site.traced.numbers.get(node.name)
            return value + more if isinstance(value, int | float) else value

        args: Any = fx.map_arg(site.node.args, known)
        kwargs: Any = fx.map_arg(site.node.kwargs, known)
        with torch.no_grad():
            results.append(float(apply_to(site, args, kwargs).flatten()[0]))
    if all(result == 0 for result in results):
        return ZERO, LIVE if sized else CONST
    return (LIVE, LIVE) if sized or not all(map(math.isfinite, results)) else (CONST, CONST)


def apply_to(site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The operation's result for arguments other than those in the graph."""
    if site.module is not None:
        result = site.module(*args, **kwargs)
    elif site.node.op == "call_method":
        result = getattr(args[0], str(site.node.target))(*args[1:], **kwargs)
    else:
        assert callable(site.node.target)
        result = site.node.target(*args, **kwargs)
    assert isinstance(result, Tensor)
    return result


def is_random(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op != "call_module" and (name in RANDOM or f"{name}_" in RANDOM)


def functional_norm(site: Site) -> Op:
    """F.batch_norm with explicit statistics and offsets: all have the channels of the input's second axis."""
    tensors = _tensors(site)
    if site.axis(site.x) != 1 or len({site.width(node) for node in tensors}) > 1:
        return barrier(site)
    return site.op(Zip(tuple(site.width(node) for node in tensors), zero_wins=False), *tensors)


def together(site: Site) -> Op:
    """A function of several values, channel by channel: maximum, addcmul, expand_as."""
    return _joint(site, *_tensors(site), zero_wins=False)


def unchanged(site: Site) -> Op:
    return site.op(Pass())


def dropout(site: Site) -> Op:
    """A function that drops values depending on its argument: a flag that follows the mode, or False, or True."""
    target: Any = site.node.target
    always = target in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
    if site.argument(2, "train" if target is torch.dropout else "training", always) is not True:
        return site.op(Pass())
    if site.node.name not in site.traced.training_only:
        raise site.refusal("it draws random numbers in evaluation mode")
    return site.op(Pass(zero=LIVE if target in (F.alpha_dropout, F.feature_alpha_dropout) else ZERO, const=LIVE))


def add(site: Site) -> Op:
    if site.node.kwargs.get("alpha", 1) != 1:
        return together(site)
    left, right = site.argument(0, "input", None), site.argument(1, "other", None)
    if isinstance(left, fx.Node) and isinstance(right, fx.Node) and left.name in site.axes and right.name in site.axes:
        if site.shape(left) == site.shape(right) == site.shape() and site.axis(left) == site.axis(right):
            return site.op(Add(), left, right)
    return _joint(site, left, right, zero_wins=False)


def subtract(site: Site) -> Op:
    return _joint(site, site.argument(0, "input", None), site.argument(1, "other", None), zero_wins=False)


def multiply(site: Site) -> Op:
    return _joint(site, site.argument(0, "input", None), site.argument(1, "other", None), zero_wins=True)


def divide(site: Site) -> Op:
    return _joint(site, site.argument(0, "input", None), site.argument(1, "other", None), zero_wins=False)


def _joint(site: Site, *operands: Any, zero_wins: bool) -> Op:
    """A function of several values with corresponding channels, some of which may be numbers or broadcast."""
    sides = [side for side in operands if isinstance(side, fx.Node) and side.name in site.shapes]
    if len(sides) == 1 and len(_tensors(site)) == 1:
        return pointwise(site, sides[0])
    wide = [side for side in sides if site.width(side) > 1] or sides
    axis = _from_end(site, wide[0])
    if not all(_fits(site, side, axis) for side in sides) or axis + len(site.shape()) < 0:
        return site.read_whole(*sides, axis=axis + len(site.shape()) if axis + len(site.shape()) >= 0 else None)
    ordered = sorted(sides, key=lambda side: -site.width(side)) if zero_wins else sides
    zero, const = _of_zeros(site, sides)
    flow = Zip(tuple(site.width(side) for side in ordered), zero_wins, zero, const)
    return site.op(flow, *ordered, axis=axis + len(site.shape()))


def _from_end(site: Site, side: fx.Node) -> int:
    """A value's channel axis counted from the end, as in broadcasting."""
    return site.axis(side) - len(site.shape(side))


def _fits(site: Site, side: fx.Node, axis: int) -> bool:
    """Whether a value's axis at the result's channel axis, counted from the end, holds just its own channels.

    Otherwise it varies along that axis without being cut there, or its channels are on another axis of the result.
    """
    place = axis + len(site.shape(side))
    along = site.shape(side)[place] if place >= 0 else 1
    if _from_end(site, side) == axis:
        return along in (1, site.shape()[axis])
    return along == 1 and site.width(side) == 1


def barrier(site: Site) -> Op:
    """An operation that mixes channels, or moves them in an unsupported way: it reads complete values."""
    return _all_read(site, opaque=False)


def made(site: Site) -> Op:
    """A tensor computed from sizes alone: nothing of it is ever removed, so any axis can be its channel axis."""
    shape = site.shape()
    long = [axis for axis, size in enumerate(shape) if size > 1] or [max(len(shape) - 1, 0)]
    return Op(site.node, Given(shape[long[-1]] if shape else 1), (), long[-1])


def left_alone(site: Site) -> Op:
    """A part that the user has named in ``ignore``: it reads complete values, and nothing in it changes."""
    return _all_read(site, opaque=True)


def part_of_several(site: Site, source: fx.Node) -> Op:
    """One of several outputs of an operation that reads complete values: attention, or a standard deviation."""
    op = _all_read(site, source, opaque=source.op == "call_module")
    if source.op != "call_module":
        return op
    # The module's parameters are counted with the first of its outputs.
    module = site.traced.modules[str(source.target)]
    first = next(user for user in source.users if user.name in site.shapes)
    return dataclasses.replace(op, module=module) if first is site.node else op


def _all_read(site: Site, call: fx.Node | None = None, *, opaque: bool) -> Op:
    call = call or site.node
    inputs = [node for node in call.all_input_nodes if node.name in site.shapes]
    if not inputs:
        return made(site)
    for node in inputs:
        site.axis(node)
    return site.read_whole(*inputs, opaque=opaque)


def functional_convolution(site: Site) -> Op:
    """F.conv2d with computed weights: depthwise, such as a blur, works channel by channel; any other reads all."""
    tensors = [node for node in site.node.all_input_nodes if node.name in site.shapes]
    groups = site.argument(6, "groups", 1)
    number = site.traced.numbers[groups.name] if isinstance(groups, fx.Node) else groups
    widths = tuple(site.width(node) for node in tensors)
    if number > 1 and set(widths) == {number} and site.axis(site.x) == 1 and site.shape()[1] == number:
        return site.op(Zip(widths, zero_wins=False), *tensors, size=groups)
    return barrier(site)


def stored(site: Site) -> Op:
    """A parameter or buffer that the model reads directly: its channel axis is its only axis longer than 1.

    If there are several such axes, any will do: where it is not the channel axis of other values, all are read.
    """
    shape = site.shape()
    if not shape:  # a single number for all channels
        return Op(site.node, Stored(1), (), 0)
    long = [axis for axis, size in enumerate(shape) if size > 1] or [len(shape) - 1]
    is_filter = any(user.target in CONVOLVE for user in site.node.users)
    axis = long[0] if is_filter or (len(shape) > 3 and shape[0] == 1) else long[-1]
    # Constants created in forward() are defined by the model's own code, and cannot be cut there.
    return Op(site.node, Stored(shape[axis]), (), axis, literal=str(site.node.target).startswith(CONSTANT))


CONVOLVE = (F.conv1d, F.conv2d, F.conv3d)
