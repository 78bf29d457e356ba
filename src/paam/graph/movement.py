"""Channel rules of operations that move channels: joined, cut, padded, spread over features."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import fx

from paam.graph.flows import LIVE, ZERO, Concat, Flatten, Pass, Route
from paam.graph.site import Op, Site
from paam.graph.trace import Shape


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
