"""Values whose channel axis grows with the map, as after ``y.flatten(1)``, and the restrictions that follow.

Index maps and constants have one number for each channel of the example. Along such an axis they would pick other
values for a larger image. So operations that would need them read complete values instead, and so does everything
between the flattening and them: channels are filled in before the flattening, where their number is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx, nn

from paam.graph.flows import Mix, Pass, Source, Whole
from paam.graph.joins import Add, Concat, Flatten, Gather, Given, Ones, Route, Stack, Stored, Zip
from paam.graph.record.recording import Shape
from paam.graph.rules.site import Op

if TYPE_CHECKING:
    from paam.graph.solve import Settled

FLATTENING = ("flatten", torch.flatten, "view", "reshape", torch.reshape, "ravel", torch.ravel)


def with_stretched(ops: Sequence[Op], shapes: Mapping[str, Shape]) -> tuple[Op, ...]:
    """The operations, each with those of its inputs that are longer for a larger image."""
    found = _stretched(ops, shapes, fixed=frozenset())
    if not found:
        return tuple(ops)
    found = _stretched(ops, shapes, _fixed(ops, shapes, found))
    return tuple(dataclasses.replace(op, stretched=frozenset(found.intersection(op.inputs))) for op in ops)


def filled_before(settled: Sequence[Settled]) -> list[Op] | None:
    """Revised operations if an index map would follow a flattening: those that lead to it read complete values."""
    whole: set[fx.Node] = set()
    for step in reversed(settled):
        op = step.op
        if not op.stretched:
            continue
        mapped = [source for source, index in zip(op.inputs, step.maps, strict=True) if index is not None]
        if op.node in whole or step.picked or not op.stretched.isdisjoint(mapped):
            whole |= op.stretched | ({op.node} if op.node.op != "output" else set())
    changed = {step.op for step in settled if step.op.node in whole and not isinstance(step.op.flow, Whole | Route)}
    if not changed:
        return None
    return [_reading_whole(step) if step.op in changed else step.op for step in settled]


def _reading_whole(step: Settled) -> Op:
    return dataclasses.replace(step.op, flow=Whole(step.width), sized=False, literal=False, size_of=None)


def _stretched(ops: Sequence[Op], shapes: Mapping[str, Shape], fixed: frozenset[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for op in ops:
        known = isinstance(op.flow, Mix | Source | Stored) or op.node in fixed or op.node.op == "output"
        if not known and (_begins(op, shapes) or _hands_on(op, shapes, found)):
            found.add(op.node)
    return found


def _begins(op: Op, shapes: Mapping[str, Shape]) -> bool:
    """Whether the map becomes part of the channel axis here, or may."""
    if isinstance(op.flow, Given):
        return True
    if not op.inputs or not shapes[op.name]:
        return False
    before, after, axis = shapes[op.inputs[0].name], shapes[op.name], op.axis
    if isinstance(op.flow, Whole):  # any axis of its result may be the channel axis
        return before != after
    if isinstance(op.flow, Flatten):
        return len(before) > len(after)
    # Even for a 1x1 map: with a larger image it has more pixels.
    flattens = isinstance(op.module, nn.Flatten) or (op.module is None and op.node.target in FLATTENING)
    return isinstance(op.flow, Pass) and flattens and len(before) > len(after) == axis + 1


def _hands_on(op: Op, shapes: Mapping[str, Shape], found: set[fx.Node]) -> bool:
    if _has_numbers_for_each(op, shapes):
        return False
    inputs = _alike(op, shapes)
    return bool(inputs) and (any if isinstance(op.flow, Concat) else all)(node in found for node in inputs)


def _alike(op: Op, shapes: Mapping[str, Shape]) -> list[fx.Node]:
    """The inputs that are longer when the result is: an operand with one channel may be broadcast in a product."""
    if isinstance(op.flow, Zip):
        return [node for node, width in zip(op.inputs, op.flow.widths, strict=True) if width == op.flow.width]
    if isinstance(op.flow, Whole):
        return [node for node in op.inputs[:1] if shapes[node.name] == shapes[op.name]]
    return [*op.inputs]


def _fixed(ops: Sequence[Op], shapes: Mapping[str, Shape], found: set[fx.Node]) -> frozenset[fx.Node]:
    """Values of fixed length: read by a layer that requires it, or joined with a value of known length."""
    fixed: set[fx.Node] = set()
    for op in reversed(ops):
        if isinstance(op.flow, Mix) or _has_numbers_for_each(op, shapes):
            fixed.update(op.inputs)
        elif isinstance(op.flow, Pass | Add | Zip | Stack | Concat | Flatten | Gather | Ones):
            if op.node in fixed or op.node not in found:
                fixed.update(_alike(op, shapes))
    return frozenset(fixed)


def _has_numbers_for_each(op: Op, shapes: Mapping[str, Shape]) -> bool:
    """Whether a layer such as a norm has one parameter per channel."""
    if op.module is None or not shapes.get(op.name) or not isinstance(op.flow, Pass | Whole):
        return False
    if isinstance(op.flow, Whole) and op.flow.opaque:
        return False
    width = shapes[op.name][op.axis]
    return width > 1 and any(width in p.shape for p in op.module.parameters(recurse=False))
