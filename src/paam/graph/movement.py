"""Channel rules of operations that move channels: joined, cut, padded, reshaped.

What a reshaping does to channels is not derived but observed: every element is given the number of its channel, the
operation is applied to these numbers, and the result tells along which axis channels now lie and in which order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from paam.graph.elementwise import part_of_several, reduction
from paam.graph.flows import LIVE, ZERO, Pass, Whole
from paam.graph.joins import Concat, Empty, Flatten, Gather, Ones, Route, Stack
from paam.graph.site import Op, Site, Tangle, TangleError
from paam.graph.trace import Shape

SIZED = ("view", "reshape", torch.reshape, "expand")
"""Operations that may hold the number of channels as a literal."""


def concat(site: Site) -> Op:
    parts = site.argument(0, "tensors", ())
    axis = site.axis(parts[0])
    dim = site.argument(1, "dim", 0) % len(site.shape(parts[0]))
    if any(site.axis(part) != axis for part in parts):
        return site.op(Whole(site.shape()[dim]), *parts, axis=dim)
    if dim != axis:
        return site.op(Stack(), *parts)  # tokens, say, or halves of a map
    return site.op(Concat(tuple(site.width(part) for part in parts)), *parts)


def stack(site: Site) -> Op:
    parts = site.argument(0, "tensors", ())
    axis, total = site.axis(parts[0]), len(site.shape())
    if any(site.axis(part) != axis for part in parts):
        raise site.refusal("its inputs have their channels on different axes")
    new = site.argument(1, "dim", 0) % total
    return site.op(Stack(), *parts, axis=axis + (new <= axis))


def channel_map(site: Site) -> Op:
    """The layers that an earlier pruning has added are understood as what they are."""
    added: Any = site.module
    return site.op(Route(added.inputs, np.array(added.source)), axis=added.axis)


def ones_channel(site: Site) -> Op:
    return site.op(Ones())


def no_channels(site: Site) -> Op:
    return site.op(Empty(), axis=site.shape().index(0))


def reshape(site: Site, x: fx.Node | None = None, move: Callable[[Tensor], Tensor] | None = None) -> Op | Tangle:
    """view, flatten, permute, squeeze and their kin: one rule for all that only moves values about.

    ``x`` and ``move``: what is moved and how, where that is not the node itself applied to its first argument.
    """
    x = x or site.x
    tangle = site.tangles.get(x.name)
    origin = tangle.origin if tangle is not None else x
    move = move or partial(_apply, site)
    width = site.width(origin)
    if tangle is not None:
        after = move(tangle.numbers)
    else:
        after, width = _moved(site, origin, move)
    shape = tuple(after.shape)
    found = _channel_axis(after)
    if width == 1 and len(shape) == len(site.shape(x)):  # a single channel can be told by nothing else: it stays
        found = site.axis(x), np.zeros(shape[site.axis(x)], dtype=np.int64)
    if site.node in site.spread:
        return site.op(Whole(shape[_last_tangled(after)]), x, axis=_last_tangled(after))
    if found is None:
        first = tangle.first if tangle is not None else site.node
        places = tangle.places if tangle is not None else _places(site.shape(origin), site.axis(origin))
        return Tangle(origin, after, move(places), first)
    axis, source = found
    if tangle is not None:
        # Channels in another order, every value at its place: a shuffle. Anything else is not followed.
        if len(source) != width or not torch.equal(move(tangle.places), _places(site.shape(origin), site.axis(origin))):
            raise TangleError(tangle.first)
        return site.op(Route(width, source), origin, axis=axis)
    size = _size(site, axis) if site.node.op != "call_module" and site.node.target in SIZED else -1
    if site.node.meta.get("settled"):  # in the model's own code, squeeze() would take away the last channel left
        return dataclasses.replace(site.op(Pass(), x, axis=axis), literal=True)
    if site.node.target == "unflatten" and site.argument(1, "dim", 0) % len(site.shape(x)) == site.axis(x):
        return site.op(Whole(site.shape()[axis]), x, axis=axis)
    if np.array_equal(source, np.arange(width)):
        return site.op(Pass(), x, axis=axis, size=size)
    block = len(source) // width
    if np.array_equal(source, np.arange(width).repeat(block)):
        return site.op(Flatten(block), x, axis=axis, size=size)
    return site.op(Whole(site.shape()[axis]), x, axis=axis)


def _moved(site: Site, x: fx.Node, move: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
    """Where an operation moves the channel numbers of a value, and how many channels it was tried with.

    The axis of a single channel cannot be told from others of length 1, so that two are tried first.
    """
    shape, axis = site.shape(x), site.axis(x)
    if shape[axis] == 1:
        try:
            moved = move(_numbers((*shape[:axis], 2, *shape[axis + 1 :]), axis))
        except RuntimeError:  # it is given the number of channels
            moved = None
        if moved is not None and _channel_axis(moved) is not None:
            return moved, 2
    return move(_numbers(shape, axis)), shape[axis]


def _numbers(shape: Shape, axis: int) -> Tensor:
    """The channel number of every element of a tensor."""
    view = [1] * len(shape)
    view[axis] = shape[axis]
    return torch.arange(shape[axis]).view(view).expand(shape).contiguous()


def _places(shape: Shape, axis: int) -> Tensor:
    """Where in its channel every element of a tensor stands."""
    others = [1 if place == axis else size for place, size in enumerate(shape)]
    return torch.arange(math.prod(others)).view(others).expand(shape).contiguous()


def _apply(site: Site, numbers: Tensor) -> Tensor:
    """Run the operation itself on channel numbers; sizes are those of the example."""

    def concrete(value: Any) -> Any:
        return numbers if value is site.x else site.traced.numbers[value.name] if isinstance(value, fx.Node) else value

    args = fx.map_arg(site.node.args, concrete)
    kwargs = fx.map_arg(site.node.kwargs, concrete)
    if site.module is not None:
        result = site.module(*args, **kwargs)
    elif site.node.op == "call_method":
        result = getattr(args[0], str(site.node.target))(*args[1:], **kwargs)
    else:
        assert callable(site.node.target)
        result = site.node.target(*args, **kwargs)
    assert isinstance(result, Tensor)
    return result


def _channel_axis(numbers: Tensor) -> tuple[int, np.ndarray[Any, np.dtype[np.int64]]] | None:
    """The axis along which alone the channel number changes, with the numbers along it."""
    for axis in range(1, numbers.dim()):
        rows = numbers.movedim(axis, 0).flatten(1)
        if (rows == rows[:, :1]).all() and (rows.shape[0] > 1 or bool((numbers == numbers.flatten()[0]).all())):
            return axis, rows[:, 0].numpy()
    return None


def _last_tangled(numbers: Tensor) -> int:
    """The last axis along which the channel number changes; not the first, which is the batch's for most others."""
    axes = [axis for axis in range(1, numbers.dim()) if (numbers != numbers.narrow(axis, 0, 1)).any()]
    return max(axes, default=min(1, numbers.dim() - 1))


