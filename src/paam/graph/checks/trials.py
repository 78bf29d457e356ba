"""Find out by trials whether a custom convolution or linear layer can be cut like torch's own.

A few of its channels make a tiny layer, which must compute what the layer computes for them. The tiny layer is cut
repeatedly, with many kinds of weights, so that a branch that only some weights enter is not missed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paam.graph.checks.comparing import agree, among, close, own_copy, result_of
from paam.graph.checks.draws import DRAWS, SPECIAL, plain, with_weights
from paam.graph.checks.layer_state import state_of
from paam.graph.checks.perturb import Noise, perturb
from paam.graph.copies import light_copy, write_out_weights
from paam.graph.flows import LIVE, ZERO, Layout, Mix
from paam.graph.record.recording import Shape
from paam.graph.shrink import shrink_mix

FACTORS = (1e5, 1.0)
"""Multipliers for the removed weights: no remaining output may depend on them."""
INPUT_SCALES = (1.0, 30.0, 0.03)
OFTEN = 3
"""For this many kinds of weights, a layer is tried more than once."""
FEW_GROUPS, FEW_OUTPUTS, FEW_INPUTS = 3, 6, 7
"""The size of the tiny layer; outputs and inputs are per group."""


def flow_by_trying(layer: nn.Module, flow: Mix, shape: Shape, tried: dict[Any, Any]) -> Mix | None:
    """The flow of a layer with input ``shape``; None if nothing of it can be cut. ``tried``: results for other layers.

    A layer that is correct only with all of its inputs, such as one that standardises weights over them, keeps them
    all.
    """
    key = ("cut", shape, flow, state_of(layer))
    if key not in tried:
        wholes = () if flow.depthwise else (dataclasses.replace(flow, whole=True),)
        found = (_tried(layer, candidate, shape, tried) for candidate in (flow, *wholes))
        tried[key] = next(filter(None, found), None)
    result: Mix | None = tried[key]
    return result


def _tried(layer: nn.Module, flow: Mix, shape: Shape, tried: dict[Any, Any]) -> Mix | None:
    rng = np.random.default_rng(0)
    other = perturb(light_copy(layer), Noise(torch.device("cpu"))).eval()  # the actual weights may be a special case
    write_out_weights(other)  # before cutting, as in compact.py
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows, columns = few = _few(flow, rng)
    tiny = light_copy(other).eval()
    try:
        shrink_mix(tiny, flow, rows, columns)
    except Exception:  # its state does not fit the cut shapes
        return None
    little = x.index_select(x.dim() - 1 if isinstance(layer, nn.Linear) else 1, torch.from_numpy(columns))
    small = _flow_of_few(flow, few)
    key: Hashable = ("few", tuple(little.shape), small, state_of(tiny))
    if key not in tried:
        with torch.random.fork_rng([]):
            tried[key] = _dead_of_few(tiny, small, little, rng)
    dead: np.int8 | None = tried[key]
    if dead is None or (flow.whole and not _agrees_if_even(other, flow, x)):
        return None
    if not _agrees_at_once(other, flow, x, few, FACTORS[0]):
        return None
    return dataclasses.replace(flow, dead=dead)


def _few(flow: Mix, rng: np.random.Generator) -> tuple[Layout, Layout]:
    """Outputs and inputs of a tiny layer; equally many if the layer has equally many."""
    if flow.depthwise:
        rows = np.sort(rng.choice(flow.outputs, min(flow.outputs, FEW_OUTPUTS), replace=False))
        return rows, rows
    size_in, size_out = flow.inputs // flow.groups, flow.outputs // flow.groups
    outputs = min(size_out, FEW_OUTPUTS)
    inputs = size_in if flow.whole else min(size_in, FEW_OUTPUTS if size_in == size_out else FEW_INPUTS)
    groups = np.sort(rng.choice(flow.groups, min(flow.groups, FEW_GROUPS), replace=False))
    made = [np.sort(rng.choice(size_out, outputs, replace=False)) + group * size_out for group in groups]
    read = [np.sort(rng.choice(size_in, inputs, replace=False)) + group * size_in for group in groups]
    return np.concatenate(made), np.concatenate(read)


def _flow_of_few(flow: Mix, few: tuple[Layout, Layout]) -> Mix:
    rows, columns = few
    groups = len(rows) if flow.depthwise else len(flow.active(rows))
    return dataclasses.replace(flow, inputs=len(columns), outputs=len(rows), groups=groups)


def _scattered(flow: Mix, rng: np.random.Generator) -> tuple[Layout, Layout]:
    """Some outputs and some inputs. Groups may keep different numbers of both: shorter ones are padded with -1."""
    if flow.depthwise:
        rows = _some(flow.outputs, rng)
        return rows, rows
    size_in = flow.inputs // flow.groups
    rows = _some(flow.outputs, rng)
    inputs = [np.arange(size_in) if flow.whole else _some(size_in, rng) for _ in range(flow.groups)]
    groups = [inputs[group] + group * size_in for group in flow.active(rows)]
    longest = max(map(len, groups))
    return rows, np.concatenate([np.append(g, np.full(longest - len(g), -1)) for g in groups])


def _some(size: int, rng: np.random.Generator) -> Layout:
    return np.sort(rng.choice(size, rng.integers(1, size, endpoint=True), replace=False))


def _dead_of_few(layer: nn.Module, flow: Mix, x: Tensor, rng: np.random.Generator) -> np.int8 | None:
    """State of a tiny layer's output for zero inputs; None if it cannot be cut. Tries all kinds of weights."""
    noise = Noise(torch.device("cpu"), seed=1)
    silent = True
    for number, draw in enumerate(DRAWS):
        drawn = with_weights(layer, draw, noise)
        given = x * INPUT_SCALES[number % len(INPUT_SCALES)]
        if draw is plain and not _says_something(result_of(drawn, given)):
            return None
        for factor in FACTORS if number < OFTEN else FACTORS[:1]:
            if not _agrees(drawn, flow, given, _scattered(flow, rng), factor):
                if draw not in SPECIAL or _is_steady(drawn, given):
                    return None
        if number < OFTEN:
            silent &= not _makes_something_of_nothing(drawn, x)
    drawn = with_weights(layer, plain, noise)
    if not (flow.whole or _agrees_if_even(drawn, flow, x)) or not _trained_alike(drawn, flow, x, rng):
        return None
    pixel = x[(slice(None), slice(None), *[slice(0, 1)] * (x.dim() - 2))]
    if pixel.shape != x.shape and _says_something(result_of(drawn, pixel)):  # it may behave differently on small maps
        if not (flow.whole or _agrees_if_even(drawn, flow, pixel)):
            return None
        if not _agrees(drawn, flow, pixel, _scattered(flow, rng), FACTORS[1]):
            return None
    return ZERO if silent else LIVE


