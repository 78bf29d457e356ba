"""One table: operation -> how channels flow through it. Unknown operations are refused, with their name and location.

A rule is a function of a :class:`Site` (one node of the graph, with its shapes and channel axes) that returns an
:class:`Op`. To support a new operation, write its rule, register it under the module class, the function, or the name
of the tensor method, and add a case for it to tests/graph/test_networks.py.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from paam.errors import GraphError, PaamError, RecipeError
from paam.graph.channel_map import ChannelMap, ChannelOffset, NoChannels, OnesChannel
from paam.graph.copies import tensors_of
from paam.graph.fingerprint import function_name
from paam.graph.flows import LIVE, Sink, Source, Whole
from paam.graph.joins import Given
from paam.graph.record.recording import LAYERS
from paam.graph.rules import cuts, elementwise, layers, movement, over_the_map
from paam.graph.rules import operations as kinds
from paam.graph.rules.elementwise import CONVOLVE
from paam.graph.rules.functions import assigned
from paam.graph.rules.layers import BATCH_NORMS, CONVOLUTIONS, INSTANCE_NORMS, TRANSPOSED
from paam.graph.rules.site import Op, Site, Tangle, TangleError
from paam.graph.rules.sizes import is_counted
from paam.graph.rules.stretch import with_stretched
from paam.graph.trace import Traced, is_fact

Rule = Callable[[Site], Op | Tangle]


RULES: dict[Any, Rule] = {
    **dict.fromkeys(CONVOLUTIONS, layers.convolution),
    **dict.fromkeys(TRANSPOSED, layers.transposed_convolution),
    nn.Linear: layers.linear,
    **dict.fromkeys(BATCH_NORMS, layers.batch_norm),
    **dict.fromkeys(INSTANCE_NORMS, layers.instance_norm),
    **dict.fromkeys(kinds.MIXING_NORMS, layers.mixing_norm),
    **dict.fromkeys(kinds.POINTWISE, elementwise.pointwise),
    **dict.fromkeys(kinds.UNCHANGED, elementwise.unchanged),
    **dict.fromkeys(kinds.DROPOUTS, elementwise.dropout),
    nn.PReLU: over_the_map.prelu,
    **dict.fromkeys(kinds.OVER_THE_MAP, over_the_map.over_the_map),
    **dict.fromkeys(kinds.AVERAGES, over_the_map.average_pool),
    F.normalize: over_the_map.normalize,
    F.batch_norm: elementwise.functional_norm,
    **dict.fromkeys(kinds.TOGETHER, elementwise.together),
    **dict.fromkeys(kinds.PRODUCTS, elementwise.barrier),
    **dict.fromkeys(kinds.SOFTMAXES, over_the_map.softmax),
    **dict.fromkeys(kinds.REDUCTIONS, over_the_map.reduction),
    **dict.fromkeys((operator.add, torch.add, "add"), elementwise.add),
    **dict.fromkeys((operator.sub, torch.sub, "sub"), elementwise.subtract),
    **dict.fromkeys((operator.mul, torch.mul, "mul"), elementwise.multiply),
    **dict.fromkeys((operator.truediv, torch.div, "div"), elementwise.divide),
    **dict.fromkeys((torch.cat, torch.concat), movement.concat),
    torch.stack: movement.stack,
    ChannelMap: movement.channel_map,
    ChannelOffset: layers.channel_offset,
    OnesChannel: movement.ones_channel,
    NoChannels: movement.no_channels,
    nn.Flatten: movement.reshape,
    **dict.fromkeys(kinds.RESHAPES, movement.reshape),
    operator.getitem: cuts.index,
    assigned: cuts.assign,
    **dict.fromkeys(CONVOLVE, elementwise.functional_convolution),
    **dict.fromkeys(kinds.PADS, cuts.pad),
    **dict.fromkeys((nn.PixelShuffle, F.pixel_shuffle), cuts.pixel_shuffle),
    **dict.fromkeys((nn.PixelUnshuffle, F.pixel_unshuffle), cuts.pixel_unshuffle),
}


def register_rule(operation: Any, rule: Rule) -> None:
    """Register the channel rule of an unsupported operation: a torch function, or the name of a tensor method.

    ``rule`` returns an operation made by a :class:`Site`: ``lambda site: site.op(Pass(LIVE, LIVE))`` if each channel
    depends only on itself (see :mod:`paam.graph.flows`). A rule that raises is refused when it is used; a wrong rule is
    refused when a network is compacted.
    """
    if operation in RULES:
        raise RecipeError(f"There is a rule for {operation} already.")

    def checked(site: Site) -> Op | Tangle:
        try:
            return rule(site)
        except (PaamError, TangleError):
            raise
        except Exception as error:
            raise site.refusal(
                f"the rule that was registered for it fails ({type(error).__name__}: {error})"
            ) from error

    RULES[operation] = checked


def bind(traced: Traced) -> tuple[Op, ...]:
    """Every value of the graph that has channels, with its flow, in execution order."""
    shared = set(_shared(traced))
    while uneven := _used_unevenly(ops := _bind(traced, frozenset(shared))) - shared:
        shared |= uneven
    holders = [*map(_holder, ops)]
    uses = Counter(holders)
    by_node = {op.node: op for op in ops if op.node.op != "output"}
    found = [
        dataclasses.replace(
            op,
            shared=holder if uses[holder] > 1 else None,
            counted=str(op.node.target) in traced.read_numbers or is_counted(op, by_node),
        )
        for op, holder in zip(ops, holders, strict=True)
    ]
    return with_stretched(found, traced.shapes)


def _used_unevenly(ops: Sequence[Op]) -> set[str]:
    """Layers that are called several times, where one call reads complete values and another does not: never cut."""
    kinds: dict[str, set[bool]] = {}
    for op in ops:
        if (holder := _holder(op)) is not None:
            kinds.setdefault(holder, set()).add(isinstance(op.flow, Whole))
    return {holder for holder, found in kinds.items() if len(found) > 1}


def _bind(traced: Traced, shared: frozenset[str]) -> list[Op]:
    nodes = list(traced.graph.nodes)
    spread: set[fx.Node] = set()
    ops: list[Op] = []
    axes: dict[str, int] = {}
    tangles: dict[str, Tangle] = {}
    before: list[int] = []  # number of operations before each node
    place = 0
    while place < len(nodes):
        node = nodes[place]
        before[place:] = [len(ops)]
        try:
            if node.op == "output":
                returned = [value for value in node.all_input_nodes if not is_fact(value)]  # sizes are recomputed
                ops += [_output(traced, node, value, axes, tangles) for value in returned]
            elif node.name in traced.shapes:  # others are sizes and numbers, recomputed from the smaller tensors
                module = traced.modules[str(node.target)] if node.op == "call_module" else None
                site = Site(node, module, traced, axes, tangles, spread, shared, traced.tried)
                found = _found(site)
                if isinstance(found, Op):
                    _check_hooks(site)
                    axes[node.name] = found.axis
                    ops.append(found)
                elif any(map(is_fact, node.users)):  # its shape must be that of the complete value
                    raise TangleError(found.first)
                else:
                    tangles[node.name] = found
            place += 1
        except TangleError as reads:  # make the value complete where its channels spread, and restart from there
            if reads.first in spread:  # otherwise this would loop forever
                raise GraphError(
                    f"The channels of '{reads.first.name}' spread in a way that is not followed."
                ) from reads
            spread.add(reads.first)
            place = nodes.index(reads.first)
            del ops[before[place] :]
            for later in nodes[place:]:
                axes.pop(later.name, None)
                tangles.pop(later.name, None)
    return ops


def _found(site: Site) -> Op | Tangle:
    """The rule's result; if the rule does not cover these arguments, the operation reads complete values."""
    try:
        found = _rule(site)(site)
        fits = isinstance(found, Tangle) or _fits(site, found)
    except (PaamError, TangleError):
        raise
    except Exception:
        fits = False
    if not fits:
        found = elementwise.barrier(site) if site.module is None else elementwise.left_alone(site)
    if isinstance(found, Op) and site.shape() and site.traced.growth(site.node)[found.axis]:
        # The batch axis cannot be cut: its length differs from call to call.
        if not isinstance(found.flow, Source | Given | Whole):
            return site.read_whole(*found.inputs) if found.inputs else elementwise.made(site)
    return found


