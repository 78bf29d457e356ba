"""Kept filters -> the smaller network, equivalent to the gated one with binary gates.

Layers are cut to the remaining channels. Where adjacent layers have different channels, a ChannelMap (index map) is
inserted between them. The constant contribution of a removed channel is measured on the gated network, run once on
the example input, and goes into the next bias. A network that needs no map keeps its class; otherwise it becomes a
RewiredModel whose layers keep their names.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from paam.errors import GraphError
from paam.graph.channel_map import ChannelMap, ChannelOffset, NoChannels, OnesChannel
from paam.graph.checks.small_network import checked
from paam.graph.constants import Shapes, Values, find_constants
from paam.graph.copies import light_copy, tensors_of, write_out_weights
from paam.graph.flows import Layout, Mix, Pass
from paam.graph.joins import Add, Concat, Stored
from paam.graph.record.recording import DTYPE
from paam.graph.resize import keep_sizes, rewrite_size
from paam.graph.rewired import NEVER_TRAINED, connected, drop_unused
from paam.graph.rules.site import Op
from paam.graph.runner import lend_constants
from paam.graph.shrink import shrink_mix, shrink_per_channel, shrink_stored
from paam.graph.solve import Masks, Settled, Solution, solve
from paam.graph.trace import BATCH, Traced

MAPS = "paam_maps"
"""Submodule with the index maps of a compacted network."""


def compact(
    traced: Traced, ops: Sequence[Op], masks: Masks, *, check: bool = True, keep_class: bool = False
) -> nn.Module:
    """A smaller copy of the traced model, with its weights; the model itself is not changed.

    ``check``: compare the two on other weights and another batch size first, and raise an error if they differ.
    """
    solution = solve(ops, masks)
    if keep_class and solution.rewired:
        emptied = _emptied(solution)
        why = f"nothing is left at '{emptied}'" if emptied else "its layers would need index maps"
        raise GraphError(
            f"{type(traced.model).__name__} cannot keep its class with this plan: {why}; keep at least one filter of"
            " every group, as many in each part of a grouped convolution, and tie the streams (streams='tied')."
        )
    rewired = solution.needs_graph(traced, keep_class)
    if check:
        rewired = checked(traced, solution, masks, build, keep_class)
    return build(traced, solution, masks).finish(rewired)


def _emptied(solution: Solution) -> str:
    return next((str(step.op.node.target) for step in solution.settled if step.width and not len(step.out)), "")


def build(traced: Traced, solution: Solution, masks: Masks, shapes: Shapes | None = None) -> Builder:
    """Build the small network's layers and graph. ``shapes``: of all values, if constants come from other map sizes."""
    values = find_constants(traced, solution, masks, shapes)
    builder = Builder(traced, {step.op.node: step.op.axis for step in solution.settled}, values)
    for step in solution.settled:
        builder.place(step)
    return builder


