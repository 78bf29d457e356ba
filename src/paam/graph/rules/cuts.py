"""Channel rules of operations that slice, split or pad values."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from paam.graph.flows import LIVE, ZERO, Pass
from paam.graph.joins import Flatten, Gather, Part, Route
from paam.graph.rules.elementwise import barrier, part_of_several
from paam.graph.rules.movement import reshape
from paam.graph.rules.over_the_map import reduction
from paam.graph.rules.site import Op, Site, Tangle


def index(site: Site) -> Op | Tangle:
    source = site.node.args[0]
    assert isinstance(source, fx.Node)
    if source.name not in site.shapes:
        return _part_of(site, source)
    key: Any = site.node.args[1]
    keys = key if isinstance(key, tuple) else (key,)
    axis, width = site.axis(site.x), site.width(site.x)
    if any(isinstance(key, fx.Node) and key.name in site.shapes for key in tree_leaves(keys)):
        return barrier(site)
    if not all(isinstance(key, slice) for key in keys):
        return reshape(site)  # axes removed or inserted
    if axis >= len(keys) or keys[axis] == slice(None):
        return site.op(Pass())
    if any(key != slice(None) for place, key in enumerate(keys) if place != axis):
        return barrier(site)
    # Bounds computed from shapes are those of the original network.
    chosen: Any = fx.map_arg(keys[axis], lambda bound: site.traced.numbers[bound.name])
    return site.op(Route(width, np.arange(width)[chosen]))


def _part_of(site: Site, source: fx.Node) -> Op | Tangle:
    """One of several outputs of an operation."""
    number: Any = site.node.args[1]
    if source.op != "call_module" and source.target in PARTS:
        return _part(site, source)
    if source.op != "call_module" and source.target in EXTREMES and number == 0:  # (values, indices)
        return reduction(site, source)
    if source.op != "call_module" and source.target in ("unbind", torch.unbind):
        x = source.args[0]
        assert isinstance(x, fx.Node)
        if not site.shape():
            return site.read_whole(x)
        dim: Any = source.args[1] if len(source.args) > 1 else source.kwargs.get("dim", 0)
        return reshape(site, x, lambda values: values.select(dim, number))
    while source.target is operator.getitem and source.name not in site.shapes:
        source = source.args[0]  # type: ignore[assignment]
    return part_of_several(site, source)


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
    if source.target in ("chunk", torch.chunk) and width % len(parts) == 0 and isinstance(concrete, int):
        return site.op(Part(width, parts[number].numpy(), len(parts)), x)
    return site.op(Route(width, parts[number].numpy()), x)


def pad(site: Site) -> Op:
    module: Any = site.module  # nn.ZeroPad2d and similar, or None for the function
    amounts = tuple(site.argument(1, "pad", ()) if module is None else module.padding)
    constant = module is not None or site.argument(2, "mode", "constant") == "constant"
    zeros = constant and (site.argument(3, "value", None) if module is None else module.value) in (None, 0)
    axis, width = site.axis(site.x), site.width(site.x)
    first = 2 * (len(site.shape(site.x)) - 1 - axis)
    before, after = amounts[first : first + 2] or (0, 0)
    spatial = any(amounts[:first])
    if not (before or after):
        # Reflected or replicated borders hold the channel's own values; a constant border differs from the channel.
        uneven = Pass(zero=ZERO if zeros else LIVE, const=LIVE)
        return site.op(uneven if constant else Pass())
    if spatial or any(amounts[first + 2 :]) or not zeros or min(before, after) < 0:
        return barrier(site)
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


def assign(site: Site) -> Op:
    """x[key] = values: a number assigned along the map works channel by channel; others read complete values."""
    key: Any = site.node.args[1]
    values: Any = site.node.args[2]
    keys = key if isinstance(key, tuple) else (key,)
    axis = site.axis(site.x)
    plain = all(isinstance(one, slice | int) for one in keys) and isinstance(values, int | float)
    if plain and (axis >= len(keys) or keys[axis] == slice(None)):
        return site.op(Pass(zero=ZERO if values == 0 else LIVE, const=LIVE))
    return barrier(site)
