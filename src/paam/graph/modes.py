"""Modes and flags of a model that are changed for a while and then put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Evaluation mode inside, every module's own mode restored outside."""
    return in_mode(model, False)


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """A forward() that changes buffers does so while it is traced: undo that, and refuse what puts others in place."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    held = [(module, dict(module._buffers), dict(module._parameters)) for module in model.modules()]
    replaced = ""
    try:
        yield
    finally:
        for module, buffers, parameters in held:
            for now, was in ((module._buffers, buffers), (module._parameters, parameters)):
                replaced = next((name for name in was if now.get(name) is not was[name]), replaced)
                now.clear()
                now.update(was)  # type: ignore[arg-type]
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
    if replaced:
        raise ValueError(f"it assigns to '{replaced}', which it holds")


@contextmanager
def copying(model: nn.Module) -> Iterator[None]:
    """No module works in place inside; the flags are restored outside."""
    flagged = [module for module in model.modules() if getattr(module, "inplace", False)]
    for module in flagged:
        module.inplace = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in flagged:
            module.inplace = True  # type: ignore[assignment]
