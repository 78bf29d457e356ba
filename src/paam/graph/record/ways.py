"""One graph for both evaluation and training mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import fx, nn

from paam.errors import GraphError
from paam.graph.fingerprint import function_name
from paam.graph.record.numbers import expect
from paam.graph.record.own_lines import at
from paam.graph.record.recording import CONSTANT, LINE, Recording


class Ways(NamedTuple):
    """The output of a graph whose network computes differently in training and in evaluation."""

    evaluation: Any
    training: Any
    also: tuple[str, ...] = ()
    """Nodes that also run in training although their output is not returned: they update statistics."""


WAYS = ("evaluation", "training")
"""In the order in which a graph returns them; also the label of a size check that belongs to one mode."""


def join_ways(model: nn.Module, evaluation: Recording, base: Recording, training: Recording) -> frozenset[str]:
    """Merge the graphs of evaluation and training. Returns the nodes that only training has.

    Arguments that differ, as of F.dropout, follow the network's mode. Where the modes diverge, training-only nodes are
    at the end, and the graph returns both results.
    """
    if base is training:
        for first, node in zip(evaluation.graph.nodes, base.graph.nodes, strict=True):
            node.args, node.kwargs = _merged(model, base, first, node, lambda other: other)
        return frozenset()
    waiting: dict[Any, list[fx.Node]] = {}
    for node in base.graph.nodes:
        waiting.setdefault(_key(node, lambda other: other), []).append(node)
    twins: dict[fx.Node, fx.Node] = {}  # node of the training graph -> node of the merged one
    only: set[str] = set()
    output = base.graph.output_node()
    for node in training.graph.nodes:
        if node.op == "output":
            results = fx.map_arg(node.args[0], twins.__getitem__)
            same = _key(output, lambda other: other) == _key(node, twins.__getitem__)
            result = output.args[0]
            also = _also(model, result, results, twins, only)
            output.args = (result if same else Ways(result, results, also),)
        elif found := waiting.get(_key(node, twins.__getitem__)):
            twins[node] = twin = found.pop(0)
            twin.args, twin.kwargs = _merged(model, base, twin, node, twins.__getitem__)
        else:
            with base.graph.inserting_before(output):
                twins[node] = copied = base.graph.node_copy(node, twins.__getitem__)
            only.add(copied.name)
            if node.op == "get_attr" and node.target in training.constants:
                copied.target = f"{CONSTANT}{len(base.constants)}"
                base.constants[copied.target] = training.constants[node.target]
            if node.name in training.shapes:
                base.shapes[copied.name] = training.shapes[node.name]
            if node.name in training.numbers:
                base.numbers[copied.name] = training.numbers[node.name]
    both = set(twins.values())
    for node in base.graph.nodes:
        if node.target is expect and (node.name in only or node not in both):
            node.args = (*node.args, WAYS[node.name in only])
    return frozenset(only)


def refuse_training(graph: fx.Graph, reason: str) -> None:
    """Make a graph without a training mode raise an error in training mode."""
    flag = _training_flag(graph)
    with graph.inserting_after(flag):
        graph.call_function(evaluated_only, (flag, reason))


def evaluated_only(training: bool, reason: str) -> None:
    if training:
        raise GraphError(f"{reason}, so that gates and pruning know its evaluation mode alone; call eval() first.")


def _also(
    model: nn.Module, evaluated: Any, trained: Any, twins: dict[fx.Node, fx.Node], only: set[str]
) -> tuple[str, ...]:
    """Layers with statistics that training computes, but of which only evaluation returns something."""
    read = leading_to(evaluated)
    holders = {_statistics_of(model, node) for node in read} - {None}
    unreturned = [node for node in {*twins.values()} - leading_to(trained) if _statistics_of(model, node) in holders]
    for node in unreturned:
        if node.name in only:
            raise GraphError(
                f"{type(model).__name__} calls '{_statistics_of(model, node)}'{at(node.meta[LINE])} in training for the"
                " sake of its statistics alone: nothing that forward() returns then comes from it. Let it return that"
                " too, or call the layer on the same values in both modes."
            )
    return tuple(sorted(node.name for node in unreturned))


def _statistics_of(model: nn.Module, node: fx.Node) -> str | None:
    """The layer or the buffer in which an operation keeps statistics in training."""
    if node.target is F.batch_norm and isinstance(mean := node.args[1] if len(node.args) > 1 else None, fx.Node):
        return str(mean.target)
    if node.op == "call_module" and any(True for _ in model.get_submodule(str(node.target)).buffers()):
        return str(node.target)
    return None


def leading_to(result: Any) -> set[fx.Node]:
    """All nodes that a graph's output depends on."""
    found: set[fx.Node] = set()
    waiting: list[fx.Node] = []
    fx.map_arg(result, waiting.append)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _key(node: fx.Node, twin: Callable[[fx.Node], fx.Node]) -> Any:
    """A hashable key of what a node computes; flags are ignored, because they may follow the mode."""

    def said(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return f"%{twin(value).name}"
        if isinstance(value, tuple | list):
            return tuple(said(part) for part in value)
        if isinstance(value, dict):
            return tuple((key, said(part)) for key, part in sorted(value.items()))
        if isinstance(value, slice):
            return "slice", said(value.start), said(value.stop), said(value.step)
        return "flag" if isinstance(value, bool) else repr(value)

    return node.op, node.target, said(node.args), said(node.kwargs)


def _merged(
    model: nn.Module, base: Recording, first: fx.Node, node: fx.Node, twin: Callable[[fx.Node], fx.Node]
) -> tuple[Any, Any]:
    """The arguments of a node of both modes: those False in evaluation and True in training follow the mode."""

    def merge(here: Any, there: Any) -> Any:
        if here is False and there is True:
            return _training_flag(base.graph)
        if here is True and there is False:
            raise GraphError(
                f"{type(model).__name__}.forward() gives {function_name(first.target)} an argument that is True in"
                " evaluation and False in training, which paam does not follow; build the model without that part."
            )
        if isinstance(there, tuple | list):
            parts = [merge(a, b) for a, b in zip(here, there, strict=True)]
            return type(there)(*parts) if hasattr(there, "_fields") else type(there)(parts)
        if isinstance(there, dict):
            return {key: merge(here[key], value) for key, value in there.items()}
        if isinstance(there, slice):
            bounds = ((getattr(part, name) for name in ("start", "stop", "step")) for part in (here, there))
            return slice(*map(merge, *bounds))
        return twin(there) if isinstance(there, fx.Node) else there

    return merge(first.args, node.args), merge(first.kwargs, node.kwargs)


def _training_flag(graph: fx.Graph) -> fx.Node:
    """The node that reads whether the network is in training mode."""
    first: fx.Node = next(node for node in graph.nodes if node.op != "placeholder")
    if first.op == "get_attr" and first.target == "training":
        return first
    with graph.inserting_before(first):
        flag: fx.Node = graph.get_attr("training")
    return flag
