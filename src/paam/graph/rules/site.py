"""One operation of the graph: what a channel rule may look at, and what it returns."""

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
    """The operation is given the number of channels, as in x.view(-1, 512) or x.view(n, y.shape[1])."""
    literal: bool = False
    """It is given as a number that the model's code holds, or computes from others."""
    size_of: fx.Node | None = None
    """It is given as the number of channels of this value."""
    counted: bool = False
    """Something else than a view of it reads how many channels the value has."""
    shared: str | None = None
    """The layer or parameter that this operation uses, where others use it too: all of them must cut it alike."""
    stretched: frozenset[fx.Node] = frozenset()
    """Inputs along whose channels' axis the map lies, too: no index map may stand there (stretch.py)."""

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
    """A value in which channels lie across several axes, as between the two views of a channel shuffle.

    ``numbers`` and ``places``: for every element, of which channel of ``origin`` it is, and where in that channel it
    stood; of the value's own shape. ``first``: the node at which channels spread.
    """

    origin: fx.Node
    numbers: Tensor
    places: Tensor
    first: fx.Node


class TangleError(Exception):
    """An operation reads channels that lie across several axes: they must be made whole where they spread."""

    def __init__(self, first: fx.Node) -> None:
        super().__init__(first.name)
        self.first = first


@dataclass(frozen=True)
class Site:
    """What a rule may look at: the node, its module, the trace, and the channel axes and tangles found so far."""

    node: fx.Node
    module: nn.Module | None
    traced: Traced
    axes: dict[str, int]
    tangles: dict[str, Tangle]
    spread: set[fx.Node]
    """Reshapings whose input must be whole, since something reads what they make of it."""
    shared: frozenset[str]
    """Layers and parameters that hold a tensor in common with others: they are not cut."""
    tried: dict[Any, Any]
    """What was found out about somebody's own layers by trying."""

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
        """An argument by its place or its name, or by the name that numpy has for it."""
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
        """``size``: the number of channels that the operation is given, or a node that computes it, or -1."""
        inputs = inputs or (self.x,)
        axis = self.axis(inputs[0]) if axis is None else axis
        sized = isinstance(size, fx.Node) or size != -1
        source = size_of(size) if isinstance(size, fx.Node) else None
        return Op(self.node, flow, inputs, axis, self.module, sized, sized and source is None, source)

    def whole(self, x: fx.Node | None = None) -> Op:
        """An operation that takes our channels for something else, positions, say: it reads them all, and is not cut.

        Nothing of the result is ever removed, so that any axis may count as its channels'.
        """
        x = x or self.x
        same = len(self.shape()) == len(self.shape(x))
        return self.read_whole(x, opaque=True, axis=self.axis(x) if same else None)

    def read_whole(self, *inputs: fx.Node, opaque: bool = False, axis: int | None = None) -> Op:
        """An operation that reads whole values. ``axis``: what had better count as the channels' axis of its result."""
        axis = self.free_axis(axis)
        return self.op(Whole(self.shape()[axis] if self.shape() else 1, opaque), *inputs, axis=axis)

    def free_axis(self, wish: int | None = None) -> int:
        """An axis of a result of which nothing is ever removed: any may count as its channels'.

        Best is that which is read next; it must not be the batch's, which has another length at every call.
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
"""What torch accepts for the names of arguments, after numpy."""


def _own_line(node: fx.Node) -> str:
    """The line of the model's own code that led to a node."""
    place = node.meta.get("line")
    return linecache.getline(*place).strip() if place else ""
