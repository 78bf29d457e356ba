"""Model and example inputs -> a graph with the shape of every value, for both modes and any batch size."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from paam.errors import GraphError, nearest, one_line
from paam.graph.channel_map import whole_shape
from paam.graph.cost import batch_of
from paam.graph.fingerprint import fingerprint
from paam.graph.modes import switch
from paam.graph.record.as_found import AsFound
from paam.graph.record.call import record
from paam.graph.record.own_lines import at, line_of
from paam.graph.record.recording import FACT, LINE, Recording, Shape, ValueDecisionError, same_tensor, same_way
from paam.graph.record.unseen import refuse_backward_hooks, refuse_reading_computed_weights
from paam.graph.record.ways import join_ways, refuse_training

OnDecision = Literal["refuse", "fix", "stop"]

BATCH, MAP = 0, 2
"""Axes of inputs whose sizes can be fixed to the recorded ones: the batch axis, and all axes from the third on."""

GROWTH = "growth"
"""Key in a node's meta: by how much each axis of its value grows per additional sample."""


@dataclass(frozen=True)
class Traced:
    """A model as a graph. By node name: ``shapes`` of its tensors, and ``numbers``, such as sizes.

    Shapes and numbers are those of ``batch`` samples, one more than the example's if the model accepts that: a batch
    of 1 would hide operations that mix the batch.
    """

    model: nn.Module
    graph: fx.Graph
    shapes: dict[str, Shape]
    numbers: dict[str, Any]
    constants: dict[str, Tensor]
    """Tensors that forward() creates, or that are plain attributes."""
    examples: tuple[Any, ...]
    batch: int
    ignore: tuple[str, ...]
    """Modules and nodes that are not pruned, as named by the user."""
    macs: dict[str, int]
    """Cost of each operation, by node name: multiply-accumulates of the example's whole batch."""
    read_numbers: frozenset[str]
    """Layers whose attributes, such as out_channels, are read by the forward() of another module."""
    asks: frozenset[str]
    """State that forward() queries (recording.py); it must compute the same whatever the answer."""
    transparent: frozenset[str]
    """Parameter-free modules that are the identity in evaluation mode, such as stochastic depth."""
    training_only: frozenset[str]
    """Nodes that are computed in training mode only."""
    one_batch_size: bool
    """The model runs at the example's batch size only, or takes a different path at others."""
    held: tuple[int, ...]
    """Axes of the inputs, BATCH and MAP, along which the graph accepts only the example's sizes."""
    own_code: bool
    """The small network runs its class's own code: the graph starts at weighted layers and may end early."""
    on_decision: OnDecision
    decision: str
    """The first decision on tensor values (data-dependent control flow): the graph ends there."""
    fixed: tuple[str, ...]
    """Data-dependent decisions that are fixed to their outcome for the example."""
    no_training: str
    """Why the graph has no training mode; empty if it has one, which is the normal case."""
    never_trained: tuple[str, ...]
    """Modules that stay in evaluation mode when the model's train() is called, such as frozen batch norms."""
    tried: dict[Any, Any] = field(default_factory=dict)
    """Cache of what trials found out about custom layers (layers.py)."""

    @property
    def leaves(self) -> tuple[str, ...]:
        """Modules that are recorded as a single operation."""
        return (*self.ignore, *sorted(self.transparent))

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """By all of their names."""
        return dict(self.model.named_modules(remove_duplicate=False))

    def positions(self, node: fx.Node, axis: int) -> int:
        """How many values each channel of a node has in the example's whole batch: N * H * W for a map [N, C, H, W]."""
        more = self.batch - batch_of(self.examples)
        shape, growth = self.shapes[node.name], self.growth(node)
        return math.prod(size - more * grows for size, grows in zip(shape, growth, strict=True)) // shape[axis]

    def is_of_samples(self, node: fx.Node) -> bool:
        """Whether a value depends on the inputs."""
        return node.name in self._of_samples

    @cached_property
    def _of_samples(self) -> set[str]:
        """Values that depend on the inputs; others, made of sizes and parameters, exist once for all samples."""
        found: set[str] = set()
        for node in self.graph.nodes:
            if node.op == "placeholder" or (not is_fact(node) and any(n.name in found for n in node.all_input_nodes)):
                found.add(node.name)
        return found

    def growth(self, node: fx.Node) -> Shape:
        """By how much each axis of a value grows per additional sample."""
        shape = self.shapes[node.name]
        if GROWTH in node.meta:
            return tuple(node.meta[GROWTH])
        # Recorded only once: a first axis as long as the batch is assumed to be the batch axis.
        batched = node.op != "get_attr" and shape[:1] == (self.batch,)
        return tuple(int(batched and place == 0) for place in range(len(shape)))

    def tensor(self, target: str) -> Any:
        """Target of a get_attr node: "layer.scale" of the model, or a constant."""
        return self.constants[target] if target in self.constants else attribute(self.model, target)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the architecture, not the weights."""
        return fingerprint(self.model, self.graph)


def trace(
    model: nn.Module,
    example_inputs: Any,
    ignore: Sequence[str] = (),
    on_decision: OnDecision = "refuse",
    held: tuple[int, ...] = (),
) -> Traced:
    """Record the model and its shapes. The model is not changed.

    ``ignore``: modules not to trace into. ``held``: axes of the inputs along which the graph accepts only the recorded
    sizes.
    """
    examples = _examples(example_inputs)
    ignored = tuple(dict.fromkeys(ignore))
    own_code = on_decision == "stop" or not all(isinstance(example, Tensor) for example in examples)
    if not own_code:
        refuse_backward_hooks(model, ignored)
    found = AsFound(model, ignored)
    evaluation = _first(model, found, examples, ignored, "stop" if own_code else on_decision, held)
    leaves = (*ignored, *evaluation.transparent)
    batch = batch_of(examples)
    one_batch_size = False
    base, training, no_training = evaluation, None, ""
    if not own_code:
        more = _one_more(examples)
        tried = _in_training(model, found, more, leaves, evaluation, on_decision, held)
        if isinstance(tried, Recording) and same_way(evaluation, tried):
            base, batch = tried, batch + 1
        else:
            wider = _again(model, found, more, leaves, evaluation, held)
            if wider is not None and same_way(evaluation, wider):
                base, batch = wider, batch + 1
            else:
                one_batch_size = True
                tried = _in_training(model, found, examples, leaves, evaluation, on_decision, held)
        if isinstance(tried, Recording):
            training = tried
            if base is not training and not one_batch_size:
                smaller = _in_training(model, found, examples, leaves, evaluation, on_decision, held)
                if isinstance(smaller, Recording) and same_way(smaller, training):
                    _note_growth(smaller, training)  # for nodes that exist in training only
        else:
            no_training = _why_not_trained(model, found, examples if one_batch_size else more, tried)
        for other in filter(None, (training, base)):
            _check_constants(model, evaluation, other)
    _note_growth(evaluation, base)
    only = join_ways(model, evaluation, base, training) if training is not None else frozenset()
    if no_training:
        refuse_training(base.graph, no_training)
    _check_ignored(model, base.graph, ignored)
    if not own_code:
        refuse_reading_computed_weights(model, base.graph)
    _write_out_squeezes(base)
    return Traced(
        model,
        base.graph,
        base.shapes,
        base.numbers,
        base.constants,
        examples,
        batch,
        ignored,
        evaluation.macs,
        frozenset(evaluation.read_numbers | base.read_numbers),
        frozenset(evaluation.asks | (training.asks if training is not None else set())),
        frozenset(evaluation.transparent),
        only,
        one_batch_size,
        held,
        own_code,
        on_decision,
        evaluation.decision,
        tuple(dict.fromkeys((*evaluation.fixed, *(training.fixed if training is not None else ())))),
        no_training,
        _never_trained(model, found),
    )


def _examples(given: Any) -> tuple[Any, ...]:
    examples = tuple(given) if isinstance(given, tuple | list) else (given,)
    leaves = tree_leaves(examples)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise GraphError(
            "example_inputs is the tensor that forward() takes, or a tuple of its arguments, tensors or lists of them:"
            " one small batch."
        )
    if any(leaf.dim() == 0 for leaf in leaves):
        raise GraphError("An example input is a single number; a batch [N, ...] is needed.")
    if any(not leaf.numel() for leaf in leaves) or not all(tree_leaves(example) for example in examples):
        raise GraphError("An example input is empty; a batch of at least one sample is needed.")
    if any(leaf.is_meta for leaf in leaves):
        raise GraphError("An example input is on the device 'meta', which computes nothing; give one with numbers.")
    return examples


def _one_more(examples: tuple[Any, ...]) -> tuple[Any, ...]:
    """The examples with one sample added."""
    batch = batch_of(examples)

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.cat([value, value[:1]]) if value.shape[0] == batch else value
        return [*value, value[0]] if isinstance(value, list) else value

    return tuple(map(widen, examples))


def _first(
    model: nn.Module,
    found: AsFound,
    examples: tuple[Any, ...],
    ignored: Sequence[str],
    on_decision: str,
    held: tuple[int, ...],
) -> Recording:
    """The recording that defines the operations: the example itself, in evaluation mode."""
    if on_decision == "refuse":
        with suppress(Exception):  # a model that does not run on meta tensors is run on the example below
            return record(model, found, examples, leaves=ignored, held=held, shapes_only=True)
    try:
        own_code = on_decision == "stop"
        return record(model, found, examples, leaves=ignored, held=held, on_decision=on_decision, own_code=own_code)
    except ValueDecisionError as decision:
        raise _decides_by_values(model, decision) from decision
    except GraphError:
        raise
    except Exception as error:  # recording runs the user's forward(), which can raise anything
        shapes = ", ".join(str(list(x.shape)) for x in tree_leaves(examples))
        raise GraphError(
            f"{type(model).__name__} does not run on an input of shape {shapes}{line_of(error)}: {one_line(error)}. It"
            " wants an input of the shape that it is used with, or is not the model that was meant."
        ) from error


def _again(
    model: nn.Module,
    found: AsFound,
    inputs: tuple[Any, ...],
    leaves: Sequence[str],
    like: Recording,
    held: Sequence[int],
) -> Recording | None:
    """An additional recording in evaluation mode; None if the model does not run on these inputs."""
    try:
        return record(model, found, inputs, leaves=leaves, held=held, like=like, shapes_only=True)
    except GraphError:
        raise
    except Exception:
        return None


def _in_training(
    model: nn.Module,
    found: AsFound,
    inputs: tuple[Any, ...],
    leaves: Sequence[str],
    like: Recording,
    on_decision: str,
    held: Sequence[int],
) -> Recording | Exception:
    """The recording in training mode, or the model's exception if there is none."""
    again = functools.partial(
        record, model, found, inputs, training=True, leaves=leaves, held=held, like=like, on_decision=on_decision
    )
    try:
        # Without computing there are no values to decide on, and no gradients.
        recorded = again(shapes_only=True, computed=on_decision == "fix")
        return again(computed=True) if "gradients" in recorded.asks else recorded
    except ValueDecisionError as decision:
        raise _decides_by_values(model, decision, " in training") from decision
    except GraphError:
        raise
    except Exception as error:  # a user's forward() can raise anything
        return error