class Builder:
    """Edits a copy of the graph, and a copy of the model's layers, operation by operation."""

    def __init__(self, traced: Traced, axes: dict[fx.Node, int], values: Values) -> None:
        self.traced = traced
        self.values = values
        # A copy that shares the tensors: most are cut anyway; the others are copied at the end.
        self.shared = {id(tensor) for tensor in tensors_of(traced.model.modules())}
        self.root = light_copy(traced.model)
        write_out_weights(self.root)
        self.modules = dict(self.root.named_modules(remove_duplicate=False))
        self.constants = traced.constants
        lend_constants(traced, self.root)
        self.name = type(traced.model).__name__
        self.graph = fx.Graph()
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.graph.output(self.graph.graph_copy(traced.graph, self.nodes))
        self.output = next(iter(reversed(self.graph.nodes)))
        self.device = tree_leaves(traced.examples)[0].device
        floats = (p.dtype for p in traced.model.parameters() if p.is_floating_point())
        self.dtype = next(floats, torch.get_default_dtype())
        self.axes = axes
        self.shapes = traced.shapes
        self.maps = self.root.get_submodule(MAPS) if hasattr(self.root, MAPS) else nn.Module()
        self.given: dict[fx.Node, dict[fx.Node, fx.Node]] = {}  # by reader: original value -> the node it reads now
        # Calls that return several values: one call per combination of channels that their parts need.
        self.calls: dict[fx.Node, dict[tuple[bytes, ...], fx.Node]] = {}
        self.shrunk: set[str | None] = set()  # layers called several times that have been cut already
        self.gone: set[fx.Node] = set()
        self.widths: dict[fx.Node, int] = {}  # channels physically present, by original node

    def place(self, step: Settled) -> None:
        op = step.op
        self.widths[op.node] = len(step.out)
        node = self.output if op.node.op == "output" else self.nodes[op.node]
        if not len(step.out):
            self.gone.add(node)
        elif isinstance(op.flow, Add):
            self._place_add(step, node)
        elif isinstance(op.flow, Concat):
            mixed = _has_other_types(op)  # then empty inputs count too: they affect the result's dtype
            present = [i for i, wanted in enumerate(step.wanted) if len(wanted) or mixed]
            node.args, node.kwargs = ([self._mapped(step, i, node) for i in present], op.axis), {}
        elif step.picked:
            self._replace(op, self._mapped(step, 0, node))
        else:
            self._feed(step, node)
            if op.sized and len(step.out) < step.width:
                node.meta["shape"] = self.shapes[op.name]
                rewrite_size(node, op.axis, len(step.out))
            if op.shared is None or op.shared not in self.shrunk:
                self._shrink(step, node)
            self.shrunk.add(op.shared)
            if (places := step.picks) is not None:
                self._append(step, places, node)

    def _feed(self, step: Settled, node: fx.Node) -> None:
        """Connect an operation to the channels that it reads.

        For one of several outputs, as in (values, indices) of a maximum, the reader is the call that makes them all.
        """
        reader = node if step.reader is step.op.node else self._call_of(step, node)
        given = self.given.setdefault(reader, {})
        for position, source in enumerate(step.op.inputs):
            if source not in given:
                given[source] = self._mapped(step, position, reader)

        def stand_in(original: fx.Node) -> fx.Node:
            return given.get(original, self.nodes[original])

        # Two values may have become one node, such as a shuffle whose map is omitted: the arguments tell them apart.
        reader.args = fx.map_arg(step.reader.args, stand_in)
        reader.kwargs = fx.map_arg(step.reader.kwargs, stand_in)

    def _call_of(self, step: Settled, node: fx.Node) -> fx.Node:
        """The call that makes this part. A part that needs different channels from earlier ones gets its own call."""
        first = self.nodes[step.reader]
        calls = self.calls.setdefault(step.reader, {})
        key = tuple(layout.tobytes() for layout in step.wanted)
        if key not in calls:
            calls[key] = first
            if len(calls) > 1:
                with self.graph.inserting_before(node):
                    calls[key] = self.graph.node_copy(step.reader, self.nodes.__getitem__)
        if calls[key] is not first:
            assert node.args[0] is first
            node.replace_input_with(first, calls[key])
        return calls[key]

    def _shrink(self, step: Settled, node: fx.Node) -> None:
        op = step.op
        if isinstance(op.flow, Mix):
            self._shrink_mix(step, op.flow, node)
        elif isinstance(op.flow, Stored):
            shrink_stored(self.root, str(op.node.target), op.axis, step.made)
        elif isinstance(op.flow, Pass) and op.module is not None:
            shrink_per_channel(self.modules[str(op.node.target)], step.width, step.made)

    def finish(self, rewired: bool) -> nn.Module:
        self._own_tensors()
        if not rewired:
            for name in self.constants:
                self.root._buffers.pop(name, None)
            return self.root
        for module in self.root.modules():
            if getattr(module, "inplace", False):
                module.inplace = False  # type: ignore[assignment]
        keep_sizes(self.graph, self.nodes, self.axes, self.shapes, self.widths)
        for node in self.graph.nodes:
            if node.op == "call_method" and node.target == "view" and not isinstance(node.args[-1], torch.dtype):
                node.target = "reshape"  # an index map may have changed the memory layout
        drop_unused(self.graph)
        for node in [node for node in reversed(self.graph.nodes) if node in self.gone]:
            self._leave_shape(node)
        drop_unused(self.graph)  # inputs of removed nodes: views between which channels were moved
        self.root.add_module(MAPS, self.maps)
        # The module keeps only what the remaining graph reads.
        small = connected(self.root, self.graph, self.name)
        small.meta[NEVER_TRAINED] = self.traced.never_trained
        return small.train(self.root.training)

    def _own_tensors(self) -> None:
        """Copy every tensor that is still shared with the original model."""
        copies: dict[int, Tensor] = {}
        for module in self.root.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if id(tensor) in self.shared:
                        assert tensor is not None
                        held[name] = copies.setdefault(id(tensor), copy.deepcopy(tensor))  # type: ignore[assignment]

    def _mapped(self, step: Settled, position: int, before: fx.Node) -> fx.Node:
        """The node that provides input ``position`` with the channels it must hold."""
        source = step.op.inputs[position]
        index, constants = step.maps[position], step.constants[position]
        if index is None:
            return self._source(source, before)
        offset = None
        if len(constants):
            offset = _spread(self.values[source.name], constants, step.wanted[position])
        return self._rewire(self._source(source, before), before, source, index, offset)

    def _rewire(
        self, node: fx.Node, before: fx.Node, source: fx.Node, index: Layout | None, offset: Tensor | None
    ) -> fx.Node:
        """The node after an index map and an offset, where needed."""
        if index is not None:
            node = self._insert(ChannelMap(index.tolist(), self.widths[source], self.axes[source]), node, before)
        return node if offset is None else self._insert(ChannelOffset(offset, self.axes[source]), node, before)

    def _place_add(self, step: Settled, node: fx.Node) -> None:
        offset: Tensor | None = None
        for source, constants in zip(step.op.inputs, step.constants, strict=True):
            if len(constants):
                part = _spread(self.values[source.name], constants, step.out)
                offset = part if offset is None else offset + part
        operands = []
        needed = _has_other_types(step.op) or self._may_stretch(step.op)
        for source, index in zip(step.op.inputs, step.maps, strict=True):
            if index is not None and (index < 0).all() and not needed:
                continue
            operands.append(self._rewire(self._source(source, node), node, source, index, offset))
            offset = None  # the sum needs it only once
        if len(operands) == 1:
            self._replace(step.op, operands[0])
        else:
            node.args, node.kwargs = tuple(operands), {}

    def _may_stretch(self, op: Op) -> bool:
        """Whether one term may be one number per channel, and another a map that is 1x1 only for the example."""
        return any(size == 1 for place, size in enumerate(self.shapes[op.name]) if place not in (BATCH, op.axis))

    def _source(self, original: fx.Node, before: fx.Node) -> fx.Node:
        """The small network's node for a value; an empty tensor of the right shape if all its channels are removed."""
        if (node := self.nodes[original]) not in self.gone:
            return node
        source = next(node for node in self.graph.nodes if node.op == "placeholder")
        held = original.meta.get(DTYPE, self.dtype)
        # A value with the images' dtype uses the network's dtype, which may be changed later.
        example = tree_leaves(self.traced.examples)[0].dtype
        dtype = self.dtype if held.is_floating_point and held == example else held
        shape, growth = self.shapes[original.name], self.traced.growth(original)
        blank = NoChannels(shape, self.axes[original], self.shapes[source.name], dtype, growth)
        return self._insert(blank, source, before)

    def _leave_shape(self, node: fx.Node) -> None:
        """If the size of a removed value is still read, replace the value with an empty tensor of that size."""
        for reader in [reader for reader in node.users if not reader.users and reader.op != "output"]:
            self.graph.erase_node(reader)  # e.g. a split whose parts are gone
        if node.users:
            original = next(original for original, copied in self.nodes.items() if copied is node)
            node.replace_all_uses_with(self._source(original, node))
        self.graph.erase_node(node)

    def _shrink_mix(self, step: Settled, flow: Mix, node: fx.Node) -> None:
        layer: Any = self.modules[str(node.target)]
        constant = None
        if step.folded:
            values = self.values[step.op.inputs[0].name].double().clone()
            values[torch.from_numpy(step.wanted[0])] = 0
            whole = layer.weight.detach().transpose(0, 1) if flow.transposed else layer.weight.detach()
            rows = whole[torch.from_numpy(step.made)].double()
            constant = torch.einsum("oc...,c->o...", rows, values).unsqueeze(1)
            if flow.padded:
                node.replace_input_with(node.args[0], self._insert(OnesChannel(step.op.axis), node.args[0], node))  # type: ignore[arg-type]
        shrink_mix(layer, flow, step.made, step.wanted[0], constant)

    def _append(self, step: Settled, places: Layout, node: fx.Node) -> None:
        """Pass only some of the channels that an operation makes to all of its readers."""
        flow, total = step.op.flow, len(step.made)
        if isinstance(flow, Mix) and flow.groups > 1 and not flow.depthwise:
            total = flow.rows_per_group(step.made) * len(flow.active(step.made))
        readers = list(node.users)
        behind = self._insert(ChannelMap(places.tolist(), total, step.op.axis), node, node.next)
        for reader in readers:
            reader.replace_input_with(node, behind)
        self.nodes[step.op.node] = behind

    def _insert(self, layer: nn.Module, source: fx.Node, before: fx.Node) -> fx.Node:
        names = itertools.chain([before.name], (f"{before.name}_{number}" for number in itertools.count(1)))
        name = next(name for name in names if not hasattr(self.maps, name))
        self.maps.add_module(name, layer.to(self.device))
        with self.graph.inserting_before(before):
            return self.graph.call_module(f"{MAPS}.{name}", (source,))

    def _replace(self, op: Op, by: fx.Node) -> None:
        self.nodes[op.node].replace_all_uses_with(by)
        self.nodes[op.node] = by


def _has_other_types(op: Op) -> bool:
    """Whether an operation reads values of another dtype than its result's."""
    return any(node.meta.get(DTYPE) != op.node.meta.get(DTYPE) for node in op.inputs)


def _spread(values: Tensor, constants: Layout, layout: Layout) -> Tensor:
    """The values of the ``constants`` channels at their positions in ``layout``, zero elsewhere."""
    chosen = torch.from_numpy(np.isin(layout, constants)).to(values.device)
    numbers = values if values.is_floating_point() else values.float()
    return torch.where(chosen, numbers[torch.from_numpy(layout)], 0)