def _fits(site: Site, op: Op) -> bool:
    """Whether an operation's result has as many channels as its flow says."""
    if not site.shape():
        return True
    states = [np.full(site.width(node), LIVE) for node in op.inputs]
    return len(op.flow.forward(states)) == site.shape()[op.axis]


def _shared(traced: Traced) -> frozenset[str]:
    """Layers and parameters of the graph that share a tensor: none of them can be cut without the others."""
    owners: dict[Tensor, set[str]] = {}
    for node in traced.graph.nodes:
        if node.op == "get_attr" and node.target != "training":
            owners.setdefault(traced.tensor(str(node.target)), set()).add(str(node.target))
        elif node.op == "call_module":
            module = traced.modules[str(node.target)]
            for tensor in tensors_of(module.modules()):
                owners.setdefault(tensor, set()).add(str(node.target))
    return frozenset(name for names in owners.values() if len(names) > 1 for name in names)


def _check_hooks(site: Site) -> None:
    """Refuse layers whose output may be changed by hooks or a replaced forward()."""
    node, module = site.node, site.module
    if module is not None and node.name not in site.traced.ignore and node.target not in site.traced.ignore:
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            raise site.refusal("hooks, or a forward() put in its place, may change what it returns; remove them")


def _holder(op: Op) -> str | None:
    """The name of the layer or parameter that belongs to an operation, if any."""
    called = op.node.op == "call_module" and op.module is not None
    tensors = tensors_of(op.module.modules()) if called and op.module is not None else ()
    holds = op.node.op == "get_attr" or any(True for _ in tensors)
    return str(op.node.target) if holds else None


