"""Find out by trials whether each channel of a custom batch norm depends on itself alone.

Trials include training mode, which uses batch statistics, and many kinds of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paam.graph.checks.comparing import agree, among, close, own_copy, result_of
from paam.graph.checks.draws import DRAWS, SPECIAL, plain, with_weights
from paam.graph.checks.layer_state import state_of
from paam.graph.checks.perturb import Noise, perturb
from paam.graph.copies import light_copy
from paam.graph.flows import Layout
from paam.graph.shrink import shrink_per_channel

FEW = 6
"""Channels of the tiny norm that is used in most trials."""
EXTREME = 1e5


def is_by_channel(norm: nn.Module, width: int, dims: int, tried: dict[Any, Any]) -> bool:
    """Whether a norm of ``width`` channels treats each of them independently; its inputs have ``dims`` axes.

    Cut to some of its channels it must compute the same for them, and must keep a constant channel constant.
    """
    key = ("by channel", width, dims, state_of(norm))
    if key not in tried:
        tried[key] = _tried(norm, width, dims, tried)
    return bool(tried[key])


def _tried(norm: nn.Module, width: int, dims: int, tried: dict[Any, Any]) -> bool:
    if any(True for child in norm.children() for _ in child.parameters()):
        return False
    rng = np.random.default_rng(0)
    other = perturb(light_copy(norm), Noise(torch.device("cpu"))).eval()  # the actual weights may be a special case
    few = np.sort(rng.choice(width, min(width, FEW), replace=False))
    tiny = light_copy(other).eval()
    shrink_per_channel(tiny, width, few)
    key = ("few by channel", len(few), dims, state_of(tiny))
    if key not in tried:
        with torch.random.fork_rng([]):
            tried[key] = _few_are_by_channel(tiny, len(few), dims, rng)
    return bool(tried[key]) and _agrees(other, _values(width, dims), few)


def _values(width: int, dims: int) -> Tensor:
    """Inputs of a norm: the first channel is constant, the others vary."""
    shape = (3, width, *[2] * (dims - 2))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 0] = 0.25
    return x


def _few_are_by_channel(norm: nn.Module, width: int, dims: int, rng: np.random.Generator) -> bool:
    noise, x = Noise(torch.device("cpu"), seed=1), _values(width, dims)
    for draw in DRAWS:
        drawn = with_weights(norm, draw, noise)
        result = result_of(drawn, x)
        if not isinstance(result, Tensor) or not _is_one_number(result[:, 0]):
            return False
        if draw is plain and not (result.isfinite().any() and _trained_alike(drawn, x, rng)):
            return False
        if not _agrees(drawn, x, _some(width, rng)) and draw not in SPECIAL:
            return False
    return True


def _is_one_number(values: Tensor) -> bool:
    return close(values, values.mean().expand_as(values))


def _some(width: int, rng: np.random.Generator) -> Layout:
    return np.sort(rng.choice(width, rng.integers(1, max(width, 2)), replace=False))


def _trained_alike(norm: nn.Module, x: Tensor, rng: np.random.Generator) -> bool:
    """Whether channels depend on themselves alone in training mode too, if the norm runs in it."""
    truth, other = (result_of(norm, x, training=True, seed=seed) for seed in (0, 1))
    if truth is None:
        return True
    kept = _some(x.shape[1], rng)
    changed = own_copy(norm)
    _make_extreme(changed, x.shape[1], kept)
    found = result_of(changed, _elsewhere(x, kept), training=True)
    if not close(_of(found, kept), _of(truth, kept)):
        return False
    random = not close(other, truth)
    return random or _agrees(norm, x, kept, training=True)


def _agrees(norm: nn.Module, x: Tensor, kept: Layout, *, training: bool = False) -> bool:
    """Whether a cut norm computes the remaining part of the original's result, whatever the other channels are."""
    whole = own_copy(norm)
    width = x.shape[1]
    _make_extreme(whole, width, kept)
    part, others = _of(x, kept), _elsewhere(x, kept)
    try:
        return agree(
            whole,
            lambda one: _of(one(others), kept),
            lambda one: one(part),
            lambda one: shrink_per_channel(one, width, kept),
            training,
        )
    except Exception:  # the norm may raise anything when it has fewer channels
        return False


def _of(x: Tensor, kept: Layout) -> Tensor:
    return x.index_select(1, torch.from_numpy(kept))


def _elsewhere(x: Tensor, kept: Layout) -> Tensor:
    """The same values in the kept channels, extreme ones in all others."""
    others = torch.from_numpy(np.flatnonzero(~among(x.shape[1], kept)))
    return x.index_copy(1, others, EXTREME * (x.index_select(1, others).flip(0) + 1))


def _make_extreme(norm: nn.Module, width: int, kept: Layout) -> None:
    factors = torch.from_numpy(np.where(among(width, kept), 1.0, EXTREME))
    held: Sequence[Tensor] = [*norm.parameters(recurse=False), *norm.buffers(recurse=False)]
    with torch.no_grad():
        for tensor in held:
            if tensor.shape == (width,) and tensor.is_floating_point():
                tensor.mul_(factors)
