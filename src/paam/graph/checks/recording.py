"""Compare a recording with the model itself before anything is built on it.

A recording has only the model's calls into torch: not a number computed from a size by anything but arithmetic, and
not a temporary replacement of a layer's weights. So both run on the same random inputs, with other batch and image
sizes than recorded and with other weights, in evaluation and in training.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from paam.errors import GraphError
from paam.graph.checks.inputs import SMALLER, Inputs, device_of, inputs_of_other_sides, random_inputs, tame_inputs
from paam.graph.checks.perturb import Noise, perturb
from paam.graph.checks.recorded_trial import Trial, is_double
from paam.graph.copies import deep_copy, light_copy
from paam.graph.record.own_lines import leave_alone
from paam.graph.record.recording import Shape
from paam.graph.rules.site import Op
from paam.graph.trace import BATCH, MAP, Traced

MORE = 3
"""Number of additional samples in a larger batch."""
LARGER = 0.5
"""Images are enlarged by dividing by this."""
SMALL = 32 * 32
"""Larger images are tried only if the example's have at most this many pixels: others would take too long."""


def sizes_to_hold(traced: Traced, ops: Sequence[Op]) -> tuple[int, ...]:
    """Axes of the inputs along which the graph is right for the recorded sizes only. A wrong graph is refused."""
    if traced.own_code:  # it runs unchanged, except for its gates
        return ()
    if traced.fixed:  # it only has to be right for the example
        _check_the_example(traced)
        return ()
    found = {*_where_it_differs(traced)}
    if traced.one_batch_size:
        found.add(BATCH)
    inferred = any(_infers_channels(op, traced.shapes) for op in ops)
    if inferred or any(_infers_samples(node, traced) for node in traced.graph.nodes):
        found.add(MAP)
    return tuple(sorted(found))


def _infers_channels(op: Op, shapes: Mapping[str, Shape]) -> bool:
    """Whether a view with a hard-coded map size infers the number of channels, as in x.view(n, -1, 7, 7)."""
    sizes = _sizes_of_view(op.node)
    if not sizes or not op.inputs or len(sizes) != len(after := shapes[op.name]) or sizes[op.axis] != -1:
        return False
    before = shapes[op.inputs[0].name]
    return sum(isinstance(size, int) for size in sizes) > 1 and math.prod(before[1:]) > after[op.axis]


def _infers_samples(node: fx.Node, traced: Traced) -> bool:
    """Whether a view with a hard-coded map size infers the number of samples, as in x.view(-1, 512 * 7 * 7)."""
    sizes = _sizes_of_view(node)
    if sizes[:1] != (-1,) or not all(isinstance(size, int) for size in sizes):
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return any(traced.growth(source)) and math.prod(traced.shapes[source.name][MAP:]) > 1


def _sizes_of_view(node: fx.Node) -> tuple[Any, ...]:
    if node.op != "call_method" or node.target not in ("view", "reshape") or len(node.args) < 2:
        return ()
    sizes = node.args[1] if isinstance(node.args[1], tuple | list) else node.args[1:]
    return tuple(sizes)


def _where_it_differs(traced: Traced) -> tuple[int, ...]:
    trial = _perturbed(traced, gentle=False)
    if not trial.makes_numbers(_smaller(traced)):
        trial = _perturbed(traced, gentle=True)
    answered = False
    for candidates in (itertools.chain(_smaller(traced), tame_inputs(traced)), _larger(traced)):
        for inputs in candidates:
            problem = trial.problem(inputs)
            if problem:
                return _blamed(trial, inputs)
            answered |= problem is not None
            if problem is not None and (trial.trained or traced.no_training):
                break
    if not answered:
        raise GraphError(
            f"{type(traced.model).__name__} answers neither random inputs nor the example with other weights"
            f" ({trial.said}), so that paam's recording cannot be compared with it; check=False leaves that out."
        )
    if _is_small(traced):
        for inputs in inputs_of_other_sides(traced):
            if trial.problem_in(inputs, training=False, gradients=False):
                return _blamed(trial, inputs)
    return ()


def _check_the_example(traced: Traced) -> None:
    """Refuse a graph whose result for the example, with the model's own weights, differs from the model's."""
    trial = Trial(traced, deep_copy(traced.model))
    example = tuple(tree_leaves(traced.examples))
    if (problem := trial.problem_in(example, training=False, gradients=False)) != "":
        raise _wrong(trial, example, problem or "it does not run")


def _is_small(traced: Traced) -> bool:
    nodes = (node for node in traced.graph.nodes if node.op == "placeholder")
    return max(math.prod(traced.shapes[node.name][MAP:]) for node in nodes) <= SMALL


def _smaller(traced: Traced) -> Iterator[Inputs]:
    """The smallest images and larger batches first, the recorded shape last."""
    for more in (MORE, 0):
        yield from random_inputs(traced, SMALLER, more=more, also_examples=False)
    yield from random_inputs(traced, (1,), more=MORE)
    yield from random_inputs(traced, (1,))


def _larger(traced: Traced) -> Iterator[Inputs]:
    if _is_small(traced):
        yield from random_inputs(traced, (LARGER,), also_examples=False)


def _blamed(trial: Trial, inputs: Inputs) -> tuple[int, ...]:
    """Which sizes must be fixed for the graph to be right; it is refused if that does not help."""
    (recorded,) = random_inputs(trial.traced, (1,))
    if [x.shape for x in inputs] == [x.shape for x in recorded]:
        recorded = inputs
    if problem := trial.problem(recorded):
        raise _wrong(trial, recorded, problem)
    (wider,) = random_inputs(trial.traced, (1,), more=MORE)
    resized = tuple(x[: len(same)] for x, same in zip(inputs, recorded, strict=True))
    batch, size = trial.problem(wider), trial.problem(resized)
    held = (BATCH,) * bool(batch) + (MAP,) * bool(size)
    return held or (BATCH, MAP)


def _wrong(trial: Trial, inputs: Inputs, problem: str) -> GraphError:
    where, within = trial.first_difference(inputs)
    asked = {"gradients": "whether gradients are on", "layout": "how a tensor lies in memory"}
    decides = "".join(f", or decides by {asked[what]}" for what in sorted(trial.traced.asks))
    return GraphError(
        f"paam's recording of {type(trial.traced.model).__name__} does not compute what the model itself does"
        f" ({problem}{where}). forward() does something beside torch's functions: it"
        " changes what a layer holds for a call or in training, works on x.data, or has a function that refers to"
        f" the model, so that copies of it use its weights{decides}. Write it with torch's functions and self."
        f"{leave_alone(within)}"
    )


def _perturbed(traced: Traced, gentle: bool) -> Trial:
    """The model and its graph, on other weights."""
    # Single precision suffices: both run the same calls in the same order, and round alike.
    dtype = torch.float64 if is_double(traced) else torch.float32
    return Trial(traced, perturb(light_copy(traced.model), Noise(device_of(traced), dtype=dtype), gentle=gentle))
