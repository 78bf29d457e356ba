"""Which filters share a gate, and where the gate is.

A group starts at a convolution or linear layer and follows its channels until they branch: through batch norm,
activations, depthwise convolutions and, with placement "sum", through the residual addition. Its gate is at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import fx

from paam.graph.cost import batch_of
from paam.graph.flows import ZERO, Mix, Pass, Whole
from paam.graph.joins import Add, Part, Zip
from paam.graph.record.recording import Shape
from paam.graph.rules.layers import BATCH_NORMS
from paam.graph.rules.site import Op
from paam.graph.trace import Traced

Placement = Literal["sum", "branch"]
Streams = Literal["independent", "tied"]

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Filters that are kept or removed together: filter i of every layer in ``layers`` is channel i at every site.

    A layer whose output is read in equal parts has a multiple of ``width`` filters: i, i + width, and so on count as
    one.

    ``layers``: layers whose filters are scored. ``norms``: per-channel layers between them and the gate. ``sites``:
    nodes whose output the gate multiplies. ``area``: values per channel and sample. ``stream``: the residual stream
    that they write into, named after its first layer; None if there is none.
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
    """All groups of the network in execution order."""
    by_node = {op.node: op for op in ops}
    tied = streams == "tied"
    held = _held(ops)
    root_of, folded = _streams(ops, held, tied)
    added = {root_of(op.node) for op in ops if isinstance(op.flow, Add)}
    answers = _answers(ops)
    sets: dict[fx.Node | str, fx.Node | str] = {}  # union-find of sites and of layers that are called repeatedly
    chains: list[_Chain] = []
    for op in ops:
        if isinstance(op.flow, Mix) and not op.flow.depthwise:
            chain = _follow(op, by_node, traced.shapes, placement, held)
            root = root_of(chain.site)
            key = folded.get(root, (root, 1))[0] if tied else chain.site
            for layer in chain.layers:
                sets[_root(sets, str(layer.node.target))] = _root(sets, key)
            chains.append(chain)
    members_of: dict[fx.Node | str, list[_Chain]] = {}
    for chain in chains:
        members_of.setdefault(_root(sets, str(chain.layers[0].node.target)), []).append(chain)
    first_of: dict[fx.Node, str] = {}
    groups = []
    for members in members_of.values():
        # Groups that reach the network's outputs are skipped: output channels must not be pruned.
        if any(chain.site in answers for chain in members):
            continue
        first = members[0].layers[0]
        layers = dict.fromkeys(str(op.node.target) for chain in members for op in chain.layers)
        norms = dict.fromkeys(str(op.node.target) for chain in members for op in chain.norms)
        root = root_of(members[0].site)
        stream = first_of.setdefault(root, str(first.node.target)) if root in added else None
        width = traced.shapes[first.name][first.axis]
        groups.append(
            Group(
                name=str(first.node.target),
                width=width // (folded.get(root, (root, 1))[1] if tied else 1),
                layers=tuple(layers),
                norms=tuple(norms),
                sites=tuple(dict.fromkeys(chain.site.name for chain in members)),
                area=max(traced.positions(first.node, first.axis) // batch_of(traced.examples), 1),
                stream=stream,
            )
        )
    return tuple(groups)


def _held(ops: Sequence[Op]) -> set[fx.Node]:
    """Values that depend on the model's own tensors only, not on the inputs."""
    held: set[fx.Node] = set()
    for op in ops:
        if op.node.op != "placeholder" and all(node in held for node in op.inputs):
            held.add(op.node)
    return held


def _answers(ops: Sequence[Op]) -> set[fx.Node]:
    """Values whose channels reach an output of the network without being mixed."""
    answers: set[fx.Node] = set()
    for op in reversed(ops):
        mixes = (isinstance(op.flow, Mix) and not op.flow.depthwise) or (isinstance(op.flow, Whole) and op.flow.opaque)
        if op.node.op == "output" or (op.node in answers and not mixes):
            answers.update(op.inputs)
    return answers


def _follow(
    op: Op, by_node: Mapping[fx.Node, Op], shapes: Mapping[str, Shape], placement: Placement, held: set[fx.Node]
) -> _Chain:
    layers, norms, site = [op], [], op.node
    while len(site.users) == 1:
        user = by_node.get(next(iter(site.users)))
        if user is None or user.node.op == "output":
            break
        scaled = isinstance(user.flow, Zip) and all(node is site or node in held for node in user.inputs)
        if isinstance(user.flow, Mix) and user.flow.depthwise:
            layers.append(user)
        elif isinstance(user.module, BATCH_NORMS) and isinstance(user.flow, Pass):
            norms.append(user)
        elif isinstance(user.flow, Pass) or scaled:
            if shapes[user.name] != shapes[site.name] or _adds_a_number(user):
                break
        elif not (isinstance(user.flow, Add) and placement == "sum"):
            break
        site = user.node
    return _Chain(tuple(layers), tuple(norms), site)


def _adds_a_number(op: Op) -> bool:
    """Whether an operator maps zero to something else, as in 1 + x: a gate after it would also remove that number."""
    of_numbers = getattr(op.node.target, "__module__", "") == "_operator"
    return of_numbers and isinstance(op.flow, Pass) and op.flow.zero != ZERO


def _streams(
    ops: Sequence[Op], held: set[fx.Node], tied: bool
) -> tuple[Callable[[fx.Node], fx.Node], dict[fx.Node, tuple[fx.Node, int]]]:
    """Which values share their channels one to one: a function from a node to the representative of its set.

    With tied streams, the operands of products and the parts of x.chunk(2, 1) are tied too, so that networks keep
    their class. ``folded``: representative of a value that is read in equal parts -> that of its parts, and how many.
    """
    parent: dict[fx.Node, fx.Node] = {}
    parts: dict[tuple[fx.Node, int], list[Op]] = {}  # by the value that is split, and the number of parts
    for op in ops:
        if isinstance(op.flow, Pass | Add) or (isinstance(op.flow, Mix) and op.flow.depthwise):
            for source in op.inputs:
                parent[_root(parent, source)] = _root(parent, op.node)
        elif isinstance(op.flow, Zip) and (tied or all(node in held for node in op.inputs[1:])):
            for source, width in zip(op.inputs, op.flow.widths, strict=True):
                if width == op.flow.width and source not in held:
                    parent[_root(parent, source)] = _root(parent, op.node)
        elif isinstance(op.flow, Part) and tied:
            parts.setdefault((op.inputs[0], op.flow.parts), []).append(op)
    for siblings in parts.values():
        for op in siblings:
            parent[_root(parent, op.node)] = _root(parent, siblings[0].node)
    folded: dict[fx.Node, tuple[fx.Node, int]] = {}
    clashing: set[fx.Node] = set()
    for (source, count), siblings in parts.items():
        root, into = _root(parent, source), (_root(parent, siblings[0].node), count)
        if folded.setdefault(root, into) != into:
            clashing.add(root)
    folded = {root: into for root, into in folded.items() if root not in clashing and into[0] not in folded}
    return lambda node: _root(parent, node), folded


def _root(parent: dict[T, T], item: T) -> T:
    """The representative of an item's set (union-find); ``parent`` maps each item towards it."""
    while (above := parent.setdefault(item, item)) is not item:
        parent[item] = parent[above]
        item = above
    return item
