"""Settings -> torch optimisers, and their state as plain tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paam.recipe import OptimizerSettings


def build_optimizer(settings: OptimizerSettings, lr: float, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The optimiser of one phase. On a GPU it is fused, and its rate a tensor that captured graphs can read."""
    parameters = list(parameters)
    on_gpu = parameters[0].is_cuda
    rate: Any = torch.tensor(lr, device=parameters[0].device) if on_gpu else lr
    if settings.optimizer == "adam":
        decay = settings.weight_decay
        return torch.optim.Adam(parameters, lr=rate, weight_decay=decay, fused=on_gpu, capturable=on_gpu)
    return torch.optim.SGD(
        parameters,
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


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """State per parameter as "number.name" -> tensor. Hyper-parameters come from the recipe and are not state."""
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": value
        for number, entries in state.items()
        for name, value in entries.items()
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
