"""Settings -> torch optimisers, and their state as plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paam.settings import OptimizerSettings
from paam.train.flat import FlatParameters

ONCE_PER_BLOCK = ("step",)
"""What an optimiser counts once for a block; of everything else it has as much as there are parameters."""


def build_optimizer(settings: OptimizerSettings, lr: float, flat: FlatParameters) -> Optimizer:
    """The optimiser of one phase. On a GPU it is fused, and its rate a tensor that captured graphs can read."""
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


def optimizer_tensors(optimizer: Optimizer, flat: FlatParameters) -> dict[str, Tensor]:
    """State by parameter as "number.name" -> tensor, whatever the layout of the block: it must load on any device.

    Hyper-parameters come from the recipe and are not state. What is counted once per block is its first parameter's.
    """
    tensors: dict[str, Tensor] = {}
    states = [optimizer.state[block] for block in flat.blocks]
    for name in dict.fromkeys(name for state in states for name in state):
        values = [state.get(name) for state in states]
        if not all(isinstance(value, Tensor) for value in values):
            continue
        if name in ONCE_PER_BLOCK:
            tensors |= {f"{_first(flat, block)}.{name}": value for block, value in enumerate(values)}
        else:
            tensors |= {f"{number}.{name}": view for number, view in enumerate(flat.views(values))}
    return tensors


def load_optimizer_tensors(optimizer: Optimizer, flat: FlatParameters, tensors: dict[str, Tensor]) -> None:
    """Take up what :func:`optimizer_tensors` handed out."""
    for name in dict.fromkeys(key.partition(".")[2] for key in tensors):
        once = name in ONCE_PER_BLOCK
        blocks = [
            tensors[f"{_first(flat, number)}.{name}"].clone() if once else torch.zeros_like(block.data)
            for number, block in enumerate(flat.blocks)
        ]
        if not once:
            for number, view in enumerate(flat.views(blocks)):
                view.copy_(tensors[f"{number}.{name}"])
        for block, value in zip(flat.blocks, blocks, strict=True):
            optimizer.state[block][name] = value.to(block.device)


def _first(flat: FlatParameters, block: int) -> int:
    """The number of the first parameter in a block."""
    return next(number for number, (home, _) in enumerate(flat.places) if home == block)