def _size(site: Site, axis: int) -> Any:
    """What a view is given as its size along the channels' axis."""
    sizes: tuple[Any, ...] = site.node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = tuple(sizes[0])
    if len(sizes) == 1 and len(site.shape()) > 1:
        return sizes[0]  # another tensor's shape, all of it
    return sizes[axis]


def index(site: Site) -> Op | Tangle:
    source = site.node.args[0]
    if isinstance(source, fx.Node) and source.op == "call_module" and source.name not in site.shapes:
        return part_of_several(site, source)
    if not isinstance(source, fx.Node) or source.op == "call_module":
        source = None
    if source is not None and source.target in PARTS:
        return _part(site, source)
    if source is not None and source.target in EXTREMES:  # (values, indices)
        if site.node.args[1] != 0:
            raise site.refusal("of what a maximum along an axis returns, only the values are known")
        return reduction(site, source)
    if source is not None and source.target in ("unbind", torch.unbind):
        x, number = source.args[0], site.node.args[1]
        assert isinstance(x, fx.Node)
        dim: Any = source.args[1] if len(source.args) > 1 else source.kwargs.get("dim", 0)
        return reshape(site, x, lambda values: values.select(dim, number))  # type: ignore[arg-type]
    key: Any = site.node.args[1]
    keys = key if isinstance(key, tuple) else (key,)
    axis, width = site.axis(site.x), site.width(site.x)
    if any(isinstance(key, fx.Node) and key.name in site.shapes for key in keys):
        raise site.refusal("only numbers, slices and None are known, such as x[:, :, ::2, ::2]")
    if not all(isinstance(key, slice) for key in keys):
        return reshape(site)  # axes taken out or put in
    if axis >= len(keys) or keys[axis] == slice(None):
        return site.op(Pass())
    if any(key != slice(None) for place, key in enumerate(keys) if place != axis):
        raise site.refusal("it slices channels and another axis at once; do it in two steps")
    # Bounds that follow from shapes are those of the whole network.
    chosen: Any = fx.map_arg(keys[axis], lambda bound: site.traced.numbers[bound.name])
    return site.op(Route(width, np.arange(width)[chosen]))


