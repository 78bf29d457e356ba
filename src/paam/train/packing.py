"""Pack many tensors into a few flat blocks, with the layout to unpack them.

A state has more than a thousand tensors. Work per tensor slows training down, even in another thread; work per block
does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paam.errors import ArtifactError

Place = Sequence[Any]
"""Index of the block, offset in it, shape, and the axes from the slowest to the fastest in memory."""
Layout = Mapping[str, Place]
"""Name -> position: plain data, the same for all tensors with the same layout."""


class Packed(NamedTuple):
    """One-dimensional blocks, and their layout."""

    blocks: Sequence[Tensor]
    layout: Layout


def pack(tensors: Mapping[str, Tensor]) -> Packed:
    """Copy tensors, concatenated per dtype and device."""
    kinds: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((tensor.device, tensor.dtype), []).append(name)
    layout: dict[str, Place] = {}
    for block, names in enumerate(kinds.values()):
        end = 0
        for name in names:
            shape = tuple(tensors[name].shape)
            layout[name] = (block, end, shape, tuple(range(len(shape))))
            end += math.prod(shape)
    return Packed([torch.cat([tensors[n].detach().reshape(-1) for n in names]) for names in kinds.values()], layout)


def unpack(packed: Packed) -> dict[str, Tensor]:
    """Views of the blocks, by name."""
    tensors: dict[str, Tensor] = {}
    for name, (block, start, shape, axes) in packed.layout.items():
        part = packed.blocks[block][start : start + math.prod(shape)].view([shape[axis] for axis in axes])
        tensors[name] = part.permute([axes.index(axis) for axis in range(len(shape))])
    return tensors


def memory_order(strides: Sequence[int]) -> tuple[int, ...]:
    """The axes of a dense tensor, from the slowest to the fastest."""
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))


def as_tensors(parts: Mapping[str, Packed]) -> tuple[dict[str, Tensor], dict[str, Layout]]:
    """The blocks of all parts by "part:number", and the layouts of the parts."""
    blocks = {f"{part}:{number}": block for part, packed in parts.items() for number, block in enumerate(packed.blocks)}
    return blocks, {part: packed.layout for part, packed in parts.items()}


def from_tensors(blocks: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> dict[str, dict[str, Tensor]]:
    """Unpack the result of :func:`as_tensors`."""
    parts: dict[str, dict[str, Tensor]] = {}
    for part, layout in layouts.items():
        count = 1 + max((place[0] for place in layout.values()), default=-1)
        parts[part] = unpack(Packed([blocks[f"{part}:{number}"] for number in range(count)], layout))
    return parts


def copy_by_name(into: Mapping[str, Tensor], out_of: Mapping[str, Tensor]) -> None:
    """Copy values into tensors of the same names and shapes, whatever their memory layouts."""
    here, there = ({name: tuple(tensor.shape) for name, tensor in given.items()} for given in (into, out_of))
    for name in dict.fromkeys((*here, *there)):
        if here.get(name) != there.get(name):
            raise ArtifactError(
                f"'{name}' has shape {there.get(name, 'none')} there and {here.get(name, 'none')} in this network"
            )
    for name, tensor in into.items():
        tensor.copy_(out_of[name])
