"""Channel rules of operations without weights: one channel in, the same channel out; and sums of several."""

from __future__ import annotations

import copy
import dataclasses
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from paam.graph.flows import CONST, LIVE, ZERO, Pass, Whole
from paam.graph.joins import Add, Stored, Zip
from paam.graph.site import Op, Site
from paam.graph.tracer import CONSTANT


def pointwise(site: Site, x: fx.Node | None = None) -> Op:
    """Any function of single values: whether it maps zero to zero is found by applying it to zero."""
    x = x or site.x
    plain = [node for node in site.node.all_input_nodes if node is x or node.target == "training" or _is_type(node)]
    if len(plain) < len(site.node.all_input_nodes):
        raise site.refusal("it reads something else that the model computes")
    zero = torch.zeros(1)

    def known(node: fx.Node) -> Any:
        return zero if node is x else site.traced.numbers.get(node.name)

    args: Any = fx.map_arg(site.node.args, known)
    kwargs: Any = fx.map_arg(site.node.kwargs, known)
    with torch.no_grad():
        if site.module is not None:
            at_zero = copy.deepcopy(site.module).cpu().float()(zero)
        elif site.node.op == "call_method":
            at_zero = getattr(args[0], str(site.node.target))(*args[1:], **kwargs)
        else:
            assert callable(site.node.target)
            at_zero = site.node.target(*args, **kwargs)
    return site.op(Pass(zero=ZERO if at_zero == 0 else CONST), x)


def _is_type(node: fx.Node) -> bool:
    return node.target is getattr and node.args[1] in ("dtype", "device")


def functional_norm(site: Site) -> Op:
    """F.batch_norm with statistics and offsets of its own: all have the channels of the input's second axis."""
    tensors = [node for node in site.node.all_input_nodes if node.name in site.shapes]
    if site.axis(site.x) != 1:
        return barrier(site)
    return site.op(Zip(tuple(site.width(node) for node in tensors), zero_wins=False), *tensors)


def together(site: Site) -> Op:
    """A function of several values, channel by channel: maximum, addcmul, expand_as."""
    return _joint(site, *(node for node in site.node.all_input_nodes if node.name in site.shapes), zero_wins=False)


def unchanged(site: Site) -> Op:
    return site.op(Pass())


def over_the_map(site: Site) -> Op:
    """Pooling, up-sampling, borders: they take the second axis for the channels', whatever lies there."""
    return site.op(Pass()) if site.axis(site.x) == 1 else site.whole()


def average_pool(site: Site) -> Op:
    if site.axis(site.x) != 1:
        return site.whole()
    pool = site.module
    padding = site.argument(3, "padding", 0) if pool is None else pool.padding
    counts = site.argument(5, "count_include_pad", True) if pool is None else pool.count_include_pad
    padded = any(padding) if isinstance(padding, tuple | list) else bool(padding)
    rounds_up = site.argument(4, "ceil_mode", False) if pool is None else pool.ceil_mode
    divisor = site.argument(6, "divisor_override", None) if pool is None else getattr(pool, "divisor_override", None)
    # A window that reaches beyond the map sums fewer values, and with a fixed divisor averages to something else.
    uneven = (padded and counts) or (divisor is not None and (padded or rounds_up))
    return site.op(Pass(const=LIVE if uneven else CONST))


def reduction(site: Site, call: fx.Node | None = None) -> Op:
    """mean, sum, amax over the map: a constant channel becomes another constant. Over channels, all are read.

    ``call``: the node that holds the arguments, where it is not the site's own.
    """
    call = call or site.node
    arguments = dataclasses.replace(site, node=call)
    x = arguments.x
    second = 2 if call.target in (torch.norm, "norm") else 1  # a norm's order comes first
    dims = arguments.argument(second, "dim", call.kwargs.get("axis"))
    dims = fx.map_arg(dims, lambda node: site.traced.numbers[node.name])
    dims = (dims,) if isinstance(dims, int) else dims
    shape, axis = site.shape(x), site.axis(x)
    reduced = set(range(len(shape))) if dims is None else {d % len(shape) for d in dims}
    if 0 in reduced:
        raise site.refusal("it goes over the batch")
    keepdim = len(site.shape()) == len(shape)
    if axis in reduced:
        place = axis if keepdim else min(1, len(site.shape()) - 1)
        return site.op(Whole(site.shape()[place]), x, axis=place)
    # A sum of equal numbers depends on how many there are, and images may have another size than the example.
    const = LIVE if call.target in SUMS else CONST
    return site.op(Pass(const=const), x, axis=axis - (0 if keepdim else sum(d < axis for d in reduced)))


SUMS = (torch.sum, "sum", torch.norm, "norm")


def normalize(site: Site) -> Op:
    """Scaled to length 1 along an axis, the channels' by default."""
    dim = site.argument(2, "dim", 1) % len(site.shape(site.x))
    if dim == 0:
        raise site.refusal("it goes over the batch")
    return site.op(Whole(site.width(site.x)) if dim == site.axis(site.x) else Pass(const=LIVE))


def add(site: Site) -> Op:
    if site.node.kwargs.get("alpha", 1) != 1:
        raise site.refusal("alpha is not 1")
    left, right = site.node.args[0], site.argument(1, "other", None)
    if isinstance(left, fx.Node) and isinstance(right, fx.Node) and left.name in site.axes and right.name in site.axes:
        if site.shape(left) == site.shape(right) and site.axis(left) == site.axis(right):
            return site.op(Add(), left, right)
    return _joint(site, left, right, zero_wins=False)