EXTREMES = ("max", torch.max, "min", torch.min)
PARTS = ("chunk", torch.chunk, "split", torch.split)


def _part(site: Site, source: fx.Node) -> Op:
    """One part of x.chunk(n, 1) or x.split(sizes, 1)."""
    x = source.args[0]
    assert isinstance(x, fx.Node)
    name = "split_size" if source.target == "split" else "split_size_or_sections"
    sizes = source.args[1] if len(source.args) > 1 else source.kwargs.get(name, source.kwargs.get("chunks"))
    dim: Any = source.args[2] if len(source.args) > 2 else source.kwargs.get("dim", 0)
    axis, width = site.axis(x), site.width(x)
    if dim % len(site.shape(x)) != axis:
        return site.op(Pass(), x)
    cut: Any = torch.chunk if source.target in ("chunk", torch.chunk) else torch.split
    concrete: Any = fx.map_arg(sizes, lambda node: site.traced.numbers[node.name])
    parts = cut(torch.arange(width), concrete if isinstance(concrete, int) else list(concrete))
    number: Any = site.node.args[1]
    return site.op(Route(width, parts[number].numpy()), x)


def pad(site: Site) -> Op:
    module: Any = site.module  # nn.ZeroPad2d and its kin, or None for the function
    amounts = tuple(site.argument(1, "pad", ()) if module is None else module.padding)
    constant = module is not None or site.argument(2, "mode", "constant") == "constant"
    zeros = constant and (site.argument(3, "value", None) if module is None else module.value) in (None, 0)
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


def pixel_shuffle(site: Site) -> Op:
    if site.axis(site.x) != len(site.shape(site.x)) - 3:
        return site.whole()
    factor: Any = site.module.upscale_factor if site.module is not None else site.argument(1, "upscale_factor", 1)
    return site.op(Gather(factor**2))


def pixel_unshuffle(site: Site) -> Op:
    if site.axis(site.x) != len(site.shape(site.x)) - 3:
        return site.whole()
    factor: Any = site.module.downscale_factor if site.module is not None else site.argument(1, "downscale_factor", 1)
    return site.op(Flatten(factor**2))


RESHAPES = (
    *("view", "reshape", "flatten", "permute", "transpose", "squeeze", "unsqueeze", "contiguous", "unflatten"),
    *("expand", "repeat"),
    *(torch.reshape, torch.flatten, torch.permute, torch.transpose, torch.squeeze, torch.unsqueeze),
)