def _rule(site: Site) -> Rule:
    node = site.node
    if node.name in site.traced.ignore or node.target in site.traced.ignore:
        return elementwise.left_alone
    if node.op == "placeholder":
        return _input
    if node.target in site.shared:
        return elementwise.left_alone
    if node.op == "get_attr":
        return elementwise.stored
    if isinstance(site.module, LAYERS):  # a subclass of a known layer is treated like that layer, and checked by trials
        key: Any = next((kind for kind in type(site.module).__mro__ if kind in RULES), None)
    else:
        key = type(site.module) if site.module is not None else node.target
    rule = RULES.get(key) or RULES.get(function_name(key))
    if rule is None and node.op == "call_module" and node.target in site.traced.transparent:
        return elementwise.unchanged
    if rule is None and elementwise.is_random(node) and node.name not in site.traced.training_only:
        raise site.refusal("it draws random numbers in evaluation mode")
    if rule is None and not _is_torchs(key):
        raise site.refusal("it has no channel rule")
    return rule or (elementwise.barrier if site.module is None else elementwise.left_alone)


def _is_torchs(key: Any) -> bool:
    """Whether an operation is torch's own, so that it depends only on its arguments: it may read complete values."""
    if isinstance(key, str):
        return True
    if isinstance(key, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(key).startswith(("aten.", "prims."))
    return (getattr(key, "__module__", None) or "torch").split(".")[0] in ("torch", "_operator", "builtins", "math")


def _input(site: Site) -> Op:
    shape = site.shape()
    axis = min(1, len(shape) - 1)
    return Op(site.node, Source(shape[axis]), (), axis)


def _output(traced: Traced, node: fx.Node, value: fx.Node, axes: dict[str, int], tangles: dict[str, Tangle]) -> Op:
    if value.name in tangles:
        raise TangleError(tangles[value.name].first)
    if value.name not in axes:
        raise GraphError(f"The model returns '{value.name}', which carries no channels; return tensors only.")
    axis, shape = axes[value.name], traced.shapes[value.name]
    return Op(node, Sink(shape[axis] if shape else 1), (value,), axis)
