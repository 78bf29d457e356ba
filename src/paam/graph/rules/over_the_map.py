"""Channel rules of operations over the map: pooling, upsampling, means and norms along some of the axes."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import fx

from paam.graph.flows import CONST, LIVE, Pass, Whole
from paam.graph.rules.site import Op, Site


def over_the_map(site: Site) -> Op:
    """Pooling, upsampling, padding: all axes but the last ones count as channels."""
    return site.op(Pass()) if _before_the_map(site) else site.whole()


def _before_the_map(site: Site) -> bool:
    """Whether the channel axis precedes the axes that a function works on; their number is part of its name."""
    target: Any = site.node.target
    name = type(site.module).__name__ if site.module is not None else getattr(target, "__name__", str(target))
    dims = re.search(r"[123](?=d$)", name)
    axis, total = site.axis(site.x), len(site.shape(site.x))
    return axis < total - int(dims[0]) if dims else axis < 2


def prelu(site: Site) -> Op:
    """One slope per channel of the second axis, or one for all."""
    layer: Any = site.module
    return site.op(Pass()) if layer.num_parameters == 1 or site.axis(site.x) == 1 else site.whole()


def average_pool(site: Site) -> Op:
    if not _before_the_map(site):
        return site.whole()
    pool = site.module
    padding = site.argument(3, "padding", 0) if pool is None else pool.padding
    counts = site.argument(5, "count_include_pad", True) if pool is None else pool.count_include_pad
    padded = any(padding) if isinstance(padding, tuple | list) else bool(padding)
    rounds_up = site.argument(4, "ceil_mode", False) if pool is None else pool.ceil_mode
    divisor = site.argument(6, "divisor_override", None) if pool is None else getattr(pool, "divisor_override", None)
    # A window that reaches beyond the map sums fewer values, so with a fixed divisor its average differs.
    uneven = (padded and counts) or (divisor is not None and (padded or rounds_up))
    return site.op(Pass(const=LIVE if uneven else CONST))


def reduction(site: Site, call: fx.Node | None = None) -> Op:
    """mean, sum, amax over the map: a constant channel becomes another constant. Over channels, all are read.

    ``call``: the node with the arguments, if it is not the site's own.
    """
    call = call or site.node
    arguments = dataclasses.replace(site, node=call)
    x = arguments.x
    second = 2 if call.target in (torch.norm, "norm") else 1  # a norm's order is the argument before
    dims = arguments.argument(second, "dim", None)
    dims = fx.map_arg(dims, lambda node: site.traced.numbers[node.name])
    if isinstance(dims, bool):  # torch.var(x, False): this is ``unbiased``, not ``dim``
        dims = None
    dims = (dims,) if isinstance(dims, int) else dims
    shape, axis = site.shape(x), site.axis(x)
    reduced = {d % len(shape) for d in dims} if dims else set(range(len(shape)))
    keepdim = len(site.shape()) == len(shape)
    if axis in reduced:
        return site.read_whole(x, axis=axis if keepdim else None)
    # A sum of equal numbers depends on how many there are, and image sizes may differ from the example's.
    const = LIVE if call.target in SUMS else CONST
    return site.op(Pass(const=const), x, axis=axis - (0 if keepdim else sum(d < axis for d in reduced)))


SUMS = (torch.sum, "sum", torch.norm, "norm")


def normalize(site: Site) -> Op:
    """Scales to unit length along an axis, by default the channel axis."""
    dim = site.argument(2, "dim", 1) % len(site.shape(site.x))
    return site.op(Whole(site.width(site.x)) if dim == site.axis(site.x) else Pass(const=LIVE))


def softmax(site: Site) -> Op:
    """A softmax over channels reads all of them."""
    dim = site.module.dim if site.module is not None else site.argument(1, "dim", None)
    if not isinstance(dim, int):
        raise site.refusal("its dim is not given")
    dim %= len(site.shape(site.x))
    # Over the map, the result for a constant depends on the size of the image.
    return site.op(Whole(site.width(site.x)) if dim == site.axis(site.x) else Pass(zero=LIVE, const=LIVE))
