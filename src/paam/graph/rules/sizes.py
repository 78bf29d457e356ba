"""Find what reads a value's number of channels. In a pruned network that number is different.

A view of the value gets the new number (compact.py). Everything else computed from it, such as a condition, a scale or
another size, must use the number of the original network. A network in which that happens cannot keep the code of its
class, which would read the new number.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from paam.graph.record.numbers import expect, parts_of
from paam.graph.rules.site import Op


def decides_by_sizes(graph: fx.Graph, axes: Mapping[fx.Node, int]) -> bool:
    """Whether the network's control flow depends on input sizes. ``axes``: channel axis by node.

    The graph detects a different path at run time; the class's own code would silently take a path that was never
    compared.
    """
    decisions = [node for node in graph.nodes if node.target is expect]
    return any(not _is_of_channels(decision.args[0], axes) for decision in decisions)


def _is_of_channels(asked: Any, axes: Mapping[fx.Node, int]) -> bool:
    """Whether a number is computed from numbers of channels alone."""
    if not isinstance(asked, fx.Node):
        return True
    if asked.target is operator.getitem and isinstance(sizes := asked.args[0], fx.Node) and sizes.target is getattr:
        return axes.get(sizes.args[0]) == asked.args[1]  # type: ignore[arg-type]
    return bool(asked.all_input_nodes) and all(_is_of_channels(node, axes) for node in asked.all_input_nodes)


def is_counted(op: Op, ops: Mapping[fx.Node, Op]) -> bool:
    """Whether the number of channels of an operation's result is read by something other than views."""
    return op.node.op != "output" and any(_counts(user, op, ops) for user in op.node.users)


def _counts(user: fx.Node, op: Op, ops: Mapping[fx.Node, Op]) -> bool:
    """Whether a reader of the value, x.shape or x.numel(), uses its number of channels."""
    if user.op == "call_method" and user.target == "numel":
        return True
    if user.target is getattr and user.args[1] == "shape":  # whose sizes are read one by one (notebook.py)
        return any(size.args[1] == op.axis and _used(size, ops) for size in user.users)
    return False


def _used(number: fx.Node, ops: Mapping[fx.Node, Op]) -> bool:
    # Splitting along the channels has a separate rule, which knows the number of parts.
    return any(reader.target is not parts_of and not _sizes_a_view(reader, number, ops) for reader in number.users)


def _sizes_a_view(reader: fx.Node, size: fx.Node, ops: Mapping[fx.Node, Op]) -> bool:
    """Whether a number is used only as the size of a view along its channel axis."""
    view = ops.get(reader)
    if view is None or not view.sized:
        return False
    sizes = reader.args[1] if len(reader.args) == 2 and isinstance(reader.args[1], tuple | list) else reader.args[1:]
    assert isinstance(sizes, tuple | list)
    return len(sizes) == 1 or [place for place, given in enumerate(sizes) if given is size] == [view.axis]
