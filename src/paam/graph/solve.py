"""Kept filters -> which channels remain physically present at every value, and what that costs.

Three passes over the graph: states forward (what is zero or constant), needs backward (what is still read), layouts
forward (what is present). Linear in the size of the graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized

from paam.graph.copies import computed_weights
from paam.graph.cost import batch_of
from paam.graph.flows import CONST, LIVE, ZERO, Layout, Mix, Needs, Pass, States, Whole
from paam.graph.joins import Add, Part, Route
from paam.graph.record.ways import Ways
from paam.graph.rules.site import Op
from paam.graph.rules.sizes import decides_by_sizes
from paam.graph.rules.stretch import filled_before
from paam.graph.trace import Traced

Masks = Mapping[str, Needs]
"""Node name -> True for channels whose gate is open. Nodes without a gate are absent."""


@dataclass(frozen=True, eq=False)
class Settled:
    """One operation after pruning.

    ``maps``: for each input, the positions of its wanted channels in the tensor that is present (-1: absent), or None
    if that tensor can be used directly. ``constants``: for each input, wanted channels that must be filled with a
    non-zero constant. ``made``: the channels that the operation makes; ``out``: those of them that are passed on. They
    differ if a layer is called twice. ``folded``: some absent inputs of a convolution or linear layer are non-zero
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
    """Its number of channels is read from a value that now has a different number."""

    @property
    def picks(self) -> Layout | None:
        """Positions of ``out`` in what the operation makes; None if it makes exactly those.

        A grouped convolution pads its groups to equal length.
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
    def reader(self) -> fx.Node:
        """The node that reads the inputs: the operation's own, or, for one of several outputs, the call of them all."""
        node = self.op.node
        while node.target is operator.getitem and not any(x in node.all_input_nodes for x in self.op.inputs):
            assert isinstance(node.args[0], fx.Node)
            node = node.args[0]
        return node

    @property
    def picked(self) -> bool:
        """Whether an index map replaces an operation that picks channels."""
        flow = self.op.flow
        if not isinstance(flow, Route) or len(self.wanted[0]) == flow.width:
            return False
        return not (isinstance(flow, Part) and len(self.wanted[0]) == flow.parts * len(self.out))

    @property
    def offsets(self) -> int:
        """Learned parameters for the constants: an addition needs one vector, other operations one per input."""
        if isinstance(self.op.flow, Add):
            return len(self.out) if any(map(len, self.constants)) else 0
        # A value that is read twice gets its constants once.
        given = {node: len(w) for node, w, c in zip(self.op.inputs, self.wanted, self.constants, strict=True) if len(c)}
        return sum(given.values())

    @property
    def smaller(self) -> bool:
        """Whether it has fewer channels than before, or reads fewer."""
        flow = self.op.flow
        reads_less = isinstance(flow, Mix) and not flow.depthwise and len(self.wanted[0]) < flow.inputs
        return len(self.out) < self.width or reads_less

    @property
    def rewires(self) -> bool:
        """Whether pruning does more here than change layer sizes."""
        flow = self.op.flow
        padded = isinstance(flow, Mix) and flow.padded and self.folded
        literal = (self.op.literal and len(self.out) < self.width) or self.resized
        moved = self.picks is not None or any(m is not None for m in self.maps)
        return self.picked or padded or literal or moved or not len(self.out)


@dataclass(frozen=True, eq=False)
class Solution:
    """The whole graph after pruning, in execution order."""

    settled: tuple[Settled, ...]
    states: dict[str, States]

    @property
    def rewired(self) -> bool:
        """Whether the connections between layers change: a value is mapped, removed or counted."""
        return any(step.rewires or (step.op.counted and step.smaller) for step in self.settled)

    def needs_graph(self, traced: Traced, keep_class: bool) -> bool:
        """Whether the small network must be a rewritten graph; ``keep_class``: only if it is unavoidable."""
        if self.rewired or keep_class or not any(step.smaller for step in self.settled):
            return self.rewired
        return decides_by_sizes(traced.graph, {step.op.node: step.op.axis for step in self.settled})


def solve(ops: Sequence[Op], masks: Masks) -> Solution:
    """Determine what remains of every value when the gates in ``masks`` are closed where they are False."""
    while True:
        solution = _solved(ops, masks)
        if (others := filled_before(solution.settled)) is None:
            return solution
        ops = others


def _solved(ops: Sequence[Op], masks: Masks) -> Solution:
    states: dict[str, States] = {}
    for op in ops:
        state = op.flow.forward([states[node.name] for node in op.inputs])
        if op.name in masks:
            state = np.where(masks[op.name], state, ZERO)
        if op.node.op != "output":
            states[op.name] = state

    needs = {name: np.zeros(len(state), dtype=bool) for name, state in states.items()}
    wanted: dict[Op, Needs] = {}  # channels that are read and are not constant
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
        elif _passes_unread(op, needs):
            layouts, made = [present[op.inputs[0].name]], present[op.inputs[0].name]
            out = made
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


def _passes_unread(op: Op, needs: Mapping[str, Needs]) -> bool:
    """Whether the output of an operation is not read, except perhaps for its shape: it passes what is present."""
    plain = isinstance(op.flow, Pass) and op.module is None and not op.sized
    return plain and op.node.op != "output" and not needs[op.name].any()


