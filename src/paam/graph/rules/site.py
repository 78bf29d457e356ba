"""One operation of the graph: the inputs and the result of a channel rule."""

from __future__ import annotations

import linecache
import operator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from paam.errors import GraphError
from paam.graph.fingerprint import function_name
from paam.graph.flows import Flow, Whole
from paam.graph.record.own_lines import leave_alone
from paam.graph.record.recording import WITHIN, Shape
from paam.graph.trace import Traced


@dataclass(frozen=True, eq=False)
class Op:
    """One operation with its flow. ``inputs``: the nodes whose channels it reads, in the order the flow expects."""

    node: fx.Node
    flow: Flow
    inputs: tuple[fx.Node, ...]
    axis: int
    module: nn.Module | None = None
    sized: bool = False
    """The operation takes the number of channels as an argument: x.view(-1, 512) or x.view(n, y.shape[1])."""
    literal: bool = False
    """That argument is a literal in the model's code, or computed from others."""
    size_of: fx.Node | None = None
    """That argument is the number of channels of this value."""
    counted: bool = False
    """The number of channels of the value is read by something other than a view of it."""
    shared: str | None = None
    """The layer or parameter that this operation shares with others: all of them must cut it the same way."""
    stretched: frozenset[fx.Node] = frozenset()
    """Inputs whose channel axis also contains the map: no index map is possible there (stretch.py)."""

    @property
    def name(self) -> str:
        return self.node.name


def size_of(size: fx.Node) -> fx.Node | None:
    """The tensor whose shape, or one size of it, a node reads: x of x.shape and x.shape[1] or x.size(1)."""
    if size.target is operator.getitem and isinstance(size.args[0], fx.Node):
        size = size.args[0]
    reads = size.target is getattr and size.args[1] == "shape"
    return size.args[0] if reads and isinstance(size.args[0], fx.Node) else None


@dataclass(frozen=True)
class Tangle:
    """A value whose channels span several axes, as between the two views of a channel shuffle.

    ``numbers`` and ``places`` have the value's shape: for every element, its channel of ``origin``, and its position in
    that channel. ``first``: the node where channels first span several axes.
    """

    origin: fx.Node
    numbers: Tensor
    places: Tensor
    first: fx.Node


class TangleError(Exception):
    """An operation reads channels that span several axes: the value must be complete where they first do."""

    def __init__(self, first: fx.Node) -> None:
        super().__init__(first.name)
        self.first = first


@dataclass(frozen=True)
class Site:
    """The context of a rule: the node, its module, the trace, and the channel axes and tangles found so far."""

    node: fx.Node
    module: nn.Module | None
    traced: Traced
    axes: dict[str, int]
    tangles: dict[str, Tangle]
    spread: set[fx.Node]
    """Reshapes whose input must be complete, because their output is read."""
    shared: frozenset[str]
    """Layers and parameters that share a tensor with others: they are not cut."""
    tried: dict[Any, Any]
    """Results of trials of custom layers."""

    @property
    def shapes(self) -> dict[str, Shape]:
        return self.traced.shapes

    @property
    def x(self) -> fx.Node:
        return self.tensor(0)

    def tensor(self, position: int) -> fx.Node:
        by_name = self.node.kwargs.get("input") if position == 0 else None
        node = self.node.args[position] if len(self.node.args) > position else by_name
        if not isinstance(node, fx.Node) or node.name not in self.shapes:
            raise self.refusal(f"its argument {position} is not a tensor computed by the model")
        return node

    def argument(self, position: int, name: str, default: Any) -> Any:
        """An argument by position or name, or by numpy's name for it."""
        args, kwargs = self.node.args, self.node.kwargs
        return args[position] if len(args) > position else kwargs.get(name, kwargs.get(ALIASES.get(name, ""), default))

    def shape(self, node: fx.Node | None = None) -> Shape:
        return self.shapes[(node or self.node).name]

    def axis(self, node: fx.Node) -> int:
        if node.name in self.tangles:
            raise TangleError(self.tangles[node.name].first)
        return self.axes[node.name]

    def width(self, node: fx.Node) -> int:
        return self.shape(node)[self.axis(node)] if self.shape(node) else 1

    def op(self, flow: Flow, *inputs: fx.Node, axis: int | None = None, size: Any = -1) -> Op:
        """``size``: the number of channels passed to the operation, or a node that computes it, or -1."""
        inputs = inputs or (self.x,)
        axis = self.axis(inputs[0]) if axis is None else axis
        sized = isinstance(size, fx.Node) or size != -1
        source = size_of(size) if isinstance(size, fx.Node) else None
        return Op(self.node, flow, inputs, axis, self.module, sized, sized and source is None, source)

    def whole(self, x: fx.Node | None = None) -> Op:
        """An operation that uses the channel axis as something else, such as positions: it reads all, and is not cut.

        Nothing of the result is ever removed, so that any axis can be its channel axis.
        """
        x = x or self.x
        same = len(self.shape()) == len(self.shape(x))
        return self.read_whole(x, opaque=True, axis=self.axis(x) if same else None)

    def read_whole(self, *inputs: fx.Node, opaque: bool = False, axis: int | None = None) -> Op:
        """An operation that reads complete values. ``axis``: preferred channel axis of its result."""
        axis = self.free_axis(axis)
        return self.op(Whole(self.shape()[axis] if self.shape() else 1, opaque), *inputs, axis=axis)

    def free_axis(self, wish: int | None = None) -> int:
        """A channel axis for a result that is never cut: any axis will do.

        Prefer the one that is read next; never the batch axis, whose length differs from call to call.
        """
        shape, growth = self.shape(), self.traced.growth(self.node)
        last = any(_reads_last(self.traced, user) for user in self.node.users)
        wishes = [wish] if wish is not None else []
        order = [*wishes, *([len(shape) - 1] if last else [1]), *range(len(shape))]
        return next((axis for axis in order if axis < len(shape) and not growth[axis]), 0)

    def refusal(self, why: str) -> GraphError:
        """The error for an operation that the rules do not cover: what, where, what to do."""
        what = type(self.module).__name__ if self.module is not None else function_name(self.node.target)
        where = f"'{self.node.target}'" if self.node.op == "call_module" else f"node '{self.node.name}'"
        owner = str(self.node.target) if self.node.op == "call_module" else self.node.meta.get(WITHIN, "")
        code = f" (`{line}`)" if (line := _own_line(self.node)) and self.node.op != "call_module" else ""
        return GraphError(
            f"paam does not know how channels flow through {what} at {where}{code}: {why}."
            " Replace that operation, or add a rule for it in paam/graph/rules.py."
            f"{leave_alone(owner)}"
        )


def _reads_last(traced: Traced, user: fx.Node) -> bool:
    return user.op == "call_module" and isinstance(traced.modules[str(user.target)], LAST_AXIS)


LAST_AXIS = (nn.Linear, nn.LayerNorm)
ALIASES = {"dim": "axis", "keepdim": "keepdims", "other": "x2", "input": "x"}
"""numpy's argument names that torch accepts too."""


def _own_line(node: fx.Node) -> str:
    """The line of the model's own code that led to a node."""
    place = node.meta.get("line")
    return linecache.getline(*place).strip() if place else ""
