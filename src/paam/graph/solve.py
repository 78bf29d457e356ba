"""Kept filters -> which channels remain physically present at every value, and what that costs.

Three passes over the graph: states forward (what is zero or constant), needs backward (what somebody still reads),
layouts forward (what is present). Linear in the size of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx, nn

from paam.graph.flows import CONST, LIVE, ZERO, Layout, Mix, Needs, States, Whole
from paam.graph.joins import Add, Route
from paam.graph.site import Op
from paam.graph.trace import Traced, attribute

Masks = Mapping[str, Needs]
"""Node name -> True for channels whose gate is open. Nodes without a gate are absent."""


@dataclass(frozen=True, eq=False)
class Settled:
    """One operation after pruning.

    ``maps``: for each input, where its wanted channels stand in the tensor that is there (-1: nowhere), or None
    when that tensor serves as it is. ``constants``: for each input, wanted channels that must be filled with a non-
    zero constant. ``made``: the channels that the operation makes, and ``out`` those of them that are passed on; they
    differ where a layer is called twice. ``folded``: some absent inputs of a convolution or linear layer are non-zero
    constants, which move into its bias or into a column that reads ones.
    """

    op: Op
    maps: tuple[Layout | None, ...]
    constants: tuple[Layout, ...]
    wanted: tuple[Layout, ...]
    made: Layout
    out: Layout
    width: int
    folded: bool
    resized: bool
    """It is given its number of channels by a value that now has another number of them."""

    @property
    def picks(self) -> Layout | None:
        """Where the channels of ``out`` stand in what the operation makes; None when it makes just them.

        A grouped convolution fills up its groups to one length.
        """
        flow = self.op.flow
        places, total = np.arange(len(self.made)), len(self.made)
        if isinstance(flow, Mix) and flow.groups > 1 and not flow.depthwise:
            length, groups = flow.rows_per_group(self.made), flow.active(self.made)
            group_of = self.made // (flow.outputs // flow.groups)
            within = [np.arange((group_of == group).sum()) for group in groups]
            places = np.searchsorted(groups, group_of) * length + np.concatenate([*within, places[:0]])
            total = length * len(groups)
        if len(self.out) == total:
            return None
        return places[np.searchsorted(self.made, self.out)]

    @property
    def offsets(self) -> int:
        """Learned numbers that carry the constants: an addition needs one vector, other operations one per input."""
        if isinstance(self.op.flow, Add):
            return len(self.out) if any(map(len, self.constants)) else 0
        return sum(len(w) for w, c in zip(self.wanted, self.constants, strict=True) if len(c))

    @property
    def rewires(self) -> bool:
        """Whether more happens here than layers that change their size."""
        flow = self.op.flow
        routed = isinstance(flow, Route) and len(self.wanted[0]) < flow.width
        padded = isinstance(flow, Mix) and flow.padded and self.folded
        literal = (self.op.literal and len(self.out) < self.width) or self.resized
        moved = self.picks is not None or any(m is not None for m in self.maps)
        return routed or padded or literal or moved or not len(self.out)


@dataclass(frozen=True, eq=False)
class Solution:
    """The whole graph after pruning, in the order of execution."""

    settled: tuple[Settled, ...]
    states: dict[str, States]

    @property
    def rewired(self) -> bool:
        """Whether the small network needs a graph of its own: something is mapped, or gone, or counted."""
        return any(step.rewires or (step.op.counted and len(step.out) < step.width) for step in self.settled)


def solve(ops: Sequence[Op], masks: Masks) -> Solution:
    """Settle what remains of every value when the gates in ``masks`` are closed where they are False."""
    states: dict[str, States] = {}
    for op in ops:
        state = op.flow.forward([states[node.name] for node in op.inputs])
        if op.name in masks:
            state = np.where(masks[op.name], state, ZERO)
        if op.node.op != "output":
            states[op.name] = state

    needs = {name: np.zeros(len(state), dtype=bool) for name, state in states.items()}
    wanted: dict[Op, Needs] = {}  # channels that somebody needs and that are not constant anyway
    for op in reversed(ops):
        is_output = op.node.op == "output"
        wanted[op] = np.zeros(0, dtype=bool) if is_output else needs[op.name] & (states[op.name] == LIVE)
        inputs = [states[node.name] for node in op.inputs]
        for node, need in zip(op.inputs, op.flow.backward(wanted[op], inputs), strict=True):
            needs[node.name] |= need

    common = _common_channels(ops, states, wanted)
    present: dict[str, Layout] = {}
    settled: list[Settled] = []
    for op in ops:
        if op.shared in common and wanted[op].any():
            rows, columns = common[op.shared]
            held = [np.flatnonzero(columns)] * len(op.inputs)
            plain = [np.where(columns, LIVE, ZERO)] * len(op.inputs)
            layouts, made = op.flow.layout(held, plain, rows, np.zeros_like(rows))
            out = made[wanted[op][made]]
        else:
            opened = masks.get(op.name, np.ones(len(wanted[op]), dtype=bool))
            before = [states[node.name] for node in op.inputs]
            layouts, made = op.flow.layout([present[node.name] for node in op.inputs], before, wanted[op], opened)
            out = made
        steps = [_align(present[n.name], states[n.name], w) for n, w in zip(op.inputs, layouts, strict=True)]
        folded = False
        if isinstance(op.flow, Mix) and op.flow.groups == 1:
            absent = np.ones(op.flow.inputs, dtype=bool)
            absent[layouts[0]] = False
            folded = bool((states[op.inputs[0].name][absent] == CONST).any())
        if op.node.op != "output":
            present[op.name] = out
        maps, constants = tuple(m for m, _ in steps), tuple(c for _, c in steps)
        resized = op.size_of is not None and len(present.get(op.size_of.name, out)) != len(out)
        settled.append(Settled(op, maps, constants, tuple(layouts), made, out, len(wanted[op]), folded, resized))
    return Solution(tuple(settled), states)


def _common_channels(
    ops: Sequence[Op], states: Mapping[str, States], wanted: Mapping[Op, Needs]
) -> dict[str | None, tuple[Needs, Needs]]:
    """For each layer that is called more than once: outputs that any call wants, inputs that in any call are not 0."""
    common: dict[str | None, tuple[Needs, Needs]] = {}
    for op in ops:
        if op.shared is None or isinstance(op.flow, Whole) or not wanted[op].any():
            continue
        read = states[op.inputs[0].name] != ZERO if op.inputs else np.zeros(0, dtype=bool)
        rows, columns = common.get(op.shared, (np.zeros_like(wanted[op]), np.zeros_like(read)))
        common[op.shared] = rows | wanted[op], columns | read
    return common


def _align(present: Layout, states: States, wanted: Layout) -> tuple[Layout | None, Layout]:
    """How a tensor that holds ``present`` becomes one that holds ``wanted``, and what to fill in."""
    if np.array_equal(present, wanted):
        return None, wanted[:0]
    place = np.full(len(states), -1)
    place[present] = np.arange(len(present))
    index = np.where(wanted >= 0, place[wanted], -1)
    missing = wanted[(index < 0) & (wanted >= 0)]
    return index, missing[states[missing] == CONST]


@dataclass(frozen=True)
class Cost:
    """Parameters, and multiply-accumulates of one sample in convolutions and linear layers."""

    params: int
    macs: int


def predicted_cost(traced: Traced, solution: Solution) -> Cost:
    """What the compacted network will cost, without building it."""
    costs = layer_costs(traced, solution).values()
    params = sum(cost.params for cost in costs) + sum(step.offsets for step in solution.settled if len(step.out))
    if not solution.rewired:  # the network keeps its class, and with it the layers that its forward() never calls
        called = {id(p) for step in solution.settled if step.op.module for p in step.op.module.parameters()}
        nodes = (step.op.node for step in solution.settled)
        called |= {id(attribute(traced.module, str(node.target))) for node in nodes if node.op == "get_attr"}
        params += sum(p.numel() for p in traced.model.parameters() if id(p) not in called)
    return Cost(params, sum(cost.macs for cost in costs))


def layer_costs(traced: Traced, solution: Solution) -> dict[str, Cost]:
    """What remains of each layer and parameter, by its name in the model; other operations by their node's."""
    costs: dict[str, Cost] = {}
    for step in solution.settled:
        op = step.op
        if not len(step.out):
            continue
        if isinstance(op.flow, Mix):
            cost = _mix_cost(traced, step, op.flow)
        else:
            macs = _macs(traced, op) * len(step.made) // step.width if step.width else 0
            cost = Cost(_own_parameters(traced, op, step.width, len(step.made)), macs)
        name = str(op.node.target) if op.node.op in ("call_module", "get_attr") else op.name
        before = costs.get(name)  # a layer that is called again is there once, and works twice
        costs[name] = cost if before is None else Cost(cost.params, before.macs + cost.macs)
    return costs