def _why_not_trained(model: nn.Module, found: AsFound, examples: tuple[Any, ...], error: Exception) -> str:
    """Why the model has no training mode: it does not run in it. A model that does run must be recordable."""
    try:
        with found, torch.random.fork_rng([]), torch.enable_grad():
            model.train()(*examples)
    except Exception as own_error:
        return f"{type(model).__name__} does not run on the example in training mode ({one_line(own_error)})"
    raise GraphError(
        f"{type(model).__name__} cannot be recorded in training mode{line_of(error)}: {one_line(error)}. Leave the"
        " submodule that it happens in alone with ignore=[...]."
    ) from error


def _never_trained(model: nn.Module, found: AsFound) -> tuple[str, ...]:
    with found:
        switch(model, True)
        return tuple(name for name, module in found.names.every if not module.training)


def _decides_by_values(model: nn.Module, decision: ValueDecisionError, mode: str = "") -> GraphError:
    return GraphError(
        f"{type(model).__name__} decides by the values of tensors{mode}: {decision}. Move that out of the model; or"
        " leave what follows it to the model's own code with on_decision='stop'; or keep what was decided for the"
        " example with on_decision='fix'."
    )


def _note_growth(first: Recording, base: Recording) -> None:
    """Note by how much each axis of a value grows per sample: ``base`` ran on one sample more than ``first``."""
    if base is first:
        return
    for twin, node in zip(first.graph.nodes, base.graph.nodes, strict=True):
        if node.name in base.shapes:
            pairs = zip(first.shapes[twin.name], base.shapes[node.name], strict=True)
            node.meta[GROWTH] = tuple(after - before for before, after in pairs)