def _agrees_if_even(layer: nn.Module, flow: Mix, x: Tensor) -> bool:
    """Whether a layer can be cut to equally many outputs and inputs: it may then add the two, for example.

    A layer that keeps all of its inputs is tried at full size: the tiny one has too few outputs.
    """
    size_in, size_out = flow.inputs // flow.groups, flow.outputs // flow.groups
    count = size_in if flow.whole else min(size_in, size_out) - 1
    if flow.depthwise or not 0 < count < size_out:
        return True
    rows, columns = (
        (np.arange(flow.groups)[:, None] * size + np.arange(count)).ravel() for size in (size_out, size_in)
    )
    return _agrees(layer, flow, x, (rows, columns), FACTORS[1])


def _trained_alike(layer: nn.Module, flow: Mix, x: Tensor, rng: np.random.Generator) -> bool:
    """Whether a layer can be cut in training mode too, if it runs in it."""
    truth, other = (result_of(layer, x, training=True, seed=seed) for seed in (0, 1))
    if truth is None:
        return True
    agrees = _agrees if close(other, truth) else _independent
    return all(agrees(layer, flow, x, _scattered(flow, rng), factor, training=True) for factor in FACTORS)


def _says_something(result: Any) -> bool:
    return isinstance(result, Tensor) and bool(result.isfinite().any())


def _makes_something_of_nothing(layer: nn.Module, x: Tensor) -> bool:
    results = (result_of(layer, torch.zeros_like(x), training=training) for training in (False, True))
    return any(result is not None and bool(result.any()) for result in results)