def _macs(traced: Traced, op: Op) -> int:
    """What an operation costs; the first value of a module that returns several stands for the module."""
    source = op.node.args[0] if op.node.op == "call_function" and op.module is not None else op.node
    assert isinstance(source, fx.Node)
    return traced.macs.get(source.name, 0)


def _mix_cost(traced: Traced, step: Settled, flow: Mix) -> Cost:
    module = step.op.module
    assert module is not None
    kernel = math.prod(getattr(module, "kernel_size", (1,)))
    biased = flow.biased or (step.folded and not flow.padded)
    rows = len(step.made)
    if flow.depthwise:
        columns = 1
    elif flow.groups == 1:
        columns = len(step.wanted[0]) + (step.folded and flow.padded)
    else:
        groups = len(flow.active(step.made))
        columns, rows = len(step.wanted[0]) // groups, groups * flow.rows_per_group(step.made)
    weights = rows * columns * kernel
    extras = [p for name, p in module.named_parameters(recurse=False) if name not in ("weight", "bias")]
    extra = sum(p.numel() * rows // flow.outputs if p.shape[:1] == (flow.outputs,) else p.numel() for p in extras)
    spread = step.op.inputs[0].name if flow.transposed else step.op.name
    return Cost(weights + rows * biased + extra, weights * traced.positions(spread, step.op.axis))


def _own_parameters(traced: Traced, op: Op, width: int, present: int) -> int:
    """Learned numbers of an operation that has some for each of its channels, or one for all, or none."""
    if op.node.op == "get_attr":
        value = attribute(traced.module, str(op.node.target))
        return value.numel() * present // width if isinstance(value, nn.Parameter) else 0
    if isinstance(op.flow, Whole) and op.flow.opaque:
        return sum(p.numel() for p in op.module.parameters()) if op.module is not None else 0
    own = op.module.parameters(recurse=False) if op.module is not None else ()
    return sum(present if p.numel() == width else p.numel() for p in own)
