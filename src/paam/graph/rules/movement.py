"""Channel rules of operations that move channels: concatenate, slice, pad, reshape.

The effect of a reshape on channels is not derived but observed: every element is filled with its channel index, the
operation is applied to these indices, and the result shows which axis now holds the channels, and in which order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from paam.graph.flows import Layout, Pass
from paam.graph.joins import Concat, Empty, Flatten, Ones, Route, Stack
from paam.graph.record.recording import Shape
from paam.graph.rules.elementwise import apply_to, barrier
from paam.graph.rules.site import Op, Site, Tangle, TangleError

Move = Callable[[Tensor], Tensor]
"""The effect of an operation on a tensor of indices."""

SIZED = ("view", "reshape", torch.reshape, "expand")
"""Operations that may hold the number of channels as a literal."""


def concat(site: Site) -> Op:
    parts = site.argument(0, "tensors", ())
    axis = site.axis(parts[0])
    dim = site.argument(1, "dim", 0) % len(site.shape(parts[0]))
    if any(site.axis(part) != axis for part in parts):
        return site.read_whole(*parts, axis=dim)
    if dim != axis:
        return site.op(Stack(), *parts)  # for example tokens, or halves of a map
    return site.op(Concat(tuple(site.width(part) for part in parts)), *parts)


def stack(site: Site) -> Op:
    parts = site.argument(0, "tensors", ())
    axis, total = site.axis(parts[0]), len(site.shape())
    if not site.shape(parts[0]) or any(site.axis(part) != axis for part in parts):
        return barrier(site)
    new = site.argument(1, "dim", 0) % total
    return site.op(Stack(), *parts, axis=axis + (new <= axis))


def channel_map(site: Site) -> Op:
    """Rules for the layers that an earlier pruning has added."""
    added: Any = site.module
    return site.op(Route(added.inputs, np.array(added.source)), axis=added.axis)


def ones_channel(site: Site) -> Op:
    return site.op(Ones())


def no_channels(site: Site) -> Op:
    return site.op(Empty(), axis=site.shape().index(0))


def reshape(site: Site, x: fx.Node | None = None, move: Move | None = None) -> Op | Tangle:
    """view, flatten, permute, squeeze and so on: one rule for everything that only moves values.

    ``x`` and ``move``: what is moved and how, if it is not the node itself applied to its first argument.
    """
    x = x or site.x
    move = move or partial(_apply, site)
    if (tangle := site.tangles.get(x.name)) is not None:
        return _moved_on(site, x, tangle, move)
    shape, axis, width = site.shape(x), site.axis(x), site.width(x)
    if width == 1:
        return _single(site, x, move)
    after = move(_numbers(shape, axis))
    if tuple(after.shape) != site.shape():
        return barrier(site)  # the operation behaves differently for integers
    if site.node in site.spread:
        return site.read_whole(x, axis=_last_tangled(after))
    found = _channel_axis(after)
    if found is None:
        return Tangle(x, after, move(_places(shape, axis)), site.node)
    place, source = found
    if site.node.meta.get("settled"):  # in the model's own code, squeeze() would remove the last remaining channel
        return dataclasses.replace(site.op(Pass(), x, axis=place), literal=True)
    block = len(source) // width
    if np.array_equal(source, np.arange(width).repeat(block)):
        size = _size(site, place) if site.node.op != "call_module" and site.node.target in SIZED else -1
        if _holds_for_fewer(site, x, move, after, place, resized=size != -1):
            return site.op(Pass() if block == 1 else Flatten(block), x, axis=place, size=size)
    if _only_picks(site, x, move, after, place, source):
        return site.op(Route(width, source), x, axis=place)  # channels permuted, or a subset of them
    return site.read_whole(x, axis=place)


def _moved_on(site: Site, x: fx.Node, tangle: Tangle, move: Move) -> Op | Tangle:
    """Channels that span several axes: a channel shuffle may merge them again."""
    after = move(tangle.numbers)
    if tuple(after.shape) != site.shape():
        raise TangleError(tangle.first)
    found = _channel_axis(after)
    if found is None:
        return Tangle(tangle.origin, after, move(tangle.places), tangle.first)
    axis, source = found
    width = site.width(tangle.origin)
    # Channels permuted, every value at its position in the map: a shuffle. Anything else is not supported.
    whole = _places(site.shape(tangle.origin), site.axis(tangle.origin))
    if len(source) != width or not torch.equal(move(tangle.places), whole):
        raise TangleError(tangle.first)
    return site.op(Route(width, source), tangle.origin, axis=axis)


def _single(site: Site, x: fx.Node, move: Move) -> Op:
    """A single channel: everything made from it depends only on it, so any axis of length 1 can be its channel axis.

    Prefer the axis that would hold several channels.
    """
    shape, axis, after = site.shape(x), site.axis(x), site.shape()
    told = []
    for count in (2, 3):
        try:
            found = _channel_axis(move(_numbers((*shape[:axis], count, *shape[axis + 1 :]), axis)))
        except (RuntimeError, IndexError, ValueError):  # the number of channels is hard-coded
            continue
        told += [found[0]] if found is not None and np.array_equal(found[1], np.arange(count)) else []
    short = [place for place, size in enumerate(after) if size == 1 and not site.traced.growth(site.node)[place]]
    best = next((place for place in (*told, axis, 1, *short) if place in short), None)
    return site.read_whole(x) if best is None else site.op(Pass(), x, axis=best)


def _holds_for_fewer(site: Site, x: fx.Node, move: Move, after: Tensor, place: int, *, resized: bool) -> bool:
    """Whether an operation treats a subset of the channels like all of them.

    An operation with a hard-coded number of channels, such as a shuffle or narrow(), does something else or fails.
    ``resized``: a view, which gets the new number.
    """
    numbers, axis = _numbers(site.shape(x), site.axis(x)), site.axis(x)
    width = numbers.shape[axis]
    block = after.shape[place] // width
    # At least one of these counts does not divide any number that the operation might have hard-coded.
    for kept in (torch.arange((width + 1) // 2), torch.arange(1, width), torch.tensor([width - 1])):
        made = (kept[:, None] * block + torch.arange(block)).flatten()
        part = numbers.index_select(axis, kept)
        try:
            moved = _apply(site, part, {place: len(made)}) if resized else move(part)
        except (RuntimeError, IndexError, ValueError):
            return False
        if not torch.equal(moved, after.index_select(place, made)):
            return False
    return True


def _only_picks(site: Site, x: fx.Node, move: Move, after: Tensor, axis: int, source: Layout) -> bool:
    """Whether an operation only picks channels, each at most once: then an index map can replace it."""
    if after.dim() != len(site.shape(x)) or axis != site.axis(x) or len(set(source.tolist())) < len(source):
        return False
    return torch.equal(move(_places(site.shape(x), axis)), _places(tuple(after.shape), axis))


def _numbers(shape: Shape, axis: int) -> Tensor:
    """The channel index of every element of a tensor."""
    view = [1] * len(shape)
    view[axis] = shape[axis]
    return torch.arange(shape[axis]).view(view).expand(shape).contiguous()


def _places(shape: Shape, axis: int) -> Tensor:
    """The position of every element within its channel."""
    others = [1 if place == axis else size for place, size in enumerate(shape)]
    return torch.arange(math.prod(others)).view(others).expand(shape).contiguous()


def _apply(site: Site, numbers: Tensor, resized: Mapping[int, int] | None = None) -> Tensor:
    """Run the operation itself on channel indices, with the example's sizes, except those in ``resized``."""

    def concrete(value: Any) -> Any:
        return numbers if value is site.x else site.traced.numbers[value.name] if isinstance(value, fx.Node) else value

    args = fx.map_arg(site.node.args, concrete)
    kwargs = fx.map_arg(site.node.kwargs, concrete)
    if resized:
        sizes = list(_sizes(args))
        for place, size in resized.items():
            sizes[place] = size
        args = (args[0], *sizes) if site.node.op == "call_method" else (args[0], tuple(sizes))
    return apply_to(site, args, kwargs)


def _sizes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sizes passed to a view, one by one or as a tuple."""
    sizes = args[1:]
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else tuple(sizes)


def _channel_axis(numbers: Tensor) -> tuple[int, np.ndarray[Any, np.dtype[np.int64]]] | None:
    """The only axis along which the channel index changes, with the indices along it."""
    for axis in (*range(1, numbers.dim()), 0)[: numbers.dim()]:  # the first is usually the batch axis
        rows = numbers.movedim(axis, 0).flatten(1)
        if (rows == rows[:, :1]).all():
            return axis, rows[:, 0].numpy()
    return None


def _last_tangled(numbers: Tensor) -> int:
    """The last axis along which the channel index changes."""
    axes = [axis for axis in range(numbers.dim()) if (numbers != numbers.narrow(axis, 0, 1)).any()]
    return max(axes)


def _size(site: Site, axis: int) -> Any:
    """The size that a view gets for the channel axis."""
    sizes = _sizes(site.node.args)
    return -1 if isinstance(sizes[0], torch.dtype) else sizes[axis]  # x.view(torch.int64) has no sizes