def subtract(site: Site) -> Op:
    if site.node.kwargs.get("alpha", 1) != 1:
        raise site.refusal("alpha is not 1")
    return _joint(site, site.node.args[0], site.argument(1, "other", None), zero_wins=False)


def multiply(site: Site) -> Op:
    return _joint(site, site.node.args[0], site.argument(1, "other", None), zero_wins=True)


def divide(site: Site) -> Op:
    return _joint(site, site.node.args[0], site.argument(1, "other", None), zero_wins=False)


def _joint(site: Site, *operands: Any, zero_wins: bool) -> Op:
    """A function of several values with equally numbered channels, some of which may be plain or broadcast."""
    sides = [side for side in operands if isinstance(side, fx.Node) and side.name in site.shapes]
    if len(sides) == 1:
        return pointwise(site, sides[0])
    for side in sides:
        site.axis(side)
    total = len(site.shape())
    # Axes are compared counted from the end, as broadcasting does.
    axes = {site.axis(side) - len(site.shape(side)) for side in sides if site.width(side) > 1}
    apart = len(axes) > 1
    if apart or (axes and site.shape()[axes.copy().pop() + total] != max(site.width(side) for side in sides)):
        place = site.axis(sides[0]) - len(site.shape(sides[0])) + total
        return site.op(Whole(site.shape()[place]), *sides, axis=place)
    ordered = sorted(sides, key=lambda side: -site.width(side)) if zero_wins else sides
    flow = Zip(tuple(site.width(side) for side in ordered), zero_wins)
    return site.op(flow, *ordered, axis=(axes or {site.axis(sides[0]) - total}).pop() + total)


def softmax(site: Site) -> Op:
    """Over channels it reads them all."""
    dim = site.module.dim if site.module is not None else site.argument(1, "dim", None)
    if not isinstance(dim, int):
        raise site.refusal("its dim is not given")
    dim %= len(site.shape(site.x))
    if dim == 0:
        raise site.refusal("it goes over the batch")
    # Over the map, what becomes of a constant depends on the size of the image.
    return site.op(Whole(site.width(site.x)) if dim == site.axis(site.x) else Pass(zero=LIVE, const=LIVE))


def barrier(site: Site) -> Op:
    """An operation that mixes channels, or moves them in ways not followed here: it reads whole values."""
    return _all_read(site, opaque=False)


def left_alone(site: Site) -> Op:
    """What the user has named in ``ignore``: it reads whole values, and nothing in it changes."""
    return _all_read(site, opaque=True)


def part_of_several(site: Site, source: fx.Node) -> Op:
    """One of the values that a module returns: attention with its weights, or a module that the user has left alone."""
    module = site.traced.module.get_submodule(str(source.target))
    if not isinstance(module, nn.MultiheadAttention) and source.target not in site.traced.ignore:
        raise dataclasses.replace(site, node=source, module=module).refusal("it returns several values")
    op = _all_read(site, source, opaque=True)
    # What the module holds is counted with the first of its values.
    first = next(user for user in source.users if user.target is operator.getitem)
    return dataclasses.replace(op, module=module) if first is site.node else op


def _all_read(site: Site, call: fx.Node | None = None, *, opaque: bool) -> Op:
    call = call or site.node
    inputs = [node for node in call.all_input_nodes if node.name in site.shapes]
    if not inputs:
        raise site.refusal("nothing that the model computes goes into it, so that it cannot be left alone")
    for node in inputs:
        site.axis(node)
    # Nothing of the result is ever removed, so that any axis may count as its channels': that which is read next.
    dims = len(site.shape())
    sequence = dims == 3 and any(_reads_last(site, user) for user in site.node.users)
    axis = dims - 1 if sequence else min(1, dims - 1)
    return site.op(Whole(site.shape()[axis], opaque), *inputs, axis=axis)


def _reads_last(site: Site, user: fx.Node) -> bool:
    return user.op == "call_module" and isinstance(site.traced.module.get_submodule(str(user.target)), LAST_AXIS)


LAST_AXIS = (nn.Linear, nn.LayerNorm)


def functional_convolution(site: Site) -> Op:
    """F.conv2d with tensors of its own: depthwise, channel by channel, as filters that blur; any other reads all."""
    tensors = [node for node in site.node.all_input_nodes if node.name in site.shapes]
    groups = site.argument(6, "groups", 1)
    number = site.traced.numbers[groups.name] if isinstance(groups, fx.Node) else groups
    widths = tuple(site.width(node) for node in tensors)
    if number > 1 and set(widths) == {number} and site.axis(site.x) == 1 and site.shape()[1] == number:
        return site.op(Zip(widths, zero_wins=False), *tensors, size=groups)
    return barrier(site)


def stored(site: Site) -> Op:
    """A parameter or buffer that the model reads by itself: its channels are its one axis that is longer than 1.

    Of several such axes any may count as theirs: where it is not what others take for channels, all are read.
    """
    shape = site.shape()
    if not shape:  # a single number for all channels
        return Op(site.node, Stored(1), (), 0)
    long = [axis for axis, size in enumerate(shape) if size > 1] or [len(shape) - 1]
    is_filter = any(user.target in CONVOLVE for user in site.node.users)
    axis = long[0] if is_filter or (len(shape) > 3 and shape[0] == 1) else long[-1]
    # What forward() makes of nothing is written in the model's own code, and cannot be cut there.
    return Op(site.node, Stored(shape[axis]), (), axis, literal=str(site.node.target).startswith(CONSTANT))


CONVOLVE = (F.conv1d, F.conv2d, F.conv3d)
