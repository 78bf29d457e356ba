"""Settings -> torch optimisers, and their state as flat blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paam.config.settings import OptimizerSettings
from paam.train.flat import FlatParameters
from paam.train.packing import Packed, copy_by_name, pack

ONCE_PER_BLOCK = ("step",)
"""Optimiser state with one value per block; all other state has the shape of the parameters."""


def build_optimizer(settings: OptimizerSettings, lr: float, flat: FlatParameters) -> Optimizer:
    """The optimiser of one phase. On a GPU it is fused, and its learning rate is a tensor, for CUDA graphs."""
    blocks = flat.blocks
    on_gpu = blocks[0].is_cuda
    rate: Any = torch.tensor(lr, device=blocks[0].device) if on_gpu else lr
    if settings.optimizer == "adam":
        decay = settings.weight_decay
        return torch.optim.Adam(blocks, lr=rate, weight_decay=decay, fused=on_gpu, capturable=on_gpu)
    return torch.optim.SGD(
        blocks,
        lr=rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.nesterov,
        fused=on_gpu,
    )


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def optimizer_state(optimizer: Optimizer, flat: FlatParameters) -> dict[str, Packed]:
    """The state of an optimiser, by torch's names: flat blocks, and each parameter's position in them.

    Hyper-parameters come from the recipe and are not state. Per-block values are stored for the first parameter.
    """
    packed: dict[str, Packed] = {}
    states = [optimizer.state[block] for block in flat.blocks]
    for name in dict.fromkeys(name for state in states for name in state):
        values = [state.get(name) for state in states]
        if all(isinstance(value, Tensor) for value in values):
            once = name in ONCE_PER_BLOCK
            packed[name] = pack(dict(zip(_firsts(flat), values, strict=True))) if once else Packed(values, flat.layout)
    return packed


def load_optimizer_state(optimizer: Optimizer, flat: FlatParameters, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Load an unpacked :func:`optimizer_state`, also from blocks of another memory layout."""
    for name, tensors in state.items():
        if name in ONCE_PER_BLOCK:
            values = [tensors[first].clone() for first in _firsts(flat)]
        else:
            values = [torch.zeros_like(block.data) for block in flat.blocks]
            copy_by_name(dict(zip(flat.layout, flat.views(values), strict=True)), tensors)
        for block, value in zip(flat.blocks, values, strict=True):
            optimizer.state[block][name] = value.to(block.device)


def _firsts(flat: FlatParameters) -> list[str]:
    """The name of the first parameter in each block."""
    homes = [(name, place[0]) for name, place in flat.layout.items()]
    return [next(name for name, home in homes if home == block) for block in range(len(flat.blocks))]
