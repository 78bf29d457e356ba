"""Compare a cut custom layer with the original one: each must compute the other's part of the result.

Weights and inputs to be removed are made extreme first, so that a norm, a threshold or a maximum over them shows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paam.graph.copies import light_copy, tensors_of
from paam.graph.flows import Layout, Needs

Call = Callable[[Any], Any]
"""Calls a layer and returns its result."""


def agree(whole: nn.Module, on_whole: Call, on_small: Call, cut: Call, training: bool) -> bool:
    """Whether a cut layer computes the remaining part of the original's result, and updates its buffers the same way.

    ``on_whole`` calls the original layer and picks the remaining part of its result. ``cut`` cuts a layer in place.
    """
    small = light_copy(whole)
    cut(small)
    _own_tensors(small, whole)
    for layer in (whole, small):
        layer.train(training)
    with torch.no_grad():
        truth, found = on_whole(whole), on_small(small)
        if not close(found, truth):
            return False
        if not training:
            return True
        cut(whole)
        stored = zip(whole.state_dict().items(), small.state_dict().items(), strict=True)
        return all(name == other and close(mine, theirs) for (name, mine), (other, theirs) in stored)


def _own_tensors(layer: nn.Module, other: nn.Module) -> None:
    """Copy every tensor that is shared with another layer: a forward() may change it in place."""
    shared = {id(tensor) for tensor in tensors_of(other.modules())}
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in shared:
                assert parameter is not None
                module._parameters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if id(buffer) in shared:
                assert buffer is not None
                module._buffers[name] = buffer.clone()


def own_copy(layer: nn.Module) -> Any:
    """A copy with copied tensors."""
    twin = light_copy(layer)
    _own_tensors(twin, layer)
    return twin


def result_of(layer: nn.Module, x: Tensor, *, training: bool = False, seed: int = 0) -> Any:
    """A layer's result, or None if it does not run: for example in training without a process group."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed() is slower: it records its caller
    with torch.no_grad(), suppress(Exception):
        return own_copy(layer).train(training)(x.clone())
    return None


def among(count: int, places: Layout) -> Needs:
    """Mask of ``places`` among ``count`` channels; -1 is ignored. Faster than np.isin, which sorts."""
    found = np.zeros(count, dtype=np.bool_)
    found[places[places >= 0]] = True
    return found


def close(found: Tensor, truth: Tensor) -> bool:
    """Whether two results are equal up to rounding, with non-finite values at the same positions."""
    if found.shape != truth.shape or found.dtype != truth.dtype:
        return False
    if torch.equal(found, truth):
        return True
    if not truth.is_floating_point():
        return False
    finite = truth.isfinite()
    largest = float(truth[finite].abs().max()) if finite.any() else 0.0
    return torch.allclose(found, truth, rtol=1e-9, atol=1e-12 * largest, equal_nan=True)
