"""Differences between the outputs of two networks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from paam.graph.record.ways import Ways

TOLERANCE = 1e-7
"""Rounding errors grow if random weights make a network sensitive; a wrong channel makes a larger difference."""
COARSE_TOLERANCE = 1e-3
"""If the network itself computes in single precision."""
HUGE = 1e8
COARSE = (torch.float32, torch.float16, torch.bfloat16)


def difference(found: Any, truth: Any, coarse: bool, *, training: bool = False) -> str:
    """How outputs differ; empty if they do not. ``coarse``: something was computed in less than double precision."""
    values, truths = tree_leaves(in_mode_of(found, training)), tree_leaves(in_mode_of(truth, training))
    if len(values) != len(truths):
        return f"it returns {len(values)} values instead of {len(truths)}"
    pairs = [*zip(values, truths, strict=True)]
    for value, wanted in pairs:
        if not isinstance(wanted, Tensor) and not _is_same(value, wanted):
            return f"it returns {value!r} instead of {wanted!r}"
    worst = max((apart(a, b) for a, b in pairs if isinstance(b, Tensor)), default=0.0)
    limit = COARSE_TOLERANCE if coarse else TOLERANCE
    return f"by {worst:.1e} of its largest value" if worst > limit else ""


def in_mode_of(result: Any, training: bool) -> Any:
    """The output for one mode of a graph that may have separate outputs for each."""
    if not isinstance(result, Ways):
        return result
    return result.training if training else result.evaluation


def has_numbers(result: Any) -> bool:
    """Whether an output is usable: nothing in it is NaN, and something is finite."""
    answers = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]
    return all(not x.isnan().any() for x in answers) and (not answers or any(x.isfinite().any() for x in answers))


def tells_apart(result: Any) -> bool:
    """Whether outputs differ between the first two samples, if there are two."""
    answers = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]
    several = [x for x in answers if x.dim() and len(x) > 1 and x.numel()]
    return not several or any(not torch.equal(x[0], x[1]) for x in several)


def apart(value: Any, truth: Tensor) -> float:
    """The maximum difference over the maximum value; infinite if shapes or the positions of NaN or infinity differ.

    Values used as infinity, such as -1e9 in a mask, are compared separately: relative to them, all others look equal.
    """
    if not isinstance(value, Tensor) or value.shape != truth.shape:
        return float("inf")
    if value.is_floating_point() != truth.is_floating_point():
        return float("inf")
    if not truth.numel():
        return 0.0
    if not truth.is_complex():
        value, truth = value.double(), truth.double()
    finite = truth.isfinite()
    if not finite.all():
        if not torch.equal(value[~finite].nan_to_num(), truth[~finite].nan_to_num()):
            return float("inf")
        if not torch.equal(value.isnan(), truth.isnan()):
            return float("inf")
        return apart(value[finite], truth[finite])
    huge = truth.abs() > HUGE
    if huge.any() and not huge.all():
        alone = float(((value - truth).abs() / truth.abs())[huge].max())
        return max(alone, apart(value[~huge], truth[~huge]))
    worst = float((value - truth).abs().max() / truth.abs().max().clamp(min=1e-30))
    return float("inf") if math.isnan(worst) else worst


def _is_same(value: Any, wanted: Any) -> bool:
    if isinstance(value, Tensor):
        return False
    if isinstance(wanted, float) and isinstance(value, float):
        both = math.isnan(value) and math.isnan(wanted)
        return both or abs(value - wanted) <= COARSE_TOLERANCE * abs(wanted)
    return value is wanted or bool(value == wanted)