def _check_constants(model: nn.Module, first: Recording, other: Recording) -> None:
    """Check that constants are constant: the other recording ran on other inputs."""
    for name, tensor in first.constants.items():
        twin = other.constants.get(name, tensor)
        if twin is not tensor and not (name in first.made and same_tensor(twin, tensor)):
            raise GraphError(
                f"{type(model).__name__} reads a tensor that it computes in a way that cannot be recorded (numpy, a"
                f" custom autograd function, compiled code){_read_at(first, name)}; use torch's own functions for it."
            )


def _read_at(recording: Recording, name: str) -> str:
    node = next(node for node in recording.graph.nodes if node.op == "get_attr" and node.target == name)
    return at(node.meta[LINE])


def _write_out_squeezes(base: Recording) -> None:
    """Make the axes that squeeze() removes explicit: in a small network it might remove a channel axis of size 1."""
    for node in base.graph.nodes:
        if node.op != "call_module" and node.target in ("squeeze", torch.squeeze):
            if len(node.args) == 1 and not node.kwargs:
                before = base.shapes[node.args[0].name]
                node.args = (node.args[0], tuple(axis for axis, size in enumerate(before) if size == 1))
                node.meta["settled"] = True


def _check_ignored(model: nn.Module, graph: fx.Graph, ignored: Sequence[str]) -> None:
    nodes = {node.name for node in graph.nodes} | {node.target for node in graph.nodes if node.op == "call_module"}
    for name in ignored:
        if name not in nodes and not name.startswith(tuple(f"{other}." for other in ignored)):
            modules = [module for module, _ in model.named_modules() if module]
            why = "is never called on its own" if name in modules else "is no part of the model"
            raise GraphError(f"ignore: '{name}' {why}.{nearest(name, modules)} Name a module, or a node of a refusal.")


def is_fact(node: fx.Node) -> bool:
    """Whether a value follows from the shapes and types of tensors alone, not from their values."""
    return FACT in node.meta or node.target is whole_shape


def attribute(model: nn.Module, target: str) -> Any:
    """Target of a get_attr node: "layer.scale" of the model."""
    owner, _, name = target.rpartition(".")
    return getattr(model.get_submodule(owner), name)
