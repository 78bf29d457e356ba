"""nms and roi_align of torchvision in plain torch, for a torchvision whose compiled operators do not match torch.

``supply()`` registers the missing operators and does nothing if the compiled ones work. Both functions follow the
compiled CPU kernels: stable order of equal scores, samples outside the map count as zero.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from paam.models.zoo import import_torchvision

SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": (
        "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width,"
        " int sampling_ratio, bool aligned) -> Tensor"
    ),
}
_SUPPLIED: list[torch.library.Library] = []
"""Registrations last only as long as their library object."""


def supply() -> Any:
    """torchvision, able to run its detectors."""
    torchvision = import_torchvision()
    extension = sys.modules["torchvision.extension"]
    if extension._has_ops() or _SUPPLIED:
        return torchvision
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, function in (("nms", nms), ("roi_align", roi_align)):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}{SCHEMAS[name]}")
        library.impl(name, function, "CompositeImplicitAutograd")
    _SUPPLIED.append(library)
    # Both check for the operators: roi_align would otherwise compile its own version, which needs a C++ compiler.
    for asking in ("torchvision.extension", "torchvision.ops.roi_align"):
        sys.modules[asking]._has_ops = lambda: True
    return torchvision


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """The boxes [N, 4] that no better one overlaps by more than the threshold, best first."""
    left_top, right_bottom = boxes[:, :2], boxes[:, 2:]
    areas = (right_bottom - left_top).prod(1)
    order = scores.argsort(descending=True, stable=True)
    kept = []
    while len(order):
        best, order = order[0], order[1:]
        kept.append(best)
        sides = torch.minimum(right_bottom[best], right_bottom[order]) - torch.maximum(left_top[best], left_top[order])
        shared = sides.clamp(min=0).prod(1)
        overlapped = shared / (areas[best] + areas[order] - shared) > iou_threshold
        order = order[~overlapped]
    return torch.stack(kept) if kept else order


def roi_align(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Means of bilinear samples in each bin of the regions [K, 5] (image, x1, y1, x2, y2): [K, C, height, width].

    Bilinear sampling on a grid is separable: a product of one matrix along the rows and one along the columns. As in
    the compiled kernel, its gradient goes to the input only.
    """
    rois = rois.detach()
    images = rois[:, 0].long()
    x1, y1, x2, y2 = (rois[:, 1:] * spatial_scale - (0.5 if aligned else 0.0)).unbind(1)
    rows = _averages(y1, y2, pooled_height, input.shape[2], sampling_ratio, aligned)
    columns = _averages(x1, x2, pooled_width, input.shape[3], sampling_ratio, aligned)
    pooled = input.new_zeros(len(rois), input.shape[1], pooled_height, pooled_width)
    for image in images.unique().tolist():
        chosen = (images == image).nonzero()[:, 0]
        means = torch.einsum("kph,chw,kqw->kcpq", rows[chosen], input[image], columns[chosen])
        pooled = pooled.index_copy(0, chosen, means)
    return pooled


def _averages(start: Tensor, end: Tensor, bins: int, size: int, sampling_ratio: int, aligned: bool) -> Tensor:
    """Weights [K, bins, size]: bin b of region k is the mean of its samples along one axis of ``size`` values."""
    length = end - start if aligned else (end - start).clamp(min=1)
    samples = torch.full_like(length, sampling_ratio) if sampling_ratio > 0 else (length / bins).ceil()
    most = int(samples.max().clamp(min=0)) if len(samples) else 0
    number = torch.arange(most, dtype=start.dtype, device=start.device)
    step = length / bins
    inside = (number + 0.5) / samples.clamp(min=1)[:, None] * step[:, None]
    first = start[:, None] + torch.arange(bins, dtype=start.dtype, device=start.device) * step[:, None]
    places = first[:, :, None] + inside[:, None, :]  # [K, bins, samples]
    counted = (number < samples[:, None])[:, None, :] & (places >= -1) & (places <= size)
    places = places.clamp(0, size - 1)
    low = places.floor().clamp(max=size - 1)
    share = places - low
    weights = start.new_zeros(len(start), bins, size)
    for corner, weight in ((low, 1 - share), ((low + 1).clamp(max=size - 1), share)):
        weights = weights.scatter_add(2, corner.long(), torch.where(counted, weight, 0.0))
    return weights / samples.clamp(min=1)[:, None, None]