def _is_steady(layer: nn.Module, x: Tensor) -> bool:
    """Whether a tiny change of the weights changes the result only slightly."""
    moved = own_copy(layer)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1 + 1e-13 * torch.randn_like(parameter))
    return close(result_of(moved, x), result_of(layer, x))


def _agrees(
    layer: nn.Module, flow: Mix, x: Tensor, cut: tuple[Layout, Layout], factor: float, *, training: bool = False
) -> bool:
    """Whether a cut layer computes the remaining part of the original result, whatever the removed weights are."""
    return _agrees_at_once(own_copy(layer), flow, x, cut, factor, training=training)


def _agrees_at_once(
    whole: nn.Module, flow: Mix, x: Tensor, cut: tuple[Layout, Layout], factor: float, *, training: bool = False
) -> bool:
    """Like _agrees(), but modifies the layer."""
    rows, columns = cut
    axis, out = (x.dim() - 1,) * 2 if isinstance(whole, nn.Linear) else (1, 1)
    held = _without(x, flow, columns, axis)
    part = x.index_select(axis, torch.from_numpy(np.maximum(columns, 0)))
    part = part.index_fill(axis, torch.from_numpy(np.flatnonzero(columns < 0)), 0)
    places = torch.from_numpy(_places(flow, rows))
    try:
        _scale_absent(whole, flow, rows, columns, factor)
        return agree(
            whole,
            lambda one: one(held).index_select(out, torch.from_numpy(rows)),
            lambda one: one(part).index_select(out, places),
            lambda one: shrink_mix(one, flow, rows, columns),
            training,
        )
    except Exception:  # the layer may raise anything when it has fewer channels
        return False


def _independent(
    layer: nn.Module, flow: Mix, x: Tensor, cut: tuple[Layout, Layout], factor: float, *, training: bool
) -> bool:
    """Whether the remaining outputs depend on the remaining weights only. The layer may draw random numbers."""
    rows, columns = cut
    axis, out = (x.dim() - 1,) * 2 if isinstance(layer, nn.Linear) else (1, 1)
    other = own_copy(layer)
    _scale_absent(other, flow, rows, columns, factor)
    held = _without(x, flow, columns, axis)
    results = [result_of(one, held, training=training) for one in (layer, other)]
    truth, found = (result.index_select(out, torch.from_numpy(rows)) for result in results)
    return close(found, truth)


def _without(x: Tensor, flow: Mix, columns: Layout, axis: int) -> Tensor:
    return x.index_fill(axis, torch.from_numpy(np.flatnonzero(~among(flow.inputs, columns))), 0)


def _places(flow: Mix, rows: Layout) -> Layout:
    """Positions of outputs in a small layer, whose groups are padded to the size of the largest."""
    if flow.groups == 1 or flow.depthwise:
        return np.arange(len(rows))
    size, longest = flow.outputs // flow.groups, flow.rows_per_group(rows)
    groups = [np.flatnonzero(rows // size == group) for group in flow.active(rows)]
    return np.concatenate([np.arange(len(group)) + place * longest for place, group in enumerate(groups)])


def _scale_absent(layer: Any, flow: Mix, rows: Layout, columns: Layout, factor: float) -> None:
    """Scale all state of a layer that belongs to outputs and inputs to be removed."""
    size_in, size_out = flow.inputs // flow.groups, flow.outputs // flow.groups
    made = np.where(among(flow.outputs, rows), 1.0, factor)
    read = np.where(among(flow.inputs, columns), 1.0, factor)
    if flow.depthwise:
        factors = made[:, None]
    elif flow.transposed:  # [in, out / groups, ...]
        factors = read[:, None] * made.reshape(flow.groups, size_out).repeat(size_in, 0)
    else:
        factors = made[:, None] * read.reshape(flow.groups, size_in).repeat(size_out, 0)
    weight = layer.weight
    with torch.no_grad():
        weight.mul_(torch.from_numpy(factors).view(*factors.shape, *[1] * (weight.dim() - 2)))
        for held in (layer._parameters, layer._buffers):
            for name, value in held.items():
                if name != "weight" and value is not None and value.dim() and value.shape[0] == flow.outputs:
                    if value.is_floating_point():
                        value.mul_(torch.from_numpy(made).view(-1, *[1] * (value.dim() - 1)))