def _common_channels(
    ops: Sequence[Op], states: Mapping[str, States], wanted: Mapping[Op, Needs]
) -> dict[str | None, tuple[Needs, Needs]]:
    """For each layer that is called more than once: outputs wanted by any call, inputs that are non-zero in any."""
    common: dict[str | None, tuple[Needs, Needs]] = {}
    for op in ops:
        if op.shared is None or isinstance(op.flow, Whole) or not wanted[op].any():
            continue
        read = states[op.inputs[0].name] != ZERO if op.inputs else np.zeros(0, dtype=bool)
        rows, columns = common.get(op.shared, (np.zeros_like(wanted[op]), np.zeros_like(read)))
        common[op.shared] = rows | wanted[op], columns | read
    return common


def _align(present: Layout, states: States, wanted: Layout) -> tuple[Layout | None, Layout]:
    """How to turn a tensor with channels ``present`` into one with channels ``wanted``, and what to fill in."""
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


def predicted_cost(traced: Traced, solution: Solution, keep_class: bool = False) -> Cost:
    """The compacted network's cost, without building it."""
    costs = _batch_costs(traced, solution).values()
    params = sum(cost.params for cost in costs) + sum(_offsets(solution))
    if not solution.needs_graph(traced, keep_class):
        # The network keeps its class, including layers that its forward() never calls.
        called = {id(p) for step in solution.settled if step.op.module for p in step.op.module.parameters()}
        nodes = (step.op.node for step in solution.settled)
        called |= {id(traced.tensor(str(node.target))) for node in nodes if node.op == "get_attr"}
        params += sum(p.numel() for p in traced.model.parameters() if id(p) not in called)
    return Cost(params, sum(cost.macs for cost in costs) // batch_of(traced.examples))


def _offsets(solution: Solution) -> Iterator[int]:
    """Learned parameters for constants. Several outputs of one call share its inputs' constants, counted once."""
    given = set()
    for step in solution.settled:
        call = (step.reader, tuple(map(bytes, step.wanted)))
        if len(step.out) and (step.reader is step.op.node or call not in given):
            given.add(call)
            yield step.offsets


def layer_costs(traced: Traced, solution: Solution) -> dict[str, Cost]:
    """Remaining cost of each layer and parameter, by its name in the model; of other operations by node name."""
    batch = batch_of(traced.examples)
    return {name: Cost(cost.params, cost.macs // batch) for name, cost in _batch_costs(traced, solution).items()}


def _batch_costs(traced: Traced, solution: Solution) -> dict[str, Cost]:
    """Like layer_costs, with the multiply-accumulates of the example's whole batch."""
    costs: dict[str, Cost] = {}
    counted: set[int] = set()  # tensors shared by several layers count once
    evaluated = _evaluated(traced, solution)
    for step in solution.settled:
        op = step.op
        if not len(step.out):
            continue
        if isinstance(op.flow, Mix):
            cost = _mix_cost(traced, step, op.flow)
        else:
            macs = _macs(traced, op) * len(step.made) // step.width if step.width else 0
            cost = Cost(_own_parameters(traced, op, step.width, len(step.made), counted), macs)
        if op.node not in evaluated:
            cost = Cost(cost.params, 0)
        name = str(op.node.target) if op.node.op in ("call_module", "get_attr") else op.name
        before = costs.get(name)  # a layer that is called again has its parameters once and its MACs twice
        costs[name] = cost if before is None else Cost(max(before.params, cost.params), before.macs + cost.macs)
    return costs


def _evaluated(traced: Traced, solution: Solution) -> set[fx.Node]:
    """What the small network computes in evaluation mode: everything that its output there depends on."""
    answer = traced.graph.output_node().args[0]
    if not isinstance(answer, Ways):
        return {step.op.node for step in solution.settled}
    needed: set[fx.Node] = set()
    fx.map_arg(answer.evaluation, needed.add)
    for step in reversed(solution.settled):
        if step.op.node in needed:
            needed.update(node for node, wanted in zip(step.op.inputs, step.wanted, strict=True) if len(wanted))
    return needed


def _macs(traced: Traced, op: Op) -> int:
    """MACs of an operation; the first output of a module that returns several has the MACs of the module."""
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
    spread = step.op.inputs[0] if flow.transposed else step.op.node
    return Cost(weights + rows * biased + extra, weights * traced.positions(spread, step.op.axis))


def _own_parameters(traced: Traced, op: Op, width: int, present: int, counted: set[int]) -> int:
    """Parameters of an operation that has one per channel, one for all channels, or none."""

    def fresh(parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
        for parameter in parameters:
            if id(parameter) not in counted:
                counted.add(id(parameter))
                yield parameter

    if op.node.op == "get_attr":
        value = traced.tensor(str(op.node.target))
        held = [value] if isinstance(value, nn.Parameter) else []
        return sum(p.numel() * present // width for p in fresh(held))
    if isinstance(op.flow, Whole) and op.flow.opaque:
        return _written_out(op.module) + sum(
            p.numel() for p in fresh(op.module.parameters() if op.module is not None else ())
        )
    own = op.module.parameters(recurse=False) if op.module is not None else ()
    return sum(present if p.numel() == width else p.numel() for p in own)


def _written_out(module: nn.Module | None) -> int:
    """By how many parameters explicit weights exceed the parametrizations that they are computed from."""
    more = 0
    for part in module.modules() if module is not None else ():
        if is_parametrized(part):
            held: Iterable[nn.Parameter] = part.get_submodule("parametrizations").parameters()
            more += sum(weight.numel() for weight in computed_weights(part).values()) - sum(p.numel() for p in held)
    return more
