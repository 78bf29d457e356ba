"""Sizes that a graph reads or takes as arguments, when some values have fewer channels."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping

from torch import fx

from paam.graph.channel_map import whole_shape
from paam.graph.record.recording import Shape
from paam.graph.rules.elementwise import CONVOLVE


def keep_sizes(
    graph: fx.Graph,
    nodes: Mapping[fx.Node, fx.Node],
    axes: Mapping[fx.Node, int],
    shapes: Mapping[str, Shape],
    widths: Mapping[fx.Node, int],
) -> None:
    """Make all readers of a value's number of channels read that of the original network.

    What is computed from it, such as a view's other sizes or a scale, is then unchanged. Views of the value itself
    already have the new number. ``nodes``: original node -> node of the edited graph. ``widths``: remaining channels.
    """
    for original, node in nodes.items():
        is_number = node.op == "call_method" and node.target == "numel"
        if not (is_number or (node.target is getattr and node.args[1] == "shape")):
            continue
        source = original.args[0]
        if not isinstance(source, fx.Node) or source not in axes:
            continue
        axis = axes[source]
        whole = shapes[source.name][axis]
        if widths[source] == whole:
            continue
        with graph.inserting_before(node):
            sizes = graph.call_function(whole_shape, (node.args[0], axis, whole))
            if is_number:
                sizes = graph.call_function(math.prod, (sizes,))
        node.replace_all_uses_with(sizes)


def rewrite_size(node: fx.Node, axis: int, size: int) -> None:
    """x.view(-1, 512) -> x.view(-1, 300); likewise for sizes read from another tensor, and for groups = 512."""
    if node.target in CONVOLVE:
        node.args, node.kwargs = node.args[:6], {**node.kwargs, "groups": size}
        return
    first, *sizes = node.args
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        given = sizes[0]
        if isinstance(given, fx.Node):
            dims = len(node.meta["shape"])
            with node.graph.inserting_before(node):
                sizes = [node.graph.call_function(operator.getitem, (given, place)) for place in range(dims)]
        else:
            sizes = list(given)  # type: ignore[arg-type]
    sizes[axis] = size
    node.args = (first, *sizes) if node.op == "call_method" else (first, tuple(sizes))
