"""Cut layers to the remaining channels: weights and all other per-channel state."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paam.graph.flows import Layout, Mix


def shrink_stored(root: nn.Module, target: str, axis: int, layout: Layout) -> None:
    owner, _, name = target.rpartition(".")
    module = root.get_submodule(owner)
    value: Tensor = getattr(module, name)
    kept = value.detach().index_select(axis, torch.from_numpy(layout).to(value.device))
    setattr(module, name, _like(value, kept))


def shrink_mix(layer: Any, flow: Mix, made: Layout, wanted: Layout, constant: Tensor | None = None) -> None:
    """Cut a convolution or linear layer to the outputs ``made`` and the inputs ``wanted``.

    ``constant``: contribution of absent inputs to each output, per kernel position, [outputs, 1, ...]. It goes into
    the bias, or, where padding makes it spatially uneven, into one additional input column.
    """
    outputs = flow.outputs
    if flow.groups > 1 and not flow.depthwise:
        _shrink_grouped(layer, flow, made, wanted)
        return
    rows, columns = torch.from_numpy(made), torch.from_numpy(wanted)
    whole: Tensor = layer.weight.detach()
    if flow.transposed and not flow.depthwise:
        whole = whole.transpose(0, 1)
    weight = _chosen(whole, 0, rows)
    if not flow.depthwise:
        weight = _chosen(weight, 1, columns)
    bias = None if layer.bias is None else _chosen(layer.bias.detach(), 0, rows)
    if constant is not None and flow.padded:
        weight = torch.cat([weight, constant.to(weight.dtype)], 1)
    elif constant is not None:
        shift = constant.flatten(1).sum(1).to(weight.dtype)
        bias = shift if bias is None else bias + shift
    if flow.transposed and not flow.depthwise:
        weight = weight.transpose(0, 1)
    _shrink_extras(layer, outputs, made)
    _set_mix(layer, weight, bias, len(made) if flow.depthwise else 1)


def _chosen(values: Tensor, axis: int, places: Tensor) -> Tensor:
    return values.index_select(axis, places.to(values.device))


def _shrink_grouped(layer: Any, flow: Mix, made: Layout, wanted: Layout) -> None:
    """Cut a grouped convolution to its remaining groups, each padded to the size of the largest."""
    groups, length = flow.active(made), flow.rows_per_group(made)
    size_in, size_out = flow.inputs // flow.groups, flow.outputs // flow.groups
    columns = wanted.reshape(len(groups), -1)
    filled = np.full((len(groups), length), -1)
    whole: Tensor = layer.weight.detach()
    weight = whole.new_zeros(len(groups), length, columns.shape[1], *whole.shape[2:])
    for place, group in enumerate(groups):
        members = made[made // size_out == group]
        filled[place, : len(members)] = members
        rows, held = torch.from_numpy(members), torch.from_numpy(columns[place][columns[place] >= 0] - group * size_in)
        if flow.transposed:  # [in, out / groups, ...]
            block = whole[group * size_in : (group + 1) * size_in].transpose(0, 1)[rows - group * size_out]
        else:
            block = whole[rows]
        weight[place, : len(rows), : len(held)] = block[:, held]
    weight = weight.transpose(1, 2).flatten(0, 1) if flow.transposed else weight.flatten(0, 1)
    layout = filled.ravel()
    bias = None if layer.bias is None else _rows(layer.bias.detach(), layout)
    _shrink_extras(layer, flow.outputs, layout)
    _set_mix(layer, weight, bias, len(groups))


def _rows(values: Tensor, layout: Layout) -> Tensor:
    """Rows by index, zero where the index is -1."""
    rows = torch.from_numpy(layout).to(values.device)
    kept = values[rows.clamp(min=0)]
    return torch.where((rows >= 0).view(-1, *[1] * (kept.dim() - 1)), kept, 0)


def _shrink_extras(layer: Any, outputs: int, layout: Layout) -> None:
    """Cut per-output state of a custom layer other than weight and bias, such as gains of standardised weights."""
    for held in (layer._parameters, layer._buffers):
        for name, value in held.items():
            if name not in ("weight", "bias") and value is not None and value.dim() and value.shape[0] == outputs:
                held[name] = _like(value, _rows(value.detach(), layout))


def _like(value: Tensor, kept: Tensor) -> Tensor:
    return nn.Parameter(kept, value.requires_grad) if isinstance(value, nn.Parameter) else kept


def _set_mix(layer: Any, weight: Tensor, bias: Tensor | None, groups: int) -> None:
    needs_grad = layer.weight.requires_grad
    layer.weight = nn.Parameter(weight.contiguous(memory_format=_memory_format(layer.weight)), needs_grad)
    layer.bias = None if bias is None else nn.Parameter(bias, needs_grad)
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = weight.shape
    else:
        near, far = weight.shape[0], weight.shape[1] * groups
        layer.out_channels, layer.in_channels = (far, near) if layer.transposed else (near, far)
        layer.groups = groups


def _memory_format(weight: Tensor) -> torch.memory_format:
    """Memory format of a weight: a channels_last layer stays channels_last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(weight.dim())
    kept = last is not None and not weight.is_contiguous() and weight.is_contiguous(memory_format=last)
    return last if kept and last is not None else torch.contiguous_format


def shrink_per_channel(layer: Any, width: int, layout: Layout) -> None:
    """Cut the per-channel state of a layer: statistics, scales and offsets of a norm, slopes of a PReLU."""
    rows = torch.from_numpy(layout)
    for count in ("num_features", "num_parameters"):
        if getattr(layer, count, None) == width:
            setattr(layer, count, len(layout))
    for held in (layer._parameters, layer._buffers):
        for name, value in held.items():
            if value is not None and value.shape == (width,):
                held[name] = _like(value, _chosen(value.detach(), 0, rows))
