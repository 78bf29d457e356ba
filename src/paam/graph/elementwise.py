"""Channel rules of operations without weights: one channel in, the same channel out; and sums of several."""

from __future__ import annotations

import torch
from torch import fx

from paam.graph.flows import CONST, LIVE, ZERO, Add, Pass
from paam.graph.site import Op, Site


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
