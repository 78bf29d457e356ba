"""Kept filters -> the smaller network, which computes what the gated one computes with binary gates.

Layers shrink to the channels that remain. Where neighbours hold different channels a ChannelMap stands between
them. What a removed channel contributed as a constant is read off the gated network itself, run once on the example
input, and is carried by the next bias. A network that needs no map keeps its class; otherwise it becomes a
RewiredModel whose layers keep their names.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from paam.errors import GraphError
from paam.graph.channel_map import ChannelMap, ChannelOffset, NoChannels, OnesChannel, whole_shape
from paam.graph.constants import Values, observe_constants
from paam.graph.elementwise import CONVOLVE
from paam.graph.flows import Layout, Mix, Pass
from paam.graph.joins import Add, Concat, Route, Stored
from paam.graph.rewired import connected
from paam.graph.shrink import shrink_mix, shrink_per_channel, shrink_stored
from paam.graph.site import Op
from paam.graph.solve import Masks, Settled, solve
from paam.graph.trace import Traced, lend_constants
from paam.graph.tracer import is_fact

MAPS = "paam_maps"
"""Where the index maps of a compacted network live."""


def compact(traced: Traced, ops: Sequence[Op], masks: Masks) -> nn.Module:
    """A smaller copy of the traced model, with its weights; the model itself is not changed."""
    solution = solve(ops, masks)
    axes = {op.node: op.axis for op in ops}
    builder = _Builder(traced, axes, observe_constants(traced, solution, masks))
    for step in solution.settled:
        builder.place(step)
    return builder.finish(solution.rewired)


class _Builder:
    """Edits a copy of the graph, and a copy of the model's layers, one operation after the other."""

    def __init__(self, traced: Traced, axes: dict[fx.Node, int], values: Values) -> None:
        self.values = values
        # A copy that shares the tensors: most are about to be cut, and the others are copied at the end.
        self.shared = {id(tensor): tensor for tensor in (*traced.model.parameters(), *traced.model.buffers())}
        twins = {id(module): _twin(module) for module in traced.model.modules() if _is_plain(module)}
        self.root = copy.deepcopy(traced.model, {**self.shared, **twins})
        lend_constants(traced, self.root)
        self.name = type(traced.model).__name__
        self.graph = fx.Graph()
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.graph.output(self.graph.graph_copy(traced.module.graph, self.nodes))
        self.output = next(iter(reversed(self.graph.nodes)))
        self.device = traced.examples[0].device
        floats = (p.dtype for p in traced.model.parameters() if p.is_floating_point())
        self.dtype = next(floats, torch.get_default_dtype())
        self.axes = axes
        self.shapes = traced.shapes
        self.maps = self.root.get_submodule(MAPS) if hasattr(self.root, MAPS) else nn.Module()
        self.fed: dict[tuple[fx.Node, fx.Node], Layout] = {}  # what each reader has been given of each value
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
            present = [i for i, wanted in enumerate(step.wanted) if len(wanted)]
            node.args, node.kwargs = ([self._mapped(step, i, node) for i in present], op.axis), {}
        elif isinstance(op.flow, Route) and len(step.wanted[0]) < op.flow.width:
            self._replace(op, self._mapped(step, 0, node))
        else:
            for position, source in enumerate(op.inputs):
                old = self.nodes[source]
                self._feed(step, position, node, old)
            if op.sized:
                node.meta["shape"] = self.shapes[op.name]
                _rewrite_size(node, op.axis, len(step.out))
            if op.shared is None or op.shared not in self.shrunk:
                self._shrink(step, node)
            self.shrunk.add(op.shared)
            if (places := step.picks) is not None:
                self._append(step, places, node)

    def _feed(self, step: Settled, position: int, node: fx.Node, old: fx.Node) -> None:
        """Give an operation the channels that it reads.

        Where it is one part of several, (values, indices) of a maximum, say, that is what makes all the parts.
        """
        reader = node if step.op.inputs[position] in step.op.node.all_input_nodes else node.args[0]
        assert isinstance(reader, fx.Node)
        before = self.fed.setdefault((reader, old), step.wanted[position])
        if not np.array_equal(before, step.wanted[position]):
            raise GraphError(f"The parts of '{old.name}' need different channels of it; make them by slices.")
        if old in reader.all_input_nodes and (new := self._mapped(step, position, reader)) is not old:
            reader.replace_input_with(old, new)

    def _shrink(self, step: Settled, node: fx.Node) -> None:
        op = step.op
        if isinstance(op.flow, Mix):
            self._shrink_mix(step, op.flow, node)
        elif isinstance(op.flow, Stored):
            shrink_stored(self.root, str(op.node.target), op.axis, step.made)
        elif isinstance(op.flow, Pass) and op.module is not None:
            shrink_per_channel(self.root.get_submodule(str(op.node.target)), step.width, step.made)

    def finish(self, rewired: bool) -> nn.Module:
        self._own_tensors()
        if not rewired:
            return self.root
        for module in self.root.modules():
            if getattr(module, "inplace", False):
                module.inplace = False  # type: ignore[assignment]
        self._keep_sizes()
        self.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        for node in [node for node in reversed(self.graph.nodes) if node in self.gone]:
            self._leave_shape(node)
        self.root.add_module(MAPS, self.maps)
        # The module takes along only what the remaining graph reads.
        return connected(self.root, self.graph, self.name).train(self.root.training)

    def _own_tensors(self) -> None:
        """Copy every tensor that still is the original model's."""
        copies: dict[int, Tensor] = {}
        for module in self.root.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if id(tensor) in self.shared:
                        assert tensor is not None
                        held[name] = copies.setdefault(id(tensor), copy.deepcopy(tensor))  # type: ignore[assignment]

    def _keep_sizes(self) -> None:
        """Let whoever reads the number of channels of a value read that of the whole network.

        What follows from it, a view's other sizes or a scale, is then what it was. Views of the value itself have been
        given the new number already.
        """
        for original, node in self.nodes.items():
            is_size = node.op == "call_method" and node.target == "size"
            is_number = node.op == "call_method" and node.target == "numel"
            if not (is_size or is_number or (node.target is getattr and node.args[1] == "shape")):
                continue
            source = original.args[0]
            if not isinstance(source, fx.Node) or source not in self.axes:
                continue
            axis = self.axes[source]
            whole = self.shapes[source.name][axis]
            if self.widths[source] == whole:
                continue
            with self.graph.inserting_before(node):
                sizes = self.graph.call_function(whole_shape, (node.args[0], axis, whole))
                if is_number:
                    sizes = self.graph.call_function(math.prod, (sizes,))
                if is_size and (place := original.args[1:2] or tuple(original.kwargs.values())):
                    sizes = self.graph.call_function(operator.getitem, (sizes, place[0]))
            node.replace_all_uses_with(sizes)

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
        """The node behind an index map and an offset, as far as they are needed."""
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
        for source, index in zip(step.op.inputs, step.maps, strict=True):
            if index is not None and (index < 0).all():
                continue
            operands.append(self._rewire(self.nodes[source], node, source, index, offset))
            offset = None  # the sum carries it once
        if len(operands) == 1:
            self._replace(step.op, operands[0])
        else:
            node.args, node.kwargs = tuple(operands), {}

    def _source(self, original: fx.Node, before: fx.Node) -> fx.Node:
        """The tensor that now stands for a value; an empty one of the right shape where nothing of it is left."""
        if (node := self.nodes[original]) not in self.gone:
            return node
        source = next(iter(self.graph.nodes))
        blank = NoChannels(self.shapes[original.name], self.axes[original], self.shapes[source.name], self.dtype)
        return self._insert(blank, source, before)

    def _leave_shape(self, node: fx.Node) -> None:
        """Somebody still reads the size of a value that is gone: let an empty one of that size stand for it."""
        original = next(original for original, copied in self.nodes.items() if copied is node)
        assert all(is_fact(reader) for reader in node.users)
        if node.users:
            node.replace_all_uses_with(self._source(original, node))
        self.graph.erase_node(node)

    def _shrink_mix(self, step: Settled, flow: Mix, node: fx.Node) -> None:
        layer: Any = self.root.get_submodule(str(node.target))
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
        """Pass on only some of the channels that an operation makes, to all of its readers."""
        flow, total = step.op.flow, len(step.made)
        if isinstance(flow, Mix) and flow.groups > 1 and not flow.depthwise:
            total = flow.rows_per_group(step.made) * len(flow.active(step.made))
        readers = list(node.users)
        behind = self._insert(ChannelMap(places.tolist(), total, step.op.axis), node, node.next)
        for reader in readers:
            reader.replace_input_with(node, behind)
        self.nodes[step.op.node] = behind

    def _insert(self, layer: nn.Module, source: fx.Node, before: fx.Node) -> fx.Node:
        taken = self.maps._modules
        names = itertools.chain([before.name], (f"{before.name}_{number}" for number in itertools.count(1)))
        name = next(name for name in names if name not in taken)
        self.maps.add_module(name, layer.to(self.device))
        with self.graph.inserting_before(before):
            return self.graph.call_module(f"{MAPS}.{name}", (source,))

    def _replace(self, op: Op, by: fx.Node) -> None:
        self.nodes[op.node].replace_all_uses_with(by)
        self.nodes[op.node] = by


def _is_plain(module: nn.Module) -> bool:
    """One of torch's own layers, without others in it: what it holds is known."""
    return type(module).__module__.startswith("torch.nn.modules.") and not module._modules


def _twin(module: nn.Module) -> nn.Module:
    """A copy of a plain layer that shares its tensors. copy.deepcopy would be ten times slower."""
    twin = copy.copy(module)
    for name, value in vars(twin).items():
        if isinstance(value, dict | list | set):
            twin.__dict__[name] = copy.copy(value)
    return twin


def _spread(values: Tensor, constants: Layout, layout: Layout) -> Tensor:
    """The constants of ``constants`` at their places in ``layout``, zero elsewhere."""
    chosen = torch.from_numpy(np.isin(layout, constants)).to(values.device)
    return torch.where(chosen, values[torch.from_numpy(layout)], 0)


def _rewrite_size(node: fx.Node, axis: int, size: int) -> None:
    """x.view(-1, 512) -> x.view(-1, 300), and as much for sizes read off another tensor, and for groups = 512."""
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
    node.args = (first, *sizes)
