"""Where gates go: groups of filters, and the gated network.

A group starts at a convolution or linear layer and follows its channels as long as they go one way: through batch
norm, activations, depthwise convolutions and, at the placement "sum", through the residual addition. Its gate
stands at the end.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import fx, nn

from paam.gates import Gate, Gates, apply_gate
from paam.graph.flows import Mix, Pass, Whole
from paam.graph.joins import Add
from paam.graph.layers import BATCH_NORMS
from paam.graph.site import Op
from paam.graph.trace import Shape, Traced, lend_constants

Placement = Literal["sum", "branch"]
Streams = Literal["independent", "tied"]

T = TypeVar("T")

GATES = "paam_gates"
"""Where gates live in a gated network."""


@dataclass(frozen=True)
class Group:
    """Filters that live and die together: filter i of every layer in ``layers`` is channel i at every site.

    ``layers``: layers whose filters are scored. ``norms``: per-channel layers between them and the gate. ``sites``:
    nodes behind which the gate multiplies. ``area``: values per channel and sample.
    ``stream``: the residual stream that they write into, by its first layer; None if they write into none.
    """

    name: str
    width: int
    layers: tuple[str, ...]
    norms: tuple[str, ...]
    sites: tuple[str, ...]
    area: int
    stream: str | None


@dataclass(frozen=True)
class _Chain:
    layers: tuple[Op, ...]
    norms: tuple[Op, ...]
    site: fx.Node


def find_groups(
    traced: Traced, ops: Sequence[Op], *, placement: Placement = "sum", streams: Streams = "independent"
) -> tuple[Group, ...]:
    """All groups of the network in the order of execution."""
    by_node = {op.node: op for op in ops}
    root_of = _streams(ops)
    added = {root_of(op.node) for op in ops if isinstance(op.flow, Add)}
    answers = _answers(ops)
    sets: dict[fx.Node | str, fx.Node | str] = {}  # sites, and layers that are called again, that belong together
    chains: list[_Chain] = []
    for op in ops:
        if isinstance(op.flow, Mix) and not op.flow.depthwise:
            chain = _follow(op, by_node, traced.shapes, placement)
            key = root_of(chain.site) if streams == "tied" else chain.site
            for layer in chain.layers:
                sets[_root(sets, str(layer.node.target))] = _root(sets, key)
            chains.append(chain)
    members_of: dict[fx.Node | str, list[_Chain]] = {}
    for chain in chains:
        members_of.setdefault(_root(sets, str(chain.layers[0].node.target)), []).append(chain)
    first_of: dict[fx.Node, str] = {}
    groups = []
    for members in members_of.values():
        # The network's answers are left alone: their channels are not ours to choose.
        if any(chain.site in answers for chain in members):
            continue
        first = members[0].layers[0]
        layers = dict.fromkeys(str(op.node.target) for chain in members for op in chain.layers)
        norms = dict.fromkeys(str(op.node.target) for chain in members for op in chain.norms)
        root = root_of(members[0].site)
        stream = first_of.setdefault(root, str(first.node.target)) if root in added else None
        groups.append(
            Group(
                name=str(first.node.target),
                width=traced.shapes[first.name][first.axis],
                layers=tuple(layers),
                norms=tuple(norms),
                sites=tuple(dict.fromkeys(chain.site.name for chain in members)),
                area=traced.positions(first.name, first.axis),
                stream=stream,
            )
        )
    return tuple(groups)


def _answers(ops: Sequence[Op]) -> set[fx.Node]:
    """Values whose channels reach an output of the network without being mixed."""
    answers: set[fx.Node] = set()
    for op in reversed(ops):
        mixes = (isinstance(op.flow, Mix) and not op.flow.depthwise) or (isinstance(op.flow, Whole) and op.flow.opaque)
        if op.node.op == "output" or (op.node in answers and not mixes):
            answers.update(op.inputs)
    return answers


def _follow(op: Op, by_node: Mapping[fx.Node, Op], shapes: Mapping[str, Shape], placement: Placement) -> _Chain:
    layers, norms, site = [op], [], op.node
    while len(site.users) == 1:
        user = by_node.get(next(iter(site.users)))
        if user is None or user.node.op == "output":
            break
        if isinstance(user.flow, Mix) and user.flow.depthwise:
            layers.append(user)
        elif isinstance(user.module, BATCH_NORMS):
            norms.append(user)
        elif isinstance(user.flow, Pass):
            if shapes[user.name] != shapes[site.name]:
                break
        elif not (isinstance(user.flow, Add) and placement == "sum"):
            break
        site = user.node
    return _Chain(tuple(layers), tuple(norms), site)


def _streams(ops: Sequence[Op]) -> Callable[[fx.Node], fx.Node]:
    """Which values share their channels one to one: a function to one representative node of each such set."""
    parent: dict[fx.Node, fx.Node] = {}
    for op in ops:
        if isinstance(op.flow, Pass | Add) or (isinstance(op.flow, Mix) and op.flow.depthwise):
            for source in op.inputs:
                parent[_root(parent, source)] = _root(parent, op.node)
    return lambda node: _root(parent, node)


def _root(parent: dict[T, T], item: T) -> T:
    """The representative of an item's set; ``parent`` leads to it."""
    while (above := parent.setdefault(item, item)) is not item:
        parent[item] = parent[above]
        item = above
    return item


class GatedModel(fx.GraphModule):
    """The traced network with gates in it. While ``norms_frozen``, train() leaves batch norms in evaluation mode."""

    norms_frozen = False

    def train(self, mode: bool = True) -> GatedModel:
        super().train(mode)
        if self.norms_frozen:
            for module in self.modules():
                if isinstance(module, BATCH_NORMS):
                    module.training = False
        return self


def attach(
    traced: Traced, ops: Sequence[Op], groups: Sequence[Group], make_gate: Callable[[list[nn.Module]], Gate]
) -> tuple[GatedModel, dict[str, Gate]]:
    """The network with one gate per group. It shares its layers with the traced model. Gates by group name."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(traced.module.graph, copied))
    nodes = {original.name: node for original, node in copied.items()}
    axes = {op.name: op.axis for op in ops}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    gates: dict[str, Gate] = {}
    with graph.inserting_before(first):
        multipliers = graph.call_module(GATES)
    for number, group in enumerate(groups):
        gates[group.name] = make_gate([traced.model.get_submodule(layer) for layer in group.layers])
        with graph.inserting_before(first):
            gate = graph.call_function(operator.getitem, (multipliers, number))
        for site in group.sites:
            value = nodes[site]
            with graph.inserting_after(value):
                gated = graph.call_function(apply_gate, (value, gate, axes[site]))
            for user in list(value.users):
                if user is not gated:
                    user.replace_input_with(value, gated)
    root = nn.Module()
    for name, child in traced.model.named_children():
        root.add_module(name, child)
    for name, parameter in traced.model.named_parameters(recurse=False):
        root.register_parameter(name, parameter)
    for name, buffer in traced.model.named_buffers(recurse=False):
        root.register_buffer(name, buffer)
    root.add_module(GATES, Gates(list(gates.values())))
    lend_constants(traced, root)
    gated_model = GatedModel(root, graph, f"Gated{type(traced.model).__name__}")
    gated_model.train(traced.model.training)
    return gated_model, gates
